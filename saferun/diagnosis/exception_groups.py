"""Tracebacks of an ExceptionGroup: which of them counts, the first, and the margin that they stand behind. Pure.

``asyncio.TaskGroup`` and others of its kind collect errors in the order in which they are raised: the first one ends
the other tasks, and what these raise while they are ended follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.model import Value

_MARKER = "Traceback (most recent call last):"
_GROUP = f"Exception Group {_MARKER}"
# What stands above each error of a group, and of the last group above it how many there are.
_NUMBER = re.compile(r"[ |+-]{1,400}-{4} (\d{1,6}) -{4,40}$")
_COUNT = re.compile(r" \((\d{1,6}) sub-exceptions?\)$")
_LINES_OF_A_MESSAGE = 60


class PlaceInGroup(Value):
    """Which traceback counts, and which error of its group it is: ``1 of 3``; empty where it is of none."""

    place: int
    text: str = ""


def first_of_group(clean: Sequence[str], starts: Sequence[int], last: int) -> PlaceInGroup:
    """The first error of the group that a traceback belongs to; the traceback itself where there is none.

    Args:
        clean: all lines.
        starts: where the tracebacks begin, in the order of the text.
        last: the traceback.
    """
    if not _is_inside(clean[starts[last]]):
        return PlaceInGroup(last)
    first = last
    for index in range(last - 1, -1, -1):
        line = clean[starts[index]]
        if line.endswith(_GROUP) and line.lstrip().startswith("+ "):
            return PlaceInGroup(first, _number(clean, starts[first]))
        if not _is_inside(line):
            break
        if not line.endswith(_GROUP):
            first = index
    # Where the group began was cut off.
    return PlaceInGroup(last)


def _is_inside(line: str) -> bool:
    """Whether the first line of a traceback stands behind the margin of a group."""
    return line.startswith(" ") and line.lstrip().startswith("| ")


def _number(clean: Sequence[str], start: int) -> str:
    number = _NUMBER.match(clean[start - 1])
    counts = (_COUNT.search(line) for line in clean[start - 1 : max(start - _LINES_OF_A_MESSAGE, 0) : -1])
    count = next((match for match in counts if match is not None), None)
    if number is None or count is None or count[1] == "1":
        return ""
    return f"{number[1]} of {count[1]}"


def prefix_of(marker_line: str) -> str:
    """What each line of a traceback begins with where something has been put before it; empty in the usual case."""
    before = marker_line[: -len(_MARKER)]
    before = before.removesuffix("Exception Group ").removesuffix("Original ")
    return before.replace("+", "|") if before.strip() else ""


def stripped(line: str, prefix: str) -> str:
    """A line without what stands before each line of its traceback."""
    return line[len(prefix) :] if prefix and line.startswith(prefix) else line
