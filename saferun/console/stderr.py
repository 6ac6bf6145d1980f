"""Standard error before there is a console."""

from __future__ import annotations

import sys

from saferun.errors import printable_lines, suppress


def print_error(message: object) -> None:
    """One or more lines of saferun itself, before there is a console."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{printable_lines(str(message))}\n")
