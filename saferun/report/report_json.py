"""report.json: what went wrong in a launch, for programs. Pure.

The fields are described in ``docs/report.md`` and checked by ``schema/report.schema.json``. Every field is always
there. Secrets are redacted, and the size is bounded, whatever the ranks wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from saferun import __version__
from saferun.diagnosis.host_fault import BadHost
from saferun.evidence.call_evidence import CALL_KINDS, RankCalls, ThreadCalls
from saferun.evidence.diagnosis_values import Diagnosis, LostPeer
from saferun.evidence.job_evidence import (
    AbortReason,
    Capture,
    CaptureNote,
    CoreDump,
    Evidence,
    GroupProgress,
    HostView,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    RankOutput,
)
from saferun.model import JsonObject, RankEnd, Value, signal_name
from saferun.preflight.json_report import decision, preflight_part
from saferun.preflight.results import Preflight
from saferun.report.recorder_order import telling_first
from saferun.report.text_diagram import Branch, branches_of
from saferun.supervisor.policy.decision_row import DecisionRow
from saferun.text.bounded_json import Page, count, integer, number, redacted_command

SCHEMA = "saferun.report/1"
LIMIT_BYTES = 2 << 20
"""How large the report is at most, as it is written (indented by one)."""
_FIRST_INCIDENTS = 10
_CALLS_OF_MAIN, _CALLS_OF_OTHERS = 40, 8
_LAST_INCIDENTS = 40
_RUN_BYTES = 1 << 17
_DECISIONS_BYTES = 1 << 17
_PREFLIGHT_BYTES = 1 << 19
_SLOW_BYTES = 1 << 17
_BAD_HOSTS_BYTES = 1 << 17

Kind = Literal["hang", "failure"]
Outcome = Literal["running", "succeeded", "failed", "stopped", "left"]
IncidentOutcome = Literal["continued", "recovered", "stopped", "restarted", "ended"]
_INCIDENT_OUTCOMES = ("continued", "recovered", "stopped", "restarted", "ended")
_START_STAGES = {"before": "before", "inside": "during", "through": "after"}

_T = TypeVar("_T")


class Run(Value):
    """A launch, as one host sees it.

    Attributes:
        run_id: what marks its processes.
        host: the host's short name.
        command: saferun's command line.
        started_at: seconds since the epoch.
        ended_at: the same; None while it runs.
        exit_code: saferun's; None while it runs.
        outcome: ``stopped``: by the user or the scheduler; ``left``: the job can go on without this host.
        files: the run directory; empty where there is none.
        clock: when it started, as it is to be shown; empty where that is not wanted.
    """

    run_id: str
    host: str
    command: tuple[str, ...]
    started_at: float
    ended_at: float | None = None
    exit_code: int | None = None
    outcome: Outcome = "running"
    files: str = ""
    clock: str = ""


class Incident(Value):
    """A hang, or the failure of an attempt.

    Attributes:
        kind: which of them.
        attempt: 0 for the first.
        time: seconds since the epoch.
        evidence: what was seen. ``evidence.hang`` is the verdict.
        diagnosis: what follows from it.
        outcome: what happened then. ``ended``: the launch failed of it.
        recovered_after_s: after ``recovered``, how long nothing had moved.
        console_lines: the lines on the console.
        directory: where the capture's files are; empty where there are none.
        clock: when it was, as it is to be shown; empty where that is not wanted.
    """

    kind: Kind
    attempt: int
    time: float
    evidence: Evidence
    diagnosis: Diagnosis
    outcome: IncidentOutcome = "continued"
    recovered_after_s: float | None = None
    console_lines: tuple[str, ...] = ()
    directory: str = ""
    clock: str = ""


class SlowRow(Value):
    """Ranks that the others waited for.

    Attributes:
        time: seconds since the epoch.
        attempt: 0 for the first.
        host: theirs.
        console_lines: the lines on the console.
        clock: when it was, as it is to be shown.
        ranks: they.
        waited: the share of the time for which they waited.
        others_waited: the same of the others, the median.
        window_s: over how long.
        by: what they were found by, as ``watchdog.stragglers.Straggler`` has it.
    """

    time: float
    attempt: int
    host: str
    console_lines: tuple[str, ...]
    clock: str
    ranks: tuple[int, ...]
    waited: float
    others_waited: float
    window_s: float
    by: str = "samples"


def build_report(
    run: Run,
    incidents: Sequence[Incident],
    *,
    omitted: int = 0,
    decisions: Sequence[DecisionRow] = (),
    preflight: Preflight | None = None,
    slow: Sequence[SlowRow] = (),
    bad_hosts: Sequence[BadHost] = (),
) -> JsonObject:
    """The content of report.json, at most ``LIMIT_BYTES`` large, in time that depends on that and not on the ranks.

    Each incident has the same share. Longer lists are shortened (``truncated`` of the incident names them), at last
    incidents are left out (``incidents_omitted``).

    Args:
        run: the launch.
        incidents: what went wrong, in the order of time.
        omitted: how many more incidents there were, between the first and the last.
        decisions: what followed each failed attempt, likewise.
        preflight: what the newest checks before a start found; None: there were none.
        slow: ranks that the others waited for, likewise.
        bad_hosts: hosts whose own hardware or system is at fault, likewise.
    """
    kept = first_and_last(incidents)
    kept_decisions = first_and_last(decisions)
    page = Page(_RUN_BYTES)
    described = {
        "run_id": page.text(run.run_id),
        "host": page.text(run.host),
        "command": page.first("command", redacted_command(run.command), page.text),
        "started_at": number(run.started_at),
        "ended_at": number(run.ended_at),
        "exit_code": integer(run.exit_code) if run.exit_code is not None else None,
        "outcome": run.outcome,
        "run_dir": page.text(run.files),
    }
    room_bytes = LIMIT_BYTES - _RUN_BYTES - _DECISIONS_BYTES - _PREFLIGHT_BYTES - _SLOW_BYTES - _BAD_HOSTS_BYTES
    # A quarter is for what cannot be cut.
    decided = Page(_DECISIONS_BYTES * 3 // 4)
    rows = decided.objects("decisions", kept_decisions, lambda row: decision(row, decided))
    bad = Page(_BAD_HOSTS_BYTES * 3 // 4).values("bad_hosts", bad_hosts, {"clock": ""})
    checks = preflight_part(preflight, Page(_PREFLIGHT_BYTES * 3 // 4)) if preflight is not None else None
    entries = []
    for incident in kept:
        share = Page(room_bytes * 3 // (4 * len(kept)))
        content = _incident(incident, share)
        entries.append((content, share.used_bytes))
    while sum(used for _, used in entries) > room_bytes:
        del entries[len(entries) // 2]
    return {
        "schema": SCHEMA,
        "saferun_version": __version__,
        "run": described,
        "preflight": checks,
        "decisions": rows,
        "decisions_omitted": len(decisions) - len(rows),
        "incidents": [content for content, _ in entries],
        "incidents_omitted": len(incidents) + omitted - len(entries),
        "slow_ranks": [_slow(row, Page(_SLOW_BYTES // len(slow))) for row in slow],
        "bad_hosts": bad,
        "bad_hosts_omitted": len(bad_hosts) - len(bad),
    }


def first_and_last(incidents: Sequence[_T]) -> list[_T]:
    """The incidents, or decisions, that a report has: the first ten and the last forty."""
    if len(incidents) <= _FIRST_INCIDENTS + _LAST_INCIDENTS:
        return [*incidents]
    return [*incidents[:_FIRST_INCIDENTS], *incidents[-_LAST_INCIDENTS:]]


# ----------------------------------------------------------------------------------------------------------- incidents


def _slow(row: SlowRow, page: Page) -> JsonObject:
    return {
        "time": number(row.time),
        "attempt": count(row.attempt),
        "host": page.text(row.host),
        "ranks": page.ranks("ranks", row.ranks),
        "waited": number(row.waited),
        "others_waited": number(row.others_waited),
        "window_s": number(row.window_s),
        "by": page.text(row.by),
        "console_lines": page.first("console_lines", row.console_lines, page.text),
    }


def _lost_peers(page: Page, peers: LostPeer) -> JsonObject:
    return {
        "ranks": page.ranks("lost_peers", peers.ranks),
        "message": page.text(peers.message),
        "call": page.text(peers.call),
        "location": page.text(peers.location),
    }


def _incident(incident: Incident, page: Page) -> JsonObject:
    evidence, diagnosis = incident.evidence, incident.diagnosis
    outcome = outcome_of(incident)
    content: JsonObject = {
        "kind": incident.kind,
        "host": page.text(evidence.host),
        "attempt": count(incident.attempt),
        "start_stage": _START_STAGES.get(diagnosis.start, ""),
        "time": number(incident.time),
        "capture_dir": page.text(incident.directory),
        "headline": page.text(diagnosis.headline),
        "hint": page.text(diagnosis.advice),
        **_why(page, evidence, diagnosis),
        **_which_ranks(page, evidence, diagnosis),
        "cores": page.objects("cores", cores_of(incident), lambda core: _core(page, core)),
        "oom": _oom(page, evidence.oom),
        "kernel_log": page.lines("kernel_log", evidence.kernel_lines),
        "last_steps": page.objects(
            "last_steps",
            steps_of(evidence),
            lambda step: {"ranks": page.ranks("last_steps", step[1]), "text": page.text(step[0])},
        ),
        **_captured(page, evidence.capture, diagnosis.cause.ranks if diagnosis.cause is not None else ()),
        "outcome": outcome,
        "recovered_after_s": number(incident.recovered_after_s) if outcome == "recovered" else None,
    }
    content["truncated"] = sorted(page.cut)
    return content


def _why(page: Page, evidence: Evidence, diagnosis: Diagnosis) -> JsonObject:
    """The verdict, the cause and the first failure, each null where there is none."""
    verdict, cause, first, output = evidence.hang, diagnosis.cause, diagnosis.first_failure, diagnosis.output
    names = {"lasted_s": "stalled_s", "busy": "busy_ranks"}
    return {
        "verdict": page.value("verdict", verdict, names) if verdict is not None else None,
        "cause": page.value("cause", cause, {"class_name": "class"}) if cause is not None else None,
        "first_failure": _end(page, first) if first is not None else None,
        "output": _output(page, output) if output is not None else None,
    }


def _which_ranks(page: Page, evidence: Evidence, diagnosis: Diagnosis) -> JsonObject:
    """What became of the other ranks and hosts, and what all of them were doing."""
    culprits = diagnosis.cause.ranks if diagnosis.cause is not None else ()
    return {
        "also_failed": page.objects("also_failed", diagnosis.also_failed, lambda end: _end(page, end)),
        "victims": page.ranks("victims", diagnosis.victims),
        "lost_peers": page.objects("lost_peers", diagnosis.lost_peers, lambda peers: _lost_peers(page, peers)),
        "stopped": page.ranks("stopped", diagnosis.stopped),
        "abandoned_local_ranks": page.ranks("abandoned_local_ranks", diagnosis.abandoned),
        "abandoned_ranks": page.ranks("abandoned_ranks", diagnosis.abandoned_ranks),
        "abort_reason": _abort_reason(page, evidence.abort_reason) if evidence.abort_reason is not None else None,
        # Where there is not room for all, the silent ones come first.
        "hosts": page.objects("hosts", sorted(evidence.hosts, key=_is_heard), lambda host: _host(page, host)),
        "wait_groups": page.values("wait_groups", diagnosis.groups),
        # The place of a branch's parent is always before its own: a list that is cut is still a tree.
        "tree": page.objects("tree", branches_of(diagnosis.tree, culprits), lambda branch: _branch(page, branch)),
        "tracebacks": page.values("tracebacks", diagnosis.tracebacks),
        "findings": page.first("findings", diagnosis.findings, page.text),
    }


def _captured(page: Page, capture: Capture, culprits: Sequence[int]) -> JsonObject:
    """What was captured of the ranks, and how that went."""
    # Before the others: they get most of the room.
    recorders = page.objects(
        "collectives", telling_first(capture.collectives, culprits), lambda rank: _collectives(page, rank)
    )
    link_names = {"unsent_bytes": "send_queue_bytes", "retries": "retransmits"}
    return {
        "host_status": page.lines("host_status", capture.host_lines),
        "stuck_connections": page.values("stuck_connections", capture.links, link_names),
        "processes": page.objects("processes", capture.processes, lambda process: _process(page, process)),
        "collectives": sorted(recorders, key=lambda row: row["rank"]),
        "last_calls": page.objects("last_calls", capture.calls, lambda rank: _calls(page, rank)),
        "captures": page.objects("captures", capture.notes, lambda note: _note(page, note)),
        "capture_elapsed_s": number(capture.elapsed_s),
        "timed_out": page.lines("timed_out", capture.timed_out),
    }


def outcome_of(incident: Incident) -> str:
    """The outcome, as one of the schema's values."""
    outcome = incident.outcome.partition(" ")[0]
    return outcome if outcome in _INCIDENT_OUTCOMES else "continued"


