"""What other hosts report and decide: aborts, decisions, hosts that cannot be reached. Pure."""

from __future__ import annotations

import signal

from saferun.model import ABORT_ORDERS
from saferun.supervisor.actions import Action, BroadcastDecision, PrintLine
from saferun.supervisor.deciding import (
    diagnose,
    end_well_alone,
    follow,
    lose_as_spare,
    regroup,
    wait_for_others,
)
from saferun.supervisor.ending import Ending, Failed, Hung, Regroup, Stopped, signum_of
from saferun.supervisor.launch_state import CutOff, LaunchState, State
from saferun.supervisor.stopping import (
    CAPTURE_BEFORE_SIGNAL_S,
    capture,
    end_cause_wait,
    expect_sigkill,
    fail,
    kill,
    on_signal,
    stop,
    stop_as_asked,
    stop_waiting_for_orphans,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.supervisor.events import (
        DeadlineExpired,
        HostsDone,
        HostsReachable,
        HostsUnreachable,
        JobAborted,
        JobDecided,
        JobLost,
        SpareLost,
    )

# Reasons that a host announces before it acts: it acts when it reads its own entry in the log.
_ANNOUNCED_WITHOUT_ACTING = frozenset({"membership", "lost", "task_lost", "restart"})
# How soon after one host a scheduler has signalled all of them, at the latest.
_SAME_SIGNAL_S = 2.0


# --------------------------------------------------------------------------------------------------------------------
# The attempt ends on all hosts


def note_abort(launch: LaunchState, event: JobAborted) -> None:
    """All hosts end this attempt, for the same reason: the first that any of them announced."""
    others = launch.attempt.others
    others.is_announced = True
    if not launch.leads and not launch.is_spare:
        others.unreachable = ""  # it has been read in the leader's store
    # saferunctl, unlike a scheduler, sends no SIGKILL afterwards.
    if event.signum and event.reason not in {"request", "restart"}:
        others.announced_signum = event.signum
        expect_sigkill(launch, event.at)
    if event.reason == "request" and not event.ours:
        launch.note_request(event.message, event.signum, ours=False)
    others.is_stopped = others.is_stopped or event.reason in ABORT_ORDERS
    others.cause_wanted = others.cause_wanted or event.reason == "victim"


def _cause_for(launch: LaunchState, event: JobAborted) -> list[Action]:
    """What has failed here may be the cause that another host waits for."""
    return launch.broadcast_cause() if launch.attempt.has_failed_rank and not event.ours else []


def on_abort(launch: LaunchState, event: JobAborted) -> list[Action]:
    """STARTING | RUNNING -> CAPTURING | STOPPING."""
    note_abort(launch, event)
    if _has_acted(event):
        return []
    launch.add_ending(Hung() if event.reason == "hang" else _ending(launch, event))
    if event.reason == "hang":
        if not launch.attempt.is_captured:
            launch.attempt.others.culprits = event.culprits
            return capture(launch, event.at)
        # RUNNING -> STOPPING: it has just been captured on all hosts.
        return stop(launch, event.at, signal.SIGTERM, launch.to_be_aborted(event.culprits))
    if event.signum == signal.SIGKILL and event.reason == "request":
        return kill(launch, event.at)
    if not event.signum:
        if isinstance(launch.attempt.ending, Regroup):
            # Nothing has failed on this host, and a capture would hold up all of them.
            return stop_as_asked(launch, event.at, signal.SIGTERM, event.idle_s)
        return capture(launch, event.at)
    signum = launch.attempt.others.announced_signum
    if signum == signal.SIGINT and signum in launch.job.stop_signals:
        return stop(launch, event.at, signum)
    is_for_others = isinstance(launch.attempt.ending, Regroup)
    if is_for_others and signum != signal.SIGTERM and signum in launch.job.stop_signals:
        # The ranks are only to be started again, unless the scheduler signals all hosts: by SIGTERM they would then die
        # without a checkpoint.
        launch.attempt.awaits_signal = True
        launch.enter(State.CAPTURING, event.at + min(_SAME_SIGNAL_S, launch.limits.grace_s / 2))
        return []
    return stop_as_asked(launch, event.at, launch.signum_for_ranks, event.idle_s)


def on_abort_without_ranks(launch: LaunchState, event: JobAborted) -> list[Action]:
    """PROBING | WAITING -> DIAGNOSING | BACKOFF."""
    note_abort(launch, event)
    if _has_acted(event):
        return []
    launch.add_ending(_ending(launch, event))
    if isinstance(launch.attempt.ending, Regroup):
        if launch.is_to_end:
            return launch.finish(1, leaves=True)
        launch.restarts += launch.attempt.ending.is_counted
        launch.enter(State.BACKOFF, event.at)
        return []
    if launch.is_spare:
        return []  # WAITING -> WAITING: it has seen nothing of it, and the leader decides
    return diagnose(launch, event.at)


def on_abort_in_diagnosis(launch: LaunchState, event: JobAborted) -> list[Action]:
    """DIAGNOSING -> DIAGNOSING | BACKOFF: where the others meet again, no decision comes.

    What this host has seen fail meanwhile are ranks that others have left.
    """
    note_abort(launch, event)
    announced = _cause_for(launch, event)
    attempt = launch.attempt
    if _has_acted(event):
        return announced
    if _others_regroup_without(launch, event):
        attempt.others.cut_off = CutOff()
        if attempt.own_diagnosis is None and not launch.leads:
            return announced
        attempt.own_diagnosis = None
        return [*announced, *diagnose(launch, event.at)]
    ending = _ending(launch, event)
    is_free = launch.answers_to_job and launch.stop_signum is None and attempt.others.decision is None
    if isinstance(ending, Regroup) and is_free:
        seen = _failure_seen(launch)
        launch.add_ending(ending)
        if attempt.ending is ending:
            return [*announced, *seen, *regroup(launch, event.at, ending)]
    return announced


def _failure_seen(launch: LaunchState) -> list[Action]:
    """What failed on this host by then: no report has it."""
    ending, placement, found = launch.attempt.ending, launch.attempt.placement, launch.attempt.own_diagnosis
    if placement is None or not isinstance(ending, Failed):
        return []
    ranks = [assignment.rank for assignment in placement.ranks if assignment.local_rank == ending.local_rank]
    what = [found.headline if found is not None else f"rank {rank} failed" for rank in ranks]
    return [PrintLine(f"as the hosts were starting again, {text}") for text in what]


def _others_regroup_without(launch: LaunchState, event: JobAborted) -> bool:
    """Whether the others meet again without this host, which was sent a signal at the same moment."""
    is_stopped = launch.stop_signum is not None and not launch.stopped_by and launch.attempt.others.cut_off is None
    return is_stopped and isinstance(_ending(launch, event), Regroup)


def on_abort_on_the_way_out(launch: LaunchState, event: JobAborted) -> list[Action]:
    """CAPTURING, STOPPING: the ranks are being ended already, or only what they left behind is left."""
    if _is_too_late_to_join(launch, event):
        return []
    note_abort(launch, event)
    announced = _cause_for(launch, event)
    if _has_acted(event):
        return []
    end_cause_wait(launch, event.at)
    ending = _ending(launch, event)
    attempt = launch.attempt
    is_of_hang = launch.state is State.CAPTURING and attempt.verdict is not None and attempt.ending is None
    if event.reason == "hang" and is_of_hang:
        # The leader has not waited for what is captured here.
        ending, attempt.others.culprits = Hung(), event.culprits
    if _others_regroup_without(launch, event):
        launch.attempt.others.cut_off = CutOff()
    elif not isinstance(ending, Regroup) or launch.stop_signum is None:
        launch.add_ending(ending)
        meets_again = attempt.ending is ending and isinstance(ending, Regroup) and launch.state is State.CAPTURING
        if meets_again and launch.deadline is not None:
            # The others have begun to meet again, and wait for this host.
            launch.enter(State.CAPTURING, min(launch.deadline, event.at + CAPTURE_BEFORE_SIGNAL_S))
    return [*announced, *stop_waiting_for_orphans(launch, event.at)]


def _is_too_late_to_join(launch: LaunchState, event: JobAborted) -> bool:
    """Whether a host wants to join a job of this host alone, whose ranks have all ended well."""
    attempt = launch.attempt
    has_ended_well = launch.state is State.STOPPING and attempt.stopping.stage == "sweeping" and attempt.ending is None
    placement = attempt.placement
    is_alone = placement is not None and placement.world_size == len(placement.ranks)
    return event.reason == "membership" and is_alone and has_ended_well


def _has_acted(event: JobAborted) -> bool:
    """Whether this host has acted already, and announced it."""
    return event.ours and event.reason not in _ANNOUNCED_WITHOUT_ACTING


def _ending(launch: LaunchState, event: JobAborted) -> Ending:
    match event.reason:
        case "membership":
            return Regroup(event.message)
        case "restart":
            return Regroup(event.message, event.message)
        case "leave" if launch.attempt.others.may_leave or launch.may_restart:
            why = f": {event.message}" if event.message and not event.signum else ""
            return Regroup(f"{event.host} leaves the job{why}", is_counted=not launch.attempt.others.may_leave)
        case "signal" | "parent":
            return Stopped(event.signum, event.host or "another host")
        case "request":
            return Stopped(event.signum, event.host or "another host", event.message)
    return Failed()


# --------------------------------------------------------------------------------------------------------------------
# What the leader decides


def on_decided(launch: LaunchState, event: JobDecided) -> list[Action]:
    """CAPTURING, STOPPING: it is carried out after the sweep."""
    if not _heed(launch, event):
        return []
    if launch.state is State.CAPTURING and launch.attempt.verdict is not None:
        # A hang was suspected here: otherwise the ranks would run on after the capture, and nothing would end them.
        launch.add_ending(Failed())
    end_cause_wait(launch, event.at)
    return stop_waiting_for_orphans(launch, event.at)


def on_decided_with_ranks(launch: LaunchState, event: JobDecided) -> list[Action]:
    """STARTING | RUNNING -> CAPTURING: it was decided without this host, which had not answered for long."""
    if not _heed(launch, event):
        return []
    launch.add_ending(Failed())
    return capture(launch, event.at)


def on_decided_while_waiting(launch: LaunchState, event: JobDecided) -> list[Action]:
    """PROBING | WAITING | DIAGNOSING -> BACKOFF | DONE, once this host has nothing else to do."""
    decision = _heed(launch, event)
    if decision is None or (launch.state is State.DIAGNOSING and launch.attempt.own_diagnosis is None):
        return []
    return follow(launch, decision, event.at)


def on_decided_between_attempts(launch: LaunchState, event: JobDecided) -> list[Action]:
    """CHECKING | JOINING | BACKOFF -> DONE: this host is about to meet the others again, and they have ended."""
    if launch.leads or event.next_step != "finish":
        return []
    line = PrintLine("the leader has ended the job: there is no other attempt")
    return [line, *launch.finish(event.exit_code or 1)]


def _heed(launch: LaunchState, event: JobDecided) -> JobDecided | None:
    """Take a decision in, as far as it is believed; the leader knows its own."""
    if launch.leads:
        return None
    attempt = launch.attempt
    is_failure = not isinstance(attempt.ending, Regroup | None) and signum_of(attempt.ending) is None
    has_failed = attempt.has_failed_rank or is_failure
    if event.next_step == "finish" and event.exit_code == 0 and (attempt.running or has_failed):
        # No other host can say that all went well here.
        event = event._replace(exit_code=1)
    attempt.others.decision = event
    return event


def on_hosts_done(launch: LaunchState, _event: HostsDone) -> list[Action]:
    """WAITING -> DONE: every rank of the job ended with exit code 0."""
    return [BroadcastDecision(launch.number, "finish", 0), *launch.finish(0)] if launch.leads else []


# --------------------------------------------------------------------------------------------------------------------
# Hosts that cannot be reached


def on_job_lost(launch: LaunchState, event: JobLost) -> list[Action]:
    """This host decides for itself what no other can decide for it any more."""
    attempt, others = launch.attempt, launch.attempt.others
    if others.cut_off is not None or others.decision is not None:
        return []
    others.cut_off = CutOff(event.what, event.hint, event.class_name)
    if launch.is_spare and launch.state is State.WAITING:
        return lose_as_spare(launch, event)
    match launch.state:
        case State.STARTING | State.RUNNING:
            return fail(launch, event.at)
        case State.WAITING if _may_end_alone(launch, event):
            return end_well_alone(launch, event.what)
        case State.WAITING | State.PROBING | State.JOINING:
            # JOINING: the hosts have met, and this one prepares its ranks, which would look for the store for long.
            launch.add_ending(Failed())
            return diagnose(launch, event.at)
        case State.CAPTURING:
            launch.add_ending(Failed())
            end_cause_wait(launch, event.at)
        case State.STOPPING if attempt.stopping.stage == "sweeping" and attempt.ending is None:
            # As in WAITING, where it would be next.
            if not _may_end_alone(launch, event):
                launch.add_ending(Failed())
            return stop_waiting_for_orphans(launch, event.at)
        case State.DIAGNOSING if attempt.own_diagnosis is not None:
            # DIAGNOSING -> DIAGNOSING: its ranks may have failed only because the leader was gone.
            attempt.own_diagnosis = None
            return diagnose(launch, event.at)
    return []


def _may_end_alone(launch: LaunchState, event: JobLost) -> bool:
    """Whether ranks that ended well are the end of it here, whatever the leader decided.

    Not where the other hosts form the job again, or their ranks may train on without the stores that were lost, while
    they find that the leader is up.
    """
    others_suffice = launch.job.outlives_leader and launch.attempt.others.may_leave
    may_leave_store = not launch.leads and not launch.job.outlives_leader
    return not others_suffice and (not event.class_name or may_leave_store)


def on_reachability(launch: LaunchState, event: HostsUnreachable | HostsReachable) -> list[Action]:
    """Hosts cannot be reached while the job goes on, or can be again."""
    launch.attempt.others.unreachable = getattr(event, "message", "")
    return wait_for_others(launch, event.at) if launch.state is State.WAITING else []


def on_waiting_deadline(launch: LaunchState, event: DeadlineExpired) -> list[Action]:
    """WAITING -> DONE: the others' ranks are at work, or have ended well, as far as this host knows.

    WAITING -> DIAGNOSING: they are at work, and a signal has come to this host, without which the job cannot go on.
    """
    late = launch.attempt.stopping.late_signal
    if late is not None:
        return on_signal(launch, late._replace(at=event.at))
    unreachable, limit_s = launch.attempt.others.unreachable, launch.limits.unreachable_s
    if launch.is_spare:
        return [PrintLine(f"{unreachable} for {limit_s:g} s; this spare host ends"), *launch.finish(0, leaves=True)]
    line = PrintLine(f"{unreachable} for {limit_s:g} s; every rank that has reported ended with exit code 0")
    return [line, *([BroadcastDecision(launch.number, "finish", 0)] if launch.leads else []), *launch.finish(0)]


# --------------------------------------------------------------------------------------------------------------------
# Spare hosts


def on_spare_lost(launch: LaunchState, event: SpareLost) -> list[Action]:
    """The leader, while the attempt goes on or ends: nothing but a line follows."""
    launch.spares = tuple(name for name in launch.spares if name != event.host)
    count = len(launch.spares)
    left = "no spare is left" if count == 0 else f"{count} spare{'' if count == 1 else 's'} left"
    return [PrintLine(f"{event.host}, a spare host, is gone ({event.why}); the job goes on, {left}")]
