"""The level of a line that a logger has written before a traceback. Pure."""

from __future__ import annotations

import re

from saferun.diagnosis.message_end import LOG_LINE

_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b")
# A program goes on after an error that it warns of. Of the levels below that the line before a traceback may have any:
# it is then most often another message.
_WARNS = re.compile(r"\bWARN(?:ING)?\b")
_FAILS = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b")


def is_of_logger(line: str) -> bool:
    """Whether a logger has written a line."""
    return _LEVEL.search(line) is not None or LOG_LINE.match(line) is not None


def warns(line: str) -> bool:
    """Whether it was logged as a warning."""
    return _WARNS.search(line) is not None


def reports_error(line: str) -> bool:
    """Whether it was logged as an error."""
    return _FAILS.search(line) is not None
