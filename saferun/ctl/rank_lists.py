"""Lists of ranks on the command line of saferunctl."""

from __future__ import annotations

import re

from saferun.errors import UsageError

_RANKS = re.compile(r"[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9}(-[0-9]{1,9})?)*")


def ranks_of(option: str, text: str) -> tuple[range, ...]:
    """A list of ranks such as ``3,5-7``.

    Raises:
        UsageError: it is none.
    """
    if _RANKS.fullmatch(text) is None:
        raise UsageError(f"{option} {text} is no list of ranks", "write it like 3,5-7")
    spans = []
    for span in text.split(","):
        low, _, high = span.partition("-")
        spans.append(range(int(low), int(high or low) + 1))
    return tuple(spans)
