"""Where the message of an exception ends: it has no end of its own. Pure."""

from __future__ import annotations

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.text.wording import CONTEXT, DIRECT

_AFTER_MESSAGE = (
    "Fatal Python error:",
    "terminate called ",
    "Exception ignored in",
    "Exception in thread",
    "Exception raised from ",
    "Thread 0x",
    "Current thread 0x",
    "Extension modules:",
    "frame #",
    "wandb:",
    DIRECT,
    CONTEXT,
)
LOG_LINE = LazyPattern(r"\[[DIWEF]\d{0,4} ?\d\d:\d\d:\d\d|[DIWEF]\d{4} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\d[ T]\d\d:")
"""Lines of torch's loggers, and any with a date."""
_LEVEL = r"(?:DEBUG|INFO|WARNING|ERROR|CRITICAL)"
# Lines of a logger of the program's own, of trackers, and warnings of Python's. What torch_npu and NCCL put into their
# messages begins with a level in brackets, or has other levels; a bare ``ERROR: `` may quote what a program has said.
_LOGGED = LazyPattern(
    rf"{_LEVEL}:[A-Za-z_][\w.]{{0,100}}:|(?:DEBUG|INFO|WARNING): |{_LEVEL} \d\d-\d\d \d\d:\d\d:\d\d |\[{_LEVEL}\|"
    rf"|\[?\d{{4}}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d[^A-Z]{{0,20}}(?:\[[\w.]{{1,100}}\][ -]{{0,3}})?\[?{_LEVEL}\b"
    rf"|\d\d/\d\d/\d{{2,4}} \d\d:\d\d:\d\d - {_LEVEL}\b"
    rf"|COMET {_LEVEL}: |swanlab: |\[neptune\] |ClearML (?:Monitor|Task|results page): "
    r"|\S{1,200}\.py:\d{1,6}: \w{1,40}Warning: "
)
_ANNOUNCES = LazyPattern(r":$|\b(?:[Oo]utput|stderr|stdout|[Ll]ogs?)\b.{0,40}$")


def is_after_message(line: str) -> bool:
    """Whether a line never belongs to the message of the exception above it."""
    return line.startswith(_AFTER_MESSAGE) or LOG_LINE.match(line) is not None


def is_logged(line: str) -> bool:
    """Whether a line is of a logger, and below a message unless that announces it."""
    return _LOGGED.match(line) is not None


def announces_lines(line: str) -> bool:
    """Whether a line of a message announces what another program has written."""
    return _ANNOUNCES.search(line[-200:]) is not None
