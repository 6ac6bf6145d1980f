"""Orphaned processes: those that the ranks left behind when they ended, and what is done about them.

Only processes that are provably the ranks' count (``rank_processes``). Any other child of this process is reaped when
it ends, and never signalled.

After a failure they are ended, but for those that have left their rank's session: these were detached on purpose, as
an upload of a checkpoint is, and live on as under torchrun. The ranks of a launcher that a rank has started have
sessions of their own as well, and are ended. What a saferun within the run has left when it ended is left.
After ranks that ended with exit code 0, those that still work are waited for.
After ranks that the user or the scheduler stops, those that handle the signal have what is left of the ranks' grace: a
rank may be a shell, which the signal ends before the training that it has started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping

from saferun.errors import suppress
from saferun.launch.process_names import process_count, process_name, process_names
from saferun.launch.rank_processes import RankProcesses
from saferun.linux.activity import Activity
from saferun.linux.children import reap
from saferun.linux.helper import PartBase
from saferun.linux.procfs import read_environ_entry, read_stat
from saferun.linux.reaper import INNER_PATIENCE_S, is_reaper
from saferun.linux.signals import caught_signals
from saferun.model import ExitStatus, Value

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
# The line is repeated at intervals that double, up to the second value.
_REPORT_EVERY_S, _LONGEST_REPORT_S = 30.0, 3600.0


class Grace(Value):
    """What is left of the grace of ranks that have ended.

    Attributes:
        signum: the signal that they were sent.
        ranks: their pids.
        left_s: seconds before SIGKILL.
    """

    signum: int
    ranks: frozenset[int]
    left_s: float


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
        self._processes = RankProcesses(run_id, not_ours, exempt)
        self._exempt = exempt
        self._on_gone = on_gone
        self._report = report
        self._report_wait = report_wait
        self._warn = warn
        self._leaves_all = False
        self._sweeps = _Sweeps()

    def begin_attempt(self) -> None:
        """A new attempt begins: other processes may get the numbers of the old sessions from now on."""
        self._sweeps = _Sweeps()
        self._processes.begin_attempt()

    def note_rank(self, pid: int, rank: int, environ: Mapping[str, str]) -> int:
        """A rank has been started and leads a session of its own. Returns when, in clock ticks since boot."""
        return self._processes.note_rank(pid, rank, environ)

    def note_script(self, pid: int, rank: int) -> None:
        """A rank's script runs, or ran, below a wrapper, which may have started a session for it."""
        self._processes.note_script(pid, rank)

    @property
    def is_left(self) -> bool:
        """Whether processes of the run are to live on."""
        return self._leaves_all or self._processes.is_left

    @property
    def has_given_up(self) -> bool:
        """Whether any were signalled in vain and are still there."""
        return self._processes.has_given_up

    @property
    def began_at(self) -> float:
        """When the wait for them began, in monotonic seconds."""
        return self._sweeps.began_at

    @property
    def awaited_until(self) -> float:
        """When all that are waited for have ended, SIGKILL included, in monotonic seconds; 0: none is waited for."""
        sweeps = self._sweeps
        return sweeps.wait_until + sweeps.term_s if sweeps.activity is not None else 0.0

    # ----------------------------------------------------------------------------------------------------------------

    def begin(
        self,
        now: float,
        term_s: float,
        *,
        wait_s: float = 0.0,
        idle_s: float = 0.0,
        ends_all: bool = False,
        grace: Grace | None = None,
    ) -> None:
        """End them, or wait for their ends.

        Args:
            now: monotonic seconds.
            term_s: seconds between SIGTERM and SIGKILL.
            wait_s: how long those that work are waited for.
            idle_s: how long one that is waited for may do nothing before it is ended.
            ends_all: end also those that have left their rank's session.
            grace: of those that handle the signal that their rank was sent; None: there is none.
        """
        self._sweeps.begin(now, term_s, wait_s, idle_s, ends_all=ends_all, grace=grace)
        self._sweep_guarded(now)

    def leave(self) -> None:
        """They are left to themselves, as torchrun leaves them."""
        self._leaves_all = True
        self._on_gone(())

    def sweep(self, now: float) -> None:
        """Find the orphans, and signal those that are to end: SIGTERM once to each process, SIGKILL later."""
        sweeps = self._sweeps
        pids, unsure = self._processes.scan()
        in_grace = self._in_grace(pids, now)
        pids = [pid for pid in pids if pid not in in_grace]
        detached, held = self._detached(pids, now)
        if detached:
            self._leave_behind(detached)
            pids = [pid for pid in pids if pid not in detached]
        activity = sweeps.activity if now < sweeps.wait_until else None  # None: they are not waited for any more
        # A process that waits for a disk is at work.
        if not pids and not in_grace and not (unsure and (activity is not None or sweeps.is_unsure(unsure, now))):
            self.deadline = sweeps.activity = None
            self._warn_of(unsure)
            self._on_gone(tuple(sorted(sweeps.swept)))
            return
        is_waiting = activity is not None or bool(in_grace)
        self.deadline = now + (_WAIT_INTERVAL_S if is_waiting and not pids else _SWEEP_INTERVAL_S)
        if in_grace:
            self.deadline = min(self.deadline, sweeps.grace_until)
        if not pids:
            return
        if activity is not None:
            self._await(pids, now, activity)
        elif sweeps.activity is not None:
            self._end(pids, now, ", which had not ended in time")
        else:
            late = [pid for pid in pids if sweeps.grace is not None and sweeps.has_had_grace(pid)]
            self._end(late, now, ", which had not ended in time")
            self._end([pid for pid in pids if pid not in held and pid not in late], now, "")

    def _in_grace(self, pids: list[int], now: float) -> set[int]:
        """Those that handle the signal that their rank was sent, and what these have started, until the grace is over.

        They had the signal with their rank, and another one may end them at once. One in a process group of its own, as
        timeout(1) makes, did not have it, and gets it now.
        """
        sweeps, found = self._sweeps, set[int]()
        grace = sweeps.grace
        if grace is None or now >= sweeps.grace_until:
            return found
        for pid in pids:  # parents come before their children
            stat = read_stat(pid)
            if stat is None:
                continue
            session = self._processes.session_of(pid)
            if stat.ppid in found or sweeps.in_grace.get(pid) == stat.start_ticks:
                found.add(pid)
            elif session in grace.ranks and pid not in sweeps.swept and grace.signum in caught_signals(pid):
                found.add(pid)
                sweeps.in_grace[pid] = stat.start_ticks
                _send(pid, 0 if _process_group(pid) == session else grace.signum)
        if found and sweeps.is_report_due(now):
            left = f"SIGKILL follows in {_duration(sweeps.grace_until - now)}, or at Ctrl-C"
            awaited = [pid for pid in pids if pid in found and pid in sweeps.in_grace]
            self._report(f"waiting for {self._processes.description(awaited)}; {left}")
        return found

    def _await(self, pids: list[int], now: float, activity: Activity) -> None:
        """Wait for those that work, and end those that do not."""
        sweeps = self._sweeps
        idle = sweeps.idle_among(activity.sample(pids, now, self._exempt()))
        self._end(idle, now, f", idle for {sweeps.idle_s:g} s")
        if sweeps.swept:
            return
        self.deadline = min(now + _WAIT_INTERVAL_S, sweeps.wait_until)
        if sweeps.is_report_due(now):
            what, most = self._processes.description(pids), _duration(sweeps.wait_until - now)
            self._report_wait(f"waiting for {what}, {most} at most; Ctrl-C stops waiting")

    def _detached(self, pids: list[int], now: float) -> tuple[set[int], set[int]]:
        """Of those that have left their rank's session: which are to live on, and which are neither left nor ended yet.

        The former were detached on purpose, and hold nothing that the next attempt needs.
        """
        sweeps = self._sweeps
        if sweeps.ends_all or sweeps.activity is not None:
            return set(), set()
        outside = [pid for pid in pids if pid not in sweeps.swept and not self._processes.is_in_session(pid)]
        if sweeps.leave_at is None or now < sweeps.leave_at:
            return set(), set(outside)
        foreign, inner = self._processes.of_other_launchers(outside)
        # A saferun within the run decides itself what it leaves; until it has ended, its helpers are there too.
        is_inner_alive = any(is_reaper(pid) for pid in pids if pid not in outside or pid in foreign)
        held = set(outside) - foreign if is_inner_alive and not sweeps.killed_reaper else set[int]()
        ended = foreign | inner if sweeps.killed_reaper else foreign
        tables: Tables = {}
        detached = {pid for pid in outside if pid not in ended | held and not _is_in_the_way(pid, tables)}
        return detached, held

    def _leave_behind(self, detached: set[int]) -> None:
        """These live on, and their descendants: no other attempt has to do with them."""
        for pid in detached:
            self._processes.leave(pid)
        pids = sorted(detached)
        name_of = {pid: process_name(pid) for pid in pids}
        # One that has ended since has no command line any more.
        pids = [pid for pid in pids if (stat := read_stat(pid)) is not None and stat.state not in "ZX"]
        if not pids:
            return
        who = self._processes.owners(pids) or "the ranks"
        where, are = ("a session of its own", "it is") if len(pids) == 1 else ("sessions of their own", "they are")
        self._report(f"{who} left {process_count(pids)} in {where}: {process_names(pids, name_of)}; {are} not ended")

    def _end(self, pids: Iterable[int], now: float, why: str) -> None:
        """Signal these, and report those that had not been signalled before."""
        sweeps = self._sweeps
        new = [pid for pid in pids if pid not in sweeps.swept]
        if new:
            self._report(f"ending {self._processes.description(new)}{why}")
        for pid in pids:
            more_s = INNER_PATIENCE_S if is_reaper(pid) else 0.0
            term_s = 0.0 if sweeps.has_had_grace(pid) else sweeps.term_s
            killing = now >= sweeps.swept.setdefault(pid, now + term_s + more_s)
            sweeps.killed_reaper |= killing and more_s > 0
            if killing or pid in new:
                _send(pid, signal.SIGKILL if killing else signal.SIGTERM)

    def end(self) -> None:
        """The time for the sweep is over: report what is left, and leave it, so that the next attempt can begin."""
        if self.deadline is None:
            return
        self.deadline = None
        left, unsure = self._processes.scan()
        if left:
            self.give_up(left)
            self._warn(f"could not be ended and is left behind: {self._processes.description(left)}")
        self._warn_of(unsure)

    def give_up(self, pids: Iterable[int]) -> None:
        """No signal ends these: they are left alone with their descendants, as long as they live."""
        self._processes.give_up(pids)

    def _warn_of(self, unsure: list[int]) -> None:
        if unsure:
            what = self._processes.description(unsure)
            self._warn(f"may be left behind in uninterruptible sleep (state D): {what}")

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    def tick(self, now: float) -> None:
        """Sweep again, if that is due."""
        if self.deadline is not None and self.deadline <= now:
            self._sweeps.make_up_for(now)
            self._sweep_guarded(now)

    def _sweep_guarded(self, now: float) -> None:
        """Sweep; if that fails, assume that nothing is left, so that the job goes on."""
        began = time.monotonic()
        sweeps = self._sweeps
        try:
            self.sweep(now)
        except Exception as error:
            self._warn(f"cannot look for what the ranks left behind: {type(error).__name__}: {error}")
            self.deadline = None
            self._on_gone(tuple(sorted(sweeps.swept)))
        sweeps.swept_at = now + time.monotonic() - began  # what a sweep takes is no time of a suspension

    def on_exit(self, pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. It may have been the last orphan, so the next sweep is due at once."""
        self._processes.forget(pid)
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
        pids, sweeps = self.remaining(), self._sweeps
        if sweeps.leave_at is None or sweeps.ends_all or not self._processes.has_left:
            return pids
        ended = [pid for pid in pids if pid in sweeps.swept or self._processes.is_in_session(pid)]
        for pid in set(pids).difference(ended):
            self._processes.leave(pid)
        return ended

    def remaining(self) -> list[int]:
        """Those that are there now; parents come before their children."""
        return self._processes.scan()[0]


class _Sweeps:
    """How the processes that the ranks of one attempt left behind are ended, or waited for."""

    def __init__(self) -> None:
        self.began_at = 0.0
        self.swept: dict[int, float] = {}  # pid -> when SIGKILL follows the SIGTERM that it was sent
        self.swept_at = 0.0  # when the last sweep was over
        self.term_s = self.idle_s = 0.0
        self.wait_until = 0.0
        self.activity: Activity | None = None  # of those that are waited for; None: none is
        self.ends_all = False
        self.leave_at: float | None = None  # when those that have left their rank's session are left
        self.grace: Grace | None = None  # None: what has had one has none any more
        self.grace_until = 0.0
        self.in_grace: dict[int, int] = {}  # pid of each that handles the signal -> when it started, in clock ticks
        self.killed_reaper = False  # that of a saferun within the run, whose ranks may live on
        self._unsure: dict[int, float] = {}  # pid -> until when it is still unknown whether it is one of them
        self._report_at, self._report_every_s = 0.0, _REPORT_EVERY_S

    def begin(
        self, now: float, term_s: float, wait_s: float, idle_s: float, *, ends_all: bool, grace: Grace | None
    ) -> None:
        """See ``Orphans.begin``. It begins again where they are to be ended that have been waited for."""
        self.began_at = now
        self.term_s, self.idle_s = term_s, idle_s
        self.wait_until = now + wait_s
        self._report_at, self._report_every_s = now + _REPORT_AFTER_S, _REPORT_EVERY_S
        self.activity = Activity(idle_s) if wait_s > 0 else None
        self.ends_all = self.ends_all or ends_all
        self.grace, self.grace_until = grace, now + grace.left_s if grace is not None else now
        if self.leave_at is None and wait_s <= 0:
            self.leave_at = now + _LEAVE_AFTER_S
        # A process that is being ended already gets no more time.
        self.swept = {pid: min(kill_at, now + term_s) for pid, kill_at in self.swept.items()}

    def has_had_grace(self, pid: int) -> bool:
        """Whether a process has had a signal that it handles, and time for it."""
        stat = read_stat(pid) if pid in self.in_grace else None
        return stat is not None and stat.start_ticks == self.in_grace[pid]

    def is_unsure(self, pids: Iterable[int], now: float) -> bool:
        """Whether it may still become known of any of these whether it is a rank's."""
        return any(now < self._unsure.setdefault(pid, now + _UNSURE_S) for pid in pids)

    def idle_among(self, families: Iterable[tuple[list[int], float]]) -> list[int]:
        """Those that have been idle for too long to be waited for, and those that are being ended."""
        return [
            pid
            for members, idle_s in families
            if idle_s >= self.idle_s or any(pid in self.swept for pid in members)
            for pid in members
        ]

    def is_report_due(self, now: float) -> bool:
        """Whether the line about those that are waited for is to be printed now."""
        is_due = self._report_at <= now
        if is_due:
            self._report_at = now + self._report_every_s
            self._report_every_s = min(2 * self._report_every_s, _LONGEST_REPORT_S)
        return is_due

    def make_up_for(self, now: float) -> None:
        """A sweep is due. If it is late, those that are waited for may have been suspended: they get that time."""
        lost_s = now - self.swept_at - _WAIT_INTERVAL_S
        if lost_s > _SUSPENDED_S and self.activity is not None:
            self.wait_until += lost_s
            self._report_at += lost_s
            self.swept = {pid: kill_at + lost_s for pid, kill_at in self.swept.items()}
            self.activity.make_up_for(lost_s)


def _send(pid: int, signum: int) -> None:
    """Signal a process; 0: only have it go on, if it is stopped."""
    with suppress(OSError):
        os.kill(pid, signum)
        stat = read_stat(pid)
        if stat is not None and stat.state == "T":
            # A stopped process takes no signal but SIGKILL before it goes on.
            os.kill(pid, signal.SIGCONT)


def _process_group(pid: int) -> int:
    """The process group of a process; -1 if it has ended."""
    try:
        return os.getpgid(pid)
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
