"""Output of processes that are left running at the end of a launch.

They hold the writing ends of pipes whose reading ends would go with saferun, and would be killed by their next line.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable, Sequence

from saferun.errors import suppress
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but, open_null
from saferun.linux.ownership import open_ours
from saferun.linux.pidfd import open_pidfd
from saferun.linux.prctl import set_name
from saferun.linux.streams import has_writers

_CHUNK_BYTES = 64 << 10
_DROPPED = -1
# Before that, what saferun has read is written to the same files.
_OWNER_ENDS_S = 60.0
_CHECK_S = 0.05
# Whether the owner has ended, where there are no pidfds.
_OWNER_CHECK_S = 0.5


def copy_left_output(pipes: Sequence[tuple[int, int, str]]) -> int:
    """Fork a process that copies what comes out of these pipes, as it is, until no process can write to them any more.

    Args:
        pipes: the reading end of each; the descriptor to which it is copied, -1: to none; and the file to which it is
            appended once this process has ended, empty: to none. Where there is a file, nothing is copied to the
            descriptor from then on, so that who reads from saferun (``| tee``) comes to an end.

    Returns:
        The pid of the process; 0 where no process holds the other end of any, or none can be forked.
    """
    held = [pipe for pipe in pipes if has_writers(pipe[0])]
    if not held:
        return 0
    owner_pid = os.getpid()
    try:
        return fork(lambda: _copy(held, owner_pid))
    except OSError:
        return 0


def _copy(pipes: Sequence[tuple[int, int, str]], owner_pid: int) -> None:
    """In the forked process."""
    set_name("sr-output")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    close_all_but(*(source for source, _, _ in pipes), *(target for _, target, _ in pipes if target != _DROPPED))
    _let_go_of([0])  # who writes to it (``producer | saferun …``) gets SIGPIPE when saferun has ended
    copy = _Copy(pipes, owner_pid)
    while copy.targets:
        copy.step()


class _Copy:
    """What is copied where, at this moment.

    Attributes:
        targets: the descriptors to which each pipe is copied, by its reading end; without pipes that are at their end.
    """

    def __init__(self, pipes: Sequence[tuple[int, int, str]], owner_pid: int) -> None:
        self.targets = {source: [target] if target != _DROPPED else [] for source, target, _ in pipes}
        self._waiting = [(source, path) for source, _, path in pipes if path]
        self._with_files = frozenset(source for source, _ in self._waiting)
        self._files: dict[int, int] = {}
        self._wait_until = time.monotonic() + _OWNER_ENDS_S
        self._console = {1, 2}
        self._owner_pid = owner_pid
        self._owner = open_pidfd(owner_pid)
        self._has_owner = True
        self._poll = select.poll()
        for source in self.targets.keys() - self._with_files:
            self._poll.register(source, select.POLLIN)
        if self._owner >= 0:
            self._poll.register(self._owner, select.POLLIN)

    def step(self) -> None:
        """Wait until something can be read, for a moment at most where something else is waited for; and copy it."""
        if self._has_owner and os.getppid() != self._owner_pid:
            self._owner_ended()
        if self._waiting and (not self._has_owner or time.monotonic() > self._wait_until):
            self._files = _open_files(self._waiting)
            for source, _ in self._waiting:
                self._poll.register(source, select.POLLIN)
            self._waiting = []
        if not self._has_owner and (unused := self._console.difference(*self.targets.values())):
            _let_go_of(unused)
            self._console -= unused
        timeout_s = _CHECK_S if self._waiting else _OWNER_CHECK_S if self._has_owner and self._owner < 0 else None
        for source, _ in self._poll.poll(timeout_s * 1000 if timeout_s is not None else None):
            if source in self.targets:
                self._copy_chunk(source)

    def _owner_ended(self) -> None:
        self._has_owner = False
        if self._owner >= 0:
            self._poll.unregister(self._owner)
        for source in self._with_files & self.targets.keys():
            self.targets[source] = []

    def _copy_chunk(self, source: int) -> None:
        chunk = _read(source)
        if chunk:
            # Or nothing reads it.
            self.targets[source] = [target for target in self.targets[source] if _write(target, chunk)]
            if source in self._files:
                _write(self._files[source], chunk)  # where there is no room now, there may be some later
        elif chunk is not None:
            self._poll.unregister(source)
            os.close(source)
            del self.targets[source]


def _let_go_of(descriptors: Iterable[int]) -> None:
    """Close descriptors of standard streams; their numbers stay in use."""
    with suppress(OSError, ImportError):
        nothing = open_null()
        for fd in descriptors:
            os.dup2(nothing, fd)
        os.close(nothing)


def _open_files(wanted: Sequence[tuple[int, str]]) -> dict[int, int]:
    """The files of pipes, by the reading ends of these; without those that cannot be opened."""
    files = {}
    for source, path in wanted:
        with suppress(OSError):
            files[source] = open_ours(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mapped=True)
    return files


def _read(source: int) -> bytes | None:
    """What has come; empty at the end, None where there is nothing yet."""
    try:
        return os.read(source, _CHUNK_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""  # the last process that had the pseudo-terminal open has exited


def _write(target: int, chunk: bytes) -> bool:
    view = memoryview(chunk)
    while view:
        try:
            view = view[os.write(target, view) :]
        except BlockingIOError:
            with suppress(OSError):
                poll = select.poll()
                poll.register(target, select.POLLOUT)
                poll.poll()
        except OSError:
            return False
    return True