def steps_of(evidence: Evidence) -> list[tuple[str, list[int]]]:
    """What the ranks have last reported by saferun.step; those that reported the same stand together."""
    ranks_of: dict[str, list[int]] = {}
    for rank, output in sorted(evidence.outputs_by_rank.items()):
        if output.last_step:
            ranks_of.setdefault(output.last_step, []).append(rank)
    return list(ranks_of.items())


def cores_of(incident: Incident) -> list[CoreDump]:
    """Every core, that of the cause first."""
    core = incident.diagnosis.core
    others = [other for other in incident.evidence.cores if other != core]
    return [core, *others] if core is not None else others


def _end(page: Page, end: RankEnd) -> JsonObject:
    signum = end.status.signum
    return {
        "rank": count(end.rank),
        "local_rank": count(end.local_rank),
        "pid": count(end.pid),
        "time": number(end.time),
        "exit_code": integer(end.status.code) if end.status.code is not None else None,
        "signal": page.text(signal_name(signum)) if signum is not None else None,
        "core_dumped": bool(end.status.core_dumped),
        "stopped_by_saferun": bool(end.stopped_by_us),
    }


def _output(page: Page, output: RankOutput) -> JsonObject:
    return page.value("output", output, {"error_time": "", "uncaught_time": ""}) | {"rank": _known(output.rank, 0)}


