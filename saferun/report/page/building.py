"""From the files of a run to the model of its page. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from saferun import __version__
from saferun.report.page.contents import (
    CoreSection,
    IncidentPart,
    PreflightSection,
    ReportPart,
    SlowPart,
    TracebackPart,
)
from saferun.report.page.gpu_rows import build_gpus
from saferun.report.page.hang_text import stalled_text
from saferun.report.page.host_rows import (
    build_checks,
    build_environment,
    build_machine,
    build_matrix,
    build_settings,
    build_versions,
)
from saferun.report.page.outputs import build_outputs, traceback_summary
from saferun.report.page.page_model import (
    LABEL_CHARACTERS,
    Call,
    Fact,
    IncidentRow,
    OutputPiece,
    PageModel,
    Table,
    Verdict,
)
from saferun.report.page.rank_records import build_calls, build_failures, build_steps
from saferun.report.page.run_contents import FailureRecord, HostGpus, RunFiles, RunJson
from saferun.report.page.stack_tree import build_stacks, call_of
from saferun.report.page.timeline import build_timelines
from saferun.report.page.wait_graph import build_group_tables, build_wait_graph
from saferun.report.report_values import Cause, Launch, RankFailure
from saferun.report.text_diagram import rank_ranges
from saferun.text.bounded_json import shown
from saferun.text.redaction import redacted_arguments
from saferun.text.wording import duration_text, ranks_text, size_text

_MOST_EARLIER = 12
_MOST_LINES = 60
_MOST_ENDS = 60
_MOST_TRACEBACKS = 12
_TRACEBACK_LINES = 200
_MOST_STORY = 200
_LONGEST = 1200
_OUTCOMES = {
    "continued": "The job went on.",
    "recovered": "The job recovered.",
    "stopped": "The ranks were stopped.",
    "restarted": "The job was started again.",
    "ended": "The launch ended.",
}
_STAGES = {
    "before": "before init_process_group",
    "during": "during init_process_group",
    "after": "after init_process_group",
}
PHASES = {
    "start": "starting",
    "run": "running",
    "work": "running, with a process group",
    "wait": "no progress: waiting",
    "stuck": "no progress: the cause",
    "ending": "after the first failure",
    "stopping": "being stopped",
}
"""The phases of a rank's life in the timeline."""
_ENDS = {"succeeded": "good", "failed": "bad", "stopped": "warn", "running": "plain"}


def build_page(files: RunFiles, clock: Callable[[float], str], scale: float = 1.0, *, folds: bool = True) -> PageModel:
    """The model of the page.

    Args:
        files: what was read.
        clock: shows a moment, given in seconds since the epoch.
        scale: how much of what there is room for is used, 0 to 1.
        folds: whether ranks to which the same happened have one row in the timeline.
    """
    report = files.report or ReportPart(run=_described(files.run))
    incidents = _distinct(report.incidents)
    main = incidents[-1] if incidents else None
    culprits = main.culprits if main is not None else frozenset()
    preflight = files.preflight or report.preflight
    whole, closing = build_timelines(files.hosts, files.report, preflight, folds=folds)
    outputs = build_outputs(files.tails, culprits, scale)
    bad_checks, fine_checks = build_checks(preflight)
    chosen, defaults = build_settings(files.run)
    run = report.run
    verdict = _verdict(main, clock) if main is not None else _without_incident(run, preflight)
    earlier = incidents[:-1][-max(int(_MOST_EARLIER * scale), 1) :]
    return PageModel(
        title=f"{run.run_id or files.name}: {verdict.kind.lower()}",
        run=tuple(_run_facts(run, files, clock)),
        command=shown(" ".join(redacted_arguments(run.command[:1000])), 2000),
        verdict=verdict,
        main=_incident(main, clock, scale, files.failure_records, files.gpus) if main is not None else None,
        earlier=tuple(_incident(incident, clock, scale / 4, ()) for incident in earlier),
        timeline=whole,
        closing=closing,
        slow=tuple(tuple(_slow_lines(row, clock)) for row in report.slow_ranks),
        outputs=outputs.blocks,
        outputs_omitted=outputs.omitted,
        checks=bad_checks,
        checks_ok=fine_checks,
        matrix=build_matrix(preflight.matrix) if preflight is not None else None,
        versions=build_versions(preflight, files.run),
        environment=build_environment(preflight),
        settings=chosen,
        defaults=defaults,
        story=_story(report, clock),
        notes=tuple(shown(note, 300) for note in files.notes),
        version=shown(report.saferun_version or __version__, 40),
        world_size=_world_size(files),
        failures=(
            *build_failures(files.failure_records, culprits, clock, scale),
            *build_failures(files.earlier_failure_records, frozenset(), clock, scale / 4, is_earlier=True),
        ),
    )


