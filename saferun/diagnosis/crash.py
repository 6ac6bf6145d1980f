"""Why an attempt failed: evidence of ranks that ended badly -> diagnosis. Pure.

The rank that the kernel reported first is often a victim: the culprit was still writing its traceback or its core. So
each failure is looked at by itself, and the root is the earliest among those that explain the most: what a rank brings
about alone, before a wait that took too long, before a connection that was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from saferun.diagnosis.causes import Failure, Standing, cause_of, read_failure, standing
from saferun.diagnosis.causes.failure import shortened
from saferun.diagnosis.causes.gpu import gpu_kernel_lines
from saferun.diagnosis.causes.signals import time_limit
from saferun.diagnosis.collectives import CollectiveFindings, compare, rank_words
from saferun.diagnosis.frames import UserCode
from saferun.diagnosis.stacks import merge
from saferun.diagnosis.tracebacks import clean_lines, likeness, merge_tracebacks
from saferun.diagnosis.waiting import Wait, group_waits, rank_waits
from saferun.evidence import Cause, Diagnosis, Evidence, RankOutput, Traceback
from saferun.model import RankEnd, signal_name

__all__ = ["diagnose_crash", "failed_by_itself"]

# An error file is stamped in whole seconds when the exception is raised; the exit follows when the interpreter has
# shut down. Only a difference beyond that rounding can put one failure before another.
_ERROR_FILE_RESOLUTION_S = 1.0
_MOST_KERNEL_LINES = 3
_MOST_UNFINISHED = 6
_EARLY_EXIT_ADVICE = (
    "no rank may end before all collectives are over: look for batches, epochs or branches that differ by rank"
)
_ELSEWHERE = "look at the other hosts, at the rank that ended first there, and at the network between them"


class _Case(NamedTuple):
    """One rank that failed by itself: when, why, and how well that explains the rest."""

    at: float
    failure: Failure
    cause: Cause
    standing: Standing

    @property
    def end(self) -> RankEnd:
        return self.failure.end


class _Verdict(NamedTuple):
    """The root: the rank that is shown, the cause, and the words of the first line."""

    first: RankEnd
    cause: Cause
    headline: str


def failed_by_itself(end: RankEnd) -> bool:
    """Whether a rank ended badly, and not because saferun told it to."""
    return not end.status.ok and not end.stopped_by_us


def diagnose_crash(evidence: Evidence) -> Diagnosis:
    """Name the cause, the rank that it lies with, and what became of the others.

    Args:
        evidence: what is known. Where no rank failed by itself, only what stopped them is told.
    """
    outputs = {output.local_rank: output for output in evidence.outputs}
    cases = _cases(evidence, outputs)
    findings = compare(evidence.capture.collectives, evidence.ranks)
    waits = _waits(evidence, findings)
    verdict = _judge(evidence, cases, findings, waits) if cases else None
    first = verdict.first if verdict is not None else None
    cause = verdict.cause if verdict is not None else None
    if evidence.stop_signum is not None:
        cause = _scheduler(evidence)
    elif evidence.trouble:
        cause = None
    core = next((core for core in evidence.cores if first is not None and core.pid == first.pid), None)
    return Diagnosis(
        headline=_headline(evidence, verdict),
        first=first,
        output=outputs.get(first.local_rank) if first is not None else None,
        also_failed=tuple(case.end for case in sorted(cases, key=lambda case: case.at) if case.end is not first),
        stopped=tuple(end.rank for end in evidence.ends if end.stopped_by_us),
        abandoned=evidence.abandoned,
        hint=evidence.trouble_hint,
        cause=cause,
        victims=_victims(cases, verdict),
        groups=group_waits(waits),
        tree=merge(evidence.capture.stacks, evidence.script, evidence.cwd),
        tracebacks=_tracebacks(cases, first),
        core=core,
        lines=_lines(evidence, findings, cause, waited=bool(cases) and cases[0].standing is Standing.TIMEOUT),
    )


# ---------------------------------------------------------------------------------------------------------------- cases


def _cases(evidence: Evidence, outputs: dict[int, RankOutput]) -> list[_Case]:
    """The ranks that failed by themselves, the best explanation first."""
    cases = []
    for end in evidence.ends:
        if not failed_by_itself(end):
            continue
        output = outputs.get(end.local_rank)
        failure = read_failure(evidence, end, output)
        cause = cause_of(failure)
        cases.append(_Case(_failed_at(end, output, evidence.started_at), failure, cause, standing(cause)))
    return sorted(cases, key=lambda case: (case.standing, case.at, case.end.rank))


def _failed_at(end: RankEnd, output: RankOutput | None, started_at: float) -> float:
    """When a rank failed, in seconds since the epoch: when it raised, if its error file can be believed."""
    started_time = end.time - (end.at - started_at)
    if output is None or not started_time - _ERROR_FILE_RESOLUTION_S <= output.error_time:
        return end.time
    return output.error_time if output.error_time < end.time - _ERROR_FILE_RESOLUTION_S else end.time


def _judge(evidence: Evidence, cases: Sequence[_Case], findings: CollectiveFindings, waits: Sequence[Wait]) -> _Verdict:
    root = cases[0]
    if root.standing is Standing.CULPRIT:
        return _crash_at_exit(evidence, cases, waits) or _culprit(evidence, root, cases)
    return (
        _mismatched(evidence, root, findings)
        or _early_exit(evidence, cases)
        or (
            _timed_out(evidence, root, findings, waits)
            if root.standing is Standing.TIMEOUT
            else _nobody(evidence, root)
        )
    )


def _culprit(evidence: Evidence, root: _Case, cases: Sequence[_Case]) -> _Verdict:
    """A rank brought it about alone, or several did alike."""
    alike = [case.end.rank for case in cases if _is_alike(case, root)]
    ranks = tuple(sorted({*root.cause.ranks, *alike}))
    others = [rank for rank in alike if rank != root.end.rank]
    tail = f"; {rank_words(others)} failed alike" if others else ""
    return _Verdict(root.end, root.cause._replace(ranks=ranks), f"{_told(evidence, root)}{tail}")


def _is_alike(case: _Case, root: _Case) -> bool:
    if case.standing is not root.standing or case.cause.class_name != root.cause.class_name:
        return False
    return case.cause.place == root.cause.place and likeness([case.cause.words]) == likeness([root.cause.words])


def _mismatched(evidence: Evidence, root: _Case, findings: CollectiveFindings) -> _Verdict | None:
    """Ranks waited for each other in different collectives, as the Flight Recorders of the living show."""
    if not findings.mismatched:
        return None
    mismatch = findings.mismatched[0]
    cause = Cause(
        "mismatched_collectives",
        "called another collective than the others",
        tuple(sorted({rank for one in findings.mismatched for rank in one.ranks})),
        mismatch.words,
        "every rank must make the same collectives, in the same order and with the same sizes: compare their paths",
    )
    return _Verdict(root.end, cause, f"{mismatch.words}; {_told(evidence, root)}")


def _early_exit(evidence: Evidence, cases: Sequence[_Case]) -> _Verdict | None:
    """Ranks that ended well while the others still needed them."""
    earliest = min(case.at for case in cases)
    early = [end for end in evidence.ends if end.status.ok and not end.stopped_by_us and end.time <= earliest]
    if not early:
        return None
    early.sort(key=lambda end: end.time)
    ranks = tuple(sorted(end.rank for end in early))
    them = "it" if len(ranks) == 1 else "them"
    words = f"exit code 0 while others still needed {them}"
    head = _who_and_when(evidence, early[0], "ended")
    more = f"; {rank_words(end.rank for end in early[1:])} likewise" if len(early) > 1 else ""
    victim = cases[0]
    cause = Cause("early_exit", words, ranks, victim.cause.proof, _EARLY_EXIT_ADVICE)
    return _Verdict(victim.end, cause, f"{head}: {words}{more}")


def _crash_at_exit(evidence: Evidence, cases: Sequence[_Case], waits: Sequence[Wait]) -> _Verdict | None:
    """A rank whose script was through, too early, and whose interpreter then crashed over what torch still had open."""
    root = cases[0]
    if root.failure.error is not None or not root.failure.python_was_over:
        return None
    bereft = any(wait.found.of_peers for wait in waits) or any(case.standing is not Standing.CULPRIT for case in cases)
    if not bereft and not _lost_peers(evidence):
        return None
    words = f"came to its end while others still needed it ({root.cause.words})"
    cause = root.cause._replace(class_name="early_exit", words=words, advice=_EARLY_EXIT_ADVICE)
    head = _who_and_when(evidence, root.end, "ended first")
    return _Verdict(root.end, cause, f"{head}: it {words}; {root.end.status.words}")


def _lost_peers(evidence: Evidence) -> bool:
    """Whether ranks that saferun stopped had lost a connection before."""
    outputs = {output.local_rank: output for output in evidence.outputs}
    stopped = [end for end in evidence.ends if end.stopped_by_us and not end.status.ok]
    return any(
        standing(cause_of(read_failure(evidence, end, outputs.get(end.local_rank)))) is Standing.VICTIM
        for end in stopped
    )


def _timed_out(evidence: Evidence, root: _Case, findings: CollectiveFindings, waits: Sequence[Wait]) -> _Verdict:
    """A rank waited too long. Who did not come is the cause, where it can be told."""
    cause = root.cause
    told = _told(evidence, root)
    if cause.ranks != (root.end.rank,) or cause.class_name == "connection_lost":
        return _Verdict(root.end, cause, told)
    idle = [wait for wait in waits if not wait.found.of_peers and wait.found.kind not in {"dead", "unanswering"}]
    if findings.culprits:
        words = findings.missing[0].words if findings.missing else ""
        return _Verdict(root.end, cause._replace(ranks=findings.culprits), f"{told}; {words}" if words else told)
    if idle:
        # They did something else than wait for others, when those had waited too long for them.
        ranks = tuple(wait.rank for wait in idle)
        words = f"{rank_words([idle[0].rank])} {idle[0].words}"
        return _Verdict(root.end, cause._replace(ranks=ranks), f"{told}; meanwhile {words}")
    return _Verdict(root.end, cause._replace(ranks=()), told)


def _nobody(evidence: Evidence, root: _Case) -> _Verdict:
    """There are victims only."""
    is_store = root.cause.class_name == "store_lost"
    cause = root.cause._replace(
        class_name="rendezvous_store_failure" if is_store else root.cause.class_name,
        words=f"{root.cause.words}; the cause is not among the ranks of this host",
        ranks=(),
        advice=_ELSEWHERE,
    )
    return _Verdict(root.end, cause, f"{_told(evidence, root)}; the cause is not among the ranks of this host")


def _victims(cases: Sequence[_Case], verdict: _Verdict | None) -> tuple[int, ...]:
    if verdict is None:
        return ()
    blamed = set(verdict.cause.ranks)
    is_culprit = cases[0].standing is Standing.CULPRIT
    return tuple(
        sorted(
            case.end.rank
            for case in cases
            if case.end.rank not in blamed
            and (case.standing is Standing.VICTIM or (case.standing is Standing.TIMEOUT and (is_culprit or blamed)))
        )
    )


# ---------------------------------------------------------------------------------------------------------------- words


def _headline(evidence: Evidence, verdict: _Verdict | None) -> str:
    if evidence.trouble:
        return evidence.trouble
    if evidence.stop_signum is not None:
        return f"stopped by {signal_name(evidence.stop_signum)}"
    if verdict is None:
        return "the attempt failed, and no rank ended badly by itself"
    return verdict.headline


def _who_and_when(evidence: Evidence, end: RankEnd, how: str) -> str:
    clock = f" at {end.clock}" if end.clock else ""
    return (
        f"rank {end.rank} ({evidence.host}, local rank {end.local_rank}, pid {end.pid}) {how}{clock}, "
        f"{end.at - evidence.started_at:.1f} s after the start"
    )


def _told(evidence: Evidence, case: _Case) -> str:
    """The first line: who, when, why, where, and how it ended."""
    cause, status = case.cause, case.end.status
    words = cause.words
    place, manner = case.failure.place_and_manner
    if cause.place:
        words += f", {manner if place == cause.place else 'at'} {cause.place}"
    # ``killed from outside (SIGKILL)`` says it all; ``exit code 1`` after an exception is still worth its words.
    if status.words not in words and (status.signum is None or f"({signal_name(status.signum)})" not in words):
        words += f"; {status.words}"
    return f"{_who_and_when(evidence, case.end, 'failed first')}: {words}"


def _waits(evidence: Evidence, findings: CollectiveFindings) -> tuple[Wait, ...]:
    """What those that lived were waiting in."""
    capture = evidence.capture
    ranks = sorted({*(dump.rank for dump in capture.stacks), *(look.rank for look in capture.looks)})
    if not ranks:
        return ()
    dead = {end.rank: end.status.words for end in evidence.ends if not end.stopped_by_us}
    user = UserCode(evidence.script, evidence.cwd)
    return rank_waits(capture, findings, ranks=ranks, dead=dead, hang=None, user=user)


def _scheduler(evidence: Evidence) -> Cause | None:
    """Why the launch was told to stop, where the scheduler says so in the ranks' output."""
    lines = (
        line for output in evidence.outputs for line in (*output.last_lines[-10:], *output.last_stdout_lines[-10:])
    )
    return time_limit(clean_lines(lines))


