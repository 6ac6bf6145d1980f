"""Progress bars in a rank's output. Pure.

A bar is redrawn in its line and ends with none: what is printed next, often a traceback, stands behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_LONGEST = 4000
# How what is printed by Python, torch and the C++ library begins; the mark of the rank belongs to it.
_BEHIND = (
    "Traceback (most recent call last):",
    "Fatal Python error:",
    "Exception in thread ",
    "Exception ignored in",
    "terminate called ",
)
# The bar was longer once: blanks cover the rest.
_SEAM = re.compile(
    r"\](?:\x1b\[[0-9;?]{0,20}[A-Za-z]|[ \r\0]){0,400}(?=(?:\[(?:default)?\d{0,6}:?rank\d{1,6}\]:? ?)?"
    rf"(?:Exception Group )?(?:{'|'.join(map(re.escape, _BEHIND))}))"
)
# tqdm's: ``45%|####5     | 45/100 [00:02<00:02, 20.0it/s]``, without a length ``45it [00:02, ?it/s, loss=0.3]``.
_BAR = re.compile(r"\d%\||\d\d:\d\d[<,] {0,4}[^\]]{0,40}(?:/s|s/)|(?:\d|\?) ?(?:[kMGT]?B|it)/s\b|s/it\b")


def is_bar(line: str) -> bool:
    """Whether a line is, or begins with, a progress bar."""
    return "/" in line and _BAR.search(line[:_LONGEST]) is not None


def without_bars(lines: Iterable[str]) -> list[str]:
    """The lines; what an error begins with and stands behind a progress bar is a line of its own."""
    found: list[str] = []
    for line in lines:
        if "]" in line and any(mark in line for mark in _BEHIND):
            seam = _SEAM.search(line[:_LONGEST])
            if seam is not None and is_bar(line[: seam.start() + 1]):
                found.append(line[: seam.start() + 1])
                line = line[seam.end() :]  # noqa: PLW2901 - the rest of it
        found.append(line)
    return found
