"""Watches the ranks: takes samples, feeds the detector, and fetches the evidence it wants. Never waits for anything."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from saferun.captures.examiner import Answer, Examiner
from saferun.captures.py_spy_json import threads_from
from saferun.evidence.job_evidence import HangVerdict
from saferun.linux.poller import Poller
from saferun.linux.small_files import modified_ns
from saferun.model import Value
from saferun.text.script_state import ScriptState
from saferun.watchdog.detector import HangDetector, sampling_interval_s
from saferun.watchdog.flight_recorder_seq import NumbersQuery
from saferun.watchdog.proc_sampler import FamilyReader, newest_pid
from saferun.watchdog.quiet_work import inspection_from
from saferun.watchdog.samples import JobSample, RankSample
from saferun.watchdog.verdicts import Repeat

# Samples are taken so rarely that they use at most this share of one processor,
_CPU_SHARE = 0.0008
# but so many in a timeout at least.
_SAMPLES_AT_LEAST = 8
# In a timeout, descendants of the ranks are looked up at most so often if new processes were started on this host, and
# at least so often if none were.
_WALKS = 40
_WALKS_AT_LEAST = 8
# The interval between samples while a verdict waits for evidence.
_URGENT_S = 0.25
# The dump of a process's stacks is waited for so long.
_DUMP_DEADLINE_S = 5.0
_DUMPS_AT_ONCE = 2
_DUMP_LIMIT_BYTES = 4 << 20
# Between the moments of an inspection: shorter than a 2 s poll, so that polling misses some intervals.
_INSPECTION_INTERVAL_S = 1.2
_INSPECTION_INTERVALS = 8  # at least so many in a timeout
_INSPECTION_DEADLINE_S = 15.0
_INSPECTION_LIMIT_BYTES = 8 << 20
# A quiet time below this is returned without a new sample: the supervisor treats a job as hanging only after longer.
_SURELY_SHORT_S = 8.0


class WatchedRank(Value):
    """One rank to be watched.

    Attributes:
        local_rank: its number on this host.
        rank: its number in the job.
        pid: its process.
        output_bytes: how much it has written to stdout and stderr so far.
        hook_prefix: its ``SAFERUN_HOOK``; empty if there is no hook.
        heartbeat_file: its ``SAFERUN_HEARTBEAT_FILE``; empty if there is none.
        read_script: reads what its script has reported, from memory.
    """

    local_rank: int
    rank: int
    pid: int
    output_bytes: Callable[[], int]
    hook_prefix: str
    heartbeat_file: str
    read_script: Callable[[], ScriptState | None] = lambda: None


class RankMonitor:
    """Watches the ranks of one attempt.

    Args:
        hang_timeout_s: how long nothing may move.
        poller: the loop's.
        on_verdict: takes a verdict. The watch pauses then, until ``resume``.
        on_recovery: takes how many seconds a hang lasted that is over.
        examiner: dumps the stacks of suspects and inspects quiet ranks; None: neither is done.
        store_port: of the job's store; 0: unknown.
        addresses: of other hosts of the job, as far as they are known.
        is_held: whether a rank waits for what a user types, or is still being started.
    """

    def __init__(
        self,
        hang_timeout_s: float,
        poller: Poller,
        *,
        on_verdict: Callable[[HangVerdict], None],
        on_recovery: Callable[[float], None],
        examiner: Examiner | None = None,
        store_port: int = 0,
        addresses: Sequence[str] = (),
        is_held: Callable[[], bool] = lambda: False,
    ) -> None:
        self._timeout_s = hang_timeout_s
        self._poller = poller
        self._on_verdict = on_verdict
        self._on_recovery = on_recovery
        self._examiner = examiner
        self._store_port = store_port
        self._addresses = tuple(addresses)
        self._is_held = is_held
        can_dump = examiner is not None and "py-spy" in (examiner.tools or ())
        self._detector = HangDetector(hang_timeout_s, can_dump=can_dump)
        self._interval_s = sampling_interval_s(hang_timeout_s)
        self._cost_s = 0.0
        self._ranks: dict[int, WatchedRank] = {}
        self._families: dict[int, FamilyReader] = {}
        self._principals: dict[int, int] = {}
        self._read_descendants: frozenset[int] = frozenset()
        self._walked_at = self._sampled_at = float("-inf")
        self._sample_at: float | None = None
        self._planned_s = self._interval_s
        self._dump_at: float | None = None
        self._dumps: dict[int, tuple[float, Answer]] = {}  # by process, with its deadline
        self._queries: dict[int, NumbersQuery] = {}
        self._inspection: Answer | None = None
        self._inspection_until = 0.0

    # ----------------------------------------------------------------------------------------------------- the schedule

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: never."""
        if self._sample_at is None:
            return None
        moments = [self._sample_at, *(deadline for deadline, _ in self._dumps.values())]
        moments += [query.deadline for query in self._queries.values()]
        if self._dump_at is not None:
            moments.append(self._dump_at)
        if self._inspection is not None:
            moments.append(self._inspection_until)
        return min(moments)

    def begin(self, now: float, ranks: Sequence[WatchedRank]) -> None:
        """Watch these ranks from now on."""
        self._ranks = {rank.local_rank: rank for rank in ranks}
        self._families = {rank.local_rank: FamilyReader(rank.pid) for rank in ranks}
        self._read_descendants = frozenset(self._ranks)
        self._sample_at = now
        self.tick(now)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._sample_at is None:
            return
        for pid in [pid for pid, (deadline, _) in self._dumps.items() if deadline <= now]:
            self._dumps.pop(pid)[1].close()
            self._dump_failed(pid, now)
        if self._inspection is not None and self._inspection_until <= now:
            self._end_inspection()
            self._inspection_failed()
        for local_rank, query in list(self._queries.items()):
            if query.deadline <= now:
                query.give_up()
            if query.is_over:
                self._answered(local_rank, query)
        if self._sample_at <= now:
            self._sample(now)
        self._begin_dumps(now)

    def idle_s(self, now: float) -> float:
        """For how long no rank has made progress; 0 if one may be working.

        Takes a sample first, which costs milliseconds, if that may be long enough for a hang.
        """
        if self._sample_at is not None and self._detector.idle_s + now - self._sampled_at >= _SURELY_SHORT_S:
            self._sample(now)
        return self._detector.idle_s

    def strict_idle_s(self, now: float) -> float:
        """As ``idle_s``, but a rank that works only a little counts as working: captures must not hold it up."""
        return min(self.idle_s(now), self._detector.strict_idle_s)

    def idle_by_rank(self) -> dict[int, float]:
        """As ``idle_s``, for each local rank, as of the last sample; takes none."""
        return self._detector.idle_by_rank()

    def pause(self) -> None:
        """Do nothing until ``resume``."""
        self._sample_at = self._dump_at = None
        for _, answer in self._dumps.values():
            answer.close()
        self._dumps.clear()
        self._end_inspection()
        for query in self._queries.values():
            query.give_up()
        self._queries.clear()

    def resume(self, now: float) -> None:
        """The watch goes on: the verdict has been captured, or handed on as the state of this host."""
        self.pause()
        self._detector.resume()
        if self._ranks:
            self._sample_at = now

    def downgrade_to_suspected(self, verdict: HangVerdict, certain_after_s: float) -> None:
        """Treat a verdict just reported as suspected only, until nothing has moved for ``certain_after_s``."""
        self._detector.downgrade_to_suspected(verdict, certain_after_s)

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often this hang has been reported, and when it is reported next."""
        return self._detector.repeat(verdict)

    def process_of(self, local_rank: int) -> int | None:
        """The process that does a rank's work, where that is known."""
        return self._principals.get(local_rank)

    def rank_found(self, rank: WatchedRank, now: float) -> None:
        """Another process than was assumed, or a new one, does a rank's work."""
        if not self._ranks:
            self._sample_at = now
        self._ranks[rank.local_rank] = rank
        self._families[rank.local_rank] = FamilyReader(rank.pid)
        self._principals.pop(rank.local_rank, None)
        self._read_descendants = self._read_descendants | {rank.local_rank}
        self._walked_at = float("-inf")

    def rank_ended(self, local_rank: int) -> None:
        """A rank is gone."""
        self._ranks.pop(local_rank, None)
        self._families.pop(local_rank, None)
        self._principals.pop(local_rank, None)
        query = self._queries.pop(local_rank, None)
        if query is not None:
            query.give_up()
        self._detector.rank_ended(local_rank)
        if not self._ranks:
            self.pause()

    def end(self) -> None:
        """End whatever runs."""
        self.pause()
        self._ranks.clear()
        self._families.clear()

    # ---------------------------------------------------------------------------------------------------------- samples

    def _sample(self, now: float) -> None:
        began_s = time.thread_time()
        self._sampled_at = now
        # Also if the code below fails, the next sample is not due at once.
        self._sample_at = now + self._planned_s
        sample = JobSample(now, self._planned_s, tuple(self._read_ranks(now)), self._is_held())
        outcome = self._detector.feed(sample)
        self._read_descendants = outcome.read_descendants
        spent_s = time.thread_time() - began_s
        self._cost_s += (spent_s - self._cost_s) / (4 if self._cost_s else 1)
        longest_s = max(self._interval_s, self._timeout_s / _SAMPLES_AT_LEAST)
        self._planned_s = min(max(self._interval_s, self._cost_s / _CPU_SHARE), longest_s)
        if outcome.is_urgent:
            self._planned_s = min(self._planned_s, _URGENT_S)
        # A sample is due as soon as an announced phase takes longer than expected.
        phases = [rank.script.phase.until for rank in sample.ranks if rank.script and rank.script.phase]
        self._sample_at = min([now + self._planned_s, *(until for until in phases if until > now)])
        for local_rank in outcome.numbers_wanted:
            self._ask(local_rank, now)
        if outcome.inspection_wanted:
            self._begin_inspection(now)
        if outcome.recovered_s is not None:
            self._on_recovery(outcome.recovered_s)
        if outcome.verdict is not None:
            self.pause()
            self._on_verdict(outcome.verdict)

    def _read_ranks(self, now: float) -> list[RankSample]:
        walk_s = max(self._interval_s, self._timeout_s / _WALKS)
        newest = 0
        walks = bool(self._read_descendants) and now - self._walked_at >= walk_s
        if walks:
            self._walked_at = now
            newest = newest_pid()
        samples = []
        for local_rank, rank in self._ranks.items():
            family = self._families[local_rank]
            read_descendants = local_rank in self._read_descendants
            if walks and read_descendants:
                family.walk(now, newest, self._timeout_s / _WALKS_AT_LEAST)
            processes = family.read(read_descendants=read_descendants)
            if processes is None:
                continue
            principal, others = processes
            self._principals[local_rank] = principal.pid
            samples.append(
                RankSample(
                    local_rank,
                    rank.rank,
                    principal,
                    others,
                    family.is_wrapper,
                    rank.output_bytes(),
                    modified_ns(rank.heartbeat_file),
                    rank.read_script(),
                )
            )
        return samples

    # ------------------------------------------------------------------------------------------------- sequence numbers

    def _ask(self, local_rank: int, now: float) -> None:
        rank = self._ranks.get(local_rank)
        if rank is None or not rank.hook_prefix:
            self._detector.take_numbers(local_rank, None)
            return
        pid = self._principals.get(local_rank, rank.pid)
        query = self._queries[local_rank] = NumbersQuery.to_process(rank.hook_prefix, pid, self._poller, now)
        query.begin(lambda: self._answered(local_rank, query))

    def _answered(self, local_rank: int, query: NumbersQuery) -> None:
        if self._queries.get(local_rank) is query:
            del self._queries[local_rank]
            self._detector.take_numbers(local_rank, query.numbers)

    # ----------------------------------------------------------------------------------------------------- inspections

    def _begin_inspection(self, now: float) -> None:
        """Have the examiner's process inspect the ranks, which would take too long here."""
        interval_s = min(_INSPECTION_INTERVAL_S, self._timeout_s / _INSPECTION_INTERVALS)
        ranks = [
            (rank.local_rank, rank.pid, self._principals.get(rank.local_rank, rank.pid))
            for rank in self._ranks.values()
        ]
        value = [ranks, self._store_port, interval_s, self._addresses]
        if self._examiner is None:
            self._inspection_failed()
            return
        try:
            self._inspection = Answer(
                self._examiner,
                self._poller,
                "inspect",
                value,
                _INSPECTION_DEADLINE_S,
                self._take_inspection,
                limit_bytes=_INSPECTION_LIMIT_BYTES,
                is_urgent=False,
            )
        except OSError:
            self._inspection_failed()
            return
        self._inspection_until = now + _INSPECTION_DEADLINE_S

    def _inspection_failed(self) -> None:
        self._detector.take_inspection(None)

    def _take_inspection(self, content: bytes) -> None:
        self._inspection = None
        self._detector.take_inspection(inspection_from(content))

    def _end_inspection(self) -> None:
        if self._inspection is not None:
            self._inspection.close()
            self._inspection = None

    # ---------------------------------------------------------------------------------------------------------- stacks

    def _begin_dumps(self, now: float) -> None:
        self._dump_at = None
        if self._sample_at is None:
            return
        for pid in self._detector.wanted_dumps(now)[: _DUMPS_AT_ONCE - len(self._dumps)]:
            self._begin_dump(pid, now)
        spacing_s = self._detector.dump_spacing_s
        if spacing_s is not None and len(self._dumps) < _DUMPS_AT_ONCE:
            self._dump_at = now + spacing_s

    def _begin_dump(self, pid: int, now: float) -> None:
        """Have py-spy dump the stacks of a process without stopping it: only its memory is read."""
        self._detector.dump_begun(pid, now)
        if self._examiner is None:
            self._dump_failed(pid, now)
            return
        try:
            answer = Answer(
                self._examiner,
                self._poller,
                "dump",
                pid,
                _DUMP_DEADLINE_S,
                lambda content: self._take_dump(pid, content),
                limit_bytes=_DUMP_LIMIT_BYTES,
            )
        except OSError:
            self._dump_failed(pid, now)
            return
        self._dumps[pid] = now + _DUMP_DEADLINE_S, answer

    def _dump_failed(self, pid: int, now: float) -> None:
        self._detector.take_dump(pid, now, ())

    def _take_dump(self, pid: int, content: bytes) -> None:
        del self._dumps[pid]
        now = time.monotonic()
        self._detector.take_dump(pid, now, threads_from(content, pid))
        self._begin_dumps(now)
