"""What the watchdog remembers of one rank. Times are those of the watchdog's clock."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.captures.inspection_values import RankInspection
from saferun.text.script_state import ReportedPhase
from saferun.watchdog.quiet_work import QuietWork
from saferun.watchdog.samples import Numbers, ProcessSample, RankSample
from saferun.watchdog.sequence_numbers import SequenceNumbers
from saferun.watchdog.signs import RankSigns
from saferun.watchdog.stack_dumps import Suspect

# For how many timeouts the weak signs of a child that a rank waits for count.
_PATIENCE = 4
# After this share of the timeout the rank has been asked for its sequence numbers.
_UNSEEN = 0.25
_CLOCKS_DIFFER_S = 1.0


class RankHistory:
    """One rank.

    Args:
        rank: its number in the job.
        window_s: over how long rates are averaged.
        clock_s: the time.

    Attributes:
        moved_at: when it last moved.
        active_at: when it last moved or was busy.
        busy_pids: its processes that were busy in the last interval.
        main_is_busy: whether the main thread of the rank was busy in it.
        stopped_since: since when it has been stopped; None: it is not.
        stopped_samples: in how many samples in a row it was.
        uninterruptible_since: since when it has been in one uninterruptible sleep.
        beat_ns: its last heartbeat; 0: none yet.
        beat_at: when that was noticed.
        numbers: the sequence numbers of its collectives.
        works_unseen: whether it works by the last inspection, which samples do not show.
        phase: the long phase that its script is in.
        is_overdue: whether that has lasted longer than it was expected to.
        doubted_at: when it was last seen to do what may be work, though for too long to count.
        stirred_at: when its main thread last did more than the rarest of loops that wait.
    """

    def __init__(self, rank: int, window_s: float, clock_s: float) -> None:
        self.rank = rank
        self.moved_at = clock_s
        self.active_at = clock_s
        self.busy_pids: frozenset[int] = frozenset()
        self.main_is_busy = False
        self.stopped_since: float | None = None
        self.stopped_samples = 0
        self.uninterruptible_since: float | None = None
        self.beat_ns = 0
        self.beat_at = clock_s
        self.numbers = SequenceNumbers(clock_s)
        self.suspects: dict[int, Suspect] = {}
        self.works_unseen = False
        self.phase: ReportedPhase | None = None
        self.is_overdue = False
        self._mark = ""
        self.doubted_at = float("-inf")
        self.stirred_at = clock_s
        self._signs = RankSigns(window_s)
        self._quiet_work = QuietWork()
        self._shown_at = clock_s  # when samples showed it move last; inspections and numbers set ``moved_at`` only
        self._wakes = -1

    def move(self, clock_s: float) -> None:
        """It makes progress: whatever spoke against it is forgotten."""
        self.moved_at = self.active_at = clock_s
        self.numbers.move()
        self.suspects.clear()

    def rebase(self) -> None:
        """What happened since the last sample is not the rank's doing."""
        self._signs.rebase()
        self.numbers.rebase()
        self.suspects.clear()

    def take(self, sample: RankSample, interval_s: float, clock_s: float, *, can_dump: bool, timeout_s: float) -> bool:
        """Take a sample. Returns whether the rank moved."""
        disturbed = self.numbers.take_disturbance()
        signs = self._signs.take(sample, interval_s, disturbed=disturbed, patience_s=_PATIENCE * timeout_s)
        self.busy_pids, self.main_is_busy = signs.busy_pids, signs.main_is_busy
        if signs.may_work:
            self.doubted_at = clock_s
        if signs.is_slightly_active:
            self.stirred_at = clock_s
        self._take_state(sample.process, clock_s, moved=signs.moved)
        if sample.heartbeat_ns != self.beat_ns:
            self.beat_ns, self.beat_at = sample.heartbeat_ns, clock_s
        if sample.script is not None and sample.script.mark != self._mark:
            # Who reports steps need not send heartbeats as well.
            self._mark, self.beat_at = sample.script.mark, clock_s
        # What is busy and cannot be dumped counts as work, unless it turns out to be in a collective.
        works = (
            clock_s - self.moved_at >= _UNSEEN * timeout_s
            and not (self.numbers.is_in_collective or self.numbers.is_asked or self.numbers.are_old)
            and any(not can_dump or self._is_unreadable(pid) for pid in signs.busy_pids)
        )
        if signs.moved or works:
            self._shown_at = clock_s
            self.works_unseen = False
            self.move(clock_s)
        elif signs.busy_pids:
            self.active_at = clock_s
        return signs.moved or works

    def take_phase(self, phase: ReportedPhase | None, at: float) -> bool:
        """Take the phase that its script is in. ``at``: monotonic seconds. Returns whether one is over since then."""
        if phase is not None and phase.since > at + _CLOCKS_DIFFER_S:
            phase = None  # from a clock that is not this host's
        has_left = self.phase is not None and (phase is None or phase.since != self.phase.since)
        self.phase = phase
        self.is_overdue = phase is not None and phase.until <= at
        return has_left

    def _is_unreadable(self, pid: int) -> bool:
        return pid in self.suspects and self.suspects[pid].is_unreadable

    def _take_state(self, process: ProcessSample, clock_s: float, *, moved: bool) -> None:
        if process.state == "T":
            self.stopped_since = clock_s if self.stopped_since is None else self.stopped_since
            self.stopped_samples += 1
        else:
            self.stopped_since, self.stopped_samples = None, 0
        if process.state != "D":
            self.uninterruptible_since = None
        elif self.uninterruptible_since is None or moved or process.main_wakes != self._wakes:
            self.uninterruptible_since = clock_s
        self._wakes = process.main_wakes

    def take_numbers(self, numbers: Numbers | None, clock_s: float) -> bool:
        """Take its answer; None where there is none. Returns whether the numbers have moved."""
        moved = self.numbers.take(numbers, clock_s)
        if moved:
            self.move(clock_s)
        return moved

    # --------------------------------------------------------------------------------------------------- inspections

    def take_inspection(
        self, moments_s: Sequence[float], inspection: RankInspection, clock_s: float, timeout_s: float
    ) -> bool:
        """Take what an inspection has found. Returns whether the rank works."""
        still_s = clock_s - self._shown_at
        does = self._quiet_work.take(moments_s, inspection, still_s=still_s, patience_s=_PATIENCE * timeout_s)
        self.works_unseen = does == "works"
        if self.works_unseen:
            self.move(clock_s)
        elif does == "may work":
            self.doubted_at = clock_s
        return self.works_unseen

    # ---------------------------------------------------------------------------------------------------------- stacks

    def suspect(self, pid: int) -> Suspect:
        """One of its busy processes."""
        return self.suspects.setdefault(pid, Suspect(main_only=self.main_is_busy))

    def dumps_alike(self, dumps: int, span_s: float) -> bool:
        """Whether all busy processes that can be dumped have shown the same stacks in so many dumps over so long."""
        suspects = [self.suspects.get(pid) for pid in self.busy_pids]
        return all(
            suspect is not None and (suspect.is_unreadable or (suspect.dumps >= dumps and suspect.span_s >= span_s))
            for suspect in suspects
        )
