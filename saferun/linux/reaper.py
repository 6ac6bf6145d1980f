"""The process that kills a run's processes if the supervisor was killed.

It is forked from the supervisor before anything but the check process is started, and only reads its pipe. When the
supervisor's end of the pipe closes without a dismissal, it kills what is provably the run's: processes that have the
run's id in their environment, and processes in a session that a rank made. Ranks die by PR_SET_PDEATHSIG, but their
children, and children that changed session, do not; and a program that sets its title overwrites its visible
environment.
"""

from __future__ import annotations

import os
import select
import signal
import struct
import time
from collections.abc import Mapping

from saferun.errors import suppress
from saferun.linux.children import KILLED_S, await_exits, fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.ownership import Identity
from saferun.linux.prctl import set_name
from saferun.linux.procfs import belongs_to_run, living_processes, read_name
from saferun.linux.scratch import remove_scratch
from saferun.linux.sessions import Sessions
from saferun.linux.signals import witness

_DISMISSED, _STARTED, _ENDED, _MADE = b"g", b"s", b"e", b"m"
# The kind of record, a pid, and when that process started (clock ticks since boot). For a directory: the length of the
# path that follows, its device and its inode. Each record is one atomic write: pipe(7), PIPE_BUF.
_RECORD = struct.Struct("<c3xiQQ")
_READ_BYTES = 1 << 13
_PIPE_BUF = 4096
_MOST_STARTED = 1024  # ranks that another reaper knows: those of the last attempts
_NAME = "sr-reaper"
_PATIENCE_S = 10.0
# The reaper of a launcher that a rank has started cleans up and exits by itself; it gets this long.
INNER_PATIENCE_S = 2.0
_POLL_S = 0.02
# The environment of a process that waits for a disk may become readable a moment later.
_UNSURE_S = 1.0
_EXIT_S = 1.0
_LEAST_PAUSE_S = 0.0002
# A rank that has exited may have left processes in its session; if not, the session's number may be reused.
_FIRST_CHECK_S, _NEXT_CHECK_S = 1.0, 60.0


class Reaper:
    """The supervisor's handle on its reaper.

    Args:
        run_id: the run's.
        host: this host's name, where the console is that of several hosts.
    """

    def __init__(self, run_id: str, host: str = "") -> None:
        self._run_id = run_id
        self._host = host
        self._started: dict[int, tuple[int, bool]] = {}  # when a rank started, and whether it has been reaped
        self._made: dict[str, Identity] = {}
        self._write_end = -1
        self.is_needed = False  # the run did not end cleanly
        self._fork(restores_terminal=True)

    def _fork(self, *, restores_terminal: bool) -> None:
        read_end, write_end = os.pipe()
        try:
            # A signal that it gets was sent to the ranks too: the sender means all processes.
            witness_fd, witness_end = os.pipe()
        except OSError:
            os.close(read_end)
            os.close(write_end)
            raise
        # The supervisor does not block: a reaper that is stopped reads later, or never.
        os.set_blocking(write_end, False)
        run_id, host = self._run_id, self._host
        known = self._started, self._made
        try:
            self.pid = fork(
                lambda: _wait_for_the_end(
                    run_id, host, read_end, witness_end, *known, restores_terminal=restores_terminal
                )
            )
        except OSError:
            os.close(write_end)
            os.close(witness_fd)
            raise
        finally:
            os.close(read_end)
            os.close(witness_end)
        self._write_end, self.witness_fd = write_end, witness_fd

    def replace(self) -> None:
        """Fork another one in the place of one that has ended. It knows at once what that one knew.

        But how the terminal was is known to the first one alone.

        Raises:
            OSError: it cannot be forked; nothing has changed.
        """
        old = self._write_end
        self._fork(restores_terminal=False)
        os.close(old)

    def begin_attempt(self) -> None:
        """What ranks of earlier attempts left in their sessions has been ended: another reaper need not know them."""
        self._started = {pid: known for pid, known in self._started.items() if not known[1]}

    def note_started(self, pid: int, start_ticks: int) -> None:
        """Report a rank, which leads a session of its own. ``start_ticks``: when it started."""
        self._started[pid] = start_ticks, False
        while len(self._started) > _MOST_STARTED:
            del self._started[next(iter(self._started))]
        self._write(_STARTED, start_ticks, pid=pid)

    def note_ended(self, pid: int) -> None:
        """Report that a rank has been reaped; processes that it left are still in its session."""
        if pid in self._started:
            self._started[pid] = self._started[pid][0], True
        self._write(_ENDED, pid=pid)

    def note_made(self, path: str, which: Identity) -> None:
        """Report a private directory of the run, which is to be removed with it."""
        self._made[path] = which
        self._write(_MADE, *which, name=os.fsencode(path))

    def dismiss(self) -> None:
        """Let it exit, and wait for that, for a time. If the run has ended cleanly, it has nothing to do."""
        if not self.is_needed:
            self._write(_DISMISSED)
        fd, self._write_end = self._write_end, -1
        with suppress(OSError):
            os.close(fd)
        give_up_at = time.monotonic() + (_PATIENCE_S if self.is_needed else 0.0) + _EXIT_S
        pause_s = _LEAST_PAUSE_S
        with suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > give_up_at:  # it has been stopped
                    os.kill(self.pid, signal.SIGKILL)
                    await_exits({self.pid}, KILLED_S)
                    return
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_S)

    def _write(self, what: bytes, first: int = 0, second: int = 0, *, pid: int = 0, name: bytes = b"") -> None:
        record = _RECORD.pack(what, pid or len(name), first, second) + name
        if len(record) <= _PIPE_BUF:
            with suppress(OSError):
                os.write(self._write_end, record)