def _branch(page: Page, branch: Branch) -> JsonObject:
    frames, left_out = page.frames("tree", branch.frames)
    return {
        "parent": branch.parent if branch.parent >= 0 else None,
        "ranks": page.ranks("tree", branch.ranks),
        "frames": frames,
        "frames_omitted": left_out,
    }


def _core(page: Page, core: CoreDump) -> JsonObject:
    frames, left_out = page.frames("cores", core.threads[0].frames[::-1] if core.threads else ())
    return page.value("cores", core, {"signum": "signal", "threads": ""}) | {
        "signal": page.text(signal_name(core.signum)),
        "crashing_thread": frames[::-1],
        "frames_omitted": left_out,
        "sender_pid": _known(core.sender_pid),
    }


def _oom(page: Page, oom: OomKill | None) -> JsonObject | None:
    if oom is None:
        return None
    return page.value("oom", oom) | {"limit_bytes": _known(oom.limit_bytes), "rss_bytes": _known(oom.rss_bytes)}


def _abort_reason(page: Page, reason: AbortReason) -> JsonObject:
    rank = _known(reason.rank, 0) if reason.rank is not None else None
    return page.value("abort_reason", reason, {"label": "host"}) | {"rank": rank}


def _is_heard(host: HostView) -> bool:
    return host.has_evidence and not host.lost_reason


