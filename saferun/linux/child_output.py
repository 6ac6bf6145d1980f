"""The output of a short-lived child, bounded in time and size."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.children import Child, SpawnError, exit_status, fork, signal_group, spawn
from saferun.linux.descriptors import keep_only, open_null
from saferun.linux.pidfd import open_pidfd
from saferun.linux.prctl import die_with_parent, set_name
from saferun.model import ExitStatus

_KEPT_BYTES = 65536
_REAP_TIMEOUT_S = 1.0
_POLL_MS = 20.0
_SHORT_POLL_MS = 1.0
_MOST_LEFT_CHUNKS = 16  # what the largest pipe of an ordinary user holds


def run_program(
    argv: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    *,
    content: bytes = b"",
    errors: bool = False,
    kept_bytes: int = _KEPT_BYTES,
    on_wait: Callable[[float], None] | None = None,
) -> tuple[bytes, ExitStatus | None]:
    """Run a program for a bounded time, or to its end.

    Args:
        argv: the program and its arguments.
        environ: its environment.
        timeout_s: after this time it is killed.
        content: its stdin; no more than fits into a pipe.
        errors: whether its stderr is part of the output; if not, it is dropped.
        kept_bytes: how much of the output's end is kept.
        on_wait: as of :func:`collect_output`.

    Returns:
        As :func:`collect_output`.

    Raises:
        SpawnError: it cannot be started.
    """
    null = open_null()
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
    return collect_output(child, read_end, timeout_s, kept_bytes, on_wait)


def run_forked(serve: Callable[[int], None], timeout_s: float, name: str = "") -> tuple[bytes, ExitStatus | None]:
    """Run a function in a fork of this process for a bounded time.

    A child that cannot be killed, in state D, lives on. So it has no descriptors of this process, but null as its
    standard streams: whoever reads the output of this process still sees its end.

    Args:
        serve: takes the descriptor to which it writes its output.
        timeout_s: after this time the process is killed.
        name: the process's name; by default that of this process.

    Returns:
        As :func:`collect_output`.

    Raises:
        OSError: there is no child: the system refuses a pipe or a fork.
    """
    parent_pid = os.getpid()
    read_end, write_end = os.pipe()

    def begin() -> None:
        die_with_parent(parent_pid)
        if name:
            set_name(name)
        keep_only(write_end)
        serve(write_end)

    try:
        pid = fork(begin)
    except OSError:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return collect_output(Child(pid, open_pidfd(pid)), read_end, timeout_s)


def collect_output(
    child: Child,
    read_end: int,
    timeout_s: float,
    kept_bytes: int = _KEPT_BYTES,
    on_wait: Callable[[float], None] | None = None,
) -> tuple[bytes, ExitStatus | None]:
    """Wait for a child and collect its output; afterwards nothing is left of its process group.

    Args:
        child: the leader of a process group of its own, which no other code reaps.
        read_end: the read end of the pipe that it writes to. It and the child's pidfd are closed.
        timeout_s: after this time the child is killed.
        kept_bytes: how much of the output's end is kept.
        on_wait: if given, the child is never killed: this is called each time that so many seconds have passed, with
            how long the child has run.

    Returns:
        The output, and the child's exit status; None if it had not exited in time.
    """
    patience = _Patience(timeout_s, on_wait)
    poll = select.poll()
    for fd in (read_end, child.pidfd):
        if fd >= 0:
            poll.register(fd, select.POLLIN)
    output = bytearray()
    is_open, ended = True, False
    try:
        while not ended and (left_s := patience.left_s()) > 0:
            # Without a pidfd the child's exit is only found by polling; usually it follows the end of its output.
            wait_ms = left_s * 1000 + 1 if child.pidfd >= 0 else _POLL_MS if is_open else _SHORT_POLL_MS
            ready = {fd for fd, _ in poll.poll(wait_ms)}
            # The output first: once the child has exited, all of it can be read.
            if read_end in ready:
                chunk = os.read(read_end, _KEPT_BYTES)
                output += chunk
                if len(output) > 2 * kept_bytes:
                    del output[:-kept_bytes]
                if not chunk:
                    is_open = False
                    poll.unregister(read_end)
            else:
                ended = child.pidfd in ready if child.pidfd >= 0 else _is_zombie(child.pid)
        if ended and is_open:
            output += _read_rest(read_end)  # written after the poll, before the exit
    finally:
        signal_group(child, signal.SIGKILL)
        status = _reap(child.pid)
        for fd in (read_end, child.pidfd):
            if fd >= 0:
                os.close(fd)
    return bytes(output[-kept_bytes:]), status if ended else None


class _Patience:
    """How long a child may still take. For the arguments see :func:`collect_output`."""

    def __init__(self, timeout_s: float, on_wait: Callable[[float], None] | None) -> None:
        self._begun_at = time.monotonic()
        self._deadline = self._begun_at + timeout_s
        self._timeout_s = timeout_s
        self._on_wait = on_wait

    def left_s(self) -> float:
        """The seconds until it is killed, or until ``on_wait`` is called again."""
        now = time.monotonic()
        if now >= self._deadline and self._on_wait is not None:
            self._on_wait(now - self._begun_at)
            self._deadline = now + self._timeout_s
        return self._deadline - now


def _read_rest(read_end: int) -> bytes:
    """What a pipe holds now. Processes that the child has left may go on writing."""
    rest = bytearray()
    os.set_blocking(read_end, False)
    with suppress(BlockingIOError):
        for _ in range(_MOST_LEFT_CHUNKS):
            chunk = os.read(read_end, _KEPT_BYTES)
            if not chunk:
                break
            rest += chunk
    return bytes(rest)


def _is_zombie(pid: int) -> bool:
    """Whether a child has exited and has not been reaped."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _reap(pid: int) -> ExitStatus | None:
    """The exit status of a killed child; None if it is in uninterruptible sleep, where SIGKILL has to wait."""
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None  # saferun was started with SIGCHLD ignored, and the kernel has reaped it
        if reaped:
            return exit_status(status)
        time.sleep(0.002)
    return None
