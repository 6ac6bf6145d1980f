"""Whether a traceback was logged: the level of the line before it, and where it begins. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.message_end import LOG_LINE
from saferun.evidence.job_evidence import Frame

_LEVEL = LazyPattern(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
# A program goes on after an error that it warns of. Of the levels below that the line before a traceback may have any:
# it is then most often another message.
_WARNS = LazyPattern(r"\bWARN(?:ING)?\b")
_FAILS = LazyPattern(r"\b(?:ERROR|CRITICAL|FATAL)\b")

# A program that logs this tries once more, and does not end by that error.
_TRIES_ON = LazyPattern(
    r"\b(?:retry|retries|retrying|attempts?|rebuild(?:ing|s)?|going on|falling back|giving up)\b", re.IGNORECASE
)


def is_of_logger(line: str) -> bool:
    """Whether a logger has written a line."""
    return _LEVEL.search(line) is not None or LOG_LINE.match(line) is not None


def warns(line: str) -> bool:
    """Whether it was logged as a warning."""
    return _WARNS.search(line) is not None


def reports_error(line: str) -> bool:
    """Whether it was logged as an error."""
    return _FAILS.search(line) is not None


def tries_on(line: str) -> bool:
    """Whether a program tries once more after the error that it logs, or has done so."""
    return _TRIES_ON.search(line) is not None


def is_of_module(frames: Sequence[Frame]) -> bool:
    """Whether a traceback begins with the module that was run: the exception was not caught, or there."""
    return bool(frames) and frames[0].function == "<module>"
