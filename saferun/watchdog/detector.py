"""Detects hangs of one host's ranks: samples go in, verdicts and requests for more evidence come out. Pure.

Time is measured by a clock of its own. It stands still while a rank is being debugged, while a core is being written
(for two timeouts at most) and while the watch is paused, and a late sample moves it by little more than a punctual one:
times in which ranks could not work, or were not sampled, do not count.

All ranks are judged together, since a rank that waits looks like one that hangs. The ranks hang if for the whole
timeout none of them moved (see ``signs``) and each was either quiet, or busy-looped in a collective whose sequence
numbers stand still. If a rank busy-loops outside of a collective its stacks are dumped; if they never change while
others wait, that is only reported as suspected.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.captures.inspection_values import JobInspection
from saferun.evidence.job_evidence import HangVerdict, ThreadStack
from saferun.watchdog.hang_rules import DUMPS, DUMPS_IN_COLLECTIVE, all_hang, some_hang, with_long_waits
from saferun.watchdog.rank_histories import RankHistories
from saferun.watchdog.rank_history import RankHistory
from saferun.watchdog.samples import JobSample, Numbers, RankSample, SampleResult
from saferun.watchdog.verdicts import Repeat, Verdicts

# A rank that does not move is asked for its sequence numbers after these shares of the timeout. Rarely: an answer from
# a full Flight Recorder costs one of the rank's threads 30-40 ms (measured).
_ASK_AT = (0.125, 0.25, 0.5, 0.75)
# Ranks that do not move are inspected after these shares of the timeout; and again before a verdict, unless the last
# inspection is younger than this.
_INSPECT_AT = (0.2, 0.45, 0.7)
_INSPECTION_LASTS_S = 15.0
# Stacks of busy ranks that do not move are dumped from this share of the timeout on.
_DUMPS_FROM = 0.5
# For so many timeouts a rank whose core is being written is waited for: the disk, or whatever takes the core, may hang.
_CORE_TIMEOUTS = 2
# A hang is over after so many samples with progress: a single one is no recovery, as some threads wake up once an hour.
_LIVELY = 3


def sampling_interval_s(timeout_s: float) -> float:
    """How often to sample, unless that costs too much."""
    return min(max(timeout_s / 20, 0.1), 5.0)


class HangDetector:
    """Judges the ranks of one host in one attempt.

    Args:
        timeout_s: how long nothing may move.
        can_dump: whether stacks can be dumped; if not, whatever is busy outside of a collective counts as work.
    """

    def __init__(self, timeout_s: float, *, can_dump: bool = True) -> None:
        self._timeout_s = timeout_s
        self._ranks = RankHistories(timeout_s, can_dump=can_dump)
        self._window_s = max(timeout_s / 10, 3 * sampling_interval_s(timeout_s))
        self._at: float | None = None
        self._confirming = False
        self._verdicts = Verdicts(timeout_s)
        self._lively = 0
        self._lively_at = 0.0
        self._is_inspecting = False
        self._inspected_marks = 0  # how many marks of _INSPECT_AT have been inspected at
        self._inspections = 0  # since a rank last moved; 0 as well after an inspection that failed
        self._inspected_at = float("-inf")

    # ------------------------------------------------------------------------------------------------------------ input

    def feed(self, sample: JobSample) -> SampleResult:
        """Take a sample. The first one, and the first after ``resume``, only serves the next for comparison."""
        is_first = self._at is None
        interval_s = max(sample.at - self._at, 1e-3) if self._at is not None else 1e-3
        self._at = sample.at
        self._ranks.take_cores(sample)
        if not is_first:
            self._ranks.clock_s += self._credit(sample, interval_s)
        moved = {rank.local_rank: self._take(rank, interval_s) for rank in sample.ranks}
        self._take_phases(sample)
        for local_rank in self._ranks.by_local_rank.keys() - moved.keys():
            # A rank that cannot be read may be moving.
            self._ranks.by_local_rank[local_rank].move(self._ranks.clock_s)
        ask = [] if is_first else self._numbers_wanted()
        recovered_s = None if is_first else self._recovery(moved=any(moved.values()))
        was_inspecting = self._is_inspecting
        self._is_inspecting = was_inspecting or (not is_first and self._pass_inspection_marks())
        if sample.is_held:
            self._confirming = False
        verdict, confirm = (None, []) if is_first or sample.is_held else self._verdict()
        self._is_inspecting = self._is_inspecting or self._inspection_is_needed()
        inspection = self._is_inspecting and not was_inspecting
        if verdict is not None:
            verdict = with_long_waits(verdict, self._ranks)
            self._verdicts.report(verdict, self._ranks.clock_s)
            self._lively = 0
        # The descendants of a rank that moves by itself need not be sampled.
        read_descendants = frozenset(local_rank for local_rank, has_moved in moved.items() if not has_moved)
        return SampleResult(verdict, recovered_s, (*ask, *confirm), read_descendants, self._confirming, inspection)

    def take_numbers(self, local_rank: int, numbers: Numbers | None) -> None:
        """The answer to ``SampleResult.numbers_wanted``; None: there is none."""
        history = self._ranks.by_local_rank.get(local_rank)
        if history is not None and history.take_numbers(numbers, self._ranks.clock_s):
            self._lively += _LIVELY

    def take_inspection(self, inspection: JobInspection | None) -> None:
        """The answer to ``SampleResult.inspection_wanted``; None: it failed."""
        self._is_inspecting = False
        self._inspected_at = self._ranks.clock_s
        for history in self._ranks.all:
            history.works_unseen = False
        if inspection is None:
            # Another one is likely to fail as well, so that the verdict waits for one only.
            self._inspections, self._inspected_marks = 0, max(self._inspected_marks, self._marks_reached())
            return
        self._inspections += 1
        for found in inspection.ranks:
            rank = self._ranks.by_local_rank.get(found.local_rank)
            if rank is not None and rank.take_inspection(
                inspection.moments_s, found, self._ranks.clock_s, self._timeout_s
            ):
                self._lively += _LIVELY

    def rank_ended(self, local_rank: int) -> None:
        """A rank has ended. The others are given time to notice."""
        history = self._ranks.by_local_rank.pop(local_rank, None)
        self._ranks.changed_at = self._ranks.clock_s
        if history is not None:
            for verdict in self._verdicts.open:
                if set(verdict.ranks) <= {history.rank}:
                    self._verdicts.close(verdict.kind, self._ranks.clock_s)

    def resume(self) -> None:
        """Go on after a verdict. The effects of a capture on the ranks do not count."""
        self._at = None
        self._confirming = self._is_inspecting = False
        for history in self._ranks.all:
            history.rebase()

    def downgrade_to_suspected(self, verdict: HangVerdict, certain_after_s: float) -> None:
        """Treat a verdict just reported as suspected only, until nothing has moved for ``certain_after_s``."""
        self._verdicts.downgrade_to_suspected(verdict.kind, certain_after_s)

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often a verdict of this kind has been reported, and when it is reported next."""
        return self._verdicts.repeat(verdict)

    def _credit(self, sample: JobSample, interval_s: float) -> float:
        """How far the clock moves."""
        if sample.is_held or any(rank.process.traced or rank.process.state == "t" for rank in sample.ranks):
            return 0.0
        if any(sample.at - since < _CORE_TIMEOUTS * self._timeout_s for since in self._ranks.cores_since.values()):
            return 0.0
        if sample.ranks and all(rank.process.state == "T" for rank in sample.ranks):
            # Whoever stopped the whole job may continue it, as a scheduler does that lends its GPUs to another job.
            self._ranks.changed_at = self._ranks.clock_s
        if interval_s > max(self._timeout_s / 2, 4 * sample.planned_s):
            # What kept saferun from sampling may have kept the ranks from working.
            self._ranks.changed_at = self._ranks.clock_s
        return min(interval_s, 2 * sample.planned_s)

    def _take(self, sample: RankSample, interval_s: float) -> bool:
        history = self._ranks.by_local_rank.get(sample.local_rank)
        if history is None:
            history = self._ranks.by_local_rank[sample.local_rank] = RankHistory(
                sample.rank, self._window_s, self._ranks.clock_s
            )
        return history.take(
            sample, interval_s, self._ranks.clock_s, can_dump=self._ranks.can_dump, timeout_s=self._timeout_s
        )

    def _take_phases(self, sample: JobSample) -> None:
        """Take the long phases that scripts announce. Ranks that waited for one get the whole timeout after its end."""
        self._ranks.at = sample.at
        for rank in sample.ranks:
            phase = rank.script.phase if rank.script is not None else None
            if self._ranks.by_local_rank[rank.local_rank].take_phase(phase, sample.at):
                self._ranks.changed_at = self._ranks.clock_s

    @property
    def idle_s(self) -> float:
        """For how long no rank has made progress, as of the last sample; 0 if one may work, or nothing is known."""
        return min(map(self._ranks.idle_s, self._ranks.all), default=0.0)

    @property
    def strict_idle_s(self) -> float:
        """As ``idle_s``, but a rank that works only a little counts as working."""
        return min(map(self._ranks.strict_idle_s, self._ranks.all), default=0.0)

    def idle_by_rank(self) -> dict[int, float]:
        """As ``idle_s``, for each local rank."""
        return {local_rank: self._ranks.idle_s(history) for local_rank, history in self._ranks.by_local_rank.items()}

    # ---------------------------------------------------------------------------------------------------------- stacks

    @property
    def dump_spacing_s(self) -> float | None:
        """How soon another dump may be wanted; None: not before the next sample."""
        if any(self._is_suspicious(history) for history in self._ranks.all):
            return self._timeout_s * (1 - _DUMPS_FROM) / DUMPS
        return None

    def wanted_dumps(self, at: float) -> tuple[int, ...]:
        """Processes whose stacks are to be dumped now, the most urgent first. ``at``: monotonic seconds."""
        due = []
        for history in filter(self._is_suspicious, self._ranks.all):
            wanted = DUMPS_IN_COLLECTIVE if history.numbers.is_in_collective else DUMPS
            for pid in history.busy_pids:
                suspect = history.suspect(pid)
                spacing_s = self._timeout_s * (1 - _DUMPS_FROM) / wanted
                if suspect.dumps >= wanted:
                    # Enough is known, and only needs to be confirmed.
                    spacing_s *= 4
                if not suspect.is_running and not suspect.is_unreadable and at - suspect.asked_at >= spacing_s:
                    due.append((suspect.dumps, suspect.asked_at, pid))
        return tuple(pid for _, _, pid in sorted(due))

    def dump_begun(self, pid: int, at: float) -> None:
        """A dump of the stacks of a process has begun."""
        for history in self._ranks.all:
            if pid in history.suspects:
                history.suspects[pid].asked_at = at
                history.suspects[pid].is_running = True

    def take_dump(self, pid: int, at: float, threads: Sequence[ThreadStack]) -> None:
        """Take the dumped stacks; no threads: the dump failed."""
        for history in self._ranks.all:
            suspect = history.suspects.get(pid)
            if suspect is not None:
                suspect.is_running = False
                if not suspect.take(at, threads):
                    history.move(self._ranks.clock_s)

    def _is_suspicious(self, history: RankHistory) -> bool:
        return (
            self._ranks.can_dump
            and bool(history.busy_pids)
            and self._ranks.still_s(history) >= self._timeout_s * _DUMPS_FROM
        )

    # --------------------------------------------------------------------------------------------------------- verdicts

    def _numbers_wanted(self) -> list[int]:
        wanted = []
        for local_rank, history in self._ranks.by_local_rank.items():
            reached = sum(self._ranks.still_s(history) >= part * self._timeout_s for part in _ASK_AT)
            if history.numbers.note_query_due(reached, self._ranks.clock_s, _ASK_AT[0] * self._timeout_s):
                wanted.append(local_rank)
        return wanted

    def _pass_inspection_marks(self) -> bool:
        """Note which of the marks have been reached. Returns whether a new one has, so that an inspection is due."""
        reached = self._marks_reached()
        is_due = reached > self._inspected_marks and not self._is_inspecting
        if is_due or reached < self._inspected_marks:
            self._inspected_marks = reached
        if not reached:
            self._inspections = 0
        return is_due

    def _marks_reached(self) -> int:
        still_s = min(map(self._ranks.still_s, self._ranks.all), default=0.0)
        # A missing heartbeat is held against a rank while others move.
        beating = [history for history in self._ranks.all if history.beat_ns > 0]
        still_s = max([still_s, *(min(self._ranks.still_s(one), self._ranks.beatless_s(one)) for one in beating)])
        return sum(still_s >= part * self._timeout_s for part in _INSPECT_AT)

    def _inspection_is_needed(self) -> bool:
        """Whether a verdict has to wait for an inspection: only the comparison of two shows what threads do."""
        is_old = self._ranks.clock_s - self._inspected_at > _INSPECTION_LASTS_S
        return self._confirming and not self._is_inspecting and (is_old or self._inspections == 1)

    def _verdict(self) -> tuple[HangVerdict | None, list[int]]:
        """The verdict, or the ranks whose numbers are needed first."""
        hang = all_hang(self._ranks) if not self._ranks.in_announced_phase else None
        if hang is None or not self._verdicts.may_report(hang, self._ranks.clock_s):
            self._confirming = False
            return self._suspected(), []
        if not self._confirming:
            self._confirming = True
            wanted = []
            for local_rank, history in self._ranks.by_local_rank.items():
                if history.numbers.note_query():
                    wanted.append(local_rank)
            return None, wanted
        if self._is_inspecting or self._inspection_is_needed() or any(one.numbers.is_asked for one in self._ranks.all):
            return None, []
        self._confirming = False
        return hang, []

    def _suspected(self) -> HangVerdict | None:
        """The suspicion about single ranks that may be reported now, if any."""
        for verdict in some_hang(self._ranks):
            if self._verdicts.may_report(verdict, self._ranks.clock_s):
                return verdict
        return None

    # --------------------------------------------------------------------------------------------------------- recovery

    def _recovery(self, *, moved: bool) -> float | None:
        """How long the hangs lasted, if with this sample all that were reported are over."""
        kinds = {verdict.kind for verdict in self._verdicts.open}
        if moved or ("quiescent" in kinds and self._ranks.busy):
            self._lively += 1
            self._lively_at = self._ranks.clock_s
        elif self._ranks.clock_s - self._lively_at > self._timeout_s / 2:
            self._lively = 0
        recovered_s = None
        for verdict in self._verdicts.open:
            if self._is_over(verdict):
                recovered_s = self._verdicts.close(verdict.kind, self._ranks.clock_s)
        return recovered_s

    def _is_over(self, verdict: HangVerdict) -> bool:
        about = [history for history in self._ranks.all if history.rank in verdict.ranks]
        if verdict.kind == "stopped":
            return all(history.stopped_since is None for history in about)
        if verdict.kind == "uninterruptible":
            return all(history.uninterruptible_since is None for history in about)
        if verdict.kind == "overdue":
            return not any(history.is_overdue for history in about)
        if verdict.kind == "heartbeat":
            return any(self._ranks.beatless_s(history) < self._timeout_s / 2 for history in about)
        return self._lively >= _LIVELY