def _distinct(incidents: Sequence[IncidentPart]) -> list[IncidentPart]:
    """The incidents, without a hang that became the failure after it: both have the same evidence."""
    kept: list[IncidentPart] = []
    for incident in incidents:
        last = kept[-1] if kept else None
        if last is not None and last.capture_dir and last.capture_dir == incident.capture_dir:
            kept.pop()
        kept.append(incident)
    return kept


def _described(run: RunJson | None) -> Launch:
    """The launch as run.json has it, where nothing went wrong and there is no report."""
    if run is None:
        return Launch()
    end = run.end
    ended = (end.time, end.exit_code, end.outcome) if end is not None else (None, None, "running")
    return Launch(run.run_id, run.host, ("saferun", *run.command), run.started_at, *ended)


def _world_size(files: RunFiles) -> int:
    sizes = (event.placement.world_size for host in files.hosts for event in host.events if event.placement is not None)
    return max(sizes, default=0)


# -------------------------------------------------------------------------------------------------------------- the run


def _run_facts(run: Launch, files: RunFiles, clock: Callable[[float], str]) -> Iterator[Fact]:
    yield Fact("Run", shown(run.run_id or (files.run.run_id if files.run is not None else ""), 100) or files.name)
    if run.outcome:
        code = f", exit code {run.exit_code}" if run.exit_code is not None else ""
        yield Fact("Outcome", f"{shown(run.outcome, 40)}{code}")
    size = _world_size(files)
    if size:
        hosts = max(len(files.hosts), 1)
        yield Fact("Ranks", f"{size} on {hosts} host{'s' if hosts > 1 else ''}" if hosts > 1 else str(size))
    if run.host:
        yield Fact("Host" if len(files.hosts) < 2 else "Leader", shown(run.host, 100))  # noqa: PLR2004 - one or several
    if run.started_at is not None:
        yield Fact("Started", clock(run.started_at))
        if run.ended_at is not None:
            yield Fact("Lasted", _lasted(run.ended_at - run.started_at))
    if run.run_dir:
        yield Fact("Files", shown(run.run_dir, 400))


def _lasted(seconds: float) -> str:
    if seconds < 120:  # noqa: PLR2004 - two minutes
        return duration_text(max(seconds, 0.0))
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h {minutes} min"
    return f"{hours} h {minutes} min {rest} s" if hours else f"{minutes} min {rest} s"


# ---------------------------------------------------------------------------------------------------------- the verdict


def _verdict(incident: IncidentPart, clock: Callable[[float], str]) -> Verdict:
    cause = incident.cause or Cause()
    hints = tuple(dict.fromkeys(shown(hint, _LONGEST) for hint in (incident.hint, cause.advice) if hint))
    lines = []
    quiet = incident.verdict
    if quiet is not None and quiet.stalled_s is not None:
        lines.append(stalled_text(quiet))
    lines.extend(shown(line, _LONGEST) for line in incident.findings[:_MOST_LINES])
    facts = [Fact("Attempt", str(incident.attempt))]
    if incident.time is not None:
        facts.append(Fact("Reported", clock(incident.time)))
    if incident.start_stage in _STAGES:
        facts.append(Fact("Start", _STAGES[incident.start_stage]))
    if cause.class_name:
        facts.append(Fact("Class", shown(cause.class_name, 100)))
    if cause.ranks:
        facts.append(Fact("Cause", rank_ranges(cause.ranks, LABEL_CHARACTERS)))
    if cause.location:
        facts.append(Fact("At", shown(cause.location, 300)))
    facts.append(Fact("What followed", _outcome(incident)))
    headline = shown(incident.headline, _LONGEST) or "the cause is not known"
    is_over = incident.outcome == "recovered"
    tone = "warn" if is_over else "bad"
    kind = "Hang" if incident.verdict is not None or incident.kind == "hang" else "Failure"
    return Verdict(tone, kind, _capital(headline), shown(cause.proof, _LONGEST), hints, tuple(lines), tuple(facts))


def _outcome(incident: IncidentPart) -> str:
    text = _OUTCOMES.get(incident.outcome, "")
    if incident.outcome == "recovered" and incident.recovered_after_s is not None:
        return f"The job recovered after {duration_text(incident.recovered_after_s)}."
    return text or shown(incident.outcome, 40)


