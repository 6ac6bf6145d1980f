"""What the kernel of this machine tells of processes that are not saferun's children."""

from __future__ import annotations

import functools
import os
import subprocess

from saferun.linux.pidfd import exit_status, open_pidfd


@functools.cache
def kernel_reports_exits() -> bool:
    """Whether it tells how a process has ended that another one has reaped: pidfds of Linux 6.15."""
    with subprocess.Popen(["true"]) as process:
        pidfd = open_pidfd(process.pid)
    if pidfd < 0:
        return False
    try:
        return exit_status(pidfd) is not None
    finally:
        os.close(pidfd)
