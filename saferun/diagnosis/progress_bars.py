"""Progress bars in a rank's output. Pure.

A bar is redrawn in its line and ends with none: what is printed next, often a traceback, stands behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.diagnosis.lazy_patterns import LazyPattern

_LONGEST = 4000
# How what is printed by Python, torch and the C++ library begins; the mark of the rank belongs to it.
_BEHIND = (
    "Traceback (most recent call last):",
    "Fatal Python error:",
    "Exception in thread ",
    "Exception ignored in",
    "terminate called ",
)
_MARK = LazyPattern("|".join(map(re.escape, _BEHIND)))
_GROUP = "Exception Group "
_RANK = LazyPattern(r"\[(?:default)?\d{0,6}:?rank\d{1,6}\]:? ?$")
_LONGEST_RANK = 32
# The bar was longer once: blanks cover the rest.
_BLANKS = " \r\0"
_CODE = LazyPattern(r"\x1b\[[0-9;?]{0,20}[A-Za-z]$")
_LONGEST_CODE = 23
# tqdm's: ``45%|####5     | 45/100 [00:02<00:02, 20.0it/s]``, without a length ``45it [00:02, ?it/s, loss=0.3]``.
_BAR = LazyPattern(r"\d%\||\d\d:\d\d[<,] {0,4}[^\]]{0,40}(?:/s|s/)|(?:\d|\?) ?(?:[kMGT]?B|it)/s\b|s/it\b")


def is_bar(line: str) -> bool:
    """Whether a line is, or begins with, a progress bar."""
    return "/" in line and _BAR.search(line[:_LONGEST]) is not None


def without_bars(lines: Iterable[str]) -> list[str]:
    """The lines; what an error begins with and stands behind a progress bar is a line of its own."""
    found: list[str] = []
    for line in lines:
        if "]" in line and _may_begin(line):
            end, start = _seam(line[:_LONGEST])
            if end and is_bar(line[:end]):
                found.append(line[:end])
                line = line[start:]  # noqa: PLW2901 - the rest of it
        found.append(line)
    return found


def _may_begin(line: str) -> bool:
    """Whether one of the marks may be in a line; all lines are asked for that, and nearly none has one."""
    return (
        "Traceback (" in line or "Exception i" in line or "terminate called " in line or "Fatal Python error:" in line
    )


def _seam(line: str) -> tuple[int, int]:
    """Where a bracket ends behind which an error begins, but for blanks, and where the error begins; zeros: nowhere.

    From each mark it steps back, so that no part of a line is read more than a few times.
    """
    for mark in _MARK.finditer(line):
        start = mark.start()
        if line.endswith(_GROUP, 0, start):
            start -= len(_GROUP)
        before = max(start - _LONGEST_RANK, 0)
        rank = _RANK.search(line[before:start])
        if rank is not None:
            start = before + rank.start()
        end = _end_before_blanks(line, start)
        if line.endswith("]", 0, end):
            return end, start
    return 0, 0


def _end_before_blanks(line: str, end: int) -> int:
    """Where a part of a line ends without the blanks and the terminal codes at its end."""
    while end:
        if line[end - 1] in _BLANKS:
            end -= 1
            continue
        before = max(end - _LONGEST_CODE, 0)
        code = _CODE.search(line[before:end]) if line[end - 1].isalpha() else None
        if code is None:
            break
        end = before + code.start()
    return end
