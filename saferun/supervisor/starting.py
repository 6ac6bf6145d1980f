"""NEW to STARTING: checks, rendezvous, probes and the start of the ranks, and starts that fail. Pure."""

from __future__ import annotations

from saferun.supervisor.actions import (
    Action,
    BroadcastDecision,
    JoinHosts,
    PrintLine,
    ProbeHosts,
    RunChecks,
    ServeStore,
    StartRanks,
)
from saferun.supervisor.deciding import diagnose
from saferun.supervisor.ending import NotStarted
from saferun.supervisor.events import StartFailed
from saferun.supervisor.launch_state import CutOff, LaunchState, State
from saferun.supervisor.stopping import fail, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.supervisor.events import (
        ChecksAsked,
        ChecksOver,
        ChecksPassed,
        DeadlineExpired,
        HostsAwaited,
        HostsJoined,
        LaunchRequested,
        ProbesPassed,
        RanksStarted,
    )

# What is reported of a phase that takes longer than it may.
_OVERDUE = {
    State.CHECKING: "the checks before the start timed out",
    State.JOINING: "the rendezvous of the hosts timed out",
    State.PROBING: "the probes between the hosts timed out",
    State.STARTING: "the ranks did not start in time",
}


def run_checks(launch: LaunchState, event: LaunchRequested) -> list[Action]:
    """NEW -> CHECKING."""
    launch.enter(State.CHECKING, event.at + launch.limits.checks_s)
    return [RunChecks(launch.number)]


def on_checks_asked(launch: LaunchState, event: ChecksAsked) -> list[Action]:
    """What came before, a name lookup for instance, is no part of the checks' time."""
    launch.enter(State.CHECKING, event.at + launch.limits.checks_s)
    return []


def join_hosts(launch: LaunchState, event: ChecksPassed) -> list[Action]:
    """CHECKING -> JOINING."""
    launch.enter(State.JOINING, event.at + launch.limits.join_s)
    left_out, launch.left_out = launch.left_out, -1
    return [JoinHosts(launch.number, launch.restarts, left_out)]


def on_awaited(launch: LaunchState, event: HostsAwaited) -> list[Action]:
    """The job may have no place for this host for days; a coordinator that falls silent is not waited for."""
    if launch.limits.awaited_s:
        launch.deadline = max(launch.deadline or 0.0, event.at + launch.limits.awaited_s)
    return []


def on_joined(launch: LaunchState, event: HostsJoined) -> list[Action]:
    """JOINING -> PROBING | STARTING; of a spare: -> WAITING."""
    _take_part(launch, event)
    is_known, launch.has_been_spare = launch.has_been_spare, launch.is_spare
    if launch.is_spare:
        launch.enter(State.WAITING, None)
        line = f"{event.placement.host}: this spare host waits to take the place of one that fails"
        return [] if is_known else [PrintLine(line)]
    if not event.probes:
        return start_ranks(launch, event)
    launch.enter(State.PROBING, event.at + launch.limits.probe_s)
    return [ProbeHosts(launch.number)]


def _take_part(launch: LaunchState, event: HostsJoined) -> None:
    if event.number >= 0:
        launch.number, launch.restarts = event.number, event.placement.restarts
    launch.leads, launch.spares, launch.needed = event.leads, event.spares, event.needed
    launch.attempt.others.may_leave = event.may_leave
    launch.attempt.placement = event.placement


def start_ranks(launch: LaunchState, event: HostsJoined | ProbesPassed) -> list[Action]:
    """JOINING | PROBING -> STARTING. The ranks first: they import torch while the coordinator does."""
    placement = launch.attempt.placement
    assert placement is not None  # noqa: S101 - the hosts have met
    launch.enter(State.STARTING, event.at + launch.limits.start_s)
    launch.attempt.running = {assignment.local_rank for assignment in placement.ranks}
    return [StartRanks(launch.number, placement), ServeStore(launch.number)]


def on_started(launch: LaunchState, _event: RanksStarted) -> list[Action]:
    """STARTING -> RUNNING."""
    launch.enter(State.RUNNING, None)
    return []


def end_after_checks(launch: LaunchState, event: ChecksOver) -> list[Action]:
    """CHECKING | PROBING -> DONE: nothing else was wanted."""
    broadcasts = launch.state is State.PROBING and launch.leads
    decision = [BroadcastDecision(launch.number, "finish", event.exit_code)] if broadcasts else []
    return [*decision, *launch.finish(event.exit_code)]


def on_start_failed(launch: LaunchState, event: StartFailed) -> list[Action]:
    """The attempt cannot begin, or not with all of its ranks."""
    launch.add_ending(NotStarted.of(event, by_checks=launch.state is State.PROBING))
    attempt = launch.attempt
    attempt.running.intersection_update(event.started)
    if launch.state is State.JOINING and event.joined is not None:
        return _give_up_place(launch, event, event.joined)
    if launch.state in {State.CHECKING, State.JOINING}:
        # -> DIAGNOSING: nothing had been started, and no other host knows of this attempt.
        if launch.job.spans_hosts:
            attempt.others.cut_off = attempt.others.cut_off or CutOff()
        return diagnose(launch, event.at)
    announced = launch.broadcast_abort("start", event.what, hint=event.hint)
    if launch.state is State.PROBING:
        # -> DIAGNOSING: nothing had been started.
        return [*announced, *diagnose(launch, event.at)]
    if launch.state in {State.STARTING, State.RUNNING}:
        # -> CAPTURING | STOPPING: the ranks that do run are ended like those of any failed attempt.
        return [*announced, *fail(launch, event.at)]
    is_swept = launch.state is State.STOPPING and attempt.stopping.stage == "sweeping"
    if not attempt.running and not is_swept:
        # A signal came before the news that there is no rank to stop.
        return [*announced, *sweep(launch, event.at)]
    return announced


def _give_up_place(launch: LaunchState, event: StartFailed, joined: HostsJoined) -> list[Action]:
    """JOINING -> DIAGNOSING: nothing has been started here, but the others count on the ranks of this host."""
    _take_part(launch, joined)
    others = launch.attempt.others
    announced = launch.broadcast_abort("leave" if others.may_leave else "start", event.what, hint=event.hint)
    if others.may_leave:
        others.cut_off = CutOff()  # they go on without it
    return [*announced, *diagnose(launch, event.at)]


def on_deadline(launch: LaunchState, event: DeadlineExpired) -> list[Action]:
    """CHECKING, JOINING, PROBING or STARTING takes longer than it may."""
    is_preparing = launch.state is State.JOINING and (event.joined is not None or not launch.job.spans_hosts)
    failed = StartFailed(
        event.at,
        event.attempt,
        "the preparation of the ranks timed out" if is_preparing else _OVERDUE[launch.state],
        "see events.jsonl in the run directory for the last event",
        1,
        launch.attempt.ranks,
        joined=event.joined,
    )
    return on_start_failed(launch, failed)
