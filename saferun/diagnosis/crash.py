"""Why an attempt failed: evidence of ranks that ended badly -> diagnosis. Pure.

The rank that the kernel reported first is often a victim: the culprit was still writing its traceback or its core. So
each failure is judged by itself, and the root is the earliest among those that explain the most: what a rank brings
about alone, before a wait that took too long, before a connection that was lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.alike_tracebacks import merge_tracebacks
from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.causes.failure import Failure, read_failure, shortened
from saferun.diagnosis.causes.fatal_signals import PIPE_WITHOUT_READER, time_limit
from saferun.diagnosis.causes.gpu import broken_gpu
from saferun.diagnosis.collectives import CollectiveFindings, compare
from saferun.diagnosis.crash_cases import (
    CLOCKS_DIFFER_S,
    Case,
    cases_of,
    failed_by_itself,
    is_alike,
    less_raised_for_others,
    stopped_cases,
    who_and_when,
)
from saferun.diagnosis.early_exits import ADVICE as EARLY_EXIT_ADVICE
from saferun.diagnosis.early_exits import CLASS_NAME as EARLY_EXIT
from saferun.diagnosis.early_exits import caught_errors, early_ends, early_exit, with_early_exit
from saferun.diagnosis.gpu_errors import error_in, gpu_lines
from saferun.diagnosis.job_end import end_of_job, ended_by_signal, silent_lines
from saferun.diagnosis.job_hosts import Hosts, hosts_text
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.judgement import Judgement
from saferun.diagnosis.lost_peers import lost_peers
from saferun.diagnosis.merged_stacks import merge
from saferun.diagnosis.network_faults import (
    NETWORK_CLASSES,
    broken_between,
    complaints_of,
    link_complaints,
    refusals,
    wrong_interface,
)
from saferun.diagnosis.rank_waits import Wait, group_waits, waits_of
from saferun.diagnosis.timeouts import (
    advice_on,
    idle,
    is_timeout,
    not_busy,
    unfinished_calls,
    unseen,
    waited,
    who_is_late,
)
from saferun.diagnosis.tracebacks import clean_lines
from saferun.diagnosis.unexplained_loss import unexplained_loss
from saferun.evidence.diagnosis_values import Cause, Diagnosis, Traceback
from saferun.evidence.job_evidence import Evidence
from saferun.model import RankEnd, signal_name
from saferun.text.wording import ranks_text

_MOST_KERNEL_LINES = 3
_AT_ITS_END = frozenset({"interpreter", "unanswering"})
_MOST_UNFINISHED = 6
_LONGEST_LAST_LINE = 160


def diagnose_crash(evidence: Evidence) -> Diagnosis:
    """Name the cause, the rank that it lies with, and what became of the others.

    Args:
        evidence: what is known. Where no rank failed by itself, only what stopped them is named.
    """
    hosts = Hosts(evidence)
    outputs = evidence.outputs_by_rank
    cases = cases_of(evidence, hosts, outputs)
    findings = compare(evidence.capture.collectives, evidence.ranks)
    waits = waits_of(evidence, hosts, findings)
    ended = end_of_job(evidence, hosts, is_a_ranks=bool(cases) and cases[0].role is Role.CULPRIT)
    begun = {case.end.rank for case in cases if case.afterwards}
    stopped_with_errors = less_raised_for_others(evidence, stopped_cases(evidence, hosts), cases)
    own = [case for case in stopped_with_errors if case.end.rank not in begun]
    # They have the root's error, and saferun stopped them before they ended by themselves.
    alike = [case for case in own if cases and case.end is not cases[0].end and is_alike(case, cases[0])]
    judgement = _judge(evidence, hosts, [*cases, *alike], findings, waits) if cases and ended is None else None
    first = judgement.first if judgement is not None else None
    cause = ended.cause if ended is not None else judgement.cause if judgement is not None else None
    if evidence.stop_signum is not None:
        cause = _scheduler(evidence) or (ended and ended.cause)
    elif evidence.error and ended is None:
        cause = None
    victims = _victims(cases, judgement) if ended is None else _collateral(cases)
    by_signal = ended_by_signal(evidence, ended)
    if first is not None or ended is not None:
        victims = tuple(sorted({*victims, *_collateral(own)} - by_signal))
    failed = [case.end for case in sorted(cases, key=lambda case: case.at) if case.end.rank not in by_signal]
    # How they failed says more of them than that they were about to end when they were captured.
    failures = {*victims, *begun, *(case.end.rank for case in alike)}
    victims = _less_blamed(victims, judgement)
    stopped = [end.rank for end in evidence.ends if end.stopped_by_us or end.rank in by_signal]
    waits = tuple(wait for wait in waits if wait.rank not in failures or wait.found.kind not in _AT_ITS_END)
    its_process = (first.rank, first.pid) if first is not None else None
    core = next((core for core in evidence.cores if (core.rank, core.pid) == its_process), None)
    headline = _headline(evidence, ended, judgement)
    is_late = bool(cases) and cases[0].role is Role.TIMEOUT
    return Diagnosis(
        headline=headline,
        first_failure=first,
        output=outputs.get(first.rank) if first is not None else None,
        also_failed=tuple(end for end in failed if end is not first),
        stopped=tuple(rank for rank in stopped if rank not in failures and (first is None or rank != first.rank)),
        abandoned=evidence.abandoned,
        # What ended the job has advice of its own.
        hint=evidence.error_hint if ended is None else "",
        cause=cause,
        victims=victims,
        groups=group_waits(waits),
        tree=merge(evidence.capture.stacks, evidence.script, evidence.cwd),
        tracebacks=_tracebacks([*cases, *alike], first, _caught(evidence, hosts, cases, cause)),
        core=core,
        findings=(*silent_lines(hosts, headline), *_lines(evidence, findings, cause, waited=is_late)),
        abandoned_ranks=tuple(sorted(rank for host in evidence.hosts for rank in host.abandoned_ranks)),
        hosts=evidence.hosts,
        lost_peers=lost_peers(
            (case.failure, case.cause._replace(message=waited(case.cause, case.end.rank)))
            for case in [*cases, *own]
            if case.end.rank in victims
        ),
    )


def _judge(
    evidence: Evidence, hosts: Hosts, cases: Sequence[Case], findings: CollectiveFindings, waits: Sequence[Wait]
) -> Judgement:
    root = cases[0]
    if root.role is Role.CULPRIT:
        return _crash_at_exit(evidence, hosts, cases, waits) or _culprit(evidence, hosts, root, cases)
    return (
        _broken_gpu(evidence, hosts, cases)
        or _mismatched(evidence, hosts, root, findings)
        or _early_exit(evidence, hosts, cases, findings, waits)
        or _network(evidence, hosts, cases, findings, waits)
        or (
            _timed_out(evidence, hosts, cases, findings, waits)
            if root.role is Role.TIMEOUT
            else _victims_only(evidence, hosts, cases, findings)
        )
    )


def _broken_gpu(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> Judgement | None:
    """Ranks lost or waited for one whose GPU is broken, and which did not fail by itself."""
    root = cases[0]
    for end in evidence.ends:
        if not end.stopped_by_us:
            continue
        owners = hosts.gpu_owners(end.rank)
        for line in hosts.kernel_lines(end.rank):
            error = error_in(line)
            if error is not None and error.is_fatal and owners.rank_of(error) == end.rank:
                cause = broken_gpu(read_failure(evidence, end, None, hosts), error)._replace(location="")
                head = f"{hosts.who(end)}: {cause.message}"
                return Judgement(cause, f"{head}; {_first_line(evidence, hosts, root)}", root.end)
    return None


def _network(
    evidence: Evidence, hosts: Hosts, cases: Sequence[Case], findings: CollectiveFindings, waits: Sequence[Wait]
) -> Judgement | None:
    """The network between hosts, where no rank holds up the others."""
    if not hosts.are_several:
        return None
    root = cases[0]
    complaints = complaints_of((case.at, case.failure) for case in cases)
    interface = wrong_interface(complaints, hosts)
    if interface is not None:
        return Judgement(interface, f"{interface.message}; {_first_line(evidence, hosts, root)}", root.end)
    timed_out = root.role is Role.TIMEOUT
    if timed_out and findings.culprits:
        return None
    links = link_complaints(evidence.capture.links)
    if timed_out and not_busy(idle(waits), root.cause):
        # A rank that does something else explains silence, and not that a host refuses another's connections.
        links, complaints = [], refusals(complaints)
        if not complaints:
            return None
    # A host whose evidence is missing may have the rank that failed.
    if not timed_out and any(not host.has_evidence for host in hosts.all):
        return None
    broken = broken_between([*links, *complaints], hosts, findings, timed_out=timed_out)
    if broken is None:
        return None
    return Judgement(broken.cause, f"{broken.headline}; {_first_line(evidence, hosts, root)}", root.end)


def _culprit(evidence: Evidence, hosts: Hosts, root: Case, cases: Sequence[Case]) -> Judgement:
    """A rank brought it about alone, or several did alike."""
    alike = [*dict.fromkeys(case.end.rank for case in cases if is_alike(case, root))]
    ranks = tuple(sorted({*root.cause.ranks, *alike}))
    others = [rank for rank in alike if rank != root.end.rank]
    where = f" ({hosts_text(hosts.of_ranks(others))})" if others and hosts.are_several else ""
    tail = f"; {ranks_text(others)}{where} failed in the same way" if others else ""
    return Judgement(root.cause._replace(ranks=ranks), f"{_first_line(evidence, hosts, root)}{tail}", root.end)


def _mismatched(evidence: Evidence, hosts: Hosts, root: Case, findings: CollectiveFindings) -> Judgement | None:
    """Ranks waited for each other in different collectives, as the Flight Recorders of the living show."""
    if not findings.mismatched:
        return None
    mismatch = findings.mismatched[0]
    cause = Cause(
        "mismatched_collectives",
        "called a different collective",
        tuple(sorted({rank for one in findings.mismatched for rank in one.ranks})),
        mismatch.message,
        "all ranks must call the same collectives, in the same order, with the same sizes: compare their code paths",
    )
    return Judgement(cause, f"{mismatch.message}; {_first_line(evidence, hosts, root)}", root.end)


def _early_exit(
    evidence: Evidence, hosts: Hosts, cases: Sequence[Case], findings: CollectiveFindings, waits: Sequence[Wait]
) -> Judgement | None:
    """Ranks that ended well while the others still needed them; where a living rank stays away as well, with that."""
    root = cases[0]
    early = early_exit(evidence, hosts, cases)
    if early is None or not is_timeout(root.cause):
        return early
    failed = [case.end.rank for case in cases if case.role is Role.TIMEOUT]
    if not findings.culprits and not not_busy(idle(waits, failed), root.cause):
        return early
    judgement = _timed_out(evidence, hosts, cases, findings, waits)
    ended = {end.rank for end in evidence.ends if end.status.ok}
    if not {*judgement.cause.ranks} - ended - {root.end.rank}:
        return early
    if findings.culprits and _are_strangers(evidence, early.cause.ranks):
        return judgement
    return with_early_exit(evidence, hosts, judgement, early)


def _are_strangers(evidence: Evidence, ranks: Sequence[int]) -> bool:
    """Whether no call that ranks still wait in is one of a group that has these ranks, by the Flight Recorders."""
    groups = [group for one in evidence.capture.collectives for group in one.groups]
    waiting = [group for group in groups if any(not call.retired for call in group.calls)]
    return bool(waiting) and all(group.ranks and {*group.ranks}.isdisjoint(ranks) for group in waiting)


def _crash_at_exit(evidence: Evidence, hosts: Hosts, cases: Sequence[Case], waits: Sequence[Wait]) -> Judgement | None:
    """A rank whose script was through, too early, and whose interpreter then crashed over what torch still had open."""
    root = cases[0]
    if root.failure.error is not None or not root.failure.python_was_over:
        return None
    has_victims = any(wait.found.of_peers for wait in waits) or any(case.role is not Role.CULPRIT for case in cases)
    if not has_victims and not _lost_peers(evidence, hosts):
        return None
    message = f"came to its end while others still needed it ({root.cause.message})"
    cause = root.cause._replace(class_name=EARLY_EXIT, message=message, advice=EARLY_EXIT_ADVICE)
    head = who_and_when(evidence, hosts, root.end, "ended first")
    return Judgement(cause, f"{head}: it {message}; {root.end.status.description}", root.end)


def _lost_peers(evidence: Evidence, hosts: Hosts) -> bool:
    """Whether ranks that saferun stopped had lost a connection before."""
    outputs = evidence.outputs_by_rank
    stopped = [end for end in evidence.ends if end.stopped_by_us and not end.status.ok]
    return any(
        role_of(judged_failure(evidence, end, outputs.get(end.rank), hosts)[1]) is Role.VICTIM for end in stopped
    )


def _timed_out(
    evidence: Evidence, hosts: Hosts, cases: Sequence[Case], findings: CollectiveFindings, waits: Sequence[Wait]
) -> Judgement:
    """A rank waited too long. Who did not come is the cause, where that is known."""
    root = cases[0]
    cause = root.cause
    headline = _first_line(evidence, hosts, root)
    if cause.class_name == "fabric_error":
        # The one that noticed it is no more the cause than the one that it names.
        return Judgement(cause._replace(ranks=()), headline, root.end)
    if cause.class_name == "connection_lost":
        return Judgement(cause, headline, root.end)
    also = sorted(case.end.rank for case in [*cases[1:], *stopped_cases(evidence, hosts)] if case.role is Role.TIMEOUT)
    others = idle(waits, [root.end.rank, *also])
    late = who_is_late(evidence, hosts, root.failure, cause, findings, others)
    if late is not None and not is_timeout(cause):
        # It was refused something at once: what the others did explains that only perhaps.
        doing = f"meanwhile {ranks_text([others[0].rank])} {others[0].description}" if others else late.message
        return Judgement(cause._replace(ranks=late.ranks), f"{headline}; {doing}", root.end)
    if late is not None:
        message = "" if cause.message in late.message else waited(cause, root.end.rank)
        cause = cause._replace(ranks=late.ranks, message=message or cause.message, advice=advice_on(late.ranks))
        second = _first_line(evidence, hosts, root, "timed out", message)
        also = [rank for rank in dict.fromkeys(also) if rank not in {root.end.rank, *late.ranks}]
        more = f"; {ranks_text(also)} timed out as well" if also else ""
        return Judgement(cause, f"{late.message}; {second}{more}", root.end)
    if findings.suspects and len(findings.suspects) < len(waits):
        stuck = next((one for one in findings.stuck if {*findings.suspects}.intersection(one.waiting)), None)
        message = f"; {stuck.message}" if stuck is not None else ""
        return Judgement(cause._replace(ranks=findings.suspects), f"{headline}{message}", root.end)
    return Judgement(cause._replace(ranks=()), f"{headline}{unseen(others, cause)}", root.end)


def _victims_only(evidence: Evidence, hosts: Hosts, cases: Sequence[Case], findings: CollectiveFindings) -> Judgement:
    """There are victims only."""
    root = cases[0]
    head = _first_line(evidence, hosts, root)
    if root.cause.class_name == PIPE_WITHOUT_READER:
        # Ranks have no pipes to each other: nothing shows that another one is the cause.
        return Judgement(root.cause, head, root.end)
    loss = unexplained_loss(evidence, hosts, root, cases, findings)
    is_store = root.cause.class_name == "store_lost"
    cause = root.cause._replace(
        class_name="rendezvous_store_failure" if is_store else root.cause.class_name,
        message=f"{root.cause.message}; {loss.where}",
        ranks=(),
        advice=loss.advice,
    )
    return Judgement(cause, f"{head}; {loss.where}{loss.meanwhile}", root.end)


def _victims(cases: Sequence[Case], judgement: Judgement | None) -> tuple[int, ...]:
    if judgement is None:
        return ()
    if judgement.cause.class_name in NETWORK_CLASSES:
        return _collateral(cases)
    blamed = set(judgement.cause.ranks)
    is_culprit = cases[0].role is Role.CULPRIT
    return tuple(
        sorted(
            case.end.rank
            for case in cases
            if case.end.rank not in blamed
            # What the first of them is a victim of is not known: not of itself.
            and (blamed or case.end is not judgement.first)
            and (case.role is Role.VICTIM or (case.role is Role.TIMEOUT and (is_culprit or blamed)))
        )
    )


def _less_blamed(victims: tuple[int, ...], judgement: Judgement | None) -> tuple[int, ...]:
    """The victims; what a rank that came too late has lost in the end is no one else's fault."""
    if judgement is None or judgement.cause.class_name in NETWORK_CLASSES:
        return victims
    return tuple(rank for rank in victims if rank not in judgement.cause.ranks)


