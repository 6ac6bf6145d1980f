"""Descriptors of processes: readable when the process exits, and safe for signals if pids are reused."""

from __future__ import annotations

import os
import signal

from saferun.linux.system_call import system_call


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
