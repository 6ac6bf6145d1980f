"""From the watchdog of each host to HangSuspected: one class for a job of one host, one for a job of several.

A rank that waits looks like one that hangs, and so does a host. In a job of several hosts no host judges alone: the
watchdog of each host reports whether its ranks make progress (``set_state``); the job-wide detector on the leader gets
the states of all hosts and reports a hang of the job (``broadcast_hang``); each host, the leader included, then posts
HangSuspected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from saferun.launch.attempt_record import AttemptRecord, InvestigationContext
from saferun.launch.non_finite import NonFiniteWarning
from saferun.model import RANKS_HELD, RANKS_QUIET, RANKS_RUN
from saferun.supervisor.events import HangSuspected
from saferun.supervisor.machine import State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.join_messages import Peer
    from saferun.evidence.job_evidence import HangVerdict
    from saferun.launch.slow_ranks import SlowRankWatch
    from saferun.launch.step_notes import StepNotes
    from saferun.model import JsonObject
    from saferun.watchdog.job_detector import JobDetector
    from saferun.watchdog.monitor import RankMonitor, WatchedRank
    from saferun.watchdog.verdicts import Repeat

# How often to check whether the modules that the watch needs have been imported.
_IMPORTS_S = 30.0
# Ranks that have ended by then are not watched at all.
_WATCH_DELAY_S = 0.5
_AGAIN_S = 1.0
KEYBOARD = "keyboard"
"""Holds a rank that waits at a prompt."""
_RUN_STATE: dict[str, object] = {"s": RANKS_RUN}
_HELD_STATE: dict[str, object] = {"s": RANKS_HELD}


class _Ticks:
    """The ticks of one watch. One that fails may leave it due, and the loop would do nothing else: the next one waits.

    Args:
        context: of the launch.
    """

    def __init__(self, context: InvestigationContext) -> None:
        self._context = context
        self._again_at = 0.0

    def deadline_of(self, watch: RankMonitor | JobDetector | None) -> float | None:
        """When its tick is due, in monotonic seconds."""
        deadline = watch.deadline if watch is not None else None
        return max(deadline, self._again_at) if deadline is not None else None

    def tick(self, what: str, watch: RankMonitor | JobDetector | None, now: float) -> bool:
        """Call its tick, if that is due. Returns whether it was."""
        due_at = self.deadline_of(watch)
        if watch is None or due_at is None or due_at > now:
            return False
        if not self._context.launch.succeeds(what, watch.tick, now):
            self._again_at = now + _AGAIN_S
        return True


class HangWatch:
    """Watches the ranks of one attempt of a job of one host: its verdicts are the job's.

    Args:
        context: of the launch.
        record: of the attempt.
        on_recovery: takes how many seconds a hang lasted that is over.
    """

    def __init__(
        self, context: InvestigationContext, record: AttemptRecord, on_recovery: Callable[[float], None]
    ) -> None:
        self._context = context
        self._record = record
        self._on_recovery = on_recovery
        self._timeout_s = context.launch.config.watch.hang_timeout_s
        self._has_imported = False
        self._monitor: RankMonitor | None = None
        self._watch_at: float | None = None
        self._ticks = _Ticks(context)
        self._slow: SlowRankWatch | None = None
        self._non_finite = NonFiniteWarning(context, record)
        self._step_notes: StepNotes | None = None
        self._holders = set[str]()
        self._number = 0  # of the last hang of the job
        context.launch.job.reports.subscribe(self._take_states, self._take_hang)

    def begin(self, now: float, *, has_imported: bool) -> None:
        """Watch the ranks, after a short delay. ``has_imported``: the modules that this needs have been imported."""
        self._has_imported = has_imported
        if self._timeout_s > 0:
            self._watch_at = now + (_WATCH_DELAY_S if has_imported else _IMPORTS_S)

    def imported(self) -> None:
        """The modules that the watch needs have been imported."""
        self._has_imported = True
        if self._watch_at is not None:
            self._watch_at = self._record.started_at + _WATCH_DELAY_S

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        watched_at = self._ticks.deadline_of(self._monitor) if self._monitor is not None else self._watch_at
        moments = (watched_at, self._slow.deadline if self._slow is not None else None)
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        due = self._slow.deadline if self._slow is not None else None
        if self._watch_at is not None and self._watch_at <= now:
            self._watch_at = None if self._has_imported else now + _IMPORTS_S
            if self._has_imported:
                self._context.launch.guarded("watch the ranks", self._begin_watch, now)
        elif self._ticks.tick("watch the ranks", self._monitor, now):
            self._context.launch.guarded("read what the ranks report", self._non_finite.warn_once)
            if self._step_notes is not None:
                self._step_notes.note(now)
            if self._slow is not None:
                due = self._slow.earliest  # one wake-up for both, where it can be
        if due is not None and due <= now:
            self._for_slow_ranks(lambda slow: slow.tick(now))

    def _for_slow_ranks(self, call: Callable[[SlowRankWatch], None]) -> None:
        """Call a method of the comparison of the ranks; if it fails, the ranks are no longer compared."""
        if self._slow is not None and not self._context.launch.succeeds("compare the ranks", call, self._slow):
            self._slow.disable()

    def _begin_watch(self, now: float) -> None:
        from saferun.watchdog.monitor import RankMonitor

        self._context.log.write_preflight()
        self._monitor = RankMonitor(
            self._timeout_s,
            self._context.launch.guarded_poller,
            on_verdict=self._take_verdict,
            on_recovery=self._take_recovery,
            examiner=self._context.launch.examiner,
            store_port=self._record.store_port,
            addresses=self._context.launch.job.other_addresses,
            is_held=self._is_held,
        )
        ranks = self.watched_ranks()
        self._monitor.begin(now, ranks)
        self._context.launch.guarded("compare the ranks", self._begin_comparison, now, ranks, self._monitor)
        from saferun.launch.step_notes import StepNotes

        self._step_notes = StepNotes(self._context, now)

    def _is_held(self) -> bool:
        """Whether a user holds a rank up, in a debugger or at a prompt; or no verdict is of use yet."""
        terminals = self._context.launch.terminals
        # Always called, also while something else holds a rank: it notices when a rank no longer asks.
        is_asking = terminals is not None and bool(
            self._context.launch.guarded("see whether a rank waits for input", terminals.are_asking)
        )
        return is_asking or bool(self._holders - {KEYBOARD}) or self._awaits_programs()

    def _awaits_programs(self) -> bool:
        """Whether a rank has not become its program: ``ExecWait`` warns, and the supervisor would ignore a verdict."""
        return self._context.launch.supervisor.state is State.STARTING

    def hold(self, holder: str, is_held: bool) -> None:  # noqa: FBT001 - the name says what it is
        """A user begins, or ceases, to hold a rank up. Meanwhile ranks are not compared, as the others wait for it.

        Args:
            holder: what holds the rank. The ranks are compared again when no holder is left.
            is_held: whether it begins.
        """
        before = bool(self._holders)
        if is_held:
            self._holders.add(holder)
        else:
            self._holders.discard(holder)
        if before != bool(self._holders):
            self._hold_changed(time.monotonic())

    def _hold_changed(self, now: float) -> None:
        """The first holder has come, or the last one has gone."""
        if self._holders:
            self._for_slow_ranks(lambda slow: slow.pause())
        else:
            self._for_slow_ranks(lambda slow: slow.resume(now))

    def _begin_comparison(self, now: float, ranks: list[WatchedRank], watch: RankMonitor) -> None:
        from saferun.launch.slow_ranks import SlowRankWatch

        self._slow = SlowRankWatch(self._context, self._record)
        self._for_slow_ranks(lambda slow: slow.begin(now, ranks, watch.process_of))
        if self._holders:
            self._for_slow_ranks(lambda slow: slow.pause())

    def watched_ranks(self) -> list[WatchedRank]:
        """The ranks that run; none if the modules cannot be imported."""
        try:
            from saferun.watchdog.monitor import WatchedRank
        except ImportError:
            return []
        attempt = self._context.launch.attempt
        watched = []
        for rank in self._record.living:
            prefix = self._context.hook.memory_prefix(attempt, rank.assignment.rank)
            heartbeat = f"{prefix}.heartbeat" if prefix else ""
            assignment = rank.assignment
            read = partial(self._non_finite.read, assignment.rank)
            watched.append(
                WatchedRank(
                    assignment.local_rank, assignment.rank, rank.pid, rank.output_bytes, prefix, heartbeat, read
                )
            )
        return watched

    def idle_s(self) -> float:
        """For how many seconds no rank of this host has made progress; 0 if one may be working, or nothing is known.

        Reset by output, reading, work in bursts, and by CPU use that is not a wait in a stuck collective.
        """
        if self._monitor is None:
            return 0.0
        return self._context.launch.guarded("check the ranks' progress", self._monitor.idle_s, time.monotonic()) or 0.0

    def strict_idle_s(self) -> float:
        """As ``idle_s``, for callers that must not hold up a rank that works only a little.

        Also reset when a main thread does more than a slow polling loop does (0.5 % of a processor).
        """
        if self._monitor is None:
            return 0.0
        return (
            self._context.launch.guarded("check the ranks' progress", self._monitor.strict_idle_s, time.monotonic())
            or 0.0
        )

    def idle_by_rank(self) -> dict[int, float]:
        """As ``idle_s``, for each local rank; empty if nothing is known."""
        if self._monitor is None:
            return {}
        return self._context.launch.guarded("check the ranks' progress", self._monitor.idle_by_rank) or {}

    def rank_found(self, local_rank: int) -> None:
        """The process that runs a rank's script has been found."""
        if self._monitor is not None:
            for rank in self.watched_ranks():
                if rank.local_rank == local_rank:
                    self._context.launch.guarded("watch the ranks", self._monitor.rank_found, rank, time.monotonic())

    def rank_ended(self, local_rank: int) -> None:
        """A rank has been reaped."""
        self._context.launch.guarded("read what the ranks report", self._read_last, local_rank)
        if self._monitor is not None:
            self._context.launch.guarded("watch the ranks", self._monitor.rank_ended, local_rank)
        self._for_slow_ranks(lambda slow: slow.rank_ended(local_rank))

    def _read_last(self, local_rank: int) -> None:
        if self._monitor is not None:
            self._non_finite.read_last(local_rank)
        self._non_finite.warn_once()

    def pause(self) -> None:
        """The ranks are being captured."""
        if self._step_notes is not None:
            self._step_notes.note(time.monotonic(), at_once=True)
        self._for_slow_ranks(lambda slow: slow.pause())
        self._watch_at = None
        if self._monitor is not None:
            self._monitor.pause()

    def captured(self, now: float) -> None:
        """A hang has been captured; on several hosts, by all of them."""

    def resume(self, now: float) -> None:
        """The hang has been reported, and the job goes on."""
        if self._monitor is not None:
            self._context.launch.guarded("watch the ranks", self._monitor.resume, now)
        if not self._holders:
            self._for_slow_ranks(lambda slow: slow.resume(now))

    def end(self) -> None:
        """No rank is left, or none that could be captured."""
        if self._step_notes is not None:
            self._step_notes.note(time.monotonic(), at_once=True)
            self._step_notes = None
        self._watch_at = None
        self._for_slow_ranks(lambda slow: slow.end())
        self._slow = None
        monitor, self._monitor = self._monitor, None
        if monitor is not None:
            self._context.launch.guarded("end the watch", monitor.end)

    def downgrade_to_suspected(self, verdict: HangVerdict, certain_after_s: float) -> None:
        """Treat the hang just captured as suspected only, until nothing has moved for ``certain_after_s``."""
        if self._monitor is not None:
            self._monitor.downgrade_to_suspected(verdict, certain_after_s)

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often this hang has been reported, and when it is reported next."""
        from saferun.watchdog.verdicts import Repeat

        return self._monitor.repeat(verdict) if self._monitor is not None else Repeat()

    def _take_verdict(self, verdict: HangVerdict) -> None:
        self._context.launch.job.reports.broadcast_hang(verdict, self._number + 1)

    def _take_recovery(self, lasted_s: float) -> None:
        self._on_recovery(lasted_s)

    def _take_states(self, states: Mapping[str, JsonObject]) -> None:
        """In a job of one host no other host has a state."""

    def _take_hang(self, verdict: HangVerdict, number: int) -> None:
        """The job hangs: have this host capture its ranks."""
        self._number = number
        self._context.post(HangSuspected(time.monotonic(), self._context.launch.attempt, verdict, number))


class JobHangWatch(HangWatch):
    """Watches the ranks of one attempt of a job of several hosts; the leader has the job-wide detector.

    Args:
        context: of the launch.
        record: of the attempt.
        on_recovery: takes how many seconds a hang lasted that is over; called on the leader.
    """

    def __init__(
        self, context: InvestigationContext, record: AttemptRecord, on_recovery: Callable[[float], None]
    ) -> None:
        super().__init__(context, record, on_recovery)
        self._job_ticks = _Ticks(context)
        self._detector: JobDetector | None = None
        self._state: JsonObject = _RUN_STATE
        self._report_quiet_at: float | None = None  # after a hold: when quiet ranks have had time to move

    # ---------------------------------------------------------------------------------------------------- on each host

    def _awaits_programs(self) -> bool:
        """The ranks of other hosts wait for such a rank, and those hosts capture; here the watch goes on."""
        return False

    def _take_verdict(self, verdict: HangVerdict) -> None:
        """Nothing moves on this host."""
        self._for_slow_ranks(lambda slow: slow.pause())
        from saferun.watchdog.job_verdicts import packed

        self._set_state({"s": RANKS_QUIET, **packed(verdict)})
        if self._monitor is not None:
            self._monitor.resume(time.monotonic())

    def _take_recovery(self, _lasted_s: float) -> None:
        """Something moves on this host again."""
        if not self._holders:
            self._for_slow_ranks(lambda slow: slow.resume(time.monotonic()))
        self._set_state(_RUN_STATE)

    def _set_state(self, state: JsonObject) -> None:
        """Report the state of this host's ranks; while a user holds one up, ``held`` instead of ``quiet``."""
        self._state = state
        if state is _RUN_STATE:
            self._report_quiet_at = None
        if self._report_quiet_at is None:
            is_held = self._holders and state is not _RUN_STATE
            self._context.launch.job.reports.set_state(_HELD_STATE if is_held else state)

    def _hold_changed(self, now: float) -> None:
        """After a hold, ranks that were quiet before it get the whole timeout before they are reported as quiet."""
        super()._hold_changed(now)
        if self._state is _RUN_STATE:
            return
        if self._holders:
            self._report_quiet_at = None
            self._context.launch.job.reports.set_state(_HELD_STATE)
        else:
            self._report_quiet_at = now + self._timeout_s

    def end(self) -> None:
        """No rank is left, or none that could be captured."""
        self._report_quiet_at = None
        super().end()

    # --------------------------------------------------------------------------------------------------- on the leader

    def _take_states(self, states: Mapping[str, JsonObject]) -> None:
        """The state of the ranks of all hosts has changed."""
        from saferun.watchdog.job_detector import JobDetector

        if self._timeout_s <= 0:
            return
        if self._detector is None:
            self._detector = JobDetector(
                self._timeout_s, on_hang=self._context.launch.job.reports.broadcast_hang, on_recovery=self._on_recovery
            )
        peers = self._context.launch.job.peers
        # The verdict of a host may name its own ranks only.
        ranks_of = {task: _ranks_of(peers.get(int(task.partition("/")[0]))) for task in states}
        self._context.launch.guarded("watch the job", self._detector.feed, states, time.monotonic(), ranks_of)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = (
            super().deadline,
            self._report_quiet_at,
            self._job_ticks.deadline_of(self._detector),
        )
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._report_quiet_at is not None and self._report_quiet_at <= now:
            self._report_quiet_at = None
            self._set_state(self._state)
        self._job_ticks.tick("watch the job", self._detector, now)
        super().tick(now)

    def captured(self, now: float) -> None:
        """All hosts have captured it."""
        if self._detector is not None:
            self._detector.captured(now)

    def downgrade_to_suspected(self, verdict: HangVerdict, certain_after_s: float) -> None:
        """Treat the hang of the job just captured as suspected only, until nothing moved for ``certain_after_s``."""
        if self._detector is not None:
            self._detector.downgrade_to_suspected(verdict, certain_after_s)

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often this hang of the job has been reported, and when it is reported next."""
        return self._detector.repeat(verdict) if self._detector is not None else super().repeat(verdict)


def _ranks_of(peer: Peer | None) -> range:
    return range(peer.base_rank, peer.base_rank + peer.ranks) if peer is not None else range(0)