def _collateral(cases: Sequence[Case]) -> tuple[int, ...]:
    """The ranks that failed because the job had lost something else than a rank."""
    return tuple(sorted(case.end.rank for case in cases if case.role is not Role.CULPRIT))


# ------------------------------------------------------------------------------------------------------------- messages


def _headline(evidence: Evidence, ended: Judgement | None, judgement: Judgement | None) -> str:
    if ended is not None:
        return ended.headline
    if evidence.error:
        return evidence.error
    if evidence.stop_signum is not None:
        return f"stopped by {signal_name(evidence.stop_signum)}"
    if judgement is None:
        return "the attempt failed, and no rank ended badly by itself"
    return judgement.headline


def _first_line(evidence: Evidence, hosts: Hosts, case: Case, how: str = "", message: str | None = None) -> str:
    """The first line: who, when, why, where, and how it ended.

    Args:
        evidence: of all.
        hosts: of the job.
        case: the rank.
        how: what became of it; empty: it failed first, unless its victims ended before it.
        message: why, instead of the message of its cause; empty: that is clear already.
    """
    cause, status = case.cause, case.end.status
    is_first = not any(failed_by_itself(end) and end.time < case.at - CLOCKS_DIFFER_S for end in evidence.ends)
    end = case.end
    # It raised then, and was stopped while its process ended: the signal is not part of the cause.
    was_ending = end.stopped_by_us and case.at < end.time
    if was_ending:
        end = end._replace(at=end.at - (end.time - case.at), clock="")
    line = who_and_when(evidence, hosts, end, how or ("failed first" if is_first else "failed"))
    message = cause.message if message is None else message
    line += f": {message}" if message else ""
    location, manner = case.failure.location_and_manner
    if cause.location:
        line += f", {manner if location == cause.location else 'at'} {cause.location}"
    line += f" ({case.afterwards})" if case.afterwards else ""
    line_after = shortened(case.failure.line_after, _LONGEST_LAST_LINE)
    line += f"; its last line of output: {line_after}" if line_after and line_after not in line else ""
    if was_ending:
        return f"{line}; stopped before its process had ended"
    # ``killed from outside (SIGKILL)`` is enough; ``exit code 1`` after an exception is still worth a mention.
    if status.description not in message and (
        status.signum is None or f"({signal_name(status.signum)})" not in message
    ):
        line += f"; {status.description}"
    return line


