"""What ``saferunctl status`` prints of a running job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from saferun.launch.live_status import GpuRow, HostReport, RankRow
from saferun.model import JsonObject, Value
from saferun.text.typed_json import fit, line_of, list_of, number_of, seconds_of
from saferun.text.wording import count_text, size_text

_LONGEST_NAME = 255
_MOST_HOSTS = 20_000
_NAMED = 8
_MIB = 1 << 20
_STATES = {
    "R": "runs",
    "S": "sleeps",
    "D": "uninterruptible",
    "T": "stopped",
    "t": "traced",
    "Z": "ended",
    "X": "ended",
    "I": "idle",
}
"""Of /proc/PID/stat. Source: proc(5)."""
_HEAD = ("rank", "pid", "state", "output", "progress", "memory", "CPU", "processes")
_Name = Annotated[str, line_of(_LONGEST_NAME)]


class _Host(Value):
    host: _Name
    report: HostReport


class LiveJob(Value):
    """What the saferun of a job answers about it."""

    state: _Name
    attempt: Annotated[int, number_of()]
    world_size: Annotated[int, number_of()]
    leader: _Name
    is_whole: bool
    hang_timeout_s: Annotated[float, seconds_of(1e9)]
    is_hung: bool
    restarts: Annotated[int, number_of()]
    missing: Annotated[tuple[str, ...], list_of(_Name, _MOST_HOSTS)] = ()
    bad_hosts: Annotated[tuple[str, ...], list_of(_Name, _NAMED)] = ()


def live_lines(content: JsonObject) -> Iterator[str]:
    """The lines.

    Args:
        content: the answer.

    Raises:
        One of ``MALFORMED``: it is no such answer.
    """
    job: LiveJob = fit(LiveJob, content)
    hosts = [_Host(fit(_Name, one["host"]), fit(HostReport, one)) for one in content["hosts"][:_MOST_HOSTS]]
    yield _first_line(job, hosts)
    if not job.is_whole:
        yield f"  of this host's saferun process alone: {job.leader}, which collects all hosts, does not answer it"
    if job.missing:
        more = f" and {len(job.missing) - _NAMED} more" if len(job.missing) > _NAMED else ""
        yield f"  no answer yet from {', '.join(job.missing[:_NAMED])}{more}"
    for bad in job.bad_hosts:
        yield f"  bad host: {bad}"
    has_steps = any(row.step >= 0 for host in hosts for row in host.report.ranks)
    head = (*_HEAD, "step") if has_steps else _HEAD
    rows = [_cells(row) for host in hosts for row in host.report.ranks]
    widths = [max(len(cells[column]) for cells in (head, *rows)) for column in range(len(head))]
    for host in hosts:
        yield _host_line(host)
        # (Rows have a cell for the step also where no rank reports one, and there is no such column.)
        for cells in (head, *(_cells(row) for row in host.report.ranks)):
            yield "  " + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=False))
        if host.report.more > 0:
            yield f"  … and {count_text(host.report.more, 'rank')} more"
        for gpu in host.report.gpus:
            yield _gpu_line(gpu)
        if host.report.stuck_in:
            yield f"  the GPU driver does not answer ({host.report.stuck_in})"


def _first_line(job: LiveJob, hosts: list[_Host]) -> str:
    size = f"{count_text(job.world_size, 'rank')}" + (f" on {len(hosts)} hosts" if len(hosts) > 1 else "")
    parts = [f"{job.state}: attempt {job.attempt}, {size}"]
    quiet = [row.quiet_s for host in hosts for row in host.report.ranks if row.quiet_s >= 0]
    if job.hang_timeout_s <= 0:
        parts.append("hangs are not watched for (--hang-timeout 0)")
    elif quiet:
        limit = f"--hang-timeout {job.hang_timeout_s:g}"
        parts.append(
            f"the job hangs: no progress for {min(quiet)} s ({limit})"
            if job.is_hung
            else f"last progress {min(quiet)} s ago ({limit})"
        )
    if job.restarts:
        parts.append(count_text(job.restarts, "restart"))
    return "; ".join(parts)


def _host_line(host: _Host) -> str:
    report = host.report
    parts = []
    if report.cpus > 0:
        parts.append(count_text(report.cpus, "processor"))
    if report.total_mib > 0:
        parts.append(f"{_size(report.available_mib)} of {_size(report.total_mib)} of memory available")
    return f"{host.host}:" + (f" {', '.join(parts)}" if parts else "")


def _cells(row: RankRow) -> tuple[str, ...]:
    return (
        str(row.rank),
        str(row.pid) if row.pid >= 0 else "-",
        _STATES.get(row.state, row.state or "?"),
        _age(row.output_age_s),
        _age(row.quiet_s),
        _size(row.rss_mib),
        f"{row.cpu_percent} %" if row.cpu_percent >= 0 else "-",
        str(row.processes) if row.processes >= 0 else "-",
        str(row.step) if row.step >= 0 else "-",
    )


def _age(seconds: int) -> str:
    return f"{seconds} s" if seconds >= 0 else "-"


def _size(mib: int) -> str:
    return size_text(mib * _MIB) if mib >= 0 else "-"


def _gpu_line(gpu: GpuRow) -> str:
    parts = []
    if gpu.busy_percent >= 0:
        parts.append(f"{gpu.busy_percent} % busy")
    if gpu.used_mib >= 0 and gpu.total_mib > 0:
        parts.append(f"{_size(gpu.used_mib)} of {_size(gpu.total_mib)}")
    if gpu.celsius >= 0:
        parts.append(f"{gpu.celsius} °C")
    return f"  GPU {gpu.number}: {', '.join(parts) or 'it does not answer'}"
