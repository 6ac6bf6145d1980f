"""What a command answers, on stdout."""

from __future__ import annotations

import sys

from saferun.errors import printable_lines


def answer(text: str) -> None:
    """Print lines. Names of functions and words of tools may hold whatever somebody has put there."""
    encoding = sys.stdout.encoding or "utf-8"
    lines = printable_lines(text.expandtabs())
    sys.stdout.write(lines.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