def _without_incident(run: Launch, preflight: PreflightSection | None) -> Verdict:
    failed = [one for one in (preflight.results if preflight is not None else ()) if one.verdict == "fail"]
    if failed and run.outcome != "succeeded":
        first = failed[0]
        where = f"{shown(first.host, 100)}: " if first.host else ""
        hints = tuple(dict.fromkeys(shown(one.hint, _LONGEST) for one in failed[:_MOST_LINES] if one.hint))
        lines = tuple(f"{shown(one.host, 100)}: {shown(one.message, _LONGEST)}" for one in failed[1:_MOST_LINES])
        return Verdict("bad", "Preflight checks failed", f"{where}{shown(first.message, _LONGEST)}", "", hints, lines)
    tone = _ENDS.get(run.outcome, "plain")
    if run.outcome == "succeeded":
        return Verdict(tone, "Succeeded", "All ranks ended with exit code 0.")
    if run.outcome == "stopped":
        return Verdict(tone, "Stopped", "The launch was stopped by a user or the scheduler.")
    if run.outcome == "left":
        return Verdict(tone, "Left", "This host left the job, which can go on without it.")
    if run.outcome == "failed":
        return Verdict(tone, "Failed", f"The launch ended with exit code {run.exit_code}.")
    if run.outcome != "running":
        return Verdict("plain", "No report", "Nothing went wrong so far, or no report was written.")
    return Verdict("plain", "Running", "The launch had not ended when this page was made, or saferun was killed.")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------------------ incidents


