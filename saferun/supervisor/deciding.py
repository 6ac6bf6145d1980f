"""DIAGNOSING, WAITING and BACKOFF: the cause of a failed attempt, whether there is another one, other hosts. Pure."""

from __future__ import annotations

import signal

from saferun.model import signal_name
from saferun.supervisor.actions import (
    ATTEMPT_FAILED,
    Action,
    BroadcastDecision,
    Diagnose,
    HurryDiagnosis,
    PrintLine,
    ReportDecision,
    ReportFailure,
    ReportRestart,
    RunChecks,
    Undiagnosed,
)
from saferun.supervisor.ending import Failed, Leave, NotStarted, Regroup, Stopped, explanation, is_final, signum_of
from saferun.supervisor.launch_state import Attempt, CutOff, LaunchState, State
from saferun.supervisor.policy import FailureFacts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.supervisor.ending import Ending
    from saferun.supervisor.events import DeadlineExpired, Diagnosed, JobDecided, JobLost, SignalReceived
    from saferun.supervisor.policy import Decision
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

_UNKNOWN = FailureFacts("unknown")
# At a signal, cores are read for so long, and this much later the report is written with what is known. Flux sends
# SIGKILL 5 s after SIGTERM.
_HURRIED_CAPTURE_S = 3.0
_HURRIED_S = 1.0
# How long before a scheduler's SIGKILL the reading of cores is over: the report is made and written then.
_REPORT_S = 5.0


def diagnose(launch: LaunchState, at: float) -> list[Action]:
    """-> DIAGNOSING."""
    attempt = launch.attempt
    others_s = 0.0
    if launch.answers_to_job:
        # The leader waits for the other hosts, and they for it.
        others_s = launch.job.others_s * (1 if launch.leads else 2)
    launch.enter(State.DIAGNOSING, at + launch.limits.diagnose_s + others_s)
    lost, kill_at = attempt.others.cut_off or CutOff(), attempt.stopping.scheduler_kill_at
    within_s = max(_HURRIED_CAPTURE_S, kill_at - at - _REPORT_S) if kill_at is not None else 0.0
    return [
        # First: the limit is part of the request to the examiner.
        *([HurryDiagnosis(launch.number, within_s)] if kill_at is not None else []),
        Diagnose(
            launch.number,
            attempt.ending or Failed(),
            attempt.stopping.abandoned,
            alone=attempt.others.cut_off is not None or isinstance(attempt.ending, Leave),
            lost=lost.what,
            lost_hint=lost.hint,
        ),
    ]


def on_diagnosed(launch: LaunchState, event: Diagnosed) -> list[Action]:
    """The leader decides; the others wait for its decision."""
    attempt, others = launch.attempt, launch.attempt.others
    is_unheard = bool(others.unreachable) and not launch.leads and others.decision is None
    if is_unheard and others.cut_off is None and not _awaits_leader(launch):
        # No decision is waited for. An elastic job can meet again all the same, as where the leader is lost.
        others.cut_off = CutOff(is_final=not launch.job.outlives_leader)
    if launch.answers_to_job and not launch.leads:
        attempt.own_diagnosis = event.diagnosis
        if others.decision is not None:
            return follow(launch, others.decision, event.at)
        return [_waiting_line(launch, event)] if is_unheard else []
    others.is_stopped = others.is_stopped or event.stopped
    return _decide(launch, event.at, event.diagnosis, event.facts)


def _awaits_leader(launch: LaunchState) -> bool:
    """Whether a leader that cannot be reached is waited for, within the limit of the phase.

    It may be there, and start all hosts again as soon as the network is back: without this one it could not.
    """
    is_stopped = launch.stop_signum is not None or bool(launch.stopped_by) or launch.attempt.others.is_stopped
    may_follow = (launch.may_restart or bool(launch.spares)) and not is_stopped and not is_final(launch.attempt.ending)
    return may_follow and not launch.job.outlives_leader


def _waiting_line(launch: LaunchState, event: Diagnosed) -> PrintLine:
    left_s = max((launch.deadline or event.at) - event.at, 0.0)
    sequel = f"waiting for its decision about another attempt for {left_s:.0f} s at most"
    return PrintLine(f"{event.diagnosis.headline}; {launch.attempt.others.unreachable}; {sequel}")


