"""A failure or a hang on the console: the cause first, then where all ranks are, then what to do. Pure.

Fewer than 40 lines, however many ranks there are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from saferun.evidence.call_evidence import RankCalls
from saferun.evidence.diagnosis_values import Diagnosis, Traceback, WaitGroup
from saferun.evidence.job_evidence import CoreDump, Frame, HangVerdict, HostView
from saferun.model import RankEnd
from saferun.report.calls_text import console_calls
from saferun.report.failure_lines import console_locals, is_recorded
from saferun.report.text_diagram import WIDTH, frame_text, group_lines, is_user_code, rank_ranges, tree_lines
from saferun.report.verdict_text import single_ranks_text
from saferun.text.bounded_json import shown
from saferun.text.redaction import lines_without_keys
from saferun.text.wording import LONG_STEP, duration_text, ranks_text, size_text

_MOST_LINES = 39
_QUOTED_LINES = 12
_QUOTED_BESIDE_A_CORE = 6
_TRACEBACK_LINES = 14
_CORE_CALLS = 6
_GROUPS_IN_A_HANG = 8
_GROUPS_IN_A_FAILURE = 5
_TREE_LINES = 14
_TREE_LINES_IN_A_FAILURE = 8
# Fewer would be a fork without branches.
_FEWEST_TREE_LINES = 3
_FINDINGS = 4
_SEVERAL = 2
_SHOWN_HOSTS = 4
_PEER_LINE_BYTES = 1024
_FRAME = re.compile(r'\s{0,40}File "([^"]{1,600})", line \d')
# A frame, its source, and the marks below it.
_FRAME_LINES = 3
ABOVE = "  above: "
"""Begins the line that names a traceback which its ranks have printed on the console."""


def failure_text(
    diagnosis: Diagnosis,
    *,
    files: str | None,
    attempt: int,
    max_restarts: int,
    restarting: bool,
    decided: str = "",
    is_above: Callable[[Traceback], bool] | None = None,
    calls: Sequence[RankCalls] = (),
) -> list[str]:
    """What the user reads when an attempt has failed.

    Args:
        diagnosis: the cause.
        files: the run directory, if there is one.
        attempt: 0 for the first.
        max_restarts: how often the ranks may be started again.
        restarting: whether they are.
        decided: what follows and why, instead of that line.
        is_above: whether a traceback stands on this console already, as its ranks printed it; it is not quoted again.
        calls: the last calls of the ranks, where they are recorded.
    """
    head = [f"saferun: {shown(diagnosis.headline)}"]
    if diagnosis.hint:
        head.append(f"hint: {shown(diagnosis.hint)}")
    crash = _crash_lines(diagnosis.core)
    rest = " in report.txt" if files else ""
    quoted_output = _output_lines_of(diagnosis, rest, beside_a_core=bool(crash))
    cause = _cause_lines(diagnosis, [*head, *quoted_output, *crash])
    traceback = _traceback_of(diagnosis)
    if traceback is not None and is_above is not None and is_above(traceback):
        quoted_output = [f"{ABOVE}{quoted_output[0].strip().removesuffix(':')}"]
    quoted_output += console_locals(diagnosis, traceback)
    body = [*quoted_output, *cause, *crash, *console_calls(diagnosis, calls, has_traceback=traceback is not None)]
    # Dead ranks have lines of their own.
    living = [group for group in diagnosis.groups if group.kind != "dead"]
    where = _groups(living, diagnosis, _GROUPS_IN_A_FAILURE, rest)
    findings = _finding_lines(diagnosis, rest)
    tail = [*_fate_lines(diagnosis), *_advice_lines(diagnosis), *_core_lines(diagnosis.core)]
    if files:
        tail.append(f"  files: {shown(files)}")
    if decided:
        tail.append(f"saferun: {shown(decided)}")
    elif restarting:
        tail.append(f"saferun: starting all ranks again, restart {attempt + 1} of {max_restarts}")
    if where:
        where.insert(
            0, "  where the others were:" if diagnosis.first_failure is not None else "  where the ranks were:"
        )
    # One group is one line; only with several of them are the calls worth reading.
    room = _MOST_LINES - 1 - sum(map(len, (head, body, where, findings, tail)))
    if len(living) != 1 and room >= _FEWEST_TREE_LINES:
        where += _tree(diagnosis, min(room, _TREE_LINES_IN_A_FAILURE), rest, "  their calls, outermost first:")
    return [*head, *[*body, *where, *findings][: _MOST_LINES - len(head) - len(tail)], *tail]


def hang_text(
    diagnosis: Diagnosis,
    verdict: HangVerdict,
    *,
    host: str,
    files: str | None,
    on_hang: str,
    count: int,
    next_s: float | None,
    calls: Sequence[RankCalls] = (),
) -> list[str]:
    """What the user reads when nothing moves any more.

    Args:
        diagnosis: the cause.
        verdict: what was seen to stand still, and for how long.
        host: whose ranks these are, where there is one host.
        files: the run directory, if there is one.
        on_hang: what is done about it: ``report``, ``stop`` or ``restart``.
        count: how often this hang has been captured, 1 for the first time.
        next_s: seconds until the next capture; None: there is none.
        calls: the last calls of the ranks, where they are recorded.
    """
    rest = " in report.txt" if files else ""
    head = [f"saferun: {shown(diagnosis.headline)}"]
    if LONG_STEP not in diagnosis.headline:
        head.append(f"  {_verdict_text(verdict, count, diagnosis.hosts)}")
    body = _groups(diagnosis.groups, diagnosis, _GROUPS_IN_A_HANG, rest)
    whose = f"the ranks on {shown(host, 60)}" if len(diagnosis.hosts) < _SEVERAL else "all ranks"
    body += _tree(diagnosis, _TREE_LINES, rest, f"  calls of {whose}, outermost first:")
    body += [*_cause_lines(diagnosis, [*head, *body]), *_finding_lines(diagnosis, rest)]
    body += console_calls(diagnosis, calls)
    tail = []
    if diagnosis.hint:
        tail.append(f"hint: {shown(diagnosis.hint)}")
    tail += _advice_lines(diagnosis)
    if files:
        tail.append(f"  files: {shown(files)}")
    tail.append(f"saferun: {_next_step(verdict, on_hang, next_s)}")
    return [*head, *body[: _MOST_LINES - len(head) - len(tail)], *tail]


def suspected_hang_text(
    diagnosis: Diagnosis, *, files: str, certain_after_s: float = 0.0, on_hang: str = "report"
) -> list[str]:
    """What the user reads of a suspected hang where there is a report: one line, and what can be done, if anything.

    Args:
        diagnosis: the cause.
        files: the run directory. Its report has the whole of :func:`hang_text`.
        certain_after_s: after how many seconds without progress it is certain; 0.0: not by time alone.
        on_hang: what the user wants to be done about a hang; nothing of it is done about a suspected one.
    """
    headline = shown(diagnosis.headline)
    where = f"stacks in {shown(files).rstrip('/')}/report.txt"
    if LONG_STEP in headline:
        return [f"saferun: {headline}; {where}"]
    hint = [f"hint: {shown(diagnosis.hint)}"] if diagnosis.hint else _advice_lines(diagnosis)
    until = f" (--on-hang {on_hang} acts on certain hangs only)" if on_hang != "report" else ""
    until = f" (it counts as a hang after {duration_text(certain_after_s)})" if certain_after_s > 0 else until
    return [f"saferun: {headline}; job left running{until}, {where}", *hint]


def hang_goes_on_text(
    diagnosis: Diagnosis, verdict: HangVerdict, *, on_hang: str, count: int, next_s: float | None
) -> list[str]:
    """What the user reads of a hang that has been reported before and goes on: one line, and what is done about it.

    The arguments are those of :func:`hang_text`.
    """
    headline = shown(diagnosis.headline)
    if LONG_STEP not in headline:
        prefix, _, what = headline.partition(": ")
        headline = f"{prefix.replace(' hangs', ' still hangs').replace(' may hang', ' may still hang')} after "
        headline += f"{duration_text(verdict.lasted_s)}: {what}"
    next_step = _next_step(verdict, on_hang, next_s)
    if next_step.startswith("stopping"):
        return [f"saferun: {headline}", f"saferun: {next_step}"]
    process = f"next hang check in {duration_text(next_s)}" if next_s is not None else "no further hang checks"
    return [f"saferun: {headline}; reported {count} times, {process}"]


def peer_text(
    diagnosis: Diagnosis,
    *,
    leader: str,
    files: str | None,
    restarting: bool = False,
    attempt: int | None = None,
    max_restarts: int | None = None,
    decided: str = "",
) -> list[str]:
    """What users read on the consoles of all other hosts: two to four lines, each of at most one kibibyte.

    Args:
        diagnosis: the cause.
        leader: the host that has judged.
        files: its run directory, if there is one.
        restarting: whether all ranks are started again.
        attempt: 0 for the first; None: not shown.
        max_restarts: how often the ranks may be started again; None: not shown.
        decided: what follows and why, instead of that line.
    """
    lines = [f"saferun: {diagnosis.headline}"]
    if diagnosis.advice:
        lines.append(f"hint: {diagnosis.advice}")
    if files:
        lines.append(f"  report: {leader}:{files.rstrip('/')}/report.txt")
    elif len(lines) == 1:
        lines.append(f"  the console of {leader} has more")
    if decided:
        lines.append(f"saferun: {decided}")
    elif restarting:
        of = f", restart {attempt + 1} of {max_restarts}" if attempt is not None and max_restarts is not None else ""
        lines.append(f"saferun: starting all ranks again{of}")
    return [_within_bytes(shown(line, 1000)) for line in lines]


def _within_bytes(line: str) -> str:
    content = line.encode(errors="replace")
    if len(content) <= _PEER_LINE_BYTES:
        return line
    return content[: _PEER_LINE_BYTES - 3].decode(errors="ignore") + "…"


def recovery_text(lasted_s: float) -> str:
    """What the user reads when a job that hung moves again. ``lasted_s``: seconds since it last did."""
    return f"saferun: job resumed after {duration_text(lasted_s)}"


def core_text(core: CoreDump) -> str:
    """What became of a core, in one line; empty where there is none."""
    size = f" ({size_text(core.size_bytes)})" if core.size_bytes > 0 else ""
    failure = f": {shown(core.failure)}" if core.failure else ""
    if core.path and core.kept:
        return f"kept in {shown(core.path)}{size}{failure}"
    if core.path or core.threads:
        return f"deleted after it had been read{size}; --cores keep keeps it{failure}"
    return f"none{failure}" if failure else ""


# ---------------------------------------------------------------------------------------------------------------- parts


def _output_lines_of(diagnosis: Diagnosis, rest: str, *, beside_a_core: bool) -> list[str]:
    """The output of the first failed rank: its traceback, its last lines, or its error file."""
    output = diagnosis.output
    path = shown(output.stderr_path) if output is not None else ""
    traceback = _traceback_of(diagnosis)
    if traceback is not None:
        most = _QUOTED_BESIDE_A_CORE if beside_a_core else _TRACEBACK_LINES
        others = len(diagnosis.tracebacks) - 1
        more = f"; {others} other{'s' if others > 1 else ''}{rest}" if others else ""
        where = f", in {path}" if path else ""
        where = ", from its failure record" if is_recorded(traceback, output) else where
        head = f"  the traceback of {rank_ranges(traceback.ranks, 60)}{where}{more}:"
        return [head, *_quoted(_without_middle(lines_without_keys(traceback.lines), most))]
    if output is None:
        return []
    most = _QUOTED_BESIDE_A_CORE if beside_a_core else _QUOTED_LINES
    quoted = lines_without_keys(output.last_lines)[-most:]
    if _is_in_headline(quoted, diagnosis):
        return [f"  it wrote nothing else to stderr{f' ({path})' if path else ''}"]
    if quoted:
        return [f"  the last lines of its stderr{f' ({path})' if path else ''}:", *_quoted(quoted)]
    if output.error_message:
        return [f"  it recorded: {shown(output.error_message)}"]
    if _is_in_headline(output.last_stdout_lines, diagnosis):
        return ["  it wrote nothing to stderr, and nothing else to stdout"]
    if output.last_stdout_lines:
        head = "  it wrote nothing to stderr; the last lines of its stdout:"
        return [head, *_quoted(lines_without_keys(output.last_stdout_lines)[-_QUOTED_BESIDE_A_CORE:])]
    return ["  it wrote nothing to stderr"]


def _is_in_headline(lines: Sequence[str], diagnosis: Diagnosis) -> bool:
    """Whether this one line, all that there is, stands in the first line of the report."""
    text = shown(lines[0]).strip() if len(lines) == 1 else ""
    return bool(text) and text in shown(diagnosis.headline)


def _traceback_of(diagnosis: Diagnosis) -> Traceback | None:
    """The traceback to be shown: that of the first rank, else that of the cause."""
    first = (diagnosis.first_failure.rank,) if diagnosis.first_failure is not None else ()
    blamed = diagnosis.cause.ranks if diagnosis.cause is not None else ()
    for ranks in (first, blamed):
        for traceback in diagnosis.tracebacks:
            if traceback.lines and not set(ranks).isdisjoint(traceback.ranks):
                return traceback
    return None


def _without_middle(lines: Sequence[str], most: int) -> list[str]:
    """At most so many lines: without frames of libraries first, and of the rest without the middle.

    The line that names it stays, the end, where the exception is, and the frames of the user's code next to it.
    """
    if len(lines) <= most:
        return list(lines)
    begins = [index for index, line in enumerate(lines) if _FRAME.match(line)]
    ends = [*begins[1:], len(lines)] if begins else []
    frames = [(is_user_code(_frame(lines[begin])), begin, end) for begin, end in zip(begins, ends, strict=True)]
    kept = {0, len(lines) - 1}
    # The user's frames first, then the others; of both the innermost first. Then the end.
    parts = [range(begin, min(end, begin + _FRAME_LINES)) for _, begin, end in sorted(frames, reverse=True)]
    for part in (*parts, *(range(index, index + 1) for index in range(len(lines) - 1, 0, -1))):
        wanted = kept | set(part)
        if _length(wanted, len(lines)) <= most:
            kept = wanted
    shown_lines: list[str] = []
    before = -1
    for index in sorted(kept):
        if index > before + 1:
            gap = index - before - 1
            shown_lines.append(f"  … {gap} line{'s' if gap > 1 else ''} …")
        shown_lines.append(lines[index])
        before = index
    return shown_lines


def _frame(line: str) -> Frame:
    match = _FRAME.match(line)
    return Frame("", match[1] if match else "", 0)


def _length(kept: set[int], count: int) -> int:
    """How many lines are shown of these, with one for each gap between them."""
    return len(kept) + sum(index + 1 not in kept for index in kept if index + 1 < count)


def _quoted(lines: Iterable[str]) -> list[str]:
    return [f"  | {shown(line)}" for line in lines]


def _cause_lines(diagnosis: Diagnosis, shown_lines: Iterable[str]) -> list[str]:
    """What is known of the cause and does not stand in the lines before."""
    cause = diagnosis.cause
    if cause is None:
        return []
    text = "\n".join(shown_lines)
    # The headline may have something else between its parts.
    is_shown = all(part in text for part in shown(cause.message).split("; "))
    message = shown(cause.message) if cause.message and not is_shown else ""
    location = shown(cause.location) if cause.location and shown(cause.location) not in text else ""
    lines = []
    if message:
        lines.append(f"  cause: {message} at {location}" if location else f"  cause: {message}")
    elif location:
        lines.append(f"  at {location}")
    if cause.proof and shown(cause.proof.strip()) not in text:
        lines.append(f"  proof: {shown(cause.proof.strip())}")
    return lines


def _crash_lines(core: CoreDump | None) -> list[str]:
    """The calls of the thread that crashed, innermost first; the last one in the user's code is among them."""
    if core is None or not core.threads or not core.threads[0].frames:
        return []
    frames = core.threads[0].frames
    picks = list(range(min(len(frames), _CORE_CALLS)))
    users = next((index for index, frame in enumerate(frames) if is_user_code(frame)), None)
    if users is not None and users not in picks:
        picks[-1] = users
    address = f", address {shown(core.address, 40)}" if core.address else ""
    tool = f", read by {shown(core.tool, 40)}" if core.tool else ""
    lines = [f"  where it crashed (from its core{tool}{address}; innermost call first):"]
    before = -1
    for pick in picks:
        gap = pick - before - 1
        skipped = f"… {gap} call{'s' if gap > 1 else ''} …  " if gap else ""
        lines.append(f"  | {skipped}{frame_text(frames[pick], WIDTH - 4 - len(skipped))}")
        before = pick
    return lines