def _scheduler(evidence: Evidence) -> Cause | None:
    """Why the launch was stopped, where the scheduler has written it into the ranks' output."""
    lines = (
        line for output in evidence.outputs for line in (*output.last_lines[-10:], *output.last_stdout_lines[-10:])
    )
    return time_limit(clean_lines(lines))


def _tracebacks(cases: Sequence[Case], first: RankEnd | None, caught: Sequence[Failure] = ()) -> tuple[Traceback, ...]:
    """What they printed, the root's first; before that what ranks had caught that left the others."""
    by_rank = {failure.end.rank: failure for failure in caught}
    for case in sorted(cases, key=lambda case: case.end is not first):
        by_rank.setdefault(case.end.rank, case.failure)
    return merge_tracebacks((rank, _printed(failure)) for rank, failure in by_rank.items())


def _caught(evidence: Evidence, hosts: Hosts, cases: Sequence[Case], cause: Cause | None) -> list[Failure]:
    """The errors of ranks that ended with exit code 0, where those are the cause."""
    if cause is None:
        return []
    early = [end for end in early_ends(evidence, hosts, cases) if end.rank in cause.ranks]
    return [one.failure for one in caught_errors(evidence, hosts, early)]


def _printed(failure: Failure) -> Sequence[str]:
    if failure.error is not None and any(block.frames for block in failure.error.blocks):
        return failure.error.lines
    return failure.fatal.lines if failure.fatal is not None else ()


def _lines(evidence: Evidence, findings: CollectiveFindings, cause: Cause | None, *, waited: bool) -> tuple[str, ...]:
    """What else is worth a line."""
    # While a job is well, ranks are a few calls apart too. Only where one has waited too long does that mean anything.
    lines = [*findings.shown_lines] if waited else [mismatch.message for mismatch in findings.mismatched]
    if waited:
        lines += unfinished_calls(evidence)
    lines += gpu_lines(evidence.kernel_lines)[-_MOST_KERNEL_LINES:]
    unfinished = evidence.capture.timed_out
    if unfinished:
        more = f" and {len(unfinished) - _MOST_UNFINISHED} more" if len(unfinished) > _MOST_UNFINISHED else ""
        lines.append(f"captures timed out: {', '.join(unfinished[:_MOST_UNFINISHED])}{more}")
    proof = cause.proof if cause is not None else ""
    return tuple(dict.fromkeys(shortened(line) for line in lines if line != proof))
