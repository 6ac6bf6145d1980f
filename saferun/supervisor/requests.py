"""What users ask a running job for by saferunctl: its end, at once or after a checkpoint, and another attempt. Pure."""

from __future__ import annotations

import signal

from saferun.supervisor.actions import (
    Action,
    BroadcastCheckpoint,
    BroadcastRequest,
    PrintLine,
    RequestCheckpoint,
)
from saferun.supervisor.deciding import diagnose, end_wait
from saferun.supervisor.ending import Regroup, Stopped
from saferun.supervisor.events import CheckpointRequested, RestartRequested, StopRequested
from saferun.supervisor.launch_state import LaunchState, State
from saferun.supervisor.stopping import (
    CAPTURE_BEFORE_SIGNAL_S,
    TOGETHER,
    kill,
    ranks_count,
    stop,
    stop_as_asked,
    stop_waiting_for_orphans,
)


def handle(launch: LaunchState, event: StopRequested | RestartRequested | CheckpointRequested) -> list[Action]:
    """What follows from a request in a state in which the table has it."""
    if isinstance(event, CheckpointRequested):
        return on_checkpoint_requested(launch, event)
    if isinstance(event, RestartRequested):
        return on_restart_requested(launch, event)
    if launch.state in {State.CHECKING, State.JOINING, State.BACKOFF}:
        return end_at_once_as_requested(launch, event)
    return on_stop_requested(launch, event)


def end_at_once_as_requested(launch: LaunchState, event: StopRequested) -> list[Action]:
    """CHECKING | JOINING | BACKOFF -> DONE: no rank runs, and there is no other attempt."""
    launch.note_request(event.by, event.signum, ours=event.ours)
    launch.stop_signum = event.signum
    asked: list[Action] = []
    if launch.state is State.BACKOFF and (event.ours or launch.leads) and launch.job.spans_hosts:
        # Hosts that wait for the others already end when they read it of the leader.
        asked.append(BroadcastRequest(launch.number, event.by, event.at_once))
    line = PrintLine(f"{event.by}: there is no other attempt")
    return [line, *asked, *launch.finish(launch.failure_code)]


def on_stop_requested(launch: LaunchState, event: StopRequested) -> list[Action]:
    """PROBING | STARTING | RUNNING | CAPTURING | STOPPING | WAITING | DIAGNOSING: the job ends, on all hosts."""
    attempt, stopping = launch.attempt, launch.attempt.stopping
    if launch.stop_signum is not None and not event.at_once:
        return []
    if launch.state is State.STOPPING and stopping.stage == "sweeping" and attempt.ending is None:
        # Every rank ended well, as for a signal: the job has not been stopped.
        line = PrintLine(f"{event.by}: processes that the ranks left behind are not waited for")
        return [
            *([line] if event.ours else []),
            *_request_of(launch, event),
            *stop_waiting_for_orphans(launch, event.at),
        ]
    is_repeated = launch.stop_signum is not None
    launch.note_request(event.by, event.signum, ours=event.ours)
    launch.stop_signum = event.signum
    launch.add_ending(Stopped(event.signum, by=event.by))
    announced = launch.broadcast_abort("request", event.by, event.signum) if launch.state in TOGETHER else []
    return [*announced, *_request_of(launch, event), *_obey(launch, event, is_repeated=is_repeated)]


def _obey(launch: LaunchState, event: StopRequested, *, is_repeated: bool) -> list[Action]:
    """What a request comes to in a state, once it is noted."""
    if launch.is_spare:
        return []  # WAITING -> WAITING: until the leader has decided
    if launch.state in {State.WAITING, State.PROBING}:
        return diagnose(launch, event.at)
    if launch.state is State.DIAGNOSING:
        return end_wait(launch, event.at)
    ranks = ranks_count(len(launch.attempt.running))
    if event.at_once:
        return [PrintLine(f"{event.by}: killing {ranks}"), *kill(launch, event.at)]
    if launch.state in {State.STARTING, State.RUNNING}:
        line = f"{event.by}: stopping {ranks}, SIGKILL follows in {launch.limits.grace_s:g} s"
        return [PrintLine(line), *stop_as_asked(launch, event.at, event.signum, event.idle_s)]
    if launch.state is State.CAPTURING and launch.deadline is not None and not is_repeated:
        launch.enter(State.CAPTURING, min(launch.deadline, event.at + CAPTURE_BEFORE_SIGNAL_S))
        if launch.attempt.awaits_cause:
            return stop(launch, event.at, event.signum)
    return []


def _request_of(launch: LaunchState, event: StopRequested) -> list[Action]:
    """Have the other hosts do the same: an abort that was announced before may have had another reason."""
    if not (event.ours and launch.job.spans_hosts) or launch.attempt.others.cut_off is not None:
        return []
    return [BroadcastRequest(launch.number, event.by, event.at_once)]


def on_restart_requested(launch: LaunchState, event: RestartRequested) -> list[Action]:
    """STARTING | RUNNING -> STOPPING | CAPTURING: then all ranks are started again, without a failure.

    Of several hosts each does that when it reads it in the job's log, this one too: another end of the attempt may be
    there before, and all hosts end it for the same reason.
    """
    count, grace_s = len(launch.attempt.running), launch.limits.grace_s
    if launch.job.spans_hosts:
        announced = launch.broadcast_abort("restart", event.by, signal.SIGTERM)
        text = f"{event.by}: all hosts stop their ranks to start them again, SIGKILL follows in {grace_s:g} s"
        return [PrintLine(text), *announced] if announced else []
    launch.add_ending(Regroup(event.by, event.by))
    line = PrintLine(f"{event.by}: stopping {ranks_count(count)} to start them again, SIGKILL follows in {grace_s:g} s")
    return [line, *stop_as_asked(launch, event.at, signal.SIGTERM, event.idle_s)]


def on_checkpoint_requested(launch: LaunchState, event: CheckpointRequested) -> list[Action]:
    """RUNNING: the ranks get the signal by which they learn to save, and end by themselves; none is started again."""
    launch.stopped_by = event.by
    asked = [RequestCheckpoint(launch.number, launch.attempt.ranks, event.signum, event.by)]
    if not event.ours or not launch.job.spans_hosts or launch.attempt.others.cut_off is not None:
        return [*asked]
    return [*asked, BroadcastCheckpoint(launch.number, event.by, event.signum)]