def _incident(
    incident: IncidentPart,
    clock: Callable[[float], str],
    scale: float,
    records: Sequence[FailureRecord],
    gpus: Sequence[HostGpus] = (),
) -> IncidentRow:
    culprits = incident.culprits
    most = max(int(_MOST_LINES * 4 * scale), 20)
    return IncidentRow(
        verdict=_verdict(incident, clock),
        attempt=incident.attempt,
        clock=clock(incident.time) if incident.time is not None else "",
        outcome=_outcome(incident),
        stacks=build_stacks(incident.tree, culprits, scale),
        graph=build_wait_graph(incident),
        groups=build_group_tables(incident, scale),
        waits=_waits(incident),
        ends=_ends(incident, clock),
        tracebacks=tuple(_tracebacks(incident.tracebacks, scale)),
        gpus=build_gpus(gpus, scale),
        machine=build_machine(incident),
        kernel_log=tuple(shown(line, 400) for line in incident.kernel_log[-most:]),
        host_status=tuple(shown(line, 400) for line in incident.host_status[-most:]),
        cores=tuple((_core_text(core), tuple(_core_calls(core))) for core in incident.cores[: most // 4]),
        captures=tuple(_captures(incident)),
        truncated=tuple(shown(name, 60) for name in incident.truncated),
        steps=build_steps(incident, scale),
        calls=build_calls(incident, records, scale),
    )


def _waits(incident: IncidentPart) -> Table | None:
    culprits = incident.culprits
    groups = sorted(
        incident.wait_groups, key=lambda group: (not culprits.issuperset(group.ranks), len(group.ranks), group.ranks)
    )
    if all(group.kind == "dead" for group in groups):
        return None
    rows: list[tuple[str, ...]] = []
    odd = set()
    for group in groups[:_MOST_ENDS]:
        if culprits.issuperset(group.ranks) and len(groups) > 1:
            odd.add(len(rows))
        kind = shown(group.kind, 60).replace("_", " ")
        what = ": ".join(part for part in (kind, shown(group.detail, 200)) if part)
        rows.append((rank_ranges(group.ranks, LABEL_CHARACTERS), what, shown(group.location, 200) or "-"))
    return Table("Who waits in what", ("Ranks", "What", "Where"), tuple(rows), frozenset(odd)) if rows else None


def _ends(incident: IncidentPart, clock: Callable[[float], str]) -> Table | None:
    rows: list[tuple[str, ...]] = []
    odd = set()
    first = incident.first_failure
    for end in ([first] if first is not None else []) + list(incident.also_failed[:_MOST_ENDS]):
        if end is first:
            odd.add(len(rows))
        what = "failed first" if end is first else "failed later"
        rows.append((f"rank {end.rank}", what, _end_text(end), clock(end.time) if end.time is not None else "-"))
    described = {rank for peers in incident.lost_peers for rank in peers.ranks}
    for peers in incident.lost_peers[:_MOST_ENDS]:
        parts = (shown(peers.message, 300), shown(peers.call, 60), shown(peers.location, 200))
        rows.append(
            (rank_ranges(peers.ranks, LABEL_CHARACTERS), "failed because of it", ", ".join(filter(None, parts)), "-")
        )
    others = [rank for rank in incident.victims if rank not in described]
    if others:
        rows.append((rank_ranges(others, LABEL_CHARACTERS), "failed because of it", "-", "-"))
    if incident.stopped:
        rows.append((rank_ranges(incident.stopped, LABEL_CHARACTERS), "stopped because of it", "-", "-"))
    for host in incident.hosts:
        if host.lost_reason:
            text = f"{shown(host.lost_reason, 40)}: {shown(host.lost_message, 300)}"
            rows.append((rank_ranges(host.ranks, LABEL_CHARACTERS), f"host {shown(host.name, 60)} lost", text, "-"))
    return Table("How the ranks ended", ("Ranks", "What", "How", "When"), tuple(rows), frozenset(odd)) if rows else None


def _end_text(end: RankFailure) -> str:
    how = f"killed by {shown(end.signal, 40)}" if end.signal else f"exit code {end.exit_code}"
    return f"{how}{', core dumped' if end.core_dumped else ''}{', by saferun' if end.stopped_by_saferun else ''}"


def _tracebacks(tracebacks: Sequence[TracebackPart], scale: float) -> Iterator[OutputPiece]:
    for one in tracebacks[: max(int(_MOST_TRACEBACKS * scale), 1)]:
        lines = tuple(shown(line, 500) for line in one.lines[-_TRACEBACK_LINES:])
        if lines:
            yield OutputPiece(f"{rank_ranges(one.ranks, LABEL_CHARACTERS)}: {traceback_summary(lines)}", lines)


def _core_text(core: CoreSection) -> str:
    what = shown(core.failure, 300)
    is_kept = core.kept and bool(core.path)
    kept = f"kept as {shown(core.path, 300)}" if is_kept else "deleted after it had been read"
    address = f", address {shown(core.address, 40)}" if core.address else ""
    size = f" ({size_text(max(core.size_bytes, 0))})" if core.size_bytes else ""
    what = what or f"read by {shown(core.tool, 40) or 'no tool'}"
    state = f"{what}, {kept}{size}" if is_kept or not core.failure else what
    return f"rank {core.rank}, pid {core.pid}, {shown(core.signal, 40)}{address}: {state}"


def _core_calls(core: CoreSection) -> Iterator[Call]:
    yield from map(call_of, core.crashing_thread[:_MOST_LINES])


def _captures(incident: IncidentPart) -> Iterator[str]:
    """What was not captured, and why."""
    failures: dict[tuple[str, str], list[int | str]] = {}
    for one in incident.captures:
        if one.failure:
            whose = one.rank if one.rank is not None else shown(one.host, 60) or "host"
            failures.setdefault((shown(one.capture, 60), shown(one.failure, 300)), []).append(whose)
    for (capture, failure), owners in list(failures.items())[:_MOST_LINES]:
        ranks = [owner for owner in owners if isinstance(owner, int)]
        hosts = [owner for owner in owners if isinstance(owner, str)]
        whose = ", ".join([*([ranks_text(ranks)] if ranks else []), *hosts[:4]])
        yield f"{capture} of {whose}: {failure}"
    for line in incident.timed_out[:_MOST_LINES]:
        yield f"timed out: {shown(line, 300)}"


# ------------------------------------------------------------------------------------------------------------ the story


def _slow_lines(row: SlowPart, clock: Callable[[float], str]) -> Iterator[str]:
    when = f" ({clock(row.time)}, attempt {row.attempt})" if row.time is not None else ""
    lines = [shown(line, 400) for line in row.console_lines[:20]]
    yield f"{lines[0] if lines else f'the others wait for {ranks_text(row.ranks)}'}{when}"
    yield from lines[1:]


def _story(report: ReportPart, clock: Callable[[float], str]) -> Table | None:
    """Every incident, every decision and every host that was found bad, in the order of time."""
    rows: list[tuple[float, tuple[str, ...]]] = []
    for incident in report.incidents:
        at = incident.time or 0.0
        what = shown(incident.kind, 20)
        text = f"{shown(incident.headline, 600)}. {_outcome(incident)}"
        rows.append((at, (clock(at) if at else "-", str(incident.attempt), what, text)))
    for decision in report.decisions:
        at = decision.time or 0.0
        wait = f" (after {duration_text(decision.wait_s)})" if decision.wait_s else ""
        text = f"{shown(decision.message, 600)}{wait}"
        what = {"finish": "end"}.get(decision.next_step, shown(decision.next_step, 20))
        rows.append((at, (clock(at) if at else "-", str(decision.attempt), what, text)))
    for bad in report.bad_hosts:
        at = bad.time or 0.0
        text = f"{shown(bad.host, 100)}: {shown(bad.reason, 600)}"
        rows.append((at, (clock(at) if at else "-", str(bad.attempt), "bad host", text)))
    if len(rows) < 2 and not report.bad_hosts:  # noqa: PLR2004 - the verdict says it all
        return None
    rows.sort(key=lambda row: row[0])
    left = report.incidents_omitted + report.decisions_omitted + report.bad_hosts_omitted
    left += max(len(rows) - _MOST_STORY, 0)
    note = f"{left} more not shown." if left else ""
    head = ("When", "Attempt", "What", "Why, and what followed")
    return Table("Incidents, retries and decisions", head, tuple(row for _, row in rows[-_MOST_STORY:]), note=note)
