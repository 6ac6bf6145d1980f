"""Closing every descriptor but a few, in a process that has been forked."""

from __future__ import annotations

import os

from saferun.errors import suppress
from saferun.linux.system_call import system_call

_LAST = (1 << 32) - 1
# Where neither the kernel nor /proc helps. Descriptors beyond are closed by exec, as all that Python opens.
_FIRST_FEW = 4096


def close_all_but(*kept: int, low: int = 3) -> None:
    """Close all descriptors of this process from ``low`` on, but these.

    Without ``close_range`` only what is open is closed: ``os.closerange`` would make a system call for every number, a
    million of them, at every start of a process.

    Source: close_range(2), Linux 5.9; proc(5), /proc/PID/fd.
    """
    gaps = _gaps(sorted(set(kept)), low)
    try:
        for first, last in gaps:
            system_call("close_range", first, last, 0)
    except OSError:
        _close_one_by_one(set(kept), low)


def _gaps(kept: list[int], low: int) -> list[tuple[int, int]]:
    gaps = []
    for fd in kept:
        if fd >= low:
            if fd > low:
                gaps.append((low, fd - 1))
            low = fd + 1
    return [*gaps, (low, _LAST)]


def _close_one_by_one(kept: set[int], low: int) -> None:
    try:
        # The list holds the descriptor that it was read by, which is closed by now.
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except (OSError, ValueError):
        fds = list(range(low, _FIRST_FEW))
    for fd in fds:
        if fd >= low and fd not in kept:
            with suppress(OSError):
                os.close(fd)
