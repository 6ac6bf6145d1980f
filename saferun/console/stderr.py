"""Standard error as it is before there is a console."""

from __future__ import annotations

import sys

from saferun.errors import printable_lines, suppress


def tell(words: object) -> None:
    """Words of saferun's own, before there is a console."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{printable_lines(str(words))}\n")
