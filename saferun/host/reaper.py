"""The process that ends a run whose supervisor was killed.

It is forked from the supervisor before anything else is started, waits at its pipe, and does nothing else. When the
supervisor's end of the pipe closes without a goodbye, it kills what is provably the run's: processes that carry the
run's id in their environment, and processes that live in a session that a rank made. Ranks die by PR_SET_PDEATHSIG, but
their children, and children that changed session, do not; and a program that sets its title overwrites the environment
that others see.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time

from saferun.errors import suppress
from saferun.host.children import fork
from saferun.host.prctl import set_name
from saferun.host.procfs import belongs_to_run, living_processes
from saferun.linux.descriptors import close_all_but
from saferun.linux.scratch import remove_scratch, scratch_paths
from saferun.linux.sessions import Sessions
from saferun.linux.signals import witness

_GOODBYE, _STARTED, _ENDED = b"g", b"s", b"e"
# What is said, a pid, and when that process started (clock ticks since boot). Records of one size, each written in one
# piece: pipe(7), PIPE_BUF.
_RECORD = struct.Struct("<c3xiQ")
_RECORDS_AT_ONCE = 256
_PATIENCE_S = 10.0
_LOOK_AGAIN_S = 0.02
_LAST_WORDS_S = 1.0
_LEAST_PAUSE_S = 0.0002
# A rank that has ended may have left something in its session; if not, the session's number may become anybody's.
_FIRST_LOOK_S, _NEXT_LOOK_S = 1.0, 60.0


class Reaper:
    """The supervisor's handle on its reaper."""

    def __init__(self, run_id: str) -> None:
        read_end, self._write_end = os.pipe()
        # What signals it gets, the ranks get too: whoever sends them to both cannot tell them apart.
        self.witness_fd, witness_end = os.pipe()
        # The supervisor waits for nobody: a reaper that is stopped reads later, or never.
        os.set_blocking(self._write_end, False)
        self.is_needed = False  # the run could not be ended in good order
        self.pid = fork(lambda: _wait_for_the_end(run_id, read_end, witness_end))
        os.close(read_end)
        os.close(witness_end)

    def note_started(self, pid: int, start_ticks: int) -> None:
        """A rank leads a session of its own from now on. ``start_ticks``: when it started."""
        self._write(_STARTED, pid, start_ticks)

    def note_ended(self, pid: int) -> None:
        """A rank has been reaped; what it left behind is still in its session."""
        self._write(_ENDED, pid)

    def dismiss(self) -> None:
        """Let it go, and wait until it is gone. Where the run has ended in good order, it is told goodbye first."""
        if not self.is_needed:
            self._write(_GOODBYE)
        fd, self._write_end = self._write_end, -1
        with suppress(OSError):
            os.close(fd)
        give_up_at = time.monotonic() + (_PATIENCE_S if self.is_needed else 0.0) + _LAST_WORDS_S
        pause_s = _LEAST_PAUSE_S
        with suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up_at:  # somebody has stopped it
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LOOK_AGAIN_S)

    def _write(self, what: bytes, pid: int = 0, start_ticks: int = 0) -> None:
        with suppress(OSError):
            os.write(self._write_end, _RECORD.pack(what, pid, start_ticks))


def _wait_for_the_end(run_id: str, read_end: int, witness_end: int) -> None:
    # What ends a job politely (a scheduler's SIGTERM to every process of it) does not end a helper process.
    set_name("sr-reaper")
    scratch = scratch_paths(run_id)  # before the current directory changes
    supervisor_pid = os.getppid()
    kept = os.dup2(read_end, 3)
    moved = os.dup2(witness_end, 4)
    witness(moved)
    close_all_but(kept, moved)
    with suppress(OSError):
        os.chdir("/")
    sessions = Sessions()
    if _is_told_goodbye(kept, sessions):
        return
    killed = kill_run(run_id, sessions)
    remove_scratch(scratch)
    if not killed:
        return
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):  # not where nobody reads: the reaper ends in any case
        why = "the end of the run failed" if os.getppid() == supervisor_pid else "the supervisor was killed"
        with suppress(OSError):
            os.write(2, f"saferun: {why}; {killed} processes of the run were ended\n".encode())


def _is_told_goodbye(fd: int, sessions: Sessions) -> bool:
    """Wait until the supervisor says goodbye, or is gone. Remembers the ranks' sessions meanwhile."""
    ended: set[int] = set()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    look_s = _FIRST_LOOK_S
    while True:
        if not poll.poll(look_s * 1000 if ended else None):
            # Sessions of ranks that have ended, and in which nobody is left, are nobody's.
            gone = ended - sessions.living(living_processes())
            for pid in gone:
                sessions.discard(pid)
            ended -= gone
            look_s = _NEXT_LOOK_S
            continue
        content = os.read(fd, _RECORD.size * _RECORDS_AT_ONCE)
        if not content:
            return False
        for what, pid, start_ticks in _RECORD.iter_unpack(content[: len(content) // _RECORD.size * _RECORD.size]):
            if what == _GOODBYE:
                return True
            if what == _STARTED:
                sessions.add(pid, start_ticks)
                ended.discard(pid)
            elif what == _ENDED:
                ended.add(pid)
                look_s = _FIRST_LOOK_S


def kill_run(run_id: str, sessions: Sessions) -> int:
    """Kill every process of a run until none is left, for at most ten seconds. Returns how many were killed.

    Args:
        run_id: stands in the environment of the run's processes.
        sessions: those that the run's ranks made.
    """
    killed: set[int] = set()
    give_up_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up_at:
        pids = [
            pid for pid in living_processes() if sessions.session_of(pid) is not None or belongs_to_run(pid, run_id)
        ]
        if not pids:
            break
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(_LOOK_AGAIN_S)
    return len(killed)
