"""What a short-lived child says, within bounds of time and memory."""

from __future__ import annotations

import os
import select
import signal
import time

from saferun.linux.children import Child, exit_status, signal_group
from saferun.model import ExitStatus

_KEPT_BYTES = 65536
_REAP_TIMEOUT_S = 1.0
_LOOK_AGAIN_MS = 20.0


def collect_output(child: Child, read_end: int, timeout_s: float) -> tuple[bytes, ExitStatus | None]:
    """Wait for a child and take what it writes; afterwards nothing is left of its process group.

    Args:
        child: the leader of a process group of its own, not reaped by anybody else.
        read_end: the pipe that it writes to. It is closed here, and so is the child's pidfd.
        timeout_s: how long the child may take; then it is killed.

    Returns:
        The last 64 KiB of the output, and how the child ended: None where it had not ended in time.
    """
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    for fd in (read_end, child.pidfd):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    output = b""
    ended = False
    try:
        while not ended and (left_s := deadline - time.monotonic()) > 0:
            # Without a pidfd nothing tells the child's end, but a look now and then.
            ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1 if child.pidfd >= 0 else _LOOK_AGAIN_MS)}
            # The output first: once the child has ended, all that it wrote is there to be read.
            if read_end in ready:
                chunk = os.read(read_end, _KEPT_BYTES)
                output = (output + chunk)[-_KEPT_BYTES:]
                if not chunk:
                    poll.unregister(read_end)
            else:
                ended = child.pidfd in ready if child.pidfd >= 0 else _is_zombie(child.pid)
    finally:
        signal_group(child, signal.SIGKILL)
        status = _reap(child.pid)
        for fd in (read_end, child.pidfd):
            if fd >= 0:
                os.close(fd)
    return output, status if ended else None


def _is_zombie(pid: int) -> bool:
    """Whether a child has ended and is still to be reaped."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(pid: int) -> ExitStatus | None:
    """How a killed child ended, or None: in the kernel's uninterruptible sleep even SIGKILL has to wait."""
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        reaped, status = os.waitpid(pid, os.WNOHANG)
        if reaped:
            return exit_status(status)
        time.sleep(0.002)
    return None
