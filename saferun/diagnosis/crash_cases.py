"""The ranks that failed by themselves, each judged alone, and which of them explains the rest best. Pure.

A rank that raises an error and then, in its ``finally``, calls a collective ends by what becomes of that: the others no
longer come. What it had raised is the cause then, not that it lost them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from saferun.diagnosis.alike_tracebacks import likeness
from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.communication import tells_of_a_lost_peer
from saferun.diagnosis.causes.failure import Failure, is_of_warning
from saferun.diagnosis.causes.own_timer import ITS_OWN_TIMER, waited_until_its_timer
from saferun.diagnosis.causes.reasons import only_ends
from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.causes.wrapped_errors import ranks_of_checkpoint
from saferun.diagnosis.collectives import compare
from saferun.diagnosis.job_hosts import Hosts, addresses_in
from saferun.diagnosis.judged_failures import judged_failure, noted
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.log_levels import is_of_module
from saferun.diagnosis.lost_peers import call_of, stopped_failures
from saferun.diagnosis.rank_waits import waits_of
from saferun.diagnosis.timeouts import idle, is_timeout, not_busy, waited
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import RankEnd, Value
from saferun.text.wording import ranks_text

CLOCKS_DIFFER_S = 0.25
"""How far apart the clocks are that NTP keeps."""
# An error file is stamped in whole seconds when the exception is raised; the exit follows when the interpreter has
# shut down. Only a difference beyond that rounding can put one failure before another.
_ERROR_FILE_RESOLUTION_S = 1.0
# A rank that ends may have closed its connections so long before: it saves, and frees its memory.
_TAKES_TO_END_S = 5.0
# Exceptions that programs expect, and signals.
_EXPECTED = frozenset(
    {"Empty", "Full", "StopIteration", "StopAsyncIteration", "KeyboardInterrupt", "SystemExit", "SignalException"}
)
# Where a rank loads an extension that torch compiles as the job runs, and where it could not be compiled.
_NOT_BUILT = LazyPattern(r"^ImportError: .{0,600}/([^/]{1,120})\.so: cannot open shared object file")
_BUILD_FAILED = LazyPattern(r"\bError building extension '([^']{1,120})'")


class Case(Value):
    """One rank that failed by itself: when, why, and how well that explains the rest.

    ``afterwards``: what came of it while it handled that error: ``it lost its connection to another rank``; empty in
    the usual case.
    """

    at: float
    failure: Failure
    cause: Cause
    role: Role
    afterwards: str = ""

    @property
    def end(self) -> RankEnd:
        """How and when the rank ended."""
        return self.failure.end


def who_and_when(evidence: Evidence, hosts: Hosts, end: RankEnd, how: str) -> str:
    """``rank 3 (node1) ended at 12:00:03, 10.0 s after the start``."""
    clock = f" at {end.clock}" if end.clock else ""
    return f"{hosts.who(end)} {how}{clock}, {max(end.at - evidence.started_at, 0.0):.1f} s after the start"


def failed_by_itself(end: RankEnd) -> bool:
    """Whether a rank ended badly, and not because saferun ended it."""
    return not end.status.ok and not end.stopped_by_us


def cases_of(evidence: Evidence, hosts: Hosts, outputs: dict[int, RankOutput]) -> list[Case]:
    """The ranks that failed by themselves, the best explanation first."""
    cases = []
    reason = evidence.abort_reason
    for end in evidence.ends:
        if not failed_by_itself(end):
            continue
        output = outputs.get(end.rank)
        failure, cause = judged_failure(evidence, end, output, hosts)
        cause = _located(cause, hosts)
        role = role_of(cause)
        cases.append(Case(_failed_at(end, output, evidence.started_at, role), failure, cause, role))
    cases = _less_waiters_for_a_build(evidence, hosts, _less_empty_exits(cases))
    cases = _less_others_of_a_checkpoint(evidence, hosts, cases)
    if cases and evidence.stop_signum is None and all(case.role is not Role.CULPRIT for case in cases):
        # A rank that had raised by itself, and had not ended yet when it was stopped, explains more than its victims.
        stopped = stopped_cases(evidence, hosts)
        raised = [case for case in stopped if _had_raised(case, outputs[case.end.rank])]
        raised = less_raised_for_others(evidence, raised, cases)
        found = [case for case in raised if case.role is Role.CULPRIT]
        found = found or _begun(evidence, hosts, [*cases, *raised], [*cases, *stopped])
        ranks = {case.end.rank for case in found}
        cases = [*(case for case in cases if case.end.rank not in ranks), *found]
    elif evidence.stop_signum is None:
        cases += _raised_before(evidence, hosts, cases)
    cases.sort(key=lambda case: (case.role, case.at, case.end.rank))
    # The clocks of hosts differ by less than this; which of them reported first was decided at one place.
    near = [case for case in cases if case.role is cases[0].role and case.at - cases[0].at < CLOCKS_DIFFER_S]
    first = next((case for case in near if reason is not None and case.end.rank == reason.rank), None)
    if first is not None and hosts.are_several:
        cases = [first, *(case for case in cases if case is not first)]
    # Of ranks that their own timers ended, those that waited for others come last.
    return sorted(cases, key=lambda case: (case.role, _waited_until_its_timer(case)))


def _raised_before(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> list[Case]:
    """The ranks that were stopped while they ended by an exception of their own, raised before any of these had failed.

    A rank whose atexit handlers take long (an upload) ends after others that failed later. What all raise alike is
    said of those that ended by it.
    """
    outputs = evidence.outputs_by_rank
    if not cases or not any(outputs[end.rank].uncaught_time for end in evidence.ends if end.rank in outputs):
        return []
    first = min(case.at for case in cases if case.role is Role.CULPRIT)
    found = []
    for case in stopped_cases(evidence, hosts):
        output = outputs[case.end.rank]
        at = _failed_at(case.end, output, evidence.started_at, case.role)
        is_earlier = output.uncaught_time > 0 and at < min(first, case.end.time)
        if is_earlier and case.role is Role.CULPRIT and _had_raised(case, output):
            found.append(case._replace(at=at))
    return [case for case in found if not any(is_alike(case, other) for other in cases)]


def _had_raised(case: Case, output: RankOutput) -> bool:
    """Whether a rank that was stopped was about to end by its error, and had not only warned of it."""
    error = case.failure.error
    is_recorded = bool(output.failure or output.error_message)
    is_uncaught = error is not None and (error.is_uncaught or is_recorded or is_of_module(error.last.frames))
    return output.raised and (error is None or is_uncaught or not is_of_warning(error))


def _waited_until_its_timer(case: Case) -> bool:
    return case.cause.message.startswith(ITS_OWN_TIMER) and waited_until_its_timer(case.failure)


def _less_empty_exits(cases: Sequence[Case]) -> list[Case]:
    """The cases; a rank that ended long after another one had lost a connection of its own is a victim if it says so.

    A collective fails where a rank has ended; a script that catches that, prints it, and exits, has no traceback. A
    rank closes its connections some time before it has ended, and one without such a line may have been the first.
    """
    lost = min((case.at for case in cases if _is_of_the_script(case)), default=math.inf) + _TAKES_TO_END_S
    return [
        case._replace(role=Role.VICTIM) if case.at > lost and _ended_without_a_reason(case) else case for case in cases
    ]


def _is_of_the_script(case: Case) -> bool:
    """Whether what was lost is a connection that the script itself had made, and not one of torch's."""
    error = case.failure.error
    if case.cause.class_name != "connection_lost" or error is None or call_of(case.failure):
        return False
    return any(case.failure.user.owns(frame) for frame in error.last.frames)


