"""Whether a failure may be the consequence of another that a living rank is still about to show. Pure.

The rank whose error ends a job is often not the first to end: ``finally: destroy_process_group()`` or an emergency
checkpoint come before its traceback, while the ranks that lost their connection to it fail at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from saferun.diagnosis.causes import Role, role_of
from saferun.diagnosis.causes.fatal_signals import PIPE_WITHOUT_READER
from saferun.diagnosis.collectives import compare
from saferun.diagnosis.crash_cases import Case, cases_of
from saferun.diagnosis.early_exits import early_ends
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judged_failures import judged_failure
from saferun.diagnosis.rank_waits import waits_of
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence

ELSEWHERE = "victim"
"""Why an attempt ends where the rank that failed is a victim: of a rank that may be on any host."""

# Ranks notice at once that one has ended which they are connected to.
_JUST_ENDED_S = 5.0
# Calls of torch.distributed at the end of a script: what the script raised before may be printed after them.
_TEARDOWN = frozenset({"destroy_process_group", "shutdown", "abort"})


def is_victim(evidence: Evidence, rank: int) -> bool:
    """Whether this rank, which has failed, lost its connection to another one or waited too long for it."""
    output = evidence.outputs_by_rank.get(rank)
    ends = [end for end in evidence.ends if end.rank == rank]
    causes = [judged_failure(evidence, end, output)[1] for end in ends]
    return any(role_of(cause) is not Role.CULPRIT and not _is_own_pipe(cause) for cause in causes)


def _is_own_pipe(cause: Cause) -> bool:
    """Whether no other rank has brought it about, though one that fails of itself explains more."""
    return cause.class_name == PIPE_WITHOUT_READER


def ranks_that_may_show_it(evidence: Evidence) -> tuple[int, ...]:
    """The living ranks of this host of which one may have brought the failure about; empty where that is known.

    A rank that waits for others is not among them: it has nothing to show.

    Args:
        evidence: of this host, with the capture of the ranks that live.
    """
    hosts = Hosts(evidence)
    cases = cases_of(evidence, hosts, evidence.outputs_by_rank)
    reason = evidence.abort_reason
    is_elsewhere = reason is not None and reason.reason == ELSEWHERE
    if not (cases or is_elsewhere) or is_shown(evidence):
        return ()
    findings = compare(evidence.capture.collectives, evidence.ranks)
    if findings.mismatched or _has_one_just_ended(evidence, hosts, cases):
        return ()
    ended = {end.rank for end in evidence.ends}
    waits = waits_of(evidence, hosts, findings)
    waiting = {wait.rank for wait in waits if wait.found.of_peers and wait.found.detail not in _TEARDOWN}
    return tuple(rank for rank in evidence.ranks if rank not in ended | waiting)


def _has_one_just_ended(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> bool:
    """Whether a rank that ended well explains the first failure: one that ended long before had nothing left to do."""
    early = early_ends(evidence, hosts, cases)
    return bool(early) and early[-1].time >= min(case.at for case in cases) - _JUST_ENDED_S


def is_shown(evidence: Evidence, among: Collection[int] = ()) -> bool:
    """Whether a rank of this host has failed by itself, and not because of another.

    Args:
        evidence: of this host.
        among: the ranks that the cause is expected of; if none of them is left alive, there is nothing to wait for.
    """
    cases = cases_of(evidence, Hosts(evidence), evidence.outputs_by_rank)
    if cases and (cases[0].role is Role.CULPRIT or _is_own_pipe(cases[0].cause)):
        return True
    return bool(among) and {end.rank for end in evidence.ends} >= set(among)
