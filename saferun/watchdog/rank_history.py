"""What the watchdog remembers of one rank. Times are those of the watchdog's clock."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.captures.inspection_values import RankInspection
from saferun.text.script_state import ReportedPhase
from saferun.watchdog.quiet_work import QuietWork
from saferun.watchdog.samples import Numbers, ProcessSample, RankSample
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
        is_asked: whether it has been asked for its sequence numbers and has not answered.
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
        self.is_asked = False
        self.suspects: dict[int, Suspect] = {}
        self.works_unseen = False
        self.phase: ReportedPhase | None = None
        self.is_overdue = False
        self._mark = ""
        self.doubted_at = float("-inf")
        self.stirred_at = clock_s
        self._signs = RankSigns(window_s)
        self._quiet_work = QuietWork()
        self._shown_at = clock_s
        self._wakes = -1
        self._numbers: Numbers | None = None
        self._numbers_at = clock_s
        self._unanswered_since: float | None = None  # since when its numbers may be old: it did not answer
        self._asked = 0
        self._is_disturbed = False

    def move(self, clock_s: float) -> None:
        """It makes progress: whatever spoke against it is forgotten."""
        self.moved_at = self.active_at = clock_s
        self._asked = 0
        self.suspects.clear()

    def rebase(self) -> None:
        """What happened since the last sample is not the rank's doing."""
        self._signs.rebase()
        self.is_asked = self._is_disturbed = False
        self._asked = 0
        self.suspects.clear()

    def take(self, sample: RankSample, interval_s: float, clock_s: float, *, can_dump: bool, timeout_s: float) -> bool:
        """Take a sample. Returns whether the rank moved."""
        disturbed, self._is_disturbed = self._is_disturbed, self.is_asked
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
            and not (self.is_in_collective or self.is_asked or self._has_old_numbers)
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

    # ------------------------------------------------------------------------------------------------ sequence numbers

    def note_query_due(self, reached: int, clock_s: float, again_s: float) -> bool:
        """As ``note_query``, if a query is due now that it has reached so many of the marks; False if none is.

        If it has answered before, and the last time it did not, it is asked again after ``again_s``.
        """
        is_due_again = self._has_old_numbers and clock_s - (self._unanswered_since or 0.0) >= again_s
        if reached <= self._asked and not (reached and is_due_again):
            return False
        self._asked = reached
        return self.note_query()

    def note_query(self) -> bool:
        """Note that its sequence numbers are asked for; False if they already are. The caller sends the query."""
        is_new = not self.is_asked
        self.is_asked = self._is_disturbed = True
        return is_new

    def take_numbers(self, numbers: Numbers | None, clock_s: float) -> bool:
        """Take the answer; None where there is none. Returns whether the numbers have moved."""
        self.is_asked = False
        self._unanswered_since = clock_s if numbers is None else None
        if numbers is None:
            return False
        if numbers == self._numbers:
            return False
        moved = self._numbers is not None
        self._numbers, self._numbers_at = numbers, clock_s
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

    @property
    def _has_old_numbers(self) -> bool:
        """Whether it has answered before, and did not when it was asked the last time."""
        return self._numbers is not None and self._unanswered_since is not None

    @property
    def was_in_collective(self) -> bool:
        """Whether it was in a collective by its last answer, however old that is."""
        return self._numbers is not None and any(enqueued > completed for enqueued, completed in self._numbers.values())

    @property
    def is_in_collective(self) -> bool:
        """Whether it has begun a collective that is not complete, by its numbers; not if they may be old.

        With NCCL sends are numbered for themselves, and a rank's last call may have a lower number than the last that
        is complete both while it waits and when it is idle. That does not count; ``NumbersQuery`` asks for the calls.
        """
        return self.was_in_collective and not self._has_old_numbers

    def frozen_s(self, clock_s: float) -> float:
        """How long its numbers are known not to have moved."""
        return clock_s - self._numbers_at

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
