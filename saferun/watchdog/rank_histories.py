"""All ranks of one attempt on a host, and the clock that they are judged by. Pure."""

from __future__ import annotations

from saferun.watchdog.rank_history import RankHistory
from saferun.watchdog.samples import JobSample


class RankHistories:
    """What is known of each rank, and for how long it has done nothing.

    Args:
        timeout_s: how long nothing may move.
        can_dump: whether stacks can be dumped.

    Attributes:
        clock_s: the detector's own clock, in seconds: it stands still while the ranks cannot work.
        changed_at: when something last happened to all ranks, by that clock: all idle times begin then at the earliest.
        at: the time of the last sample, in monotonic seconds.
        by_local_rank: the ranks.
        cores_since: of the ranks whose core is being written, by rank: since when, in monotonic seconds.
    """

    def __init__(self, timeout_s: float, *, can_dump: bool) -> None:
        self.timeout_s = timeout_s
        self.can_dump = can_dump
        self.clock_s = 0.0
        self.changed_at = 0.0
        self.at = 0.0
        self.by_local_rank: dict[int, RankHistory] = {}
        self.cores_since: dict[int, float] = {}

    def take_cores(self, sample: JobSample) -> None:
        """Take which ranks' cores are being written."""
        dumping = [rank.rank for rank in sample.ranks if rank.process.core_dumping]
        self.cores_since = {rank: self.cores_since.get(rank, sample.at) for rank in dumping}

    @property
    def all(self) -> tuple[RankHistory, ...]:
        """The ranks that have not ended."""
        return tuple(self.by_local_rank.values())

    @property
    def busy(self) -> tuple[int, ...]:
        """The ranks of which a process uses its processor."""
        return tuple(sorted(history.rank for history in self.all if history.busy_pids))

    @property
    def in_announced_phase(self) -> bool:
        """Whether a rank is in a long phase that has not lasted longer than it was expected to."""
        return any(history.phase is not None and not history.is_overdue for history in self.all)

    def still_s(self, history: RankHistory) -> float:
        """For how long it has not moved."""
        return self.clock_s - max(history.moved_at, self.changed_at)

    def quiet_s(self, history: RankHistory) -> float:
        """For how long it has neither moved nor used a processor."""
        return self.clock_s - max(history.active_at, self.changed_at)

    def beatless_s(self, history: RankHistory) -> float:
        """For how long it has not called ``saferun.heartbeat``."""
        return self.clock_s - max(history.beat_at, self.changed_at)

    def idle_s(self, history: RankHistory) -> float:
        """For how long it certainly has not worked; 0 if it may be working."""
        if history.works_unseen:
            return 0.0
        if not history.busy_pids:
            return self.quiet_s(history)
        # A busy rank may be working, unless it waits in a collective that makes no progress.
        return (
            min(self.still_s(history), history.numbers.frozen_s(self.clock_s))
            if history.numbers.is_in_collective
            else 0.0
        )

    def strict_idle_s(self, history: RankHistory) -> float:
        """As ``idle_s``, but a main thread that does as little as a fast polling loop may be working as well."""
        idle_s = self.idle_s(history)
        return idle_s if history.busy_pids else min(idle_s, self.clock_s - history.stirred_at)

    def is_doubted(self, history: RankHistory) -> bool:
        """Whether it may be working after all: by its inspections, or because it may wait for a slow disk."""
        return history.uninterruptible_since is not None or self.clock_s - history.doubted_at < self.timeout_s