def end_wait(launch: LaunchState, at: float) -> list[Action]:
    """DIAGNOSING: there is to be no other attempt, so that the decision of an unreachable leader is not waited for."""
    attempt = launch.attempt
    if attempt.own_diagnosis is None or not attempt.others.unreachable or not launch.answers_to_job:
        return []
    attempt.others.cut_off = CutOff(is_final=True)
    return _decide(launch, at, attempt.own_diagnosis, None)


def on_deadline(launch: LaunchState, event: DeadlineExpired) -> list[Action]:
    """No diagnosis came in time, or no decision."""
    attempt = launch.attempt
    if attempt.others.decision is not None and launch.answers_to_job:
        return follow(launch, attempt.others.decision, event.at)  # which waited for the diagnosis of this host
    if attempt.own_diagnosis is not None:
        # The leader is there, and yet it does not decide: enough.
        attempt.others.cut_off = CutOff(is_final=True)
        return _decide(launch, event.at, attempt.own_diagnosis, None)
    if launch.answers_to_job and not launch.leads:
        return launch.finish(_exit_code(launch))
    # Restarts are decided without the cause, as under torchrun.
    headline = explanation(attempt.ending)[0] or _stopped_text(attempt.ending) or ATTEMPT_FAILED
    undiagnosed: Any = Undiagnosed(headline, abandoned=attempt.stopping.abandoned)
    return _decide(launch, event.at, undiagnosed, None)


def _stopped_text(ending: Ending | None) -> str:
    """What the headline says of an attempt that a signal to this host ended, or saferunctl; empty: neither did."""
    signum = signum_of(ending)
    by = ending.by if isinstance(ending, Stopped) else ""
    return f"stopped by {by or signal_name(signum)}" if signum is not None else ""


def hurry(launch: LaunchState, event: SignalReceived) -> list[Action]:
    """DIAGNOSING: a scheduler's SIGKILL may follow, or a user waits. What is captured by then makes the report.

    On several hosts the phase lasts as long as before: without the leader's decision the other hosts have none, nor
    has it their evidence.
    """
    attempt, stopping = launch.attempt, launch.attempt.stopping
    if attempt.own_diagnosis is not None:
        return end_wait(launch, event.at)  # this host has handed in all it knows
    within_s = 0.0 if stopping.is_hurried else _HURRIED_CAPTURE_S
    line = ": finishing the report"
    if not launch.answers_to_job and launch.deadline is not None:
        launch.enter(State.DIAGNOSING, min(launch.deadline, event.at + within_s + _HURRIED_S))
        line = f": the report follows in {within_s + _HURRIED_S:g} s at most"
    hurried = HurryDiagnosis(launch.number, within_s)
    if stopping.is_hurried:
        return [hurried]
    stopping.is_hurried = True
    if event.signum == signal.SIGINT:
        launch.interrupted_at = event.at
        line += ", or at the next Ctrl-C" if not launch.answers_to_job else ""
    return [signal_line(event, line), hurried]


def name_of(event: SignalReceived) -> str:
    """What a line calls it: the signal, or what has happened to the parent process."""
    return event.why or signal_name(event.signum)


def signal_line(event: SignalReceived, text: str) -> PrintLine:
    """What follows from a signal. That of a parent process that has ended came to this host alone."""
    return PrintLine(f"{name_of(event)}{text}", of_signal=not event.why)


def _decide(launch: LaunchState, at: float, diagnosis: Diagnosis, facts: FailureFacts | None) -> list[Action]:
    placement = launch.attempt.placement
    decision = _before_ranks(launch) or launch.policy.decide(
        _completed(launch, facts),
        restarts=launch.restarts,
        hosts=placement.group_world_size if placement is not None else 1,
        least_hosts=launch.job.least_hosts,
        spares=launch.spares,
        needed=launch.needed,
        moves_leader=launch.job.moves_leader,
        at=at,
    )
    finishes = decision.next_step == "finish"
    restarting = not finishes and not launch.is_to_end
    stop_signum = signum_of(launch.attempt.ending)
    actions: list[Action] = [ReportFailure(launch.number, diagnosis, restarting, decision, stop_signum)]
    broadcasts = launch.answers_to_job and launch.leads
    if finishes:
        # DIAGNOSING -> DONE
        code = _exit_code(launch)
        if broadcasts:
            actions.append(BroadcastDecision(launch.number, "finish", code, 0.0, launch.restarts, diagnosis, decision))
        return [*actions, *launch.finish(code)]
    # DIAGNOSING -> BACKOFF
    launch.restarts += decision.is_counted
    excluded = launch.left_out = -1 if decision.exclude is None else decision.exclude
    if any(fault.host == 0 for fault in decision.faulty):
        launch.left_out = 0  # a spare leads from now on
    if broadcasts:
        actions.append(
            BroadcastDecision(
                launch.number,
                "restart",
                1,
                decision.wait_s,
                launch.restarts,
                diagnosis,
                decision,
                excluded,
                launch.policy.replaced,
            )
        )
    if broadcasts and launch.left_out == 0:
        # DIAGNOSING -> DONE: this is the host that is left out.
        return [*actions, *launch.finish(0, leaves=True)]
    if launch.is_to_end:
        # DIAGNOSING -> DONE: the others meet again without it.
        return [*actions, *launch.finish(launch.failure_code, leaves=True)]
    launch.enter(State.BACKOFF, at + decision.wait_s)
    return actions


