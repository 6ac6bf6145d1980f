"""Durations on the command line of saferunctl."""

from __future__ import annotations

import re

from saferun.errors import UsageError

_UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|w)")


def seconds_of(option: str, text: str) -> float:
    """A duration such as 90s, 10min, 12h, 7d, 4w, in seconds.

    Raises:
        UsageError: it is none.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} {text} is not a duration", "use a number with s, min, h, d or w: 90s, 12h, 7d")
    return float(found[1]) * _UNITS[found[2]]