def _groups(groups: Sequence[WaitGroup], diagnosis: Diagnosis, budget: int, rest: str) -> list[str]:
    return group_lines(groups, culprits=_culprits(diagnosis), budget=budget, rest=rest)


def _tree(diagnosis: Diagnosis, budget: int, rest: str, title: str) -> list[str]:
    lines = tree_lines(diagnosis.tree, culprits=_culprits(diagnosis), budget=budget, rest=rest)
    return [title, *lines] if lines else []


def _culprits(diagnosis: Diagnosis) -> tuple[int, ...]:
    return diagnosis.cause.ranks if diagnosis.cause is not None else ()


def _finding_lines(diagnosis: Diagnosis, rest: str) -> list[str]:
    lines = [f"  {shown(line)}" for line in diagnosis.findings[:_FINDINGS]]
    left = len(diagnosis.findings) - _FINDINGS
    if left > 0:
        lines[-1] = f"  … {left + 1} more findings{rest}"
    return lines


def _how(diagnosis: Diagnosis) -> str:
    """How the victims failed, where most of them failed alike."""
    if not diagnosis.lost_peers:
        return ""
    most = max(diagnosis.lost_peers, key=lambda peers: len(peers.ranks))
    call = f" in {shown(most.call, 80)}" if most.call else ""
    location = f", {shown(most.location, 120)}" if most.location else ""
    whose = f"{ranks_text(most.ranks)}: " if set(most.ranks) != set(diagnosis.victims) else ""
    return f" ({whose}{shown(most.message, 160)}{call}{location})"


