"""The calls of Linux that Python 3.11 has no names for: namespaces, mounts, and dying with one's parent."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave namespaces for new ones; CLONE_NEWPID: the next child is PID 1 of a new one (unshare(2))."""
    _checked(_libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter namespaces of a pidfd's process, or the one that is open; CLONE_NEWPID moves children only (setns(2))."""
    _checked(_libc.setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or bind with MS_BIND (mount(2))."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(result, f"mount {kind or 'bind'} on {target}")


def die_with_parent(signum: int) -> None:
    """Get a signal when the thread that forked this process ends (PR_SET_PDEATHSIG of prctl(2))."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signum)), "prctl PR_SET_PDEATHSIG")


def set_name(name: str) -> None:
    """Be shown under a name of at most 15 bytes in /proc/PID/comm (PR_SET_NAME of prctl(2))."""
    _checked(_libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode())), "prctl PR_SET_NAME")
