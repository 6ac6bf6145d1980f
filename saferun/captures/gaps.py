"""What a capture's directory lacks, as the text of a file there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

NAME = "missing.txt"


def gaps_text(unwritten: Sequence[str], unfinished: Sequence[str]) -> str:
    """The text; empty where nothing is missing.

    Args:
        unwritten: names of files that found no room in memory while the file system did not answer.
        unfinished: captures that were not ready in time.
    """
    lines = [f"no room in memory while the files could not be written: {name}" for name in unwritten]
    lines += [f"captures timed out: {name}" for name in unfinished]
    return "".join(f"{line}\n" for line in lines)
