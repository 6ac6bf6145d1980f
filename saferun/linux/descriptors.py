"""Closing descriptors: all but a few in a forked process, and one where an error occurs; one that leads nowhere."""

from __future__ import annotations

import os

from saferun.errors import suppress
from saferun.linux.system_call import system_call

_LAST = (1 << 32) - 1
# Without close_range and /proc. Higher ones are closed by exec, as all that Python opens.
_FIRST_FEW = 4096


class close_on_error:  # noqa: N801 - a function, as ``contextlib.suppress`` is
    """``with close_on_error(fd):`` closes a descriptor if the block raises."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the descriptor after an error."""
        if kind is not None:
            os.close(self._fd)


def open_null() -> int:
    """Open what is empty for readers, and takes whatever is written: /dev/null, or a file in memory.

    On some hosts /dev/null is a file by mistake, which only root can write. What is written there by saferun's own
    processes and tools is a few lines.

    Raises:
        OSError: there are no descriptors left.
    """
    try:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        from saferun.linux.memory_file import shared_memory_file

        return shared_memory_file("saferun-null")


def keep_only(*kept: int) -> None:
    """In a forked process: close all descriptors except these; the standard streams lead nowhere.

    Raises:
        OSError: nothing that leads nowhere can be opened.
    """
    close_all_but(*kept)
    null = open_null()
    for fd in (0, 1, 2):
        if fd not in kept and fd != null:
            os.dup2(null, fd)
    if null > 2:  # noqa: PLR2004
        os.close(null)


def close_all_but(*kept: int, low: int = 3) -> None:
    """Close all descriptors of this process from ``low`` on except these.

    Without ``close_range`` the open ones are listed first: ``os.closerange`` would make a system call for every number,
    up to a million at every start of a process.

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
        # The list includes the descriptor that it was read with, which is closed by now.
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except (OSError, ValueError):
        fds = list(range(low, _FIRST_FEW))
    for fd in fds:
        if fd >= low and fd not in kept:
            with suppress(OSError):
                os.close(fd)
