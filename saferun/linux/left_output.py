"""Output of processes that are left running at the end of a launch.

They hold the writing ends of pipes whose reading ends would go with saferun, and would be killed by their next line.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.ownership import open_ours
from saferun.linux.prctl import set_name

_CHUNK_BYTES = 64 << 10
_DROPPED = -1
# Before that, what saferun has read is written to the same files.
_OWNER_ENDS_S = 60.0
_CHECK_S = 0.05


def copy_left_output(pipes: Sequence[tuple[int, int, str]]) -> int:
    """Fork a process that copies what comes out of these pipes, as it is, until no process can write to them any more.

    Args:
        pipes: the reading end of each; the descriptor to which it is copied, -1: to none; and the file to which it is
            appended once this process has ended, empty: to none.

    Returns:
        The pid of the process; 0 where no process holds the other end of any, or none can be forked.
    """
    held = [pipe for pipe in pipes if _has_writers(pipe[0])]
    if not held:
        return 0
    owner_pid = os.getpid()
    try:
        return fork(lambda: _copy(held, owner_pid))
    except OSError:
        return 0


def _has_writers(source: int) -> bool:
    poll = select.poll()
    poll.register(source, 0)
    return not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def _copy(pipes: Sequence[tuple[int, int, str]], owner_pid: int) -> None:
    """In the forked process."""
    set_name("sr-output")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    targets = {source: [target] if target != _DROPPED else [] for source, target, _ in pipes}
    close_all_but(*targets, *(target for some in targets.values() for target in some))
    poll = select.poll()
    for source, _, path in pipes:
        if not path:
            poll.register(source, select.POLLIN)
    waiting = [(source, path) for source, _, path in pipes if path]
    files: dict[int, int] = {}
    wait_until = time.monotonic() + _OWNER_ENDS_S
    while targets:
        if waiting and (os.getppid() != owner_pid or time.monotonic() > wait_until):
            files = _open_files(waiting)
            for source, _ in waiting:
                poll.register(source, select.POLLIN)
            waiting = []
        for source, _ in poll.poll(_CHECK_S * 1000 if waiting else None):
            chunk = _read(source)
            if chunk:
                targets[source] = [target for target in targets[source] if _write(target, chunk)]  # or nothing reads it
                if source in files:
                    _write(files[source], chunk)  # where there is no room now, there may be some later
            elif chunk is not None:
                poll.unregister(source)
                os.close(source)
                del targets[source]


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