def _host(page: Page, host: HostView) -> JsonObject:
    return {
        "index": count(host.host),
        "name": page.text(host.label),
        "ranks": page.ranks("hosts", host.ranks),
        "has_evidence": bool(host.has_evidence),
        "lost_reason": page.text(host.lost_reason),
        "lost_message": page.text(host.lost_message),
        "abandoned_ranks": page.ranks("hosts", host.abandoned_ranks),
        "oom": _oom(page, host.oom),
    }


def _process(page: Page, process: ProcessSnapshot) -> JsonObject:
    return page.value("processes", process, {"command": "", "waits": "", "unreadable": ""}) | {
        "command": page.command(process.command),
        "tracer_pid": _known(process.tracer_pid),
    }


def _note(page: Page, note: CaptureNote) -> JsonObject:
    return page.value("captures", note, {"path": "file"}) | {"rank": _known(note.rank, 0), "pid": _known(note.pid)}


def _known(value: int, least: int = 1) -> int | None:
    """A number; None for what stands for an unknown one."""
    return count(value) if value >= least else None


def _calls(page: Page, rank: RankCalls) -> JsonObject:
    return {
        "rank": count(rank.rank),
        "pid": count(rank.pid),
        "has_ended": bool(rank.is_dead),
        "note": page.text(rank.note),
        "failure": page.text(rank.failure),
        "threads": page.objects("last_calls", rank.threads, lambda thread: _thread_calls(page, rank, thread)),
    }


def _thread_calls(page: Page, rank: RankCalls, thread: ThreadCalls) -> JsonObject:
    events = thread.events[-_CALLS_OF_MAIN if thread.is_main else -_CALLS_OF_OTHERS :]
    rows = [(event, rank.function(event)) for event in events if event.kind in CALL_KINDS]
    return {
        "tid": count(thread.tid),
        "is_main": bool(thread.is_main),
        "total": count(thread.total),
        "events": page.objects(
            "last_calls",
            rows,
            lambda row: {
                "kind": row[0].kind,
                "function": page.text(row[1].name if row[1] is not None else ""),
                "file": page.text(row[1].file if row[1] is not None else ""),
                "line": count(row[0].line or (row[1].line if row[1] is not None else 0)),
                "before_s": number(max(0.0, row[0].before_s)),
            },
        ),
    }


def _collectives(page: Page, rank: RankCollectives) -> JsonObject:
    return {
        "rank": count(rank.rank),
        "failure": page.text(rank.failure),
        "incomplete": page.text(rank.incomplete),
        "groups": page.objects("collectives", rank.groups, lambda group: _progress(page, group)),
    }


def _progress(page: Page, group: GroupProgress) -> JsonObject:
    last = group.calls[-1] if group.calls else None
    return {
        "group": page.text(group.group),
        "description": page.text(group.description),
        "enqueued": integer(group.enqueued),
        "started": integer(group.started),
        "completed": integer(group.completed),
        "last_call": {
            "seq": integer(last.seq),
            "op": page.text(last.op),
            "sizes": page.text(last.sizes),
            "retired": bool(last.retired),
            "failed": bool(last.failed),
            "is_p2p": bool(last.is_p2p),
        }
        if last is not None
        else None,
    }
