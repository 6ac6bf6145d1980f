"""What ``saferunctl status`` shows of a running job: each host's ranks, collected on the leader.

The leader sends the request in the job's log, and each host answers in its state, which goes to the leader anyway:
small lists of numbers, so that the answers of a thousand hosts do not load the store. However often users ask, the
hosts are asked at most once in two seconds, and less often in a larger job. Hosts that do not answer in time are left
out.

If a user asks another host, that host asks the leader, and all hosts read the answer in the job's log: one answer for
all users who wait. A table with too many ranks for an entry has only their number. Without an answer of the leader a
host shows its own ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any

from saferun.captures.examiner import Answer
from saferun.launch.launch_context import LaunchContext
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED, loads
from saferun.text.redaction import redacted_text
from saferun.text.typed_json import fit, line_of, list_of, number_of, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.rank import Rank

_USAGE_S = 4.0
_USAGE_BYTES = 1 << 20
# Hosts that have not answered by then are left out.
_OTHERS_S = 8.0
_LEAST_INTERVAL_S = 2.0
_HOSTS_A_SECOND = 100
# The additional time that the leader has to answer another host.
_LEADER_S = 4.0
_LONGEST_LEADER_S = 25.0
# A state has 4 KiB in all.
_LONGEST_REPORT = 1500
# An entry of the job's log has 64 KiB.
_LONGEST_TABLE = 60_000
_MOST_REPORTS = 20_000
_LONGEST_NAME = 100
_MOST_RANKS = 4096
_MOST_GPUS = 64
_MIB = 1 << 20
_HIGHEST = 1 << 40
# Hosts that were found bad: the newest.
_MOST_BAD, _LONGEST_BAD = 8, 240
_Count = Annotated[int, number_of(_HIGHEST, -1)]
_Name = Annotated[str, line_of(_LONGEST_NAME)]


class RankRow(Value):
    """A rank, in numbers; -1: unknown. Ages are in seconds, memory in MiB, ``cpu_percent`` of one processor.

    ``step``: the last one that its script has reported.
    """

    rank: Annotated[int, number_of(1 << 31)]
    pid: _Count = -1
    state: _Name = ""
    output_age_s: _Count = -1
    quiet_s: _Count = -1
    rss_mib: _Count = -1
    cpu_percent: _Count = -1
    processes: _Count = -1
    step: Annotated[int, number_of(1 << 53, -1)] = -1


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
    stuck_in: _Name = ""
    state: _Name = ""
    more: _Count = 0


class JobReport(Value):
    """What one saferun knows of the job.

    ``time``: seconds since the epoch; ``missing``: hosts that have not answered; ``bad_hosts``: the newest of those
    whose own hardware or system was found to be at fault, with the reason; known to the leader.
    """

    time: Annotated[float, seconds_of(1e11)]
    state: _Name
    attempt: Annotated[int, number_of(_HIGHEST)]
    world_size: Annotated[int, number_of(1 << 31)]
    hang_timeout_s: Annotated[float, seconds_of(_HIGHEST)]
    is_hung: bool
    restarts: Annotated[int, number_of(_HIGHEST)]
    missing: Annotated[tuple[str, ...], list_of(_Name, _MOST_REPORTS, skips=True)] = ()
    bad_hosts: Annotated[tuple[str, ...], list_of(Annotated[str, line_of(_LONGEST_BAD)], _MOST_BAD, skips=True)] = ()


class LiveStatus:
    """Collects what the ranks are doing. Its owner calls ``tick`` at its deadline.

    Args:
        context: the launch.
        wrapped: takes a callback, and returns one whose exceptions only close the control socket.
    """

    def __init__(self, context: LaunchContext, wrapped: Callable[..., Callable[..., None]]) -> None:
        self._context = context
        self._wrapped = wrapped
        self._number = 0
        self._begun_at = float("-inf")
        self._waiting: list[Callable[[JsonObject], None]] = []
        self._until: float | None = None
        self._own: Answer | None = None
        self._own_until = 0.0
        self._shares: list[int] = []  # numbers of requests of the leader that this host answers
        self._reports: dict[str, tuple[str, HostReport]] = {}
        self._asking: list[Callable[[JsonObject], None]] = []  # users who wait for the leader's answer
        self._asking_until = 0.0
        self._is_asked = False  # by other hosts
        reports = context.job.reports
        reports.subscribe_status(wrapped(self._take_wanted), wrapped(self._take_report))
        reports.subscribe_table(wrapped(self._take_asked), wrapped(self._take_table))

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [self._own_until] if self._own is not None else []
        if self._until is not None:
            moments.append(self._until)
        elif self._waiting:
            moments.append(self._begun_at + self._interval_s)
        if self._asking:
            moments.append(self._asking_until)
        return min(moments, default=None)

    def tick(self, now: float) -> None:
        """Send a request, or answer with what has been received."""
        if self._own is not None and self._own_until <= now:
            self._own.close()
            self._take_usage(b"")
        if self._waiting and self._until is None and now >= self._begun_at + self._interval_s:
            self._begin(now)
        elif self._until is not None and self._until <= now:
            self._answer()
        if self._asking and self._asking_until <= now:
            asking, self._asking = self._asking, []
            for on_done in asking:
                self._collect(on_done)

    def request(self, on_done: Callable[[JsonObject], None]) -> None:
        """Collect what the ranks of all hosts are doing: here on the leader; elsewhere the leader is asked."""
        job = self._context.job
        if job.leads or not self._context.config.hosts.spans_hosts:
            self._collect(on_done)
            return
        if not self._asking:
            plan = self._context.current.plan
            hosts = plan.placement.group_world_size if plan is not None else 1
            lasts_s = max(_LEAST_INTERVAL_S, hosts / _HOSTS_A_SECOND) + _OTHERS_S + _LEADER_S
            self._asking_until = time.monotonic() + min(lasts_s, _LONGEST_LEADER_S)
            job.reports.ask_for_table()
        self._asking.append(on_done)

    def _collect(self, on_done: Callable[[JsonObject], None]) -> None:
        self._waiting.append(on_done)
        self.tick(time.monotonic())

    def close(self) -> None:
        """The control socket is closed: drop all requests."""
        self._waiting.clear()
        self._asking.clear()
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
        if self._context.config.hosts.spans_hosts and job.leads:
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
        if not (context.config.hosts.spans_hosts and context.job.leads):
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
        reports = [(self._host_name(host), report) for host, report in self._ordered()]
        return self._answer_of(reports, self._job_report(), is_whole=self._context.job.leads)

    def _ordered(self) -> list[tuple[str, HostReport]]:
        return [self._reports[task] for task in sorted(self._reports, key=_order)]

    def _host_name(self, host: str) -> str:
        return host or self._context.investigation.log.host

    def _job_report(self) -> JobReport:
        context = self._context
        log, job, plan = context.investigation.log, context.job, context.current.plan
        counted = log.counted(context.attempt)
        shown = {self._host_name(host) for host, _ in self._reports.values()}
        return JobReport(
            time.time(),
            context.supervisor.state.value,
            context.attempt,
            plan.placement.world_size if plan is not None else 0,
            context.config.watch.hang_timeout_s,
            counted.is_hung,
            counted.restarts,
            tuple(sorted({peer.label for peer in job.peers.values()} - shown)) if job.leads else (),
            tuple(redacted_text(f"{bad.host}: {bad.reason}")[:_LONGEST_BAD] for bad in log.bad_hosts[-_MOST_BAD:]),
        )

    def _answer_of(self, reports: Iterable[tuple[str, HostReport]], of_job: JobReport, *, is_whole: bool) -> JsonObject:
        """The answer to saferunctl. ``is_whole``: it is of all hosts."""
        hosts: dict[str, JsonObject] = {}
        for host, report in reports:
            found = hosts.setdefault(host, {**report._asdict(), "ranks": [], "gpus": [], "more": 0})
            found["ranks"] += [row._asdict() for row in report.ranks]
            found["gpus"] = found["gpus"] or [gpu._asdict() for gpu in report.gpus]
            found["more"] += report.more
        job = self._context.job
        return {
            "ok": True,
            **of_job._asdict(),
            "leader": job.leader or self._host_name(""),
            "leads": job.leads,
            "is_whole": is_whole,
            "hosts": [{"host": name, **found} for name, found in hosts.items()],
            "missing": list(of_job.missing),
            "bad_hosts": list(of_job.bad_hosts),
        }

    # ---------------------------------------------------------------------------------- the leader, and who asks it

    def _take_asked(self) -> None:
        """A user asks another host."""
        if self._context.job.leads and not self._is_asked:
            self._is_asked = True
            self._collect(self._share_table)

    def _share_table(self, _answer: JsonObject) -> None:
        self._is_asked = False
        of_job = list(self._job_report())
        for longest in (_LONGEST_REPORT, 0):
            reports = [[self._host_name(host), _packed(report, longest)] for host, report in self._ordered()]
            if len(json.dumps([of_job, reports])) <= _LONGEST_TABLE:
                self._context.job.reports.share_table([of_job, reports])
                return

    def _take_table(self, table: Any) -> None:  # noqa: ANN401 - JSON
        """The leader has answered a host that asked."""
        if not self._asking:
            return
        try:
            of_job: JobReport = fit(JobReport, table[0])
            reports = [(fit(_Name, host), fit(HostReport, report)) for host, report in table[1][:_MOST_REPORTS]]
        except MALFORMED:
            return
        asking, self._asking = self._asking, []
        answer = self._answer_of(reports, of_job, is_whole=True)
        for on_done in asking:
            on_done(answer)

    # --------------------------------------------------------------------------------------------------- on each host

    def _take_wanted(self, number: int) -> None:
        """The leader asks."""
        self._shares = [number]
        self._ask_usage()

    def _ask_usage(self) -> None:
        """Have the examiner read which resources the ranks of this host use."""
        if self._own is not None:
            return
        self._own_until = time.monotonic() + _USAGE_S
        pids = [rank.pid for rank in self._context.current.living()]
        try:
            self._own = Answer(
                self._context.examiner,
                self._context.guarded_poller,
                "usage",
                pids,
                _USAGE_S,
                self._wrapped(self._take_usage),
                limit_bytes=_USAGE_BYTES,
                is_urgent=False,
            )
        except OSError:
            self._take_usage(b"")

    def _take_usage(self, content: bytes) -> None:
        """The examiner has answered; empty: it failed, and the supervisor's own data has to do."""
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
        idle = context.investigation.hangs.idle_by_rank()
        rows = [self._row(rank, used if isinstance(used, dict) else {}, idle, now) for rank in context.current.ranks]
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

    def _row(self, rank: Rank, used: JsonObject, idle: Mapping[int, float], now: float) -> RankRow:
        intake = self._context.ranks.intake
        read_at = max((intake.read_at(stream) for stream in rank.streams), default=0.0)
        age_s = round(now - read_at) if read_at and rank.output_bytes() else -1
        script = self._context.investigation.hook.script_state(self._context.attempt, rank.assignment.rank)
        step = script.step if script is not None else -1
        if rank.end is not None:
            state = "ended" if rank.end.status.ok else rank.end.status.description
            return RankRow(rank.assignment.rank, rank.pid, state, age_s, step=step)
        one = used.get(str(rank.pid))
        one = one if isinstance(one, dict) else {}
        return RankRow(
            rank.assignment.rank,
            rank.pid,
            str(one.get("state", "")),
            age_s,
            round(idle[rank.assignment.local_rank]) if rank.assignment.local_rank in idle else -1,
            _mib(one.get("rss_bytes")),
            _whole(one.get("cpu_percent")),
            _whole(one.get("processes")),
            step,
        )


def _packed(report: HostReport, longest: int = _LONGEST_REPORT) -> list[object]:
    """A report as it travels; ranks for which there is no room are counted. ``longest``: characters."""
    rows: list[list[object]] = []
    size = 200 + 30 * len(report.gpus)
    for row in report.ranks:
        packed: list[object] = list(row)
        size += len(repr(packed)) + 2
        if size > longest:
            break
        rows.append(packed)
    more = report.more + len(report.ranks) - len(rows)
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
