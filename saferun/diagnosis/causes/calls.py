"""The call that raised an exception, as its traceback quotes it: one error number of the system has many reasons. Pure.

Sources: errno(3); tracebacks of Python 3.8 to 3.14.
"""

from __future__ import annotations

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.tracebacks import Block, PythonError

# Python 3.13 quotes all lines of a call.
_MOST_QUOTED = 12
_FRAME = LazyPattern(r'\s{0,40}(?:> )?File "')
_PROCESS = LazyPattern(
    r"fork\w{0,10}\(|[Ss]pawn\w{0,10}\(|\bPopen\(|\bsubprocess\.\w{1,20}\(|(?:Process|Thread|Pool|Executor)\(|\.start\("
    r"|\b_launch\b|\b_execute_child\b"
)
# fcntl(2), read(2), send(2) and those like them, and what packages of locks and sockets are called.
_WAITS = LazyPattern(
    r"[Ff]lock|lockf\b|\bLOCK_(?:NB|EX|SH)\b|\bfcntl\b|\bF_(?:OFD_)?SETLKW?\b|/(?:filelock|portalocker|fasteners)/"
    r"|(?<![A-Za-z])(?:p?read|p?write|recv|send|accept|connect|flush|splice)[a-z]{0,10}(?:_into|_ex)?\(|[Ss]ock"
)
_SOCKET = LazyPattern(
    r"(?<![A-Za-z])[Ss]ock(?:et)?s?(?![A-Za-z])|\bssl\.py\b|/asyncio/selector_events\.py\b|\b[sg]etsockopt\("
    r"|\.(?:getpeername|getsockname|shutdown|recv(?:_into|from|msg)?|send(?:all|to|msg)?|bind|listen|connect(?:_ex)?"
    r"|accept)\("
)


def would_wait(error: PythonError | None, message: str) -> bool:
    """Whether a call that reads, writes or locks has raised the exception of this message, and none for a process."""
    call = _call_of(error, message)
    return _WAITS.search(call) is not None and _PROCESS.search(call) is None


def is_of_socket(error: PythonError | None, message: str) -> bool:
    """Whether a call of a socket has raised the exception of this message."""
    return _SOCKET.search(_call_of(error, message)) is not None


def _call_of(error: PythonError | None, message: str) -> str:
    """File, function and source of the last call before the exception of this message; empty where unknown."""
    if error is None:
        return ""
    for block in reversed(error.blocks):
        if block.message and block.message[0].strip().startswith(message):
            location = f"{block.frames[-1].file} {block.frames[-1].function} " if block.frames else ""
            return location + _quoted(error, block)
    return ""


def _quoted(error: PythonError, block: Block) -> str:
    end = block.message_start - error.blocks[0].start
    lines: list[str] = []
    for line in reversed(error.lines[max(end - _MOST_QUOTED, 0) : max(end, 0)]):
        if _FRAME.match(line):
            break
        lines.insert(0, line.strip())
    return " ".join(lines)
