"""The process that ends a run whose supervisor was killed.

It is forked from the supervisor before anything else is started, waits in one read, and does nothing else. When the
supervisor's end of the pipe closes without a goodbye, it kills whatever carries the run's id in its environment:
ranks die by PR_SET_PDEATHSIG, but their children, and children that changed session, do not.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress

from saferun.host.children import fork
from saferun.host.prctl import set_name
from saferun.host.procfs import processes_of_run
from saferun.linux.descriptors import close_all_but
from saferun.linux.scratch import remove_scratch, scratch_paths
from saferun.linux.signals import witness

_GOODBYE = b"g"
_PATIENCE_S = 10.0


class Reaper:
    """The supervisor's handle on its reaper."""

    def __init__(self, run_id: str) -> None:
        read_end, self._write_end = os.pipe()
        # What signals it gets, the ranks get too: whoever sends them to both cannot tell them apart.
        self.witness_fd, witness_end = os.pipe()
        self.pid = fork(lambda: _wait_for_the_end(run_id, read_end, witness_end))
        os.close(read_end)
        os.close(witness_end)

    def dismiss(self) -> None:
        """Say goodbye: the run has ended in good order. Waits for the reaper to be gone."""
        with suppress(OSError):
            os.write(self._write_end, _GOODBYE)
        os.close(self._write_end)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _wait_for_the_end(run_id: str, read_end: int, witness_end: int) -> None:
    # What ends a job politely (a scheduler's SIGTERM to every process of it) does not end a helper process.
    set_name("sr-reaper")
    scratch = scratch_paths(run_id)  # before the current directory changes
    kept = os.dup2(read_end, 3)
    moved = os.dup2(witness_end, 4)
    witness(moved)
    close_all_but(kept, moved)
    with suppress(OSError):
        os.chdir("/")
    if os.read(kept, 1) == _GOODBYE:
        return
    killed = kill_run(run_id)
    remove_scratch(scratch)
    if not killed:
        return
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):  # not where nobody reads: the reaper ends in any case
        with suppress(OSError):
            os.write(2, f"saferun: the supervisor was killed; {killed} processes of the run were ended\n".encode())


def kill_run(run_id: str) -> int:
    """Kill every process of a run until none is left, for at most ten seconds. Returns how many were killed."""
    killed: set[int] = set()
    give_up_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at:
        pids = processes_of_run(run_id)
        if not pids:
            break
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(0.02)
    return len(killed)
