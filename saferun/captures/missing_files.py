"""The text of the file that lists what a capture's directory lacks. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NAME = "missing.txt"


def missing_text(unwritten: Sequence[str], unfinished: Sequence[str]) -> str:
    """The text; empty if nothing is missing.

    Args:
        unwritten: names of files without room in memory while the file system did not respond.
        unfinished: captures that timed out.
    """
    lines = [f"no room in memory while the files could not be written: {name}" for name in unwritten]
    lines += [f"captures timed out: {name}" for name in unfinished]
    return "".join(f"{line}\n" for line in lines)