def _wait_for_the_end(
    run_id: str,
    host: str,
    read_end: int,
    witness_end: int,
    started: Mapping[int, tuple[int, bool]],
    made: Mapping[str, Identity],
    *,
    restores_terminal: bool,
) -> None:
    # A scheduler's SIGTERM to every process of the job does not end a helper process.
    set_name(_NAME)
    supervisor_pid = os.getppid()
    kept = os.dup2(read_end, 3)
    moved = os.dup2(witness_end, 4)
    witness(moved)
    close_all_but(kept, moved)
    with suppress(OSError):
        os.chdir("/")
    mode = None
    if restores_terminal and os.isatty(0):
        from saferun.linux.terminal_mode import TerminalMode

        mode = TerminalMode(0)
    known = _Known(started, made)
    if _is_dismissed(kept, known):
        return
    killed = kill_run(run_id, known.sessions)
    if mode is not None:
        mode.restore()
    # Only what was reported: other users may know the run's id and make directories with it in their names.
    remove_scratch((path, *which) for path, which in known.made.items())
    if not killed:
        return
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    if poll.poll(0):  # not if it would block: the reaper must exit
        on_host = f" on {host}" if host else ""
        is_killed = os.getppid() != supervisor_pid
        why = f"the supervisor{on_host} was killed" if is_killed else f"the supervisor{on_host} failed"
        ended = "1 process of the run was ended" if killed == 1 else f"{killed} processes of the run were ended"
        with suppress(OSError):
            os.write(2, f"saferun: {why}; {ended}\n".encode(errors="backslashreplace"))


class _Known:
    """What a reaper knows of a run.

    Args:
        started: when each rank has started, and whether it has been reaped.
        made: the directories of the run.
    """

    def __init__(self, started: Mapping[int, tuple[int, bool]], made: Mapping[str, Identity]) -> None:
        self.sessions = Sessions()
        self.made = dict(made)
        self._ended: set[int] = set()  # ranks that have been reaped, and may have left processes
        for pid, (start_ticks, is_reaped) in started.items():
            self.sessions.add(pid, start_ticks)
            if is_reaped:
                self._ended.add(pid)
        self._check_s = _FIRST_CHECK_S
        if self._ended:
            self._forget_empty_sessions()

    @property
    def check_s(self) -> float | None:
        """After how many seconds ``check`` is due; None: there is nothing to check."""
        return self._check_s if self._ended else None

    def check(self) -> None:
        """Forget what is over."""
        self._forget_empty_sessions()
        self._check_s = _NEXT_CHECK_S

    def _forget_empty_sessions(self) -> None:
        """Of ranks that have been reaped, keep those that left processes: another session may get the number."""
        gone = self._ended - self.sessions.living(living_processes())
        for pid in gone:
            self.sessions.discard(pid)
        self._ended -= gone

    def take(self, what: bytes, pid: int, first: int, second: int, name: bytes) -> None:
        """A record of the supervisor's."""
        if what == _STARTED:
            self.sessions.add(pid, first)
            self._ended.discard(pid)
        elif what == _ENDED:
            self._ended.add(pid)
            self._check_s = _FIRST_CHECK_S
        elif what == _MADE:
            self.made[os.fsdecode(name)] = first, second


def _is_dismissed(fd: int, known: _Known) -> bool:
    """Wait until the supervisor dismisses it (True) or exits (False); note meanwhile what it reports."""
    rest = b""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        check_s = known.check_s
        if not poll.poll(check_s * 1000 if check_s is not None else None):
            known.check()
            continue
        content = os.read(fd, _READ_BYTES)
        if not content:
            return False
        records, rest = _records(rest + content)
        for record in records:
            if record[0] == _DISMISSED:
                return True
            known.take(*record)


def _records(content: bytes) -> tuple[list[tuple[bytes, int, int, int, bytes]], bytes]:
    """The complete records, and the beginning of the next one."""
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
    """Whether a process is the reaper of a launch, by its name."""
    return read_name(pid) == _NAME


def kill_run(run_id: str, sessions: Sessions) -> int:
    """Kill the processes of a run until none is left, for at most ten seconds. Returns how many were killed.

    Args:
        run_id: in the environment of the run's processes.
        sessions: the sessions of the run's ranks.
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
        time.sleep(_POLL_S)
    return len(killed)
