"""What a short-lived child says, within bounds of time and memory."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping, Sequence

from saferun.linux.children import Child, SpawnError, exit_status, signal_group, spawn
from saferun.model import ExitStatus

_KEPT_BYTES = 65536
_REAP_TIMEOUT_S = 1.0
_LOOK_AGAIN_MS = 20.0


def run_program(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    *,
    content: bytes = b"",
    errors: bool = False,
    kept_bytes: int = _KEPT_BYTES,
) -> tuple[bytes, ExitStatus | None]:
    """Run a program for a bounded time.

    Args:
        argv: the program and its arguments.
        environ: its environment.
        timeout_s: how long it may take; then it is killed.
        content: what it finds on stdin; no more than a pipe holds.
        errors: whether what it writes to stderr counts as output; else that is dropped.
        kept_bytes: how much of the output is kept, from its end.

    Returns:
        As :func:`collect_output`.

    Raises:
        SpawnError: it cannot be started.
    """
    null = os.open(os.devnull, os.O_RDWR)
    in_read, in_write = os.pipe()
    read_end, write_end = os.pipe()
    try:
        os.write(in_write, content)
        child = spawn(argv, environ, stdin=in_read, stdout=write_end, stderr=write_end if errors else null)
    except SpawnError:
        os.close(read_end)
        raise
    finally:
        for fd in (null, in_read, in_write, write_end):
            os.close(fd)
    return collect_output(child, read_end, timeout_s, kept_bytes)


def collect_output(
    child: Child, read_end: int, timeout_s: float, kept_bytes: int = _KEPT_BYTES
) -> tuple[bytes, ExitStatus | None]:
    """Wait for a child and take what it writes; afterwards nothing is left of its process group.

    Args:
        child: the leader of a process group of its own, not reaped by anybody else.
        read_end: the pipe that it writes to. It is closed here, and so is the child's pidfd.
        timeout_s: how long the child may take; then it is killed.
        kept_bytes: how much of the output is kept, from its end.

    Returns:
        The output, and how the child ended: None where it had not ended in time.
    """
    deadline = time.monotonic() + timeout_s
    poll = select.poll()
    for fd in (read_end, child.pidfd):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    output = bytearray()
    ended = False
    try:
        while not ended and (left_s := deadline - time.monotonic()) > 0:
            # Without a pidfd nothing tells the child's end, but a look now and then.
            ready = {fd for fd, _ in poll.poll(left_s * 1000 + 1 if child.pidfd >= 0 else _LOOK_AGAIN_MS)}
            # The output first: once the child has ended, all that it wrote is there to be read.
            if read_end in ready:
                chunk = os.read(read_end, _KEPT_BYTES)
                output += chunk
                if len(output) > 2 * kept_bytes:
                    del output[:-kept_bytes]
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
    return bytes(output[-kept_bytes:]), status if ended else None


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
