"""Which processes are the ranks': what they have started, whatever its parent is now.

A process counts only if it is provably a rank's: it has the run's id in its environment, or it is in a session that a
rank made. Any other process that became a child of this one (as the first process of a container, or from before an
exec to saferun) does not.

Sources: setsid(2); proc_pid_environ(5).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

from saferun.launch.process_names import MOST_NAMED, process_count, process_names
from saferun.linux.procfs import (
    belongs_to_run,
    descendants_of,
    living_processes,
    read_environ_entries,
    read_environ_entry,
    read_stat,
)
from saferun.linux.reaper import is_reaper
from saferun.linux.sessions import Sessions

# Every launcher gives its ranks other values of some of these; what a rank starts itself inherits the rank's.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_MARKS_OF_A_RANK = frozenset({"LOCAL_RANK", "MASTER_PORT"})
# Every rank of every attempt gets another value of this one.
_MARK_OF_AN_ATTEMPT = "SAFERUN_HEARTBEAT_FILE"


class RankProcesses:
    """The processes that descend from the ranks, without the ranks themselves.

    Args:
        run_id: marks the processes of this run.
        not_ours: children of this process that have nothing to do with the launch.
        exempt: returns the processes that are saferun's own, and the ranks.
    """

    def __init__(self, run_id: str, not_ours: Iterable[int], exempt: Callable[[], set[int]]) -> None:
        self._run_id = run_id
        self._not_ours = set(not_ours)
        self._exempt = exempt
        self._given_up: dict[int, int] = {}  # pid -> start time in clock ticks since boot
        self._given: list[dict[str, str]] = []  # of each rank, also of earlier attempts: its _RANK_VARIABLES
        self._marks = set[str]()  # the ranks' values of _MARK_OF_AN_ATTEMPT
        self._earlier = set[str]()  # those of attempts that have left something, which may start more
        self._left = Sessions()  # of this and earlier attempts: those whose processes live on
        self._attempt = _AttemptProcesses()

    def begin_attempt(self) -> None:
        """A new attempt begins: other processes may get the numbers of the old sessions from now on."""
        self._attempt = _AttemptProcesses()
        if self._left:
            self._earlier |= self._marks
            self._left.keep(self._left.living(living_processes()))

    def note_rank(self, pid: int, rank: int, environ: Mapping[str, str]) -> int:
        """A rank has been started and leads a session of its own. Returns when, in clock ticks since boot."""
        self._attempt.ranks[pid] = rank
        given = {name: environ[name] for name in _RANK_VARIABLES if name in environ}
        if given not in self._given:
            self._given.append(given)
        if mark := environ.get(_MARK_OF_AN_ATTEMPT):
            self._marks.add(mark)
            self._earlier.discard(mark)
        self._left.discard(pid)
        return self._attempt.sessions.add(pid)

    def note_script(self, pid: int, rank: int) -> None:
        """A rank's script runs, or ran, below a wrapper, which may have started a session for it."""
        try:
            session = os.getsid(pid)
        except OSError:
            session = pid
        if session not in self._attempt.ranks and session != os.getsid(0):
            self._attempt.ranks[session] = rank
            self._attempt.sessions.add(session)

    def leave(self, pid: int) -> None:
        """A process lives on, and what is in its session: no other attempt has to do with it."""
        if (session := _session_number(pid)) > 0:
            self._left.add(session)

    def give_up(self, pids: Iterable[int]) -> None:
        """No signal ends these: they are left alone with their descendants, as long as they live."""
        for pid in pids:
            stat = read_stat(pid)
            self._given_up[pid] = stat.start_ticks if stat is not None else 0

    def forget(self, pid: int) -> None:
        """A process has been reaped, and another one may get its number."""
        self._not_ours.discard(pid)
        self._given_up.pop(pid, None)

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def has_left(self) -> bool:
        """Whether any are left to live on, as far as was noted; they may have ended since."""
        return bool(self._left)

    @property
    def is_left(self) -> bool:
        """Whether any that are left to live on are there now."""
        return self.has_left and bool(self._left.living(living_processes()))

    @property
    def has_given_up(self) -> bool:
        """Whether any that no signal ends are there now."""
        return any(_lives(pid, started) for pid, started in self._given_up.items())

    def is_in_session(self, pid: int) -> bool:
        """Whether a process is in the session of a rank of this attempt."""
        return self.session_of(pid) is not None

    def session_of(self, pid: int) -> int | None:
        """The pid of the rank of this attempt in whose session a process is; None: it is in none."""
        return self._attempt.sessions.session_of(pid)

    def scan(self) -> tuple[list[int], list[int]]:
        """Those that are there now, parents before children; and those of which that cannot be known without a wait."""
        self._given_up = {pid: started for pid, started in self._given_up.items() if _lives(pid, started)}
        leave_out = {*self._not_ours, *self._exempt(), *self._given_up}
        found: dict[bool | None, list[int]] = {True: [], None: [], False: []}
        left = set[int]()
        for pid in descendants_of(os.getpid(), frozenset(leave_out)):
            if (self._left or self._earlier) and self._is_left_behind(pid, left):
                left.add(pid)
            else:
                found[self._is_ours(pid)].append(pid)
        return found[True], found[None]

    def _is_left_behind(self, pid: int, left: set[int]) -> bool:
        """Whether a process, or its parent, is one of those that live on, or was detached by one that has ended."""
        if self._left.session_of(pid) is not None:
            return True
        stat = read_stat(pid)
        if stat is not None and stat.ppid in left:
            return True
        if not self._earlier or self.is_in_session(pid):
            return False
        is_earlier = read_environ_entry(pid, _MARK_OF_AN_ATTEMPT) in self._earlier
        if is_earlier:
            self.leave(pid)  # where its environment cannot be read later
        return is_earlier

    def _is_ours(self, pid: int) -> bool | None:
        if self.is_in_session(pid):
            return True
        stat = read_stat(pid)
        process = (pid, stat.start_ticks if stat is not None else 0)
        is_ours = belongs_to_run(pid, self._run_id)
        if is_ours:
            self._attempt.known.add(process)
        return True if is_ours is None and process in self._attempt.known else is_ours

    def of_other_launchers(self, pids: Iterable[int]) -> tuple[set[int], set[int]]:
        """Of these: the ranks of other launchers with their descendants; and what a saferun within the run started."""
        foreign, inner, others = set[int](), set[int](), set[int]()
        sessions = set[int]()
        for pid in pids:
            # Nothing can be read while a process waits for a disk.
            entries = read_environ_entries(pid, ("SAFERUN_RUN_ID", *_RANK_VARIABLES))
            stat = read_stat(pid)
            parent, session = stat.ppid if stat is not None else 0, _session_number(pid)
            if entries.pop("SAFERUN_RUN_ID", self._run_id) != self._run_id:
                inner.add(pid)
            elif parent not in others and (
                self._is_other_rank(entries) or session in sessions or parent in foreign or is_reaper(pid)
            ):
                foreign.add(pid)
                sessions.add(session)
            else:
                # A launcher that a rank has detached lives on with its ranks, and a saferun with its reaper.
                others.add(pid)
        return foreign, inner

    def _is_other_rank(self, entries: Mapping[str, str]) -> bool:
        """Whether these variables are those of a rank, and were given to none of this host's."""
        return (
            bool(self._given)
            and not _MARKS_OF_A_RANK.isdisjoint(entries)
            and not any(entries.items() <= given.items() for given in self._given)
        )

    # ----------------------------------------------------------------------------------------------------------------

    def owners(self, pids: Iterable[int]) -> str:
        """``rank 0``, ``ranks 0, 1`` whose processes these are; empty: of too many, or it is not known of any."""
        ranks = sorted({self._rank_of(pid) for pid in pids} - {"?"}, key=int)
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if 0 < len(ranks) <= MOST_NAMED else ""

    def _rank_of(self, pid: int) -> str:
        session = self._attempt.sessions.session_of(pid)
        if session is not None:
            return str(self._attempt.ranks.get(session, "?"))
        rank = read_environ_entry(pid, "RANK")
        return rank if rank.isascii() and rank.isdigit() else "?"

    def description(self, pids: list[int]) -> str:
        """``2 processes of rank 0: aws s3 sync … (pid 12), sleep 600 (pid 13)``."""
        owners = self.owners(pids)
        return f"{process_count(pids)}{f' of {owners}' if owners else ''}: {process_names(pids)}"


class _AttemptProcesses:
    """What is known of the ranks' processes in one attempt."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.ranks: dict[int, int] = {}  # pid of a rank, or session of its script -> its rank
        self.known = set[tuple[int, int]]()  # pids and start times of processes that are the ranks'


def _lives(pid: int, start_ticks: int) -> bool:
    """Whether this is still the process that was started then, if that can be read."""
    stat = read_stat(pid)
    return _session_number(pid) >= 0 and (stat is None or start_ticks in {0, stat.start_ticks})


def _session_number(pid: int) -> int:
    """The session that a process is in; -1 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1
