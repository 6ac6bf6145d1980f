"""What is said of ranks that lost others, or the store, where no rank is known to have failed of itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.collectives import CollectiveFindings
from saferun.diagnosis.crash_cases import Case
from saferun.diagnosis.job_hosts import Hosts, hosts_text
from saferun.diagnosis.rank_waits import Wait, waits_of
from saferun.diagnosis.timeouts import idle
from saferun.evidence.job_evidence import Evidence
from saferun.model import Value
from saferun.text.wording import ranks_text

_NONE_KNOWN = "no earlier rank failure is known"
_BETWEEN = "look at the network between the hosts, and at what the ranks did at their end"
_ELSEWHERE = "look at the other hosts, at the rank that ended first there, and at the network between them"
_CLOSES_EARLY = "a rank that calls destroy_process_group() or closes connections while others still call collectives"
_SERVED = "look at what served the store: a rank that does may not end, or close it, before the others are through"
# Ranks have these connections to each other; what else they lose has advice of its own.
_OF_RANKS = frozenset({"peer_lost", "communicator_aborted"})
# In that the CPU may be until a collective on the GPU is over.
_ON_GPU = "gpu"


class Loss(Value):
    """Where the cause may be.

    Attributes:
        where: to stand after what was lost.
        advice: what to look at.
        meanwhile: what others did then; empty: that is not known.
    """

    where: str
    advice: str
    meanwhile: str = ""


def unexplained_loss(
    evidence: Evidence, hosts: Hosts, case: Case, cases: Sequence[Case], findings: CollectiveFindings
) -> Loss:
    """Where to look for the cause.

    Args:
        evidence: of all.
        hosts: of the job.
        case: the rank that failed first.
        cases: all that failed.
        findings: of the Flight Recorders.
    """
    unheard = [host for host in hosts.all if not host.has_evidence]
    if unheard:
        return Loss(
            f"the cause is not among the ranks that are known; no evidence from {hosts_text(unheard)}",
            f"look at {hosts_text(unheard)}, at its ranks' output, and at the network to it",
        )
    if hosts.are_several:
        return Loss(_NONE_KNOWN, _BETWEEN)
    if not hosts.is_one:
        return Loss("the cause is not among the ranks of this host", _ELSEWHERE)
    if case.cause.class_name == "store_lost":
        return Loss(_NONE_KNOWN, _SERVED)
    if case.cause.class_name not in _OF_RANKS:
        return Loss(_NONE_KNOWN, case.cause.advice)
    others = _others(evidence, hosts, case, cases, findings)
    if not others:
        return Loss(_NONE_KNOWN, f"look for {_CLOSES_EARLY}: it breaks theirs")
    advice = f"look at what {ranks_text(wait.rank for wait in others)} did before: {_CLOSES_EARLY} breaks theirs"
    meanwhile = f"; meanwhile {ranks_text([others[0].rank])} {others[0].description}"
    if others[1:]:
        meanwhile += f"; {ranks_text(wait.rank for wait in others[1:])} did not wait for another rank either"
    return Loss(_NONE_KNOWN, advice, meanwhile)


def _others(
    evidence: Evidence, hosts: Hosts, case: Case, cases: Sequence[Case], findings: CollectiveFindings
) -> list[Wait]:
    """The ranks that lived when the first one had failed, and did something else than wait for others."""
    then = evidence._replace(ends=tuple(end for end in evidence.ends if end.stopped_by_us or end.time <= case.at))
    waits = idle(waits_of(then, hosts, findings), [one.end.rank for one in cases])
    return [wait for wait in waits if wait.found.kind != _ON_GPU]