def _before_ranks(launch: LaunchState) -> Decision | None:
    """What follows from hosts that the checks have found at fault, unless the job is to end anyway."""
    ending, others = launch.attempt.ending, launch.attempt.others
    if not isinstance(ending, NotStarted) or not ending.faulty:
        return None
    if launch.stop_signum is not None or launch.stopped_by or others.is_stopped or others.cut_off is not None:
        return None
    from saferun.supervisor.policy.faulty_hosts import decision_before_ranks

    return decision_before_ranks(
        ending.faulty, launch.spares, moves_leader=launch.job.moves_leader, may_go_on=ending.may_go_on
    )


def _completed(launch: LaunchState, facts: FailureFacts | None) -> FailureFacts:
    """What is known of a failure, and what only this machine knows of it."""
    facts = facts or _UNKNOWN
    ending, others = launch.attempt.ending, launch.attempt.others
    lost = others.cut_off or CutOff()
    what = explanation(ending)[0]
    is_transient = isinstance(ending, NotStarted) and bool(ending.class_name)
    if isinstance(ending, NotStarted) and is_transient:
        facts = facts._replace(class_name=ending.class_name, is_start_over=False, transient_override=True, message=what)
    if lost.class_name:
        # Each host decides for itself, and all the same: the leader can serve another store.
        facts = facts._replace(
            class_name=lost.class_name, transient_override=True, message=what or lost.what, host=None
        )
    reason = ""
    if _leaves_to_others(launch):
        return facts
    if launch.stop_signum is not None:
        reason = f"stopped by {launch.stopped_by or signal_name(launch.stop_signum)}"
    elif others.is_stopped or launch.stopped_by:
        reason = f"stopped by {launch.stopped_by}" if launch.stopped_by else "stopped"
    elif others.cut_off is not None and not (launch.job.outlives_leader or is_transient or lost.class_name):
        if _may_replace_leader(launch):
            return facts._replace(faulty=_lost_leader(launch, lost.what), is_start_over=None)
        reason = "the other hosts cannot be reached"
    elif lost.is_final or is_final(ending):
        reason = facts.message or "another attempt would not help"
    return facts._replace(restarting_allowed=False, stop_reason=reason) if reason else facts


def _leaves_to_others(launch: LaunchState) -> bool:
    """Whether this leader was sent a signal after a failure, after which the others can meet again without it."""
    attempt = launch.attempt
    is_over = isinstance(attempt.ending, Stopped | Leave) or attempt.others.is_stopped
    has_others = attempt.placement is not None and attempt.placement.group_world_size > 1
    is_awaited = attempt.others.may_leave or launch.job.awaits_replacement_host
    has_left = launch.leaves_by_signal and launch.leads and launch.answers_to_job
    return has_left and has_others and is_awaited and not is_over


def _may_replace_leader(launch: LaunchState) -> bool:
    """Whether a spare can take the place of the leader, which this host has lost."""
    lost = launch.attempt.others.cut_off
    is_alone = lost is not None and bool(lost.what) and not lost.is_final
    return is_alone and launch.job.moves_leader and bool(launch.spares) and not launch.leads


def _lost_leader(launch: LaunchState, what: str) -> tuple[FaultyHost, ...]:
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

    placement = launch.attempt.placement
    return (FaultyHost(0, placement.leader if placement is not None else "the leader", what, is_lost=True),)