def _tracebacks(cases: Sequence[_Case], first: RankEnd | None) -> tuple[Traceback, ...]:
    """What they printed, the root's first."""
    ordered = sorted(cases, key=lambda case: case.end is not first)
    return merge_tracebacks((case.end.rank, _printed(case.failure)) for case in ordered)


def _printed(failure: Failure) -> Sequence[str]:
    if failure.error is not None and any(block.frames for block in failure.error.blocks):
        return failure.error.lines
    return failure.fatal.lines if failure.fatal is not None else ()


def _lines(evidence: Evidence, findings: CollectiveFindings, cause: Cause | None, *, waited: bool) -> tuple[str, ...]:
    """What else is worth a line."""
    # While a job is well, ranks are a few calls apart too. Only where one has waited too long does that mean anything.
    lines = [*findings.lines] if waited else [mismatch.words for mismatch in findings.mismatched]
    lines += gpu_kernel_lines(evidence.kernel_lines)[-_MOST_KERNEL_LINES:]
    unfinished = evidence.capture.unfinished
    if unfinished:
        more = f" and {len(unfinished) - _MOST_UNFINISHED} more" if len(unfinished) > _MOST_UNFINISHED else ""
        lines.append(f"not ready in time: {', '.join(unfinished[:_MOST_UNFINISHED])}{more}")
    proof = cause.proof if cause is not None else ""
    return tuple(dict.fromkeys(shortened(line) for line in lines if line != proof))
