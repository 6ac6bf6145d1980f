"""The main thread's stack that a process writes itself, by Python's faulthandler: without ptrace, even within C code.

The ranks' hook registers it for a signal; without the hook no signal is sent.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

from saferun.captures.scene import UNPTRACEABLE_STATES, Process
from saferun.evidence.job_evidence import Frame, ThreadStack
from saferun.linux.procfs import read_stat
from saferun.linux.small_files import list_directory, read_pairs

STACKS_SIGNAL = 63
"""SIGRTMAX-1, as in the hook."""
_TEXT_LIMIT_BYTES = 1 << 20
_THREADS_LIMIT = 256
_PATIENCE_S = 2.0
_POLL_S = 0.01
_SETTLED_POLLS = 3
_THREAD = re.compile(r"(?:Stack|(?:Current t|T)hread 0x[0-9a-fA-F]+(?: \[(?P<name>.*)\])?) \(most recent call first\):")
# Marks further threads; further frames of a thread are indented.
_CUT_SHORT = "..."
_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+|\?+) in (?P<function>.*)')


class _Asked:
    """A process that was sent the signal: the file, its size before, and the threads that block the signal."""

    def __init__(self, pid: int, path: str) -> None:
        self.pid = pid
        self.path = path
        self.before_bytes = self._size_bytes = _size_of(path)
        self._deaf = _threads_that_block(pid)
        self._settled_polls = 0
        self._moved_at = time.monotonic()

    def has_written(self, now: float) -> bool:
        """Whether the dump is complete, or nothing more is written.

        The text has no end mark, and a process that waits for a CPU may pause anywhere within it. But the thread that
        writes it blocks the signal meanwhile. Source: sigaction(2).
        """
        size_bytes = _size_of(self.path)
        if size_bytes != self._size_bytes:
            self._size_bytes, self._settled_polls, self._moved_at = size_bytes, 0, now
            return False
        if now >= self._moved_at + _PATIENCE_S:
            return True
        self._settled_polls += size_bytes > self.before_bytes
        return self._settled_polls >= _SETTLED_POLLS and not self.is_at_it

    @property
    def is_at_it(self) -> bool:
        """Whether a thread is writing the dump."""
        return bool(_threads_that_block(self.pid) - self._deaf)

    def text(self) -> bytes:
        """The dump; if it is incomplete, it ends with faulthandler's own mark for that."""
        text = _read_from(self.path, self.before_bytes)
        return text + f"\n{_CUT_SHORT}\n".encode() if text and self.is_at_it else text


def dump_by_signal(processes: Iterable[Process], deadline: float) -> dict[int, bytes]:
    """Have processes write their stacks. Returns the dumps by pid, without processes that cannot, or do not respond.

    Args:
        processes: the processes, all signalled at once.
        deadline: in monotonic seconds.
    """
    asked = [one for one in map(_ask, processes) if one is not None]
    waiting = asked
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        now = time.monotonic()
        waiting = [one for one in waiting if not one.has_written(now)]
    found = {one.pid: one.text() for one in asked}
    return {pid: text for pid, text in found.items() if text}


def can_dump(process: Process) -> bool:
    """Whether a process can be signalled: it has the hook, and its main thread can handle a signal now."""
    stat = read_stat(process.pid)
    if not process.hook_prefix or stat is None or stat.state in UNPTRACEABLE_STATES:
        return False
    if str(process.pid) in _threads_that_block(process.pid):
        return False  # another thread would write its own stack, which would pass for the main one's
    path = _path_of(process)
    return _catches_signal(process.pid) and os.path.isfile(path) and _has_open(process.pid, path)


def _path_of(process: Process) -> str:
    return f"{process.hook_prefix}.{process.pid}.stacks"


def _catches_signal(pid: int) -> bool:
    """Whether faulthandler catches it, and not a handler of the script.

    The signal kills a process that does not catch it. A script that has one handler for every signal has put it in the
    place of faulthandler's, and may end itself there; it catches the signal before this one as well. One that counts
    its own signals from the top catches the one after this one. But that one has a name, SIGRTMAX: it is caught, with
    SIGRTMIN, also by scripts that handle all signals with names, and leave this one alone.
    """
    caught = read_pairs(f"/proc/{pid}/status").get("SigCgt", "")
    if not _is_in(caught, STACKS_SIGNAL) or _is_in(caught, STACKS_SIGNAL - 1):
        return False
    return not _is_in(caught, signal.SIGRTMAX) or _is_in(caught, signal.SIGRTMIN)


def _is_in(mask: str, signum: int) -> bool:
    """Whether a signal is in a mask as proc_pid_status(5) has it."""
    return mask.isalnum() and bool(int(mask, 16) >> (signum - 1) & 1)


def _has_open(pid: int, path: str) -> bool:
    """Whether a process still has the file open; True if that is not readable.

    A script that closes all descriptors may have reused the number that faulthandler writes to. And if the process now
    runs another program, that one may catch the signal.
    """
    folder = f"/proc/{pid}/fd"
    wanted = os.path.realpath(path)
    try:
        for name in os.listdir(folder):
            with suppress(FileNotFoundError):
                if os.readlink(f"{folder}/{name}") == wanted:
                    return True
    except OSError:
        return True
    return False


def _ask(process: Process) -> _Asked | None:
    if not can_dump(process):
        return None
    asked = _Asked(process.pid, _path_of(process))
    try:
        os.kill(process.pid, STACKS_SIGNAL)
    except OSError:
        return None
    return asked


def _threads_that_block(pid: int) -> set[str]:
    """The threads of a process that block the signal. Source: proc_pid_status(5)."""
    tasks = list_directory(f"/proc/{pid}/task")
    blocked = {task: read_pairs(f"/proc/{pid}/task/{task}/status").get("SigBlk", "") for task in tasks}
    return {task for task, mask in blocked.items() if _is_in(mask, STACKS_SIGNAL)}


def _size_of(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _read_from(path: str, offset: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return os.pread(fd, _TEXT_LIMIT_BYTES, offset)
        finally:
            os.close(fd)
    except OSError:
        return b""


def threads_from_text(content: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Parse faulthandler's text, the main thread first; empty if there is no thread.

    It has neither names nor thread ids; the main thread is the last one printed, as the oldest, unless it was cut off,
    which happens after a hundred threads.
    """
    threads: list[tuple[str, bool, list[Frame]]] = []
    is_whole = True
    for line in content[:_TEXT_LIMIT_BYTES].decode(errors="replace").splitlines():
        if head := _THREAD.match(line):
            threads.append((head["name"] or "", line.startswith("Current"), []))
        elif threads and (frame := _FRAME.match(line)):
            number = int(frame["line"]) if frame["line"].isdecimal() and len(frame["line"]) < 10 else 0  # noqa: PLR2004
            threads[-1][2].append(Frame(frame["function"][:512], frame["file"][:1024], number))
        elif line == _CUT_SHORT:
            is_whole = False
    stacks = [
        ThreadStack(
            name or ("MainThread" if is_last else ""), pid if is_last else 0, is_last, is_current, False, tuple(frames)
        )
        for (name, is_current, frames), is_last in zip(
            threads, (is_whole and index == len(threads) - 1 for index in range(len(threads))), strict=True
        )
        if frames
    ]
    return tuple(stacks[::-1][:_THREADS_LIMIT])