def _fate_lines(diagnosis: Diagnosis) -> list[str]:
    """What became of the other ranks."""
    lines = []
    victims = set(diagnosis.victims)
    others = [end for end in diagnosis.also_failed if end.rank not in victims]
    if others:
        lines.append(f"  failed after it: {_failures(others, diagnosis.hosts)}")
    if victims:
        lines.append(f"  failed because of it: {ranks_text(victims)}{_on(diagnosis.hosts, victims)}{_how(diagnosis)}")
    if diagnosis.stopped:
        lines.append(
            f"  stopped because of it: {ranks_text(diagnosis.stopped)}{_on(diagnosis.hosts, diagnosis.stopped)}"
        )
    if diagnosis.abandoned:
        lines.append(
            f"  could not be killed (uninterruptible, state D): local {ranks_text(diagnosis.abandoned)}; left behind"
        )
    if diagnosis.abandoned_ranks:
        where = _on(diagnosis.hosts, diagnosis.abandoned_ranks)
        names = f"{ranks_text(diagnosis.abandoned_ranks)}{where}"
        lines.append(f"  could not be killed (uninterruptible, state D): {names}; left behind")
    return lines


def _failures(ends: Iterable[RankEnd], hosts: Sequence[HostView]) -> str:
    by_status: dict[str, list[int]] = {}
    for end in ends:
        by_status.setdefault(end.status.description, []).append(end.rank)
    return shown(
        "; ".join(f"{ranks_text(ranks)}{_on(hosts, ranks)} ({message})" for message, ranks in by_status.items())
    )


