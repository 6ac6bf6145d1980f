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
from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.ownership import Identity
from saferun.linux.prctl import set_name
from saferun.linux.procfs import belongs_to_run, living_processes, read_name
from saferun.linux.scratch import remove_scratch
from saferun.linux.sessions import Sessions
from saferun.linux.signals import witness

_GOODBYE, _STARTED, _ENDED, _MADE = b"g", b"s", b"e", b"m"
# What is said, a pid, and when that process started (clock ticks since boot). Of a directory that was made: how many
# bytes of its path follow, its device and its inode. Each is written in one piece: pipe(7), PIPE_BUF.
_RECORD = struct.Struct("<c3xiQQ")
_READ_BYTES = 1 << 13
_PIPE_BUF = 4096
_NAME = "sr-reaper"
_PATIENCE_S = 10.0
# The reaper of a launcher that a rank has started removes what that has made, and ends by itself; not for ever.
INNER_PATIENCE_S = 2.0
_LOOK_AGAIN_S = 0.02
# Whose a process is that waits for a disk may be read a moment later.
_UNSURE_S = 1.0
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
        self._write(_STARTED, start_ticks, pid=pid)

    def note_ended(self, pid: int) -> None:
        """A rank has been reaped; what it left behind is still in its session."""
        self._write(_ENDED, pid=pid)

    def note_made(self, path: str, which: Identity) -> None:
        """A private directory of the run has been made, and is to be removed with it."""
        self._write(_MADE, *which, name=os.fsencode(path))

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

    def _write(self, what: bytes, first: int = 0, second: int = 0, *, pid: int = 0, name: bytes = b"") -> None:
        record = _RECORD.pack(what, pid or len(name), first, second) + name
        if len(record) <= _PIPE_BUF:
            with suppress(OSError):
                os.write(self._write_end, record)


def _wait_for_the_end(run_id: str, read_end: int, witness_end: int) -> None:
    # What ends a job politely (a scheduler's SIGTERM to every process of it) does not end a helper process.
    set_name(_NAME)
    supervisor_pid = os.getppid()
    kept = os.dup2(read_end, 3)
    moved = os.dup2(witness_end, 4)
    witness(moved)
    close_all_but(kept, moved)
    with suppress(OSError):
        os.chdir("/")
    sessions = Sessions()
    made: dict[str, Identity] = {}
    if _is_told_goodbye(kept, sessions, made):
        return
    killed = kill_run(run_id, sessions)
    # What was really made, and that alone: others can know the run's id, and make what has it in its name.
    remove_scratch((path, *which) for path, which in made.items())
    if not killed:
        return
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):  # not where nobody reads: the reaper ends in any case
        why = "the end of the run failed" if os.getppid() == supervisor_pid else "the supervisor was killed"
        with suppress(OSError):
            os.write(2, f"saferun: {why}; {killed} processes of the run were ended\n".encode())


def _is_told_goodbye(fd: int, sessions: Sessions, made: dict[str, Identity]) -> bool:
    """Wait until the supervisor says goodbye, or is gone. Remembers the ranks' sessions meanwhile, and what is made."""
    ended: set[int] = set()
    rest = b""
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
        content = os.read(fd, _READ_BYTES)
        if not content:
            return False
        records, rest = _records(rest + content)
        for what, pid, first, second, name in records:
            if what == _GOODBYE:
                return True
            if what == _STARTED:
                sessions.add(pid, first)
                ended.discard(pid)
            elif what == _ENDED:
                ended.add(pid)
                look_s = _FIRST_LOOK_S
            elif what == _MADE:
                made[os.fsdecode(name)] = first, second


def _records(content: bytes) -> tuple[list[tuple[bytes, int, int, int, bytes]], bytes]:
    """The whole records, and the beginning of one that is left."""
    found = []
    at = 0
    while at + _RECORD.size <= len(content):
        what, pid, first, second = _RECORD.unpack_from(content, at)
        name_at = at + _RECORD.size
        end = name_at + (pid if what == _MADE else 0)
        if end > len(content):
            break
        found.append((what, pid, first, second, content[name_at:end]))
        at = end
    return found, content[at:]


def is_reaper(pid: int) -> bool:
    """Whether it is the reaper of a launch, by its name: of another one, where it is not known as this one's own."""
    return read_name(pid) == _NAME


def kill_run(run_id: str, sessions: Sessions) -> int:
    """Kill every process of a run until none is left, for at most ten seconds. Returns how many were killed.

    Args:
        run_id: stands in the environment of the run's processes.
        sessions: those that the run's ranks made.
    """
    killed: set[int] = set()
    began_at = time.monotonic()
    while (now := time.monotonic()) < began_at + _PATIENCE_S:
        found: dict[bool | None, list[int]] = {True: [], None: [], False: []}
        for pid in living_processes():
            found[sessions.session_of(pid) is not None or belongs_to_run(pid, run_id)].append(pid)
        pids = found[True]
        if not pids and (not found[None] or now > began_at + _UNSURE_S):
            break
        for pid in pids:
            if now < began_at + INNER_PATIENCE_S and is_reaper(pid):
                continue
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        time.sleep(_LOOK_AGAIN_S)
    return len(killed)
