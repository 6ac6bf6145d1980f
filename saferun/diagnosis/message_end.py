"""Where the message of an exception ends: it has no end of its own. Pure."""

from __future__ import annotations

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.text.wording import CONTEXT, DIRECT

ABORTS = (
    "terminate called ",
    # glibc's own checks of the heap and the stack.
    "double free or corruption",
    "free(): ",
    "malloc(): ",
    "malloc_consolidate(): ",
    "munmap_chunk(): ",
    "realloc(): ",
    "corrupted size vs. prev_size",
    "corrupted double-linked list",
    "*** stack smashing detected",
    "*** buffer overflow detected",
)
"""What C++ and the C library print before they abort."""
_AFTER_MESSAGE = (
    *ABORTS,
    "Fatal Python error:",
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
    # FFmpeg's.
    r"|\[[\w,:]{1,60} @ (?:0x)?[0-9a-f]{1,16}\] "
)
# Python's own messages, which end with their line, whatever was printed below; a key of some types has several lines.
_NAME = r"'[^']{1,200}'"
_MEANT = r"(?:\. Did you mean: .{1,220})?"
_ONE_LINE = LazyPattern(
    r"(?:KeyError: (?:'[^']{0,400}'|\"[^\"]{0,400}\"|-?\d{1,20}|\(.{1,400}\))"
    r"|IndexError: (?:(?:list|tuple|string|range object|deque) (?:assignment )?index out of range|pop from .{1,30}"
    r"|index -?\d{1,20} is out of bounds for .{1,60}|index out of range in self)"
    rf"|AttributeError: (?:{_NAME} object|(?:module|type object) {_NAME}) has no attribute {_NAME}{_MEANT}"
    rf"|NameError: name {_NAME} is not defined{_MEANT}|UnboundLocalError: .{{1,400}}"
    r"|TypeError: (?:[\w.<>]{1,200}\(\) (?:got an unexpected|got multiple values for|missing \d|takes ).{1,400}"
    rf"|{_NAME} object is not (?:callable|iterable|subscriptable)|unsupported operand type.{{1,300}})"
    r"|ZeroDivisionError: .{0,40}\b(?:division|modulo|divmod)\b.{0,40}|RecursionError: maximum recursion depth .{1,100}"
    rf"|UnicodeDecodeError: {_NAME} codec can't decode .{{1,200}}"
    rf"|ModuleNotFoundError: No module named {_NAME}(?:; {_NAME} is not a package)?"
    r"|(?:FileNotFound|FileExists|IsADirectory|NotADirectory|Permission|BlockingIO|BrokenPipe|ConnectionReset"
    r"|ConnectionRefused|ConnectionAborted|Timeout|OS)Error: \[Errno \d{1,3}\] [^:']{1,80}(?:: '[^']{1,600}')?"
    r"(?: -> '[^']{1,600}')?)$"
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


def has_one_line(line: str) -> bool:
    """Whether a message whose first line this is has no other."""
    return _ONE_LINE.match(line) is not None