def _ended_without_a_reason(case: Case) -> bool:
    failure = case.failure
    has_earlier = failure.earlier is not None and not failure.earlier.ends_nothing
    if case.cause.class_name != "python_exit" or has_earlier or failure.end.status.code != 1:
        return False
    return only_ends(case.cause.proof) and tells_of_a_lost_peer((*failure.lines, *failure.stdout_lines))


def _less_waiters_for_a_build(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> list[Case]:
    """The cases; a rank that could not load an extension which another one failed to build is that one's victim.

    One rank compiles an extension of torch's, the others wait for its lock and then load the file. They do so as soon
    as the build has failed, and may end before the rank that reports why.
    """
    names = [_name_in(_NOT_BUILT, case.failure) for case in cases]
    if not any(names):
        return [*cases]
    outputs = evidence.outputs_by_rank
    stopped = [case for case in stopped_cases(evidence, hosts) if _had_raised(case, outputs[case.end.rank])]
    failed = {_name_in(_BUILD_FAILED, case.failure) for case in [*cases, *stopped]} - {""}
    return [
        case._replace(role=Role.VICTIM) if name in failed else case for case, name in zip(cases, names, strict=True)
    ]


def _name_in(pattern: LazyPattern, failure: Failure) -> str:
    """The name of an extension in the message of an exception; empty where the pattern is not found."""
    found = first_line(pattern, failure.messages)
    return found[1][1] if found is not None else ""


def _less_others_of_a_checkpoint(evidence: Evidence, hosts: Hosts, cases: Sequence[Case]) -> list[Case]:
    """See ``less_raised_for_others``: with the ranks that were stopped when they had raised the same."""
    if not any(map(_ranks_of_checkpoint, cases)):
        return [*cases]
    outputs = evidence.outputs_by_rank
    stopped = [case for case in stopped_cases(evidence, hosts) if _had_raised(case, outputs[case.end.rank])]
    return less_raised_for_others(evidence, cases, stopped)


def less_raised_for_others(evidence: Evidence, cases: Sequence[Case], others: Sequence[Case]) -> list[Case]:
    """The cases; a rank that raised what a distributed checkpoint failed of on other ranks is a victim of those.

    All ranks that save or load together raise one ``CheckpointException``, with the errors of those that failed. It has
    their numbers in the process group: they are the job's only where most of its ranks have raised it, and one that it
    names is among them.

    Args:
        evidence: of all.
        cases: of which these are.
        others: other ranks that have raised an error.
    """
    named = {case.end.rank: ranks for case in [*cases, *others] if (ranks := _ranks_of_checkpoint(case))}
    counts = Counter(named.values())
    half = (evidence.world_size or len(evidence.ranks)) // 2
    of_job = {failed for rank, failed in named.items() if rank in failed and counts[failed] > half}
    found = []
    for case in cases:
        failed = named.get(case.end.rank, frozenset())
        is_victim = failed in of_job and case.end.rank not in failed and case.role is not Role.VICTIM
        found.append(_victim_of_checkpoint(case, failed) if is_victim else case)
    return found


def _victim_of_checkpoint(case: Case, failed: frozenset[int]) -> Case:
    message = f"the distributed checkpoint failed on {ranks_text(sorted(failed))}"
    return case._replace(role=Role.VICTIM, cause=case.cause._replace(message=message))


def _ranks_of_checkpoint(case: Case) -> frozenset[int]:
    return ranks_of_checkpoint(case.failure.messages)


def stopped_cases(evidence: Evidence, hosts: Hosts) -> list[Case]:
    """The ranks that saferun stopped, and that had an error of their own."""
    found = (
        (failure, _located(noted(failure, cause_of(failure)), hosts)) for failure in stopped_failures(evidence, hosts)
    )
    return [Case(failure.end.time, failure, cause, role_of(cause)) for failure, cause in found]


def is_alike(case: Case, root: Case) -> bool:
    """Whether a rank failed in the same way as another."""
    if case.role is not root.role or case.cause.class_name != root.cause.class_name:
        return False
    return case.cause.location == root.cause.location and likeness([case.cause.message]) == likeness(
        [root.cause.message]
    )


def _located(cause: Cause, hosts: Hosts) -> Cause:
    """A cause whose other end is named by its host."""
    if not hosts.are_several or role_of(cause) is Role.CULPRIT:
        return cause
    peer = next((host for address in addresses_in(cause.proof) if (host := hosts.at_address(address))), None)
    if peer is None:
        return cause
    message = cause.message.replace("to another rank", f"to a rank of {peer.label}")
    return cause._replace(message=message, proof=hosts.located(cause.proof))


def _failed_at(end: RankEnd, output: RankOutput | None, started_at: float, role: Role) -> float:
    """When a rank failed, in seconds since the epoch: when it raised, if its record or error file can be believed.

    One that lost another rank may have done so before that one had ended: there the ends are compared.
    """
    started_time = end.time - (end.at - started_at)
    if output is not None and role is Role.CULPRIT and started_time <= output.uncaught_time <= end.time:
        return output.uncaught_time
    if output is None or not started_time - _ERROR_FILE_RESOLUTION_S <= output.error_time:
        return end.time
    return output.error_time if output.error_time < end.time - _ERROR_FILE_RESOLUTION_S else end.time


# --------------------------------------------------------------------------- what was raised before others were lost


def _begun(evidence: Evidence, hosts: Hosts, cases: Sequence[Case], failed: Sequence[Case]) -> list[Case]:
    """The ranks that lost the others, or waited too long for them, while they handled an error of their own.

    An error that all handle is one that the program expects. Where another rank is late, a timeout needs no other
    explanation.

    Args:
        evidence: of all.
        hosts: of the job.
        cases: of which these are.
        failed: all that have printed an error.
    """
    begun = [found for case in cases if (found := _before_it_lost_the_others(case)) is not None]
    if begun and len(begun) == len(failed) and all(is_alike(case, begun[0]) for case in begun):
        return []
    waited_too_long = {case.end.rank for case in failed if is_timeout(case.cause)}
    at_once = [case for case in begun if case.end.rank not in waited_too_long]
    return at_once if len(at_once) < len(begun) and _is_another_late(evidence, hosts, failed, begun) else begun


def _before_it_lost_the_others(case: Case) -> Case | None:
    """The case with the error that the rank handled when it lost the others; None where there was none."""
    for failure in _handled(case.failure):
        cause = cause_of(failure)
        if role_of(cause) is Role.CULPRIT:
            lost = case.cause.class_name in {"peer_lost", "store_lost"}
            afterwards = f", it {case.cause.message}" if lost else f": {waited(case.cause, case.end.rank)}"
            return Case(case.at, failure, cause, Role.CULPRIT, f"while it handled that{afterwards}")
    return None


def _handled(failure: Failure) -> Iterator[Failure]:
    """The failure as it would be without the errors that came while others were handled, the nearest of these first.

    A traceback begins where the exception is caught: one that a library has got over has no line of the user's.
    """
    error = failure.error
    if error is None:
        return
    for index in range(len(error.blocks) - 1, 0, -1):
        if error.blocks[index].link != "context":
            continue
        cut = error._replace(blocks=error.blocks[:index])
        is_users = any(failure.user.owns(frame) for block in cut.blocks for frame in block.frames)
        if is_users and cut.last.exception.rpartition(".")[2] not in _EXPECTED:
            yield failure._replace(error=cut)


def _is_another_late(evidence: Evidence, hosts: Hosts, failed: Sequence[Case], begun: Sequence[Case]) -> bool:
    """Whether the others did not come to what these ranks waited in because of a rank that did something else."""
    findings = compare(evidence.capture.collectives, evidence.ranks)
    culprits = {*findings.culprits}
    if culprits:
        return culprits.isdisjoint(case.end.rank for case in begun)
    others = idle(waits_of(evidence, hosts, findings), [case.end.rank for case in failed])
    return any(not_busy(others, case.cause) for case in failed)
