"""RUNNING and CAPTURING: ranks that end, a store that is lost, hangs. Pure."""

from __future__ import annotations

import signal

from saferun.supervisor.actions import Action, AwaitCause, ReportHang
from saferun.supervisor.ending import Failed, Hung, StoreLost
from saferun.supervisor.launch_state import LaunchState, State
from saferun.supervisor.stopping import capture, fail, is_captured_for_failure, stop, sweep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.supervisor.events import (
        CauseShown,
        DeadlineExpired,
        EvidenceCaptured,
        HangSuspected,
        RankExited,
        StoreUnavailable,
    )


def on_rank_exited(launch: LaunchState, event: RankExited) -> list[Action]:
    """A rank ends while all are started or run. With the last one that ends well the job is done here."""
    _note_exit(launch, event)
    # Of ranks that end before the last one runs: RUNNING begins with the first rank.
    launch.enter(State.RUNNING, None)
    if not event.status.ok:
        return fail(launch, event.at, event.local_rank)
    # RUNNING -> STOPPING: every rank is done; only what they left behind is to be ended.
    return [] if launch.attempt.running else sweep(launch, event.at)


def on_rank_exited_in_capture(launch: LaunchState, event: RankExited) -> list[Action]:
    """A rank may also fail while the others are captured because they hang."""
    _note_exit(launch, event)
    attempt = launch.attempt
    announced: list[Action] = []
    if attempt.verdict is not None:
        attempt.has_moved = True
        if not event.status.ok:
            launch.add_ending(Failed(event.local_rank))
        announced = launch.broadcast_abort("failure") if attempt.ending is not None else []
    elif not event.status.ok:
        announced = launch.broadcast_cause()
    # CAPTURING -> STOPPING: no rank is left to be captured.
    return announced if attempt.running else [*announced, *sweep(launch, event.at)]


def on_rank_exited_in_stop(launch: LaunchState, event: RankExited) -> list[Action]:
    """STOPPING: the sweep follows the last rank."""
    _note_exit(launch, event)
    if launch.attempt.running or launch.attempt.stopping.stage == "sweeping":
        return []
    return sweep(launch, event.at)


def _note_exit(launch: LaunchState, event: RankExited) -> None:
    launch.attempt.running.discard(event.local_rank)
    launch.attempt.has_failed_rank = launch.attempt.has_failed_rank or not event.status.ok


def on_store_unavailable(launch: LaunchState, event: StoreUnavailable) -> list[Action]:
    """RUNNING | CAPTURING: ranks that ask for the store would wait forever."""
    if launch.state is State.CAPTURING and launch.attempt.verdict is None:
        return []
    launch.add_ending(StoreLost(event.what, event.hint))
    return fail(launch, event.at) if launch.state is State.RUNNING else []


def on_hang(launch: LaunchState, event: HangSuspected) -> list[Action]:
    """RUNNING -> CAPTURING."""
    return capture(launch, event.at, event.verdict, event.number)


def on_captured(launch: LaunchState, event: EvidenceCaptured) -> list[Action]:
    """CAPTURING -> STOPPING | RUNNING; or it lasts on, for the cause of a victim's failure."""
    attempt, limit_s = launch.attempt, launch.limits.cause_s
    attempt.has_moved = attempt.has_moved or event.moved
    if event.doubted and attempt.verdict is not None:
        attempt.verdict = attempt.verdict._replace(certain=False)
    suspects = tuple(rank for rank in event.suspects if rank in attempt.running)
    if suspects and limit_s > 0 and not attempt.is_cause_shown and is_captured_for_failure(launch):
        attempt.is_captured = attempt.awaits_cause = True
        launch.enter(State.CAPTURING, event.at + limit_s)
        return [AwaitCause(launch.number, suspects, limit_s)]
    return _after_capture(launch, event.at, event.culprits)


def on_cause_shown(launch: LaunchState, event: CauseShown) -> list[Action]:
    """CAPTURING -> STOPPING: nothing more is to be waited for."""
    launch.attempt.is_cause_shown = True
    return _after_capture(launch, event.at, ()) if launch.attempt.awaits_cause else []


def on_capture_deadline(launch: LaunchState, event: DeadlineExpired) -> list[Action]:
    """CAPTURING -> STOPPING | RUNNING: captures that are not there by now are not waited for."""
    return _after_capture(launch, event.at, ())


def _after_capture(launch: LaunchState, at: float, culprits: tuple[int, ...]) -> list[Action]:
    attempt, hang_policy = launch.attempt, launch.hang_policy
    verdict, attempt.verdict = attempt.verdict, None
    attempt.is_captured = True
    if verdict is None or attempt.ending is not None:
        aborted = launch.to_be_aborted(attempt.others.culprits) if isinstance(attempt.ending, Hung) else ()
        return stop(launch, at, launch.signum_for_ranks, aborted)
    next_step = hang_policy.next_step(certain=verdict.certain and not attempt.has_moved and launch.leads)
    if next_step == "restart" and not (launch.may_restart or launch.spares):
        next_step = "stop"
    report = ReportHang(launch.number, next_step)
    if next_step == "report":
        # CAPTURING -> RUNNING: the job goes on, and may well make progress again.
        launch.enter(State.RUNNING, None)
        return [report]
    launch.add_ending(Hung(is_final=next_step == "stop"))
    aborted = launch.to_be_aborted(culprits)
    return [report, *launch.broadcast_abort("hang"), *stop(launch, at, signal.SIGTERM, aborted)]
