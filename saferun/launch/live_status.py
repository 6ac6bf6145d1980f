"""What ``saferunctl status`` shows of a running job: each host's ranks, collected on the leader.

The leader asks by the job's log, and every host answers with its state, which goes to the leader anyway: small lists of
numbers, so that the answers of a thousand hosts are nothing to the store. However often users ask, the hosts are asked
once in two seconds at most, and more rarely the more of them there are. Whoever does not answer in time is left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from saferun.captures.client import Answer
from saferun.launch.launch_context import LaunchContext
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED, loads
from saferun.text.typed_json import fit, line_of, list_of, number_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.rank_group import Rank

_USAGE_S = 4.0
_USAGE_BYTES = 1 << 20
# Other hosts answer by then, or are left out.
_OTHERS_S = 8.0
_LEAST_INTERVAL_S = 2.0
_HOSTS_A_SECOND = 100
# A state has 4 KiB in all.
_LONGEST_REPORT = 1500
_LONGEST_NAME = 100
_MOST_RANKS = 4096
_MOST_GPUS = 64
_MIB = 1 << 20
_HIGHEST = 1 << 40
_Count = Annotated[int, number_of(_HIGHEST, -1)]


class RankRow(Value):
    """A rank, in numbers; -1: unknown. Ages are in seconds, memory in MiB, ``cpu_percent`` of one processor."""

    rank: Annotated[int, number_of(1 << 31)]
    pid: _Count = -1
    state: Annotated[str, line_of(_LONGEST_NAME)] = ""
    output_age_s: _Count = -1
    quiet_s: _Count = -1
    rss_mib: _Count = -1
    cpu_percent: _Count = -1
    processes: _Count = -1


class GpuRow(Value):
    """A GPU, in numbers; -1: unknown."""

    number: _Count
    busy_percent: _Count = -1
    used_mib: _Count = -1
    total_mib: _Count = -1
    celsius: _Count = -1


class HostReport(Value):
    """What one saferun reports. ``more``: ranks for which there was no room."""

    ranks: Annotated[tuple[RankRow, ...], list_of(RankRow, _MOST_RANKS, skips=True)] = ()
    gpus: Annotated[tuple[GpuRow, ...], list_of(GpuRow, _MOST_GPUS, skips=True)] = ()
    cpus: _Count = -1
    available_mib: _Count = -1
    total_mib: _Count = -1
    stuck_in: Annotated[str, line_of(_LONGEST_NAME)] = ""
    state: Annotated[str, line_of(_LONGEST_NAME)] = ""
    more: _Count = 0


class LiveStatus:
    """Collects what the ranks do. Its owner wakes it at its deadline.

    Args:
        context: the launch.
        guarded: calls, and costs no more than the control socket if that fails.
    """

    def __init__(self, context: LaunchContext, guarded: Callable[..., Callable[..., None]]) -> None:
        self._context = context
        self._guarded = guarded
        self._number = 0
        self._begun_at = float("-inf")
        self._waiting: list[Callable[[JsonObject], None]] = []
        self._until: float | None = None
        self._own: Answer | None = None
        self._own_until = 0.0
        self._shares: list[int] = []  # numbers of requests of the leader that this host answers
        self._reports: dict[str, tuple[str, HostReport]] = {}
        context.job.reports.subscribe_status(guarded(self._take_wanted), guarded(self._take_report))

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [self._own_until] if self._own is not None else []
        if self._until is not None:
            moments.append(self._until)
        elif self._waiting:
            moments.append(self._begun_at + self._interval_s)
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Ask, or answer with what has come."""
        if self._own is not None and self._own_until <= now:
            self._own.close()
            self._take_usage(b"")
        if self._waiting and self._until is None and now >= self._begun_at + self._interval_s:
            self._begin(now)
        elif self._until is not None and self._until <= now:
            self._answer()

    def request(self, on_done: Callable[[JsonObject], None]) -> None:
        """Collect what all hosts do, if this one is the leader, and hand it over."""
        self._waiting.append(on_done)
        self.tick(time.monotonic())

    def close(self) -> None:
        """Nothing is wanted any more."""
        self._waiting.clear()
        self._until = None
        own, self._own = self._own, None
        if own is not None:
            own.close()

    @property
    def _interval_s(self) -> float:
        return max(_LEAST_INTERVAL_S, self._hosts / _HOSTS_A_SECOND)

    @property
    def _hosts(self) -> int:
        return max(1, len(self._context.job.peers))

    # ------------------------------------------------------------------------------------------------------ the leader

    def _begin(self, now: float) -> None:
        self._number += 1
        self._begun_at = now
        self._until = now + _OTHERS_S
        self._reports.clear()
        job = self._context.job
        if self._context.config.hosts.together and job.leads:
            job.reports.ask_for_status(self._number)  # this host hears of it as well
        else:
            self._ask_usage()

    def _take_report(self, task: str, host: str, report: Mapping[str, Any]) -> None:
        """Another saferun has answered."""
        if report.get("n") != self._number:
            return
        try:
            self._reports[task] = host, fit(HostReport, report.get("of"))
        except MALFORMED:
            return
        self._answer_if_whole()

    def _answer_if_whole(self) -> None:
        missing = self._awaited() - len(self._reports)
        if missing <= 0:
            self._answer()

    def _awaited(self) -> int:
        """How many saferuns report to this one."""
        context, peers = self._context, self._context.job.peers
        if not (context.config.hosts.together and context.job.leads):
            return 1
        each = context.config.hosts.task is not None
        return sum(peer.ranks if each else 1 for peer in peers.values())

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._until = None
        answer = self._as_json()
        for on_done in waiting:
            on_done(answer)

    def _as_json(self) -> JsonObject:
        context = self._context
        log, job = context.investigation.log, context.job
        plan = context.current.plan
        hosts: dict[str, JsonObject] = {}
        for host, report in (self._reports[task] for task in sorted(self._reports, key=_order)):
            found = hosts.setdefault(host or log.host, {**report._asdict(), "ranks": [], "gpus": [], "more": 0})
            found["ranks"] += [row._asdict() for row in report.ranks]
            found["gpus"] = found["gpus"] or [gpu._asdict() for gpu in report.gpus]
            found["more"] += report.more
        counted = log.counted(context.attempt)
        missing = sorted({peer.label for peer in job.peers.values()} - hosts.keys()) if job.leads else []
        return {
            "ok": True,
            "time": time.time(),
            "state": context.supervisor.state.value,
            "attempt": context.attempt,
            "world_size": plan.placement.world_size if plan is not None else 0,
            "leader": job.leader or log.host,
            "leads": job.leads,
            "hang_timeout_s": context.config.watch.hang_timeout_s,
            "is_hung": counted.is_hung,
            "restarts": counted.restarts,
            "hosts": [{"host": name, **found} for name, found in hosts.items()],
            "missing": missing,
        }

    # --------------------------------------------------------------------------------------------------- on each host

    def _take_wanted(self, number: int) -> None:
        """The leader asks."""
        self._shares = [number]
        self._ask_usage()

    def _ask_usage(self) -> None:
        """Have the examiner see what the ranks of this host use."""
        if self._own is not None:
            return
        self._own_until = time.monotonic() + _USAGE_S
        pids = [rank.child.pid for rank in self._context.current.living()]
        try:
            self._own = Answer(
                self._context.examiner,
                self._context.guarded_poller,
                "usage",
                pids,
                _USAGE_S,
                self._guarded(self._take_usage),
                limit_bytes=_USAGE_BYTES,
                is_urgent=False,
            )
        except OSError:
            self._take_usage(b"")

    def _take_usage(self, content: bytes) -> None:
        """The examiner has answered; empty: it could not, and what the supervisor knows has to do."""
        self._own = None
        try:
            usage = loads(content) if content else {}
        except MALFORMED:
            usage = {}
        report = self._own_report(usage if isinstance(usage, dict) else {}, time.monotonic())
        numbers, self._shares = self._shares, []
        job = self._context.job
        if numbers and not job.leads:
            job.reports.share_status({"n": numbers[-1], "of": _packed(report)})
        else:
            self._reports["0/0"] = "", report
            self._answer_if_whole()

    def _own_report(self, usage: JsonObject, now: float) -> HostReport:
        context = self._context
        used = usage.get("ranks")
        quiet = context.investigation.hangs.quiet_by_rank()
        rows = [self._row(rank, used if isinstance(used, dict) else {}, quiet, now) for rank in context.current.ranks]
        gpus = [_gpu(gpu) for gpu in usage.get("gpus", ()) if isinstance(gpu, dict)]
        memory = usage.get("memory")
        memory = memory if isinstance(memory, dict) else {}
        report: HostReport = fit(
            HostReport,
            {
                "gpus": gpus,
                "cpus": usage.get("cpus", -1),
                "available_mib": _mib(memory.get("available_bytes")),
                "total_mib": _mib(memory.get("total_bytes")),
                "stuck_in": str(usage.get("stuck_in", "")),
                "state": context.supervisor.state.value,
            },
        )
        return report._replace(ranks=tuple(rows))

    def _row(self, rank: Rank, used: JsonObject, quiet: Mapping[int, float], now: float) -> RankRow:
        intake = self._context.ranks.intake
        read_at = max((intake.read_at(stream) for stream in rank.streams), default=0.0)
        age_s = round(now - read_at) if read_at and rank.output_bytes() else -1
        if rank.end is not None:
            state = "ended" if rank.end.status.ok else rank.end.status.description
            return RankRow(rank.place.rank, rank.child.pid, state, age_s)
        one = used.get(str(rank.child.pid))
        one = one if isinstance(one, dict) else {}
        return RankRow(
            rank.place.rank,
            rank.child.pid,
            str(one.get("state", "")),
            age_s,
            round(quiet[rank.place.local_rank]) if rank.place.local_rank in quiet else -1,
            _mib(one.get("rss_bytes")),
            _whole(one.get("cpu_percent")),
            _whole(one.get("processes")),
        )


def _packed(report: HostReport) -> list[object]:
    """A report as it travels; ranks for which there is no room are counted."""
    rows: list[list[object]] = []
    size = 200 + 30 * len(report.gpus)
    for row in report.ranks:
        packed: list[object] = list(row)
        size += len(repr(packed)) + 2
        if size > _LONGEST_REPORT:
            break
        rows.append(packed)
    more = len(report.ranks) - len(rows)
    return [rows, [list(gpu) for gpu in report.gpus], *report[2:-1], more]


def _order(task: str) -> tuple[int, ...]:
    return tuple(int(part) for part in task.split("/"))


def _gpu(gpu: JsonObject) -> list[int]:
    used, total = _mib(gpu.get("memory_used_bytes")), _mib(gpu.get("memory_total_bytes"))
    return [_whole(gpu.get("index")), _whole(gpu.get("busy_percent")), used, total, _whole(gpu.get("temperature_c"))]


def _mib(value: object) -> int:
    return value // _MIB if isinstance(value, int) and value >= 0 else -1


def _whole(value: object) -> int:
    return round(value) if isinstance(value, int | float) and 0 <= value < _HIGHEST else -1
