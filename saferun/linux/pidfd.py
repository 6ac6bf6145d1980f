"""Descriptors of processes: readable when the process exits, and safe for signals if pids are reused."""

from __future__ import annotations

import os
import signal
import sys

from saferun.linux.system_call import system_call
from saferun.model import ExitStatus

# From linux/pidfd.h: struct pidfd_info in its first version, and where the wait status is in it.
_GET_INFO = 0xC040FF0B
_INFO_BYTES = 64
_INFO_EXIT = 1 << 3
_EXIT_CODE_AT = 60


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process exits; -1 if the system has none, or no such process.

    It is closed by exec. Source: pidfd_open(2), Linux 5.3.
    """
    try:
        if hasattr(os, "pidfd_open"):
            return os.pidfd_open(pid)
        return system_call("pidfd_open", pid, 0)
    except OSError:
        return -1


def send_signal(pid: int, pidfd: int, signum: int) -> None:
    """Send a signal to a child that has not been reaped.

    Args:
        pid: the child; its pid is not reused until it is reaped.
        pidfd: its descriptor, or -1.
        signum: the signal.

    Raises:
        OSError: as kill(2).
    """
    if pidfd >= 0:
        try:
            if hasattr(signal, "pidfd_send_signal"):
                signal.pidfd_send_signal(pidfd, signum)
            else:
                system_call("pidfd_send_signal", pidfd, signum, 0, 0)
            return
        except ProcessLookupError:
            raise
        except OSError:
            pass  # a seccomp filter allows pidfd_open but not this; kill reports other errors
    os.kill(pid, signum)


def exit_status(pidfd: int) -> ExitStatus | None:
    """How the process of a descriptor ended, whoever has reaped it; None where it has not, or the kernel cannot tell.

    Source: ioctl_pidfd(2), PIDFD_GET_INFO with PIDFD_INFO_EXIT, Linux 6.15.
    """
    import fcntl

    request = bytearray(_INFO_BYTES)
    request[:8] = _INFO_EXIT.to_bytes(8, sys.byteorder)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, request)
    except (OSError, ValueError):
        return None
    if not int.from_bytes(request[:8], sys.byteorder) & _INFO_EXIT:
        return None
    status = int.from_bytes(request[_EXIT_CODE_AT : _EXIT_CODE_AT + 4], sys.byteorder)
    if os.WIFSIGNALED(status):
        return ExitStatus(None, os.WTERMSIG(status), os.WCOREDUMP(status))
    return ExitStatus(os.WEXITSTATUS(status), None)
