"""Tracebacks of an ExceptionGroup: which of them counts, and the margin that they stand behind. Pure.

``asyncio.TaskGroup`` and others of its kind collect errors in the order in which they are raised: the first one ends
the other tasks, and what these raise while they are ended follows from it. The order of other groups, which a script
has made of what its workers returned, means nothing: of them the last one counts, which stands nearest to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.model import Value

_MARKER = "Traceback (most recent call last):"
_GROUP = f"Exception Group {_MARKER}"
# What stands above each error of a group, and of the last group above it how many there are.
_NUMBER = LazyPattern(r"[ |+-]{1,400}-{4} (\d{1,6}) -{4,40}$")
_COUNT = LazyPattern(r" \((\d{1,6}) sub-exceptions?\)$")
_LINES_OF_A_MESSAGE = 60
# What asyncio, anyio and trio name in the message of a group, or in the line that has raised it.
_IN_ORDER = LazyPattern(r"TaskGroup|\b[Nn]ursery\b")
# What ends a task that another one's error has made superfluous.
_CANCELLED = frozenset({"CancelledError", "Cancelled", "GeneratorExit"})


class _Block(Protocol):
    @property
    def exception(self) -> str: ...
    @property
    def start(self) -> int: ...


class PositionInGroup(Value):
    """Which traceback counts, and which error of its group it is: ``1 of 3``; empty where it is of none."""

    position: int
    text: str = ""


def of_its_group(clean: Sequence[str], chains: Sequence[Sequence[_Block]], last: int) -> PositionInGroup:
    """The error that counts of the group that a traceback belongs to; the traceback itself where there is none.

    Args:
        clean: all lines.
        chains: the tracebacks, each with those that it follows from, in the order of the text.
        last: the traceback.
    """
    if not _is_inside(clean[chains[last][-1].start]):
        return PositionInGroup(last)
    inside = [last]
    for index in range(last - 1, -1, -1):
        start = chains[index][-1].start
        line = clean[start]
        if line.endswith(_GROUP) and line.lstrip().startswith("+ "):
            is_in_order = any(map(_IN_ORDER.search, clean[start : chains[index + 1][0].start]))
            candidates = inside[::-1] if is_in_order else inside
            position = next((position for position in candidates if not _is_cancelled(chains[position])), candidates[0])
            return PositionInGroup(position, _number(clean, chains[position][0].start))
        if not _is_inside(line):
            break
        if not line.endswith(_GROUP):
            inside.append(index)
    # Where the group began was cut off.
    return PositionInGroup(last)


def _is_cancelled(chain: Sequence[_Block]) -> bool:
    return chain[-1].exception.rpartition(".")[2] in _CANCELLED


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


def without_prefix(lines: Sequence[str]) -> list[str]:
    """The lines of a traceback without what stands before each of them in an exception group."""
    prefix = prefix_of(lines[0])
    return [stripped(line, prefix) for line in lines]
