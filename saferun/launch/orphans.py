"""Orphaned processes: those that the ranks left behind when they ended, and what is done about them.

A process counts only if it is provably a rank's: it has the run's id in its environment, or it is in a session that a
rank made. Any other process that became a child of this one (as the first process of a container, or from before an
exec to saferun) is reaped when it ends, and never signalled.

After a failure they are ended, but for those that have left their rank's session: these were detached on purpose, as
an upload of a checkpoint is, and live on as under torchrun. The ranks of a launcher that a rank has started have
sessions of their own as well, and are ended. What a saferun within the run has left when it ended is left.
After ranks that ended with exit code 0, those that still work are waited for.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from saferun.errors import suppress
from saferun.launch.process_names import MOST_NAMED, process_count, process_name, process_names
from saferun.linux.activity import Activity
from saferun.linux.children import reap
from saferun.linux.helper import PartBase
from saferun.linux.procfs import (
    belongs_to_run,
    descendants_of,
    living_processes,
    read_environ_entries,
    read_environ_entry,
    read_stat,
)
from saferun.linux.reaper import INNER_PATIENCE_S, is_reaper
from saferun.linux.sessions import Sessions
from saferun.model import ExitStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.connections import Tables

_SWEEP_INTERVAL_S = 0.05
_WAIT_INTERVAL_S = 0.5
_LAST_SWEEP_S = 2.0
# A sweep that is this late: this process was stopped, suspended or held up, and perhaps what it waits for as well.
_SUSPENDED_S = 5.0
# The environment of a process that waits for a disk may be readable soon; if it waits longer, no signal can end it.
_UNSURE_S = 2.0
# A library's helper processes that end by themselves when their rank is gone are not reported.
_REPORT_AFTER_S = 1.0
# The same for those that are to live on. Until then those with a session of their own are left alone.
_LEAVE_AFTER_S = 0.5
# Every launcher gives its ranks other values of some of these; what a rank starts itself inherits the rank's.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_MARKS_OF_A_RANK = frozenset({"LOCAL_RANK", "MASTER_PORT"})
# Every rank of every attempt gets another value of this one.
_MARK_OF_AN_ATTEMPT = "SAFERUN_HEARTBEAT_FILE"
# The line is repeated at intervals that double, up to the second value.
_REPORT_EVERY_S, _LONGEST_REPORT_S = 30.0, 3600.0


class Orphans(PartBase):
    """The processes that descend from the ranks, without the ranks themselves.

    Args:
        run_id: marks the processes of this run.
        not_ours: children of this process that have nothing to do with the launch.
        exempt: returns the processes that are saferun's own, and the ranks.
        on_gone: called when none is left, with the pids of all that had to be ended.
        report: takes one line for the user.
        report_wait: takes the line about those that are waited for, as often as it is repeated.
        warn: takes one line about those that cannot be ended.
    """

    def __init__(
        self,
        run_id: str,
        *,
        not_ours: frozenset[int],
        exempt: Callable[[], set[int]],
        on_gone: Callable[[tuple[int, ...]], None],
        report: Callable[[str], None],
        report_wait: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self.deadline: float | None = None  # when ``sweep`` is due, in monotonic seconds
        self.awaited_until: float  # the same for the end of all that are waited for, SIGKILL included; 0: none is
        self._run_id = run_id
        self._not_ours = set(not_ours)
        self._given_up: dict[int, int] = {}  # pid -> start time in clock ticks since boot
        self._exempt = exempt
        self._on_gone = on_gone
        self._report = report
        self._report_wait = report_wait
        self._warn = warn
        self._sessions = Sessions()
        self._ranks: dict[int, int] = {}  # pid of a rank -> its rank
        self._given: list[dict[str, str]] = []  # of each rank, also of earlier attempts: its _RANK_VARIABLES
        self._marks = set[str]()  # the ranks' values of _MARK_OF_AN_ATTEMPT
        self._earlier = set[str]()  # those of attempts that have left something, which may start more
        self.began_at = 0.0  # the wait for them
        self._leaves_all = False
        self._left = Sessions()  # of this and earlier attempts: those whose processes live on
        self._forget()

    def _forget(self) -> None:
        self._swept: dict[int, float] = {}  # pid -> when SIGKILL follows the SIGTERM that it was sent
        self._term_s = 0.0
        self._wait_until = self.awaited_until = 0.0
        self._swept_at = 0.0  # when the last sweep was over
        self._idle_s = 0.0
        self._report_at = 0.0
        self._report_every_s = _REPORT_EVERY_S
        self._activity: Activity | None = None
        self._ends_all = False
        self._leave_at: float | None = None  # when those that have left their rank's session are left
        self._killed_reaper = False  # that of a saferun within the run, whose ranks may live on
        self._unsure: dict[int, float] = {}  # pid -> until when it is still unknown whether it is one of them
        self._known: set[tuple[int, int]] = set()  # pids and start times of those that are

    def begin_attempt(self) -> None:
        """A new attempt begins: other processes may get the numbers of the old sessions from now on."""
        self._forget()
        self._sessions.clear()
        self._ranks.clear()
        if self._left:
            self._earlier |= self._marks
            self._left.keep(self._left.living(living_processes()))

    def note_rank(self, pid: int, rank: int, environ: Mapping[str, str]) -> int:
        """A rank has been started and leads a session of its own. Returns when, in clock ticks since boot."""
        self._ranks[pid] = rank
        given = {name: environ[name] for name in _RANK_VARIABLES if name in environ}
        if given not in self._given:
            self._given.append(given)
        if mark := environ.get(_MARK_OF_AN_ATTEMPT):
            self._marks.add(mark)
            self._earlier.discard(mark)
        self._left.discard(pid)
        return self._sessions.add(pid)

    def note_script(self, pid: int, rank: int) -> None:
        """A rank's script runs, or ran, below a wrapper, which may have started a session for it."""
        try:
            session = os.getsid(pid)
        except OSError:
            session = pid
        if session not in self._ranks and session != os.getsid(0):
            self._ranks[session] = rank
            self._sessions.add(session)

    @property
    def is_left(self) -> bool:
        """Whether processes of the run are to live on."""
        return self._leaves_all or (bool(self._left) and bool(self._left.living(living_processes())))

    # ----------------------------------------------------------------------------------------------------------------

    def begin(
        self, now: float, term_s: float, *, wait_s: float = 0.0, idle_s: float = 0.0, ends_all: bool = False
    ) -> None:
        """End them, or wait for their ends.

        Args:
            now: monotonic seconds.
            term_s: seconds between SIGTERM and SIGKILL.
            wait_s: how long those that work are waited for.
            idle_s: how long one that is waited for may do nothing before it is ended.
            ends_all: end also those that have left their rank's session.
        """
        self.began_at = now
        self._term_s = term_s
        self._wait_until = now + wait_s
        self.awaited_until = self._wait_until + term_s if wait_s > 0 else 0.0
        self._idle_s = idle_s
        self._report_at = now + _REPORT_AFTER_S
        self._report_every_s = _REPORT_EVERY_S
        self._activity = Activity(idle_s) if wait_s > 0 else None
        self._ends_all = self._ends_all or ends_all
        if self._leave_at is None and wait_s <= 0:
            self._leave_at = now + _LEAVE_AFTER_S
        # A process that is being ended already gets no more time.
        self._swept = {pid: min(kill_at, now + term_s) for pid, kill_at in self._swept.items()}
        self._sweep_guarded(now)

    def leave(self) -> None:
        """They are left to themselves, as torchrun leaves them."""
        self._leaves_all = True
        self._on_gone(())

    def sweep(self, now: float) -> None:
        """Find the orphans, and signal those that are to end: SIGTERM once to each process, SIGKILL later."""
        pids, unsure = self._scan()
        detached, held = self._detached(pids, now)
        if detached:
            self._leave_behind(detached)
            pids = [pid for pid in pids if pid not in detached]
        # A process that waits for a disk is at work.
        is_waiting = self._activity is not None and now < self._wait_until
        if not pids and not any(is_waiting or now < self._unsure.setdefault(pid, now + _UNSURE_S) for pid in unsure):
            self.deadline = None
            self._activity, self.awaited_until = None, 0.0
            self._warn_of(unsure)
            self._on_gone(tuple(sorted(self._swept)))
            return
        self.deadline = now + (_WAIT_INTERVAL_S if is_waiting and not pids else _SWEEP_INTERVAL_S)
        if not pids:
            return
        if self._activity is not None and now < self._wait_until:
            idle = self._idle_among(pids, now, self._activity)
            self._end(idle, now, f", idle for {self._idle_s:g} s")
            if not self._swept:
                self.deadline = min(now + _WAIT_INTERVAL_S, self._wait_until)
                if self._report_at <= now:
                    self._report_at = now + self._report_every_s
                    self._report_every_s = min(2 * self._report_every_s, _LONGEST_REPORT_S)
                    minutes = _duration(self._wait_until - now)
                    self._report_wait(f"waiting for {self._description(pids)}, {minutes} at most; Ctrl-C stops waiting")
        elif self._activity is not None:
            self._end(pids, now, ", which had not ended in time")
        else:
            self._end([pid for pid in pids if pid not in held], now, "")

    def _detached(self, pids: list[int], now: float) -> tuple[set[int], set[int]]:
        """Of those that have left their rank's session: which are to live on, and which are neither left nor ended yet.

        The former were detached on purpose, and hold nothing that the next attempt needs.
        """
        if self._ends_all or self._activity is not None:
            return set(), set()
        outside = [pid for pid in pids if pid not in self._swept and self._sessions.session_of(pid) is None]
        if self._leave_at is None or now < self._leave_at:
            return set(), set(outside)
        foreign, inner = self._of_other_launchers(outside)
        # A saferun within the run decides itself what it leaves; until it has ended, its helpers are there too.
        is_inner_alive = any(is_reaper(pid) for pid in pids if pid not in outside or pid in foreign)
        held = set(outside) - foreign if is_inner_alive and not self._killed_reaper else set[int]()
        ended = foreign | inner if self._killed_reaper else foreign
        tables: Tables = {}
        detached = {pid for pid in outside if pid not in ended | held and not _is_in_the_way(pid, tables)}
        return detached, held

    def _of_other_launchers(self, pids: list[int]) -> tuple[set[int], set[int]]:
        """The ranks of other launchers with their descendants; and what a saferun within the run has started."""
        foreign, inner, others = set[int](), set[int](), set[int]()
        sessions = set[int]()
        for pid in pids:
            # Nothing can be read while a process waits for a disk.
            entries = read_environ_entries(pid, ("SAFERUN_RUN_ID", *_RANK_VARIABLES))
            stat = read_stat(pid)
            parent, session = stat.ppid if stat is not None else 0, _session_of(pid)
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

    def _leave_behind(self, detached: set[int]) -> None:
        """These live on, and their descendants: no other attempt has to do with them."""
        for pid in detached:
            if (session := _session_of(pid)) > 0:
                self._left.add(session)
        pids = sorted(detached)
        name_of = {pid: process_name(pid) for pid in pids}
        # One that has ended since has no command line any more.
        pids = [pid for pid in pids if (stat := read_stat(pid)) is not None and stat.state not in "ZX"]
        if not pids:
            return
        ranks = self._ranks_of(pids)
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if 0 < len(ranks) <= MOST_NAMED else "the ranks"
        where, are = ("a session of its own", "it is") if len(pids) == 1 else ("sessions of their own", "they are")
        self._report(f"{who} left {process_count(pids)} in {where}: {process_names(pids, name_of)}; {are} not ended")

    def _idle_among(self, pids: list[int], now: float, activity: Activity) -> list[int]:
        """Those that have been idle for too long to be waited for, and those that are being ended."""
        idle: list[int] = []
        for members, idle_s in activity.sample(pids, now, self._exempt()):
            if idle_s >= self._idle_s or any(pid in self._swept for pid in members):
                idle += members
        return idle

    def _end(self, pids: Iterable[int], now: float, why: str) -> None:
        """Signal these, and report those that had not been signalled before."""
        new = [pid for pid in pids if pid not in self._swept]
        if new:
            self._report(f"ending {self._description(new)}{why}")
        for pid in pids:
            more_s = INNER_PATIENCE_S if is_reaper(pid) else 0.0
            killing = now >= self._swept.setdefault(pid, now + self._term_s + more_s)
            self._killed_reaper |= killing and more_s > 0
            if killing or pid in new:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
                    stat = read_stat(pid)
                    if stat is not None and stat.state == "T":
                        # A stopped process takes no signal but SIGKILL before it goes on.
                        os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        """The time for the sweep is over: report what is left, and leave it, so that the next attempt can begin."""
        if self.deadline is None:
            return
        self.deadline = None
        left, unsure = self._scan()
        if left:
            self.give_up(left)
            self._warn(f"could not be ended and is left behind: {self._description(left)}")
        self._warn_of(unsure)

    def give_up(self, pids: Iterable[int]) -> None:
        """No signal ends these: they are left alone with their descendants, as long as they live."""
        for pid in pids:
            stat = read_stat(pid)
            self._given_up[pid] = stat.start_ticks if stat is not None else 0

    def _warn_of(self, unsure: list[int]) -> None:
        if unsure:
            self._warn(f"may be left behind in uninterruptible sleep (state D): {self._description(unsure)}")

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    def tick(self, now: float) -> None:
        """Sweep again, if that is due."""
        if self.deadline is not None and self.deadline <= now:
            lost_s = now - self._swept_at - _WAIT_INTERVAL_S
            if lost_s > _SUSPENDED_S and self._activity is not None:
                # Those that are waited for may have been suspended as well: they have that time again.
                self._wait_until += lost_s
                self.awaited_until += lost_s
                self._report_at += lost_s
                self._swept = {pid: kill_at + lost_s for pid, kill_at in self._swept.items()}
                self._activity.make_up_for(lost_s)
            self._sweep_guarded(now)

    def _sweep_guarded(self, now: float) -> None:
        """Sweep; if that fails, assume that nothing is left, so that the job goes on."""
        began = time.monotonic()
        try:
            self.sweep(now)
        except Exception as error:
            self._warn(f"cannot look for what the ranks left behind: {type(error).__name__}: {error}")
            self.deadline = None
            self._on_gone(tuple(sorted(self._swept)))
        self._swept_at = now + time.monotonic() - began  # what a sweep takes is no time of a suspension

    def on_exit(self, pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. It may have been the last orphan, so the next sweep is due at once."""
        # Another process may get its number.
        self._not_ours.discard(pid)
        self._given_up.pop(pid, None)
        if self.deadline is not None:
            self.deadline = 0.0
        return False

    def close(self) -> None:
        """The launch ends, for whatever reason: end all of them but those that are to be left."""
        give_up_at = time.monotonic() + _LAST_SWEEP_S
        while not self._leaves_all and (pids := self._to_be_ended()) and time.monotonic() < give_up_at:
            is_late = time.monotonic() > give_up_at - _LAST_SWEEP_S / 2
            for pid in [pid for pid in pids if is_late or not is_reaper(pid)]:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            reap()
            time.sleep(_SWEEP_INTERVAL_S)
        reap()

    def _to_be_ended(self) -> list[int]:
        """Those that are there at the end of the launch, without what a process that was left has detached since."""
        pids = self.remaining()
        if self._leave_at is None or self._ends_all or not self._left:
            return pids
        ended = [pid for pid in pids if pid in self._swept or self._sessions.session_of(pid) is not None]
        for pid in set(pids).difference(ended):
            if (session := _session_of(pid)) > 0:
                self._left.add(session)
        return ended

    # ----------------------------------------------------------------------------------------------------------------

    def remaining(self) -> list[int]:
        """Those that are there now; parents come before their children."""
        return self._scan()[0]

    def _scan(self) -> tuple[list[int], list[int]]:
        """The orphans there are now, and the processes of which that cannot be known without a wait."""
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
        if not self._earlier or self._sessions.session_of(pid) is not None:
            return False
        is_earlier = read_environ_entry(pid, _MARK_OF_AN_ATTEMPT) in self._earlier
        if is_earlier and (session := _session_of(pid)) > 0:
            self._left.add(session)  # where its environment cannot be read later
        return is_earlier

    def _is_ours(self, pid: int) -> bool | None:
        if self._sessions.session_of(pid) is not None:
            return True
        stat = read_stat(pid)
        process = (pid, stat.start_ticks if stat is not None else 0)
        is_ours = belongs_to_run(pid, self._run_id)
        if is_ours:
            self._known.add(process)
        return True if is_ours is None and process in self._known else is_ours

    def _rank_of(self, pid: int) -> str:
        session = self._sessions.session_of(pid)
        if session is not None:
            return str(self._ranks.get(session, "?"))
        rank = read_environ_entry(pid, "RANK")
        return rank if rank.isascii() and rank.isdigit() else "?"

    def _ranks_of(self, pids: list[int]) -> list[str]:
        return sorted({self._rank_of(pid) for pid in pids} - {"?"}, key=int)

    def _description(self, pids: list[int]) -> str:
        """``2 processes of rank 0: aws s3 sync … (pid 12), sleep 600 (pid 13)``."""
        ranks = self._ranks_of(pids)
        of = f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" if 0 < len(ranks) <= MOST_NAMED else ""
        return f"{process_count(pids)}{of}: {process_names(pids)}"


def _lives(pid: int, start_ticks: int) -> bool:
    """Whether this is still the process that was started then, if that can be read."""
    stat = read_stat(pid)
    return _session_of(pid) >= 0 and (stat is None or start_ticks in {0, stat.start_ticks})


def _session_of(pid: int) -> int:
    """The session that a process is in; -1 if it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return -1


def _is_in_the_way(pid: int, tables: Tables) -> bool:
    """Whether a process has a GPU open or listens on the port of the store, which the next attempt needs."""
    try:
        from saferun.linux.connections import listens_on
        from saferun.watchdog.wait_sampler import uses_gpu
    except ImportError:  # their files cannot be read
        return True
    return uses_gpu(pid) or listens_on(pid, read_environ_entry(pid, "MASTER_PORT"), tables)


def _duration(seconds: float) -> str:
    """``10 min``, ``30 s``."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"  # noqa: PLR2004 - a minute