def _on(hosts: Sequence[HostView], ranks: Iterable[int]) -> str:
    """Where ranks are: `` on node2``; nothing where there is one host."""
    if len(hosts) < _SEVERAL:
        return ""
    wanted = set(ranks)
    labels = [shown(host.label, 60) for host in hosts if not wanted.isdisjoint(host.ranks)]
    if not labels:
        return ""
    if len(labels) == len(hosts):
        return f" on all {len(labels)} hosts"
    return f" on {', '.join(labels)}" if len(labels) <= _SHOWN_HOSTS else f" on {len(labels)} hosts"


def _advice_lines(diagnosis: Diagnosis) -> list[str]:
    advice = diagnosis.cause.advice if diagnosis.cause is not None else ""
    return [f"hint: {shown(advice)}"] if advice and advice != diagnosis.hint else []


def _core_lines(core: CoreDump | None) -> list[str]:
    message = core_text(core) if core is not None else ""
    return [f"  core: {message}"] if message else []


# ---------------------------------------------------------------------------------------------------------------- hangs


def _verdict_text(verdict: HangVerdict, count: int, hosts: Sequence[HostView] = ()) -> str:
    ranks = f"{ranks_text(verdict.ranks, 60)}{_on(hosts, verdict.ranks)}"
    lasted = duration_text(verdict.lasted_s)
    match verdict.kind:
        case "quiescent":
            message = f"no rank has made progress for {lasted} (CPU, I/O, output)"
        case "stuck_collective":
            message = f"no collective has made progress for {lasted}, and all ranks are otherwise idle"
        case "spinning":
            message = f"{ranks} in a busy loop for {lasted}, and no other rank made progress"
        case kind:
            message = single_ranks_text(kind, ranks, verdict.lasted_s) or f"{shown(kind, 40)} for {lasted}"
    if not verdict.certain:
        message = f"suspected: {message}"
    return f"{message}; reported {count} times" if count > 1 else message


def _next_step(verdict: HangVerdict, on_hang: str, next_s: float | None) -> str:
    if verdict.certain and on_hang == "stop":
        return "stopping all ranks (--on-hang stop)"
    if verdict.certain and on_hang == "restart":
        return "stopping all ranks, to start them again (--on-hang restart)"
    process = f"next hang check in {duration_text(next_s)}" if next_s is not None else "no further hang checks"
    why = "--on-hang report" if verdict.certain else "suspected hangs are only reported"
    return f"job left running; {process} ({why})"
