"""report.txt: the console's lines and everything that found no room there, for people. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from saferun import __version__
from saferun.diagnosis.host_fault import BadHost
from saferun.evidence.diagnosis_values import Diagnosis
from saferun.evidence.job_evidence import (
    CaptureNote,
    CoreDump,
    Evidence,
    Frame,
    HostView,
    OomKill,
    ProcessSnapshot,
    RankCollectives,
    StackDump,
    StuckLink,
    ThreadStack,
)
from saferun.preflight.findings_text import decision_text, table_lines
from saferun.preflight.results import HostInfo, Preflight
from saferun.report.calls_text import report_calls
from saferun.report.console_text import ABOVE, core_text
from saferun.report.report_json import Incident, Run, SlowRow, cores_of, first_and_last, outcome_of, steps_of
from saferun.report.text_diagram import WIDTH, frame_text, group_lines, group_text, rank_ranges, whole_tree_lines
from saferun.supervisor.policy.decision_row import DecisionRow
from saferun.text.bounded_json import redacted_command, redacted_command_line, redacted_line
from saferun.text.redaction import lines_without_keys
from saferun.text.wording import duration_text, ranks_text, size_text

LIMIT_BYTES = 4 << 20
"""How large the report is at most."""
_WIDEST = 1000
_RULE = "=" * 100
_MOST_FRAMES = 200
_MOST_NAMES = 6
_SEVERAL = 2
_OUTCOMES = {
    "continued": "the job went on",
    "stopped": "the ranks were stopped",
    "restarted": "the ranks were started again",
    "ended": "the launch ended",
}
_STARTS = {
    "before": "no rank had reached init_process_group",
    "inside": "not all ranks had got through init_process_group",
    "through": "all ranks had got through init_process_group",
}


def build_report_text(
    run: Run,
    incidents: Sequence[Incident],
    *,
    omitted: int = 0,
    decisions: Sequence[DecisionRow] = (),
    preflight: Preflight | None = None,
    infos: Mapping[int, HostInfo] | None = None,
    slow: Sequence[SlowRow] = (),
    bad_hosts: Sequence[BadHost] = (),
) -> str:
    """The content of report.txt, at most ``LIMIT_BYTES`` large in UTF-8; each incident has the same share of it.

    Args:
        run: the launch.
        incidents: what went wrong, in the order of time.
        omitted: how many more incidents there were, between the first and the last.
        decisions: what followed each failed attempt, likewise.
        preflight: what the newest checks before a start found; None: there were none.
        infos: what the hosts reported of themselves, by their numbers.
        slow: ranks that the others waited for, in the order of time.
        bad_hosts: those whose own hardware or system is at fault, likewise.
    """
    kept = first_and_last(incidents)
    # What is over when an incident is cut must hold the line that reports it.
    share = (LIMIT_BYTES - (LIMIT_BYTES >> 2)) // (len(kept) or 1)
    lines = _within(_run_lines(run, len(incidents) + omitted, len(kept)), LIMIT_BYTES >> 4)
    lines += _within(_section("decisions", _decision_lines(decisions)), LIMIT_BYTES >> 4)
    lines += _within(_section("slow ranks", _slow_lines(slow)), LIMIT_BYTES >> 4)
    lines += _within(_section("bad hosts", map(_bad_host_line, bad_hosts)), LIMIT_BYTES >> 4)
    if preflight is not None:
        table = table_lines(preflight, infos or {}, width=WIDTH - 2)
        lines += _within(_section("preflight checks", (f"  {line}".rstrip() for line in table)), LIMIT_BYTES >> 4)
    for number, incident in enumerate(kept, 1):
        lines += _within(_incident_lines(number, incident), share)
    return "\n".join(lines) + "\n"


def _within(lines: Iterable[str], most_bytes: int) -> list[str]:
    kept: list[str] = []
    for line in lines:
        text = redacted_line(line, _WIDEST)
        most_bytes -= len(text.encode()) + 1
        if most_bytes < 0:
            return [*kept, "… truncated at the size limit; the capture files have the rest"]
        kept.append(text)
    return kept


# --------------------------------------------------------------------------------------------------------------- parts


def _run_lines(run: Run, incidents: int, kept: int) -> Iterator[str]:
    started = f", started {run.clock}" if run.clock else ""
    yield f"saferun {__version__}: run {run.run_id} on {run.host}{started}"
    yield f"command: {shlex.join(redacted_command(run.command))}"
    exit_code = f" (exit code {run.exit_code})" if run.exit_code is not None else ""
    yield f"outcome: {run.outcome}{exit_code}"
    if run.files:
        yield f"files: {run.files}"
    if kept < incidents:
        yield f"incidents: {incidents}, of which the first and the last are shown, {kept} in all"


def _decision_lines(decisions: Sequence[DecisionRow]) -> Iterator[str]:
    kept = first_and_last(decisions)
    for row in kept:
        yield f"  {decision_text(row)}"
    if len(kept) < len(decisions):
        yield f"  of {len(decisions)} decisions, the first and the last are shown, {len(kept)} in all"


def _bad_host_line(row: BadHost) -> str:
    return f"  {f'{row.clock}  ' if row.clock else ''}{row.host}: {row.reason}"


def _slow_lines(slow: Sequence[SlowRow]) -> Iterator[str]:
    for row in slow:
        yield f"  {row.clock}"
        yield from (f"    {line.removeprefix('saferun: ').strip()}" for line in row.console_lines)


def _incident_lines(number: int, incident: Incident) -> Iterator[str]:
    evidence, diagnosis = incident.evidence, incident.diagnosis
    capture = evidence.capture
    clock = f" at {incident.clock}" if incident.clock else ""
    yield ""
    yield _RULE
    where = f"{len(evidence.hosts)} hosts" if len(evidence.hosts) >= _SEVERAL else evidence.host
    yield f"{number}. {incident.kind} in attempt {incident.attempt} on {where}{clock}"
    yield _RULE
    yield from map(_here, incident.console_lines) if incident.console_lines else (diagnosis.headline,)
    yield f"what followed: {_outcome_text(incident)}"
    if diagnosis.start in _STARTS:
        yield f"how far the start had come: {_STARTS[diagnosis.start]}"
    if incident.directory:
        yield f"files of the captures: {incident.directory}"
    culprits = diagnosis.cause.ranks if diagnosis.cause is not None else ()
    hosts = {rank: f" on {host.label}" for host in evidence.hosts for rank in host.ranks} if evidence.hosts else {}
    yield from _section("cause", _cause_lines(diagnosis, evidence))
    yield from _section("hosts", map(_host_line, evidence.hosts))
    budget = max(len(diagnosis.groups), 3)
    yield from _section(
        "who waits in what", group_lines(diagnosis.groups, culprits=culprits, budget=budget, width=_WIDEST)
    )
    yield from _section("calls of all ranks, outermost first", whole_tree_lines(diagnosis.tree, culprits=culprits))
    yield from _section("rank by rank", _rank_lines(diagnosis, hosts))
    yield from _section("findings", (f"  {line}" for line in diagnosis.findings))
    yield from _section("ends", _end_lines(diagnosis, evidence, hosts))
    yield from _section("tracebacks", _traceback_lines(diagnosis))
    yield from _section("last steps (saferun.step)", _step_lines(evidence))
    yield from _section("last lines of the ranks", _output_lines(evidence, hosts))
    yield from _section("processes", (_process_line(process, hosts) for process in capture.processes))
    yield from _section("connections with unacknowledged data", map(_link_line, capture.links))
    yield from _section("collectives (Flight Recorder)", _collective_lines(capture.collectives))
    yield from _section("last calls (--trace-calls)", report_calls(capture.calls))
    yield from _section("all threads, each distinct stack once, innermost call first", _stack_lines(capture.stacks))
    yield from _section("cores", _core_lines(cores_of(incident)))
    ooms = [host.oom for host in evidence.hosts] or [evidence.oom]
    yield from _section("out of memory", (line for oom in ooms for line in _oom_lines(oom)))
    yield from _section(
        "hosts' GPUs and the like" if evidence.hosts else "this host", (f"  {line}" for line in capture.host_lines)
    )
    yield from _section("kernel log", (f"  {line}" for line in evidence.kernel_lines))
    yield from _section("captures", _note_lines(capture.notes))
    yield from _section("captures that timed out", (f"  {name}" for name in capture.timed_out))


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    """A title and the lines below it; nothing where there are no lines."""
    is_first = True
    for line in lines:
        if is_first:
            yield ""
            yield f"--- {title}"
            is_first = False
        yield line


def _here(line: str) -> str:
    """A line of the console as it is here: what its ranks had printed above it stands below, as "tracebacks"."""
    return line.replace(ABOVE, "  below: ", 1) if line.startswith(ABOVE) else line


def _outcome_text(incident: Incident) -> str:
    followed = outcome_of(incident)
    if followed == "recovered":
        after_s = incident.recovered_after_s
        return f"job resumed{f' after {duration_text(after_s)}' if after_s is not None else ''}"
    return _OUTCOMES[followed]


def _cause_lines(diagnosis: Diagnosis, evidence: Evidence) -> Iterator[str]:
    cause, verdict = diagnosis.cause, evidence.hang
    if cause is not None:
        yield f"  class: {cause.class_name}"
        yield f"  message: {cause.message}"
        if cause.ranks:
            yield f"  ranks: {ranks_text(cause.ranks, _WIDEST)}"
        if cause.location:
            yield f"  at: {cause.location}"
        if cause.proof and cause.proof not in cause.message:
            yield f"  proof: {cause.proof}"
        if cause.advice:
            yield f"  advice: {cause.advice}"
    if verdict is not None:
        certain = "certain" if verdict.certain else "suspected"
        lasted = duration_text(verdict.lasted_s)
        yield f"  verdict: {verdict.kind} ({certain}), {ranks_text(verdict.ranks, _WIDEST)}, for {lasted}"
        if verdict.busy:
            yield f"  busy: {ranks_text(verdict.busy, _WIDEST)}"


def _host_line(host: HostView) -> str:
    lost = f", lost ({host.lost_reason}): {host.lost_message}" if host.lost_reason else ""
    part = "" if host.has_evidence else ", no evidence from it"
    unkilled = f", could not be killed: {ranks_text(host.abandoned_ranks)}" if host.abandoned_ranks else ""
    addresses = f" ({', '.join(host.addresses[:_MOST_NAMES])})" if host.addresses else ""
    return f"  {host.label}{addresses}: {rank_ranges(host.ranks, 200)}{lost}{part}{unkilled}"


def _link_line(link: StuckLink) -> str:
    return (
        f"  rank {link.rank}: {link.local} -> {link.remote}, {link.state}, {link.unsent_bytes} bytes unacknowledged, "
        f"{link.retries} retransmits"
    )


def _rank_lines(diagnosis: Diagnosis, hosts: Mapping[int, str]) -> Iterator[str]:
    rows = [(rank, group) for group in diagnosis.groups for rank in group.ranks]
    for rank, group in sorted(rows, key=lambda row: row[0]):
        location = f"  {group.location}" if group.location else ""
        yield f"  rank {rank}{hosts.get(rank, '')}: {group_text(group)}{location}"


def _end_lines(diagnosis: Diagnosis, evidence: Evidence, hosts: Mapping[int, str]) -> Iterator[str]:
    first = diagnosis.first_failure.rank if diagnosis.first_failure is not None else -1
    victims = frozenset(diagnosis.victims)
    for end in sorted(evidence.ends, key=lambda end: end.at):
        notes = [
            *(["the first"] if end.rank == first else []),
            *(["because of another rank"] if end.rank in victims else []),
            *(["stopped by saferun"] if end.stopped_by_us else []),
        ]
        clock = f" at {end.clock}" if end.clock else ""
        note = f" ({', '.join(notes)})" if notes else ""
        after = duration_text(end.at - evidence.started_at)
        who = f"rank {end.rank}{hosts.get(end.rank, '')}, pid {end.pid}"
        yield f"  {who}: {end.status.description}{clock}, {after} after the start{note}"
    if diagnosis.abandoned:
        yield f"  could not be killed: local {ranks_text(diagnosis.abandoned, _WIDEST)}"
    if diagnosis.abandoned_ranks:
        yield f"  could not be killed: {ranks_text(diagnosis.abandoned_ranks, _WIDEST)}"


def _traceback_lines(diagnosis: Diagnosis) -> Iterator[str]:
    for traceback in diagnosis.tracebacks:
        yield f"  of {rank_ranges(traceback.ranks, _WIDEST)}:"
        yield from _quoted(traceback.lines)


def _step_lines(evidence: Evidence) -> Iterator[str]:
    for step, ranks in steps_of(evidence):
        yield f"  {ranks_text(tuple(ranks), _WIDEST)}: {step}"


def _output_lines(evidence: Evidence, hosts: Mapping[int, str]) -> Iterator[str]:
    for output in evidence.outputs:
        who = f"local rank {output.local_rank}"
        if output.rank >= 0 and hosts:
            who = f"rank {output.rank}{hosts.get(output.rank, '')}"
        path = f" ({output.stderr_path})" if output.stderr_path else ""
        for name, lines in (("stderr", output.last_lines), ("stdout", output.last_stdout_lines)):
            if lines:
                yield f"  {who}, {name}{path if name == 'stderr' else ''}:"
                yield from _quoted(lines)
        if output.error_message:
            yield f"  {who} recorded: {output.error_message}"
        if output.failure:
            yield f"  {who} at its exception:"
            yield from _quoted(output.failure)


def _quoted(lines: Sequence[str]) -> Iterator[str]:
    """What a rank wrote; what it may have of a private key goes while the lines are as they were."""
    return (f"  | {line}" for line in lines_without_keys(lines))


def _process_line(process: ProcessSnapshot, hosts: Mapping[int, str]) -> str:
    who = f"rank {process.rank}{hosts.get(process.rank, '')}" + (
        "" if process.is_rank else f", child of {process.ppid}"
    )
    parts = [
        f"  {who}: pid {process.pid} {process.name}, state {process.state}",
        *([f"in {process.syscall}"] if process.syscall else []),
        *([f"asleep in {process.wchan}"] if process.wchan else []),
        *([f"waits on {process.waits_on}"] if process.waits_on else []),
        *([f"traced by pid {process.tracer_pid}"] if process.tracer_pid else []),
        *(["its core is being written"] if process.core_dumping else []),
        f"{process.threads} thread{'' if process.threads == 1 else 's'}",
        size_text(process.rss_bytes),
        f"{process.cpu_s:.1f} s of CPU time",
    ]
    return f"{', '.join(parts)}: {redacted_command_line(process.command)}"


def _collective_lines(ranks: Sequence[RankCollectives]) -> Iterator[str]:
    for rank in ranks:
        if rank.failure:
            yield f"  rank {rank.rank}: not available: {rank.failure}"
        if rank.incomplete:
            yield f"  rank {rank.rank}: {rank.incomplete}"
        for group in rank.groups:
            description = f" ({group.description})" if group.description else ""
            yield (
                f"  rank {rank.rank}, group {group.group}{description}: enqueued {group.enqueued}, "
                f"started {group.started}, completed {group.completed}"
            )
            for call in group.calls[-3:]:
                state = "done" if call.retired else "failed" if call.failed else "not done"
                lines = (frame for frame in call.frames if "/torch/" not in frame.file)
                at = next((f", at {frame_text(frame, WIDTH)}" for frame in lines), "")
                yield f"    {call.seq} {call.op} {call.sizes}, {state}{at}"


# -------------------------------------------------------------------------------------------------------------- stacks


def _stack_lines(dumps: Sequence[StackDump]) -> Iterator[str]:
    by_frames: dict[tuple[Frame, ...], list[tuple[StackDump, ThreadStack]]] = {}
    for dump in dumps:
        for thread in dump.threads:
            by_frames.setdefault(thread.frames, []).append((dump, thread))
    # Main threads of ranks first, and of those the odd ones.
    for frames, threads in sorted(by_frames.items(), key=lambda item: _stack_order(item[1])):
        yield f"  {_owners(threads)}:"
        shown_frames = frames if len(frames) <= _MOST_FRAMES else frames[:_MOST_FRAMES]
        yield from (f"      {frame_text(frame, 2 * WIDTH)}" for frame in shown_frames)
        if len(shown_frames) < len(frames):
            yield f"      … {len(frames) - len(shown_frames)} more calls"
        if not frames:
            yield "      (no calls)"
    for dump in dumps:
        if dump.failure:
            yield f"  no stack of {_process_text(dump)} by {dump.tool}: {dump.failure}"


def _stack_order(threads: Sequence[tuple[StackDump, ThreadStack]]) -> tuple[bool, int]:
    return not any(thread.is_main and dump.is_rank for dump, thread in threads), len(threads)


def _owners(threads: Sequence[tuple[StackDump, ThreadStack]]) -> str:
    ranks = rank_ranges((dump.rank for dump, _ in threads), 200)
    names = _few(thread.name for _, thread in threads)
    tools = _few(dump.tool for dump, _ in threads)
    below = _few(_process_text(dump) for dump, _ in threads if not dump.is_rank)
    locked = [dump.rank for dump, thread in threads if thread.owns_gil]
    parts = [
        ranks,
        *([f"thread {names}"] if names else []),
        *([f"in {below}"] if below else []),
        *([f"the GIL is held by {ranks_text(locked)}"] if locked else []),
        *([f"by {tools}"] if tools else []),
    ]
    return ", ".join(parts)


def _process_text(dump: StackDump) -> str:
    return f"pid {dump.pid}" + (f" ({dump.name})" if dump.name else "") + f" of rank {dump.rank}"


def _few(names: Iterable[str]) -> str:
    distinct = [name for name in dict.fromkeys(names) if name]
    more = f" and {len(distinct) - _MOST_NAMES} more" if len(distinct) > _MOST_NAMES else ""
    return ", ".join(distinct[:_MOST_NAMES]) + more


# ------------------------------------------------------------------------------------------------------ host and cores


def _core_lines(cores: Sequence[CoreDump]) -> Iterator[str]:
    for core in cores:
        sender = f", sent by pid {core.sender_pid}" if core.sender_pid else ""
        address = f", address {core.address}" if core.address else ""
        yield f"  rank {core.rank}, pid {core.pid}, signal {core.signum}{sender}{address}: {core_text(core) or 'none'}"
        for number, thread in enumerate(core.threads):
            crashed = " (it crashed)" if number == 0 else ""
            yield f"    thread {thread.name or thread.tid}{crashed}, by {core.tool}:"
            yield from (f"      {frame_text(frame, 2 * WIDTH)}" for frame in thread.frames[:_MOST_FRAMES])


def _oom_lines(oom: OomKill | None) -> Iterator[str]:
    if oom is None:
        return
    limit = f", limit {size_text(oom.limit_bytes)}" if oom.limit_bytes else ""
    used = f", the killed process used {size_text(oom.rss_bytes)}" if oom.rss_bytes else ""
    pids = f", pids {', '.join(map(str, oom.pids[:50]))}" if oom.pids else ""
    where = f" on {oom.host}" if oom.host else ""
    yield (
        f"  {oom.kills} killed by the kernel's OOM killer{where} ({oom.scope}{limit}{used}{pids}); "
        f"read from {oom.source}"
    )


def _note_lines(notes: Sequence[CaptureNote]) -> Iterator[str]:
    for note in notes:
        who = f"rank {note.rank}" if note.rank >= 0 else note.host or "host"
        pid = f", pid {note.pid}" if note.pid else ""
        path = f": {note.path}" if note.path else ""
        failure = f": failed: {note.failure}" if note.failure else ""
        yield f"  {note.capture} of {who}{pid}, {note.elapsed_s:.2f} s{path}{failure}"
