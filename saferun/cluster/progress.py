"""Whether the ranks of this host make progress: sampled while another host may be dead. Never waits.

A rank that uses its processor all the time may work, or busy-wait for a dead host, as NCCL does. Its sequence numbers
tell the two apart: it waits if a collective is under way, and none begins or completes. A rank without numbers is taken
to be at work. Steps and heartbeats that its script reports are progress; a phase that it has announced is noted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from saferun.cluster.silence import Progress
from saferun.linux.poller import Poller
from saferun.linux.small_files import has_own_processes, modified_ns
from saferun.text.script_state import ScriptState
from saferun.watchdog.flight_recorder_seq import NumbersQuery
from saferun.watchdog.proc_sampler import FamilyReader, newest_pid
from saferun.watchdog.samples import Numbers, RankSample
from saferun.watchdog.signs import RankSigns

_SAMPLES = 8
_LEAST_INTERVAL_S = 0.2
_LONGEST_INTERVAL_S = 2.0
# A rank is asked for its sequence numbers after so many samples: the answer costs it up to 40 ms.
_ASK_EVERY = 2


class ObservedRank(Protocol):
    """A rank that runs, with what is read of it here: ``saferun.watchdog.monitor.WatchedRank`` has that."""

    @property
    def local_rank(self) -> int:
        """Its number on this host."""

    @property
    def rank(self) -> int:
        """Its number in the job."""

    @property
    def pid(self) -> int:
        """Its process."""

    @property
    def hook_prefix(self) -> str:
        """Its ``SAFERUN_HOOK``; empty where there is no hook."""

    @property
    def heartbeat_file(self) -> str:
        """Its ``SAFERUN_HEARTBEAT_FILE``; empty if there is none."""

    def output_bytes(self) -> int:
        """How much it has written to stdout and stderr."""

    def read_script(self) -> ScriptState | None:
        """Read from memory what its script has reported."""


class ProgressWatch:
    """Samples of the ranks, for as long as they are needed.

    Args:
        span_s: the time in which some rank is expected to move.
        poller: the loop's.
    """

    def __init__(self, span_s: float, poller: Poller) -> None:
        self._interval_s = min(max(span_s / _SAMPLES, _LEAST_INTERVAL_S), _LONGEST_INTERVAL_S)
        self._span_s = span_s
        self._poller = poller
        self.deadline: float | None = None
        self._observation = _Observation(span_s, poller, 0.0)

    def begin(self, now: float) -> None:
        """Watch from now on, if that is not done already."""
        if self.deadline is None:
            self._observation = _Observation(self._span_s, self._poller, now)
            self.deadline = now

    def end(self) -> None:
        """Stop: no verdict needs them any more."""
        self.deadline = None
        self._observation.end()

    def tick(self, now: float, ranks: Sequence[ObservedRank]) -> None:
        """Take a sample where it is due."""
        if self.deadline is None or now < self.deadline:
            return
        self.deadline = now + self._interval_s
        self._observation.sample(now, ranks)

    def progress(self, now: float, *, runs: bool) -> Progress:
        """What has been seen. ``runs``: whether there are any ranks."""
        return self._observation.progress(now, runs=runs)


class _Observation:
    """What is seen of the ranks from the beginning of a watch to its end.

    Args:
        span_s: the time in which some rank is expected to move.
        poller: the loop's.
        now: when it begins.
    """

    def __init__(self, span_s: float, poller: Poller, now: float) -> None:
        self._span_s = span_s
        self._poller = poller
        self.began_at = self.moved_at = self.active_at = self._sampled_at = now
        self._announced_at = float("-inf")  # when a rank was last in a phase that its script announced
        self._samples = 0
        self._families: dict[int, FamilyReader] = {}
        self._signs: dict[int, RankSigns] = {}
        self._numbers: dict[int, Numbers | None] = {}  # the last answers, by pid; None: it has no numbers
        self._queries: dict[int, NumbersQuery] = {}

    def end(self) -> None:
        """Wait for no answers any more."""
        for query in self._queries.values():
            query.give_up()
        self._queries.clear()

    def sample(self, now: float, ranks: Sequence[ObservedRank]) -> None:
        """Take a sample of each rank, and ask some for their sequence numbers."""
        interval_s, self._sampled_at = max(now - self._sampled_at, 0.01), now
        for pid, query in list(self._queries.items()):
            if query.deadline <= now:
                query.give_up()
                self._answered(pid, query)
        asks = self._samples % _ASK_EVERY == 0
        self._samples += 1
        newest = newest_pid()
        for rank in ranks:
            pid = self._sample_rank(rank, now, interval_s, newest)
            if asks and pid and pid not in self._queries:
                self._ask(rank, pid, now)

    def _sample_rank(self, rank: ObservedRank, now: float, interval_s: float, newest: int) -> int:
        """Take a sample of a rank; returns the process that does its work, 0 if there is none."""
        family = self._families.get(rank.pid)
        if family is None:
            family = self._families[rank.pid] = FamilyReader(rank.pid)
        family.walk(now, newest, self._span_s)
        found = family.read(read_descendants=True)
        if found is None:
            if not has_own_processes():
                self.moved_at = self.active_at = now  # nothing can be seen of any rank: they are taken to be at work
            return 0
        principal, others = found
        script = rank.read_script()
        if script is not None and script.phase is not None and script.phase.since <= now:
            self._announced_at = max(self._announced_at, min(script.phase.until, now))
        beat_ns = modified_ns(rank.heartbeat_file)
        written = rank.output_bytes()
        sample = RankSample(rank.local_rank, rank.rank, principal, others, family.is_wrapper, written, beat_ns, script)
        signs = self._signs.setdefault(rank.pid, RankSigns(self._span_s))
        # A rank that was asked for its numbers since the last sample has worked to answer.
        disturbed = bool(self._queries) or self._samples % _ASK_EVERY == 0
        seen = signs.take(sample, interval_s, disturbed=disturbed, patience_s=self._span_s)
        if seen.moved or (seen.busy_pids and self._works(principal.pid)):
            self.moved_at = now
        if seen.moved or seen.busy_pids:
            self.active_at = now
        return principal.pid

    def _works(self, pid: int) -> bool:
        """Whether a process that uses its processor all the time waits for no collective, as far as is known."""
        if pid not in self._numbers:
            return False
        numbers = self._numbers[pid]
        return numbers is None or all(enqueued <= completed for enqueued, completed in numbers.values())

    def _ask(self, rank: ObservedRank, pid: int, now: float) -> None:
        if not rank.hook_prefix:
            self._numbers[pid] = None
            return
        query = self._queries[pid] = NumbersQuery.to_process(rank.hook_prefix, pid, self._poller, now)
        query.begin(lambda: self._answered(pid, query))

    def _answered(self, pid: int, query: NumbersQuery) -> None:
        if self._queries.get(pid) is not query:
            return
        del self._queries[pid]
        before = self._numbers.get(pid)
        if query.numbers is None and before is not None:
            return  # it has some, and does not answer now
        self._numbers[pid] = query.numbers
        if before is not None and query.numbers != before:
            # A collective has been begun or completed since.
            self.moved_at = self.active_at = max(self.moved_at, self._sampled_at)

    def progress(self, now: float, *, runs: bool) -> Progress:
        """What has been seen. ``runs``: whether there are any ranks."""
        return Progress(
            runs,
            now - self.began_at,
            now - self.moved_at,
            now - self.active_at,
            unannounced_s=now - self._announced_at,
        )
