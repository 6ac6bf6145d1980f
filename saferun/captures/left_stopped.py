"""Continues processes that a tool has left stopped when it was killed.

pystack and gdb stop a process by a SIGSTOP to each of its threads. A thread that does not run, as in uninterruptible
sleep, takes it only afterwards, and if the tool has been killed by then, it stops the process. py-spy and strace stop
threads without a signal.

Sources: ptrace(2), "Attaching and detaching"; signal(7); proc(5). SIGCONT discards the SIGSTOP that threads have not
taken yet (kernel/signal.c, prepare_signal).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress

from saferun.captures.process_state import read_thread_states
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import set_name
from saferun.linux.procfs import read_stat, thread_ids
from saferun.linux.small_files import read_bytes

# A tool that was killed lets go of a process once the kernel has ended it, which then stops a moment later.
_QUIET_CHECKS = 20
_CHECK_AGAIN_S = 0.05
# A thread may be in uninterruptible sleep for long, and so may the tool that holds it.
_LONGEST_WATCH_S = 300.0
_STATUS_BYTES = 8192
_CHUNK_BYTES = 4096
_SIGSTOP_BIT = 1 << (signal.SIGSTOP - 1)
_ALL_IS_WELL = b"."


class Resumer:
    """Continues what tools leave stopped, in its block.

    Args:
        running: the processes that were not stopped before: when each was started, in ticks.
        pipe: the descriptor of a pipe to the process that watches.
    """

    def __init__(self, running: Mapping[int, int], pipe: int) -> None:
        self._running = running
        self._pipe = pipe
        self.is_needed = False
        """Whether the process that watches has something to do when the block has ended."""

    def tool_failed(self, pid: int) -> None:
        """A tool that was at this process was killed. Continues the process now, and again where it stops later."""
        if pid in self._running:
            self.is_needed = True
            os.write(self._pipe, b"%d\n" % pid)  # never SIGPIPE: its other end is open here as well
            _continue(pid, self._running[pid])


@contextmanager
def resumed_if_killed(pids: Collection[int]) -> Iterator[Resumer]:
    """Continue what a tool leaves stopped, also where this process is killed along with the tool, or is interrupted.

    A process of its own waits for that. It ends with the block, or, if a tool was killed, once nothing can stop any
    more. Without room for one the block runs all the same.

    Args:
        pids: processes that the tools in this block may stop. Those that are stopped already stay so.
    """
    running = {
        pid: stat.start_ticks
        for pid in pids
        if (stat := read_stat(pid)) is not None and not _is_stopped(pid, stat.state)
    }
    wait_end, own_end = os.pipe()
    watching = -1

    def watch() -> None:
        set_name("sr-resume")
        close_all_but(wait_end, low=0)
        failures = b""
        while chunk := os.read(wait_end, _CHUNK_BYTES):
            failures += chunk
        failed = {int(line) for line in failures.split(b"\n") if line.isdigit()}
        is_over = failures.endswith(_ALL_IS_WELL)
        _watch({pid: ticks for pid, ticks in running.items() if not is_over or pid in failed})

    resumer = Resumer(running, own_end)
    try:
        with suppress(OSError):
            watching = fork(watch)
        yield resumer
        os.write(own_end, _ALL_IS_WELL)
    finally:
        os.close(own_end)
        os.close(wait_end)
    if watching >= 0 and not resumer.is_needed:
        with suppress(ChildProcessError):
            os.waitpid(watching, 0)


def _watch(running: Mapping[int, int]) -> None:
    """Continue each of these processes that stops before none of them has been held or about to stop for a second."""
    now = time.monotonic()
    until = now + _LONGEST_WATCH_S
    quiet_checks = 0
    while running and quiet_checks < _QUIET_CHECKS and now < until:
        are_held = [_continue(pid, start_ticks) for pid, start_ticks in running.items()]
        quiet_checks = 0 if any(are_held) else quiet_checks + 1
        took_s = time.monotonic() - now
        time.sleep(max(_CHECK_AGAIN_S, 2 * took_s))  # of a process with thousands of threads a check takes long
        now = time.monotonic()


def _continue(pid: int, start_ticks: int) -> bool:
    """Continue a process that has stopped, or that will. Returns whether it had to be, or something traces it."""
    stat = read_stat(pid)
    if stat is None or stat.start_ticks != start_ticks:
        return False  # its number may be another process's by now
    statuses = [read_bytes(f"/proc/{pid}/task/{tid}/status", _STATUS_BYTES) for tid in thread_ids(pid)]
    if any(_field(status, b"TracerPid") not in {b"0", b""} for status in statuses):
        return True
    if stat.state != "T" and not any(map(_has_pending_stop, statuses)):
        return False
    with suppress(OSError):
        os.kill(pid, signal.SIGCONT)
    return True


def _is_stopped(pid: int, state: str) -> bool:
    """Whether a process was stopped by something else, of which threads may be in uninterruptible sleep."""
    if state == "D" and "T" in read_thread_states(pid).values():
        return True
    return state == "T" or _has_pending_stop(read_bytes(f"/proc/{pid}/status", _STATUS_BYTES))


def _has_pending_stop(status: bytes) -> bool:
    return any(int(_field(status, name) or b"0", 16) & _SIGSTOP_BIT for name in (b"SigPnd", b"ShdPnd"))


def _field(status: bytes, name: bytes) -> bytes:
    return status.partition(b"\n%s:" % name)[2].partition(b"\n")[0].strip()
