"""Output of processes that are left running at the end of a launch.

They hold the writing ends of pipes whose reading ends would go with saferun, and would be killed by their next line.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import set_name

_CHUNK_BYTES = 64 << 10
_DROPPED = -1


def copy_left_output(pipes: Sequence[tuple[int, int]]) -> int:
    """Fork a process that copies what comes out of these pipes, as it is, until no process can write to them any more.

    Args:
        pipes: the reading end of each, and the descriptor to which it is copied; -1: it is read and dropped.

    Returns:
        The pid of the process; 0 where no process holds the other end of any, or none can be forked.
    """
    held = [(source, target) for source, target in pipes if _has_writers(source)]
    if not held:
        return 0
    try:
        return fork(lambda: _copy(held))
    except OSError:
        return 0


def _has_writers(source: int) -> bool:
    poll = select.poll()
    poll.register(source, 0)
    return not any(events & (select.POLLHUP | select.POLLERR) for _, events in poll.poll(0))


def _copy(pipes: Sequence[tuple[int, int]]) -> None:
    """In the forked process."""
    set_name("sr-output")
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    targets = dict(pipes)
    close_all_but(*targets, *(target for target in targets.values() if target != _DROPPED))
    poll = select.poll()
    for source in targets:
        poll.register(source, select.POLLIN)
    while targets:
        for source, _ in poll.poll():
            chunk = _read(source)
            if chunk is None:
                continue
            if not chunk:
                poll.unregister(source)
                os.close(source)
                del targets[source]
            elif targets[source] != _DROPPED and not _write(targets[source], chunk):
                targets[source] = _DROPPED  # its reader has gone


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