def lose_as_spare(launch: LaunchState, event: JobLost) -> list[Action]:
    """WAITING -> BACKOFF | DONE: a spare that has lost the leader may lead the others, or the job does without it.

    Where only the leader's store is gone, the ranks may train on, and if they do not, the leader serves another one.
    """
    is_stopped = launch.stop_signum is not None or launch.attempt.others.is_stopped
    if event.class_name and not is_stopped:
        launch.enter(State.BACKOFF, event.at)
        return [PrintLine(f"{event.what}; this spare host waits for the next rendezvous")]
    if _may_replace_leader(launch) and not is_stopped:
        launch.left_out = 0
        launch.policy.replaced += 1  # as the others have it, which decide for themselves
        launch.enter(State.BACKOFF, event.at)
        return [PrintLine(f"{event.what}; this spare host rejoins the others")]
    return [PrintLine(f"{event.what}; this spare host ends"), *launch.finish(0, leaves=True)]


def _exit_code(launch: LaunchState) -> int:
    ending = launch.attempt.ending
    if isinstance(ending, NotStarted) and launch.has_been_spare and launch.attempt.placement is None:
        return 0  # the others do without it, and a launcher may end them at the first bad exit code
    return ending.exit_code if isinstance(ending, NotStarted) else launch.failure_code


def follow(launch: LaunchState, decision: JobDecided, at: float) -> list[Action]:
    """Do what the leader has decided."""
    placement = launch.attempt.placement
    restarting = decision.next_step == "restart" and not launch.is_to_end
    actions: list[Action] = []
    # Where nothing but checks was wanted, the leader shows what they found.
    if (decision.exit_code != 0 or decision.messages) and launch.state is not State.PROBING:
        stop_signum = signum_of(launch.attempt.ending)
        actions.append(ReportDecision(launch.number, decision.messages, restarting, stop_signum))
    if restarting and placement is not None and decision.excluded == placement.group_rank:
        # DIAGNOSING -> DONE: the others go on without this host. A launcher that ends all of them at the first bad exit
        # code (srun --kill-on-bad-exit, mpirun) is to let them.
        return [*actions, *launch.finish(0, leaves=True)]
    if restarting:
        # DIAGNOSING | WAITING -> BACKOFF
        launch.restarts, launch.left_out = decision.restarts, decision.excluded
        launch.policy.replaced = decision.replaced  # this host may lead one day
        launch.enter(State.BACKOFF, at + decision.wait_s)
        return actions
    # DIAGNOSING | WAITING -> DONE
    ending = launch.attempt.ending
    is_own = isinstance(ending, NotStarted) and decision.exit_code != 0
    leaves = decision.next_step == "restart" and (launch.leaves_by_signal or launch.stop_signum is None)
    return [*actions, *launch.finish(_exit_code(launch) if is_own else decision.exit_code, leaves=leaves)]


def regroup(launch: LaunchState, at: float, ending: Regroup) -> list[Action]:
    """STOPPING | DIAGNOSING -> BACKOFF: no failure."""
    launch.restarts += ending.is_counted
    launch.enter(State.BACKOFF, at)
    if ending.by:
        return [ReportRestart(launch.number, ending.by)]
    hosts = "a host that takes its place" if ending.is_counted else "the hosts that are there"
    return [PrintLine(f"{ending.message}: starting all ranks again with {hosts}")]


def wait_for_others(launch: LaunchState, at: float) -> list[Action]:
    """-> WAITING, without end, unless the others cannot be reached, or a signal is still to be obeyed."""
    unreachable, limit_s = launch.attempt.others.unreachable, launch.limits.unreachable_s
    obey_at = launch.attempt.stopping.obey_at
    if obey_at is not None:
        launch.enter(State.WAITING, obey_at)
        return []
    launch.enter(State.WAITING, at + limit_s if unreachable else None)
    if not unreachable:
        return []
    if launch.is_spare:
        return [PrintLine(f"{unreachable}; this spare host waits for {limit_s:g} s at most")]
    well = "every rank that has reported ended with exit code 0"
    return [PrintLine(f"{unreachable}; {well}; waiting for {limit_s:g} s at most")]


def end_well_alone(launch: LaunchState, what: str) -> list[Action]:
    """WAITING | STOPPING -> DONE: as under torchrun, whose exit barrier ends then."""
    return [PrintLine(f"{what}; all ranks of this host ended well"), *launch.finish(0)]


def begin_next(launch: LaunchState, event: DeadlineExpired) -> list[Action]:
    """BACKOFF -> CHECKING: the store's port stays bound from attempt to attempt."""
    launch.number += 1
    launch.attempt = Attempt()
    launch.enter(State.CHECKING, event.at + launch.limits.checks_s)
    return [RunChecks(launch.number)]
