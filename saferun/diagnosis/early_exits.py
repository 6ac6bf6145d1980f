"""Ranks that ended with exit code 0 before others failed that may have needed them. Pure.

Some had an error of their own all the same: a script that logs its exception and goes on to its end exits with 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.causes.failure import Failure, shortened
from saferun.diagnosis.crash_cases import CLOCKS_DIFFER_S, Case, who_and_when
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.judgement import Judgement
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.lost_peers import call_of
from saferun.diagnosis.tracebacks import ends_with_traceback
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence
from saferun.model import ExitStatus, RankEnd, Value
from saferun.text.wording import ranks_text

CLASS_NAME = "early_exit"
ADVICE = "no rank may end before all collectives are over: look for batches, epochs or branches that differ by rank"
_CAUGHT_ADVICE = (
    "look at that error: the script caught it and ended with exit code 0; let it raise, so that all ranks stop because "
    "of it"
)
_HARMLESS_AT_THE_END = frozenset({"remote_service_error", "name_resolution", "name_unknown"})
_LONGEST_MESSAGE = 160
_NEEDED = " while others still needed "
_MARKER = "Traceback (most recent call last):"
# How a log marks what the program goes on after.
_BELOW_ERROR = LazyPattern(r"\b(?:DEBUG|INFO|WARN|WARNING)\b|\[?[DIW]\d{4} \d\d:\d\d")


class CaughtError(Value):
    """An error that a rank had printed last before it ended with exit code 0."""

    failure: Failure
    cause: Cause


def early_ends(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> list[RankEnd]:
    """The ranks that ended well before the first of these failures that is about another rank, earliest first."""
    times = [case.at for case in cases if _is_about_peers(case)]
    if not times:
        return []
    earliest = min(times) + (CLOCKS_DIFFER_S if hosts.are_several else 0.0)
    early = [end for end in evidence.ends if end.status.ok and not end.stopped_by_us and end.time <= earliest]
    return sorted(early, key=lambda end: end.time)


def _is_about_peers(case: Case) -> bool:
    """Whether what a rank lost was another rank: a connection of its own may be to anything."""
    return case.cause.class_name != "connection_lost" or bool(call_of(case.failure))


def caught_errors(evidence: Evidence, hosts: Hosts, ends: Sequence[RankEnd]) -> list[CaughtError]:
    """The errors that ranks which ended well had printed last, less those that another rank had brought about."""
    return [one for one in _last_errors(evidence, hosts, ends) if role_of(one.cause) is Role.CULPRIT]


def _last_errors(evidence: Evidence, hosts: Hosts, ends: Sequence[RankEnd]) -> list[CaughtError]:
    """The errors that ranks which ended well had printed last, less those that they got over."""
    outputs = evidence.outputs_by_rank
    found = []
    for end in ends:
        output = outputs.get(end.rank)
        if output is None or not any(map(_has_traceback_last, (output.last_lines, output.last_stdout_lines))):
            continue
        failure, cause = judged_failure(evidence, end._replace(status=ExitStatus(1, None)), output, hosts)
        error = failure.error
        if error is None or error.is_aside or failure.line_after or _BELOW_ERROR.search(error.before):
            continue
        found.append(CaughtError(failure._replace(end=end), cause))
    return found


def _has_traceback_last(lines: Sequence[str]) -> bool:
    return any(_MARKER in line for line in lines) and ends_with_traceback(lines)


def early_exit(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> Judgement | None:
    """Ranks that ended well while the others still needed them."""
    early = early_ends(evidence, hosts, cases)
    if not early:
        return None
    victim = next(case for case in cases if _is_about_peers(case))
    errors = _last_errors(evidence, hosts, early)
    caught = [one for one in errors if role_of(one.cause) is Role.CULPRIT]
    if caught:
        lost = {one.failure.end.rank for one in errors} - {one.failure.end.rank for one in caught}
        return _caught(evidence, hosts, caught, [end for end in early if end.rank not in lost], victim)
    them = "it" if len(early) == 1 else "them"
    message = f"exit code 0{_NEEDED}{them}"
    cause = Cause(CLASS_NAME, message, tuple(sorted(end.rank for end in early)), victim.cause.proof, ADVICE)
    head = who_and_when(evidence, hosts, early[0], "ended")
    more = f"; {ranks_text(end.rank for end in early[1:])} likewise" if len(early) > 1 else ""
    return Judgement(cause, f"{head}: {message}{more}", victim.end)


def _caught(
    evidence: Evidence, hosts: Hosts, caught: Sequence[CaughtError], early: Sequence[RankEnd], victim: Case
) -> Judgement:
    """Some of them had printed an error before: that may be why they left the others, who may have needed any."""
    first = caught[0]
    message = f"exit code 0 after it had printed {shortened(first.cause.message, _LONGEST_MESSAGE)}"
    at = f", at {first.cause.location}" if first.cause.location else ""
    ranks = tuple(sorted(end.rank for end in early))
    advice = _caught_advice(first.cause)
    cause = Cause(CLASS_NAME, message, ranks, first.cause.proof, advice, first.cause.location)
    head = who_and_when(evidence, hosts, first.failure.end, "ended")
    others = ranks_text(one.failure.end.rank for one in caught[1:])
    more = f"; {others} ended after an error as well" if len(caught) > 1 else ""
    rest = {*ranks} - {one.failure.end.rank for one in caught}
    more += f"; {ranks_text(rest)} ended as well, without one" if rest else ""
    return Judgement(cause, f"{head}: {message}{at},{_NEEDED}it{more}", victim.end)


def _caught_advice(cause: Cause) -> str:
    """Which of the two it was is not known: what a tracker's upload fails with at the end of a script is harmless."""
    if cause.class_name in _HARMLESS_AT_THE_END:
        return f"{ADVICE}; the script went on after the error that it has printed, which need not be why"
    return f"{_CAUGHT_ADVICE}; where it had got over that error: {ADVICE}"


def with_early_exit(evidence: Evidence, hosts: Hosts, judgement: Judgement, early: Judgement) -> Judgement:
    """A judgement about ranks that stayed away, with those that had ended before: which were needed is not known."""
    cause, ranks = judgement.cause, early.cause.ranks
    ends = sorted((end for end in evidence.ends if end.rank in ranks), key=lambda end: end.time)
    # The message is about one that had printed an error, where one had.
    first = next((one.failure.end for one in caught_errors(evidence, hosts, ends)), ends[0])
    head = who_and_when(evidence, hosts, first, "had ended")
    others = [end.rank for end in ends if end.rank != first.rank]
    more = f"; {ranks_text(others)} {'likewise' if first is ends[0] else 'had ended as well'}" if others else ""
    tail = f"{head}: {early.cause.message.partition(_NEEDED)[0]}{more}"
    advice = f"{cause.advice}; where {ranks_text(ranks)} {'was' if len(ranks) == 1 else 'were'} needed as well, "
    cause = cause._replace(ranks=tuple(sorted({*cause.ranks, *ranks})), advice=f"{advice}{early.cause.advice}")
    return judgement._replace(cause=cause, headline=f"{judgement.headline}; {tail}")
