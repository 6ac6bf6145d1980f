"""The state machine of one host's share of a launch: a table of transitions. Pure: events in, actions out.

ARCHITECTURE.md draws the machine. The transitions stand in ``starting``, ``running``, ``stopping``, ``requests``,
``deciding`` and ``other_hosts``, each a function from the launch and an event to actions.
"""

from __future__ import annotations

from saferun.supervisor import deciding, other_hosts, running, starting, stopping
from saferun.supervisor.events import (
    CauseShown,
    CheckpointRequested,
    ChecksAsked,
    ChecksOver,
    ChecksPassed,
    CoreDumpSeen,
    DeadlineExpired,
    Diagnosed,
    Event,
    EvidenceCaptured,
    HangSuspected,
    HostsAwaited,
    HostsDone,
    HostsJoined,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
    LaunchRequested,
    LoopStalled,
    OrphansGone,
    ProbesPassed,
    RankExited,
    RanksStarted,
    RestartRequested,
    SignalReceived,
    SpareLost,
    StartFailed,
    StopRequested,
    StoreServed,
    StoreUnavailable,
    ToolAtWork,
)
from saferun.supervisor.launch_state import LaunchState, Limits, State
from saferun.supervisor.policy import AttemptPolicy, HangPolicy, JobPolicy
from saferun.supervisor.story import Story

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Literal

    from saferun.supervisor.actions import Action
    from saferun.supervisor.policy.faulty_hosts import FaultyHost

__all__ = ["Limits", "State", "Supervisor", "UnlistedError"]


class UnlistedError(Exception):
    """An event came in a state in which the table does not have it."""


def _resume(launch: LaunchState, event: LoopStalled) -> list[Action]:
    """This process was stopped or held up: give the phase the time that it had left."""
    launch.deadline = event.at + event.left_s
    return []


def _on_request(launch: LaunchState, event: StopRequested | RestartRequested | CheckpointRequested) -> list[Action]:
    """What a user asks for by saferunctl. It is loaded when there is a request."""
    try:
        from saferun.supervisor import requests
    except ImportError:  # from a file system that does not answer; a signal to saferun is still obeyed
        return []
    return requests.handle(launch, event)


# What is done about an event, state by state.
TRANSITIONS: dict[State, dict[type, Callable[[LaunchState, Any], list[Action]]]] = {
    State.NEW: {
        LaunchRequested: starting.run_checks,
        SignalReceived: stopping.end_at_once,
    },
    State.CHECKING: {
        ChecksAsked: starting.on_checks_asked,
        ChecksPassed: starting.join_hosts,
        ChecksOver: starting.end_after_checks,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.end_at_once,
        StopRequested: _on_request,
        DeadlineExpired: starting.on_deadline,
        LoopStalled: _resume,
        JobDecided: other_hosts.on_decided_between_attempts,
    },
    State.JOINING: {
        HostsAwaited: starting.on_awaited,
        HostsJoined: starting.on_joined,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.end_at_once,
        StopRequested: _on_request,
        DeadlineExpired: starting.on_deadline,
        LoopStalled: _resume,
        JobDecided: other_hosts.on_decided_between_attempts,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.PROBING: {
        ProbesPassed: starting.start_ranks,
        ChecksOver: starting.end_after_checks,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.on_signal,
        StopRequested: _on_request,
        DeadlineExpired: starting.on_deadline,
        LoopStalled: _resume,
        JobAborted: other_hosts.on_abort_without_ranks,
        JobDecided: other_hosts.on_decided_while_waiting,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.STARTING: {
        RanksStarted: starting.on_started,
        StartFailed: starting.on_start_failed,
        RankExited: running.on_rank_exited,
        SignalReceived: stopping.on_signal,
        StopRequested: _on_request,
        RestartRequested: _on_request,
        DeadlineExpired: starting.on_deadline,
        LoopStalled: _resume,
        JobAborted: other_hosts.on_abort,
        JobDecided: other_hosts.on_decided_with_ranks,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.RUNNING: {
        RankExited: running.on_rank_exited,
        StoreUnavailable: running.on_store_unavailable,
        HangSuspected: running.on_hang,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.on_signal,
        StopRequested: _on_request,
        RestartRequested: _on_request,
        CheckpointRequested: _on_request,
        JobAborted: other_hosts.on_abort,
        JobDecided: other_hosts.on_decided_with_ranks,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.CAPTURING: {
        EvidenceCaptured: running.on_captured,
        CauseShown: running.on_cause_shown,
        RankExited: running.on_rank_exited_in_capture,
        StoreUnavailable: running.on_store_unavailable,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.on_signal_on_the_way_out,
        StopRequested: _on_request,
        DeadlineExpired: running.on_capture_deadline,
        LoopStalled: _resume,
        JobAborted: other_hosts.on_abort_on_the_way_out,
        JobDecided: other_hosts.on_decided,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.STOPPING: {
        RankExited: running.on_rank_exited_in_stop,
        OrphansGone: stopping.on_orphans_gone,
        CoreDumpSeen: stopping.on_core_dump,
        ToolAtWork: stopping.on_tool,
        StartFailed: starting.on_start_failed,
        SignalReceived: stopping.on_signal_on_the_way_out,
        StopRequested: _on_request,
        DeadlineExpired: stopping.on_deadline,
        LoopStalled: stopping.on_stall,
        JobAborted: other_hosts.on_abort_on_the_way_out,
        JobDecided: other_hosts.on_decided,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.WAITING: {
        SignalReceived: stopping.on_signal,
        StopRequested: _on_request,
        DeadlineExpired: other_hosts.on_waiting_deadline,
        LoopStalled: other_hosts.on_waiting_deadline,
        JobAborted: other_hosts.on_abort_without_ranks,
        JobDecided: other_hosts.on_decided_while_waiting,
        JobLost: other_hosts.on_job_lost,
        HostsDone: other_hosts.on_hosts_done,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.DIAGNOSING: {
        Diagnosed: deciding.on_diagnosed,
        SignalReceived: stopping.on_signal_on_the_way_out,
        StopRequested: _on_request,
        DeadlineExpired: deciding.on_deadline,
        LoopStalled: _resume,
        JobAborted: other_hosts.on_abort_in_diagnosis,
        JobDecided: other_hosts.on_decided_while_waiting,
        JobLost: other_hosts.on_job_lost,
        HostsUnreachable: other_hosts.on_reachability,
        HostsReachable: other_hosts.on_reachability,
        SpareLost: other_hosts.on_spare_lost,
    },
    State.BACKOFF: {
        SpareLost: other_hosts.on_spare_lost,
        SignalReceived: stopping.end_backoff,
        StopRequested: _on_request,
        JobDecided: other_hosts.on_decided_between_attempts,
        DeadlineExpired: deciding.begin_next,
        LoopStalled: deciding.begin_next,
    },
    State.DONE: {},
}

# Answers that come late or twice, and news that change nothing any more. Whatever stands in neither table is a defect.
_LATE = (RestartRequested, CheckpointRequested)  # no ranks are at work, or they are being ended
_OF_CHECKS = (ChecksAsked, ChecksPassed)
_OF_MEETING = (*_OF_CHECKS, HostsAwaited)
_BEFORE_RANKS = (*_OF_MEETING, ChecksOver, HostsJoined, ProbesPassed)
_OF_RANKS = (*_BEFORE_RANKS, RanksStarted, StoreServed)
_OF_CAPTURES = (*_OF_RANKS, EvidenceCaptured, CauseShown, HangSuspected)
IGNORED: dict[State, tuple[type, ...]] = {
    State.NEW: (),
    # An orphan of an earlier attempt may end, and anyone may connect to the store's port, at any time.
    State.CHECKING: (*_LATE, HostsAwaited, RankExited, StoreUnavailable, JobLost, SpareLost),
    State.JOINING: (*_LATE, *_OF_CHECKS, ChecksOver, ProbesPassed, RankExited, StoreUnavailable, CauseShown),
    State.PROBING: (*_LATE, *_OF_MEETING, HostsJoined, RankExited, StoreUnavailable, HangSuspected, CauseShown),
    State.STARTING: (CheckpointRequested, *_BEFORE_RANKS, StoreServed, StoreUnavailable, HangSuspected, CauseShown),
    State.RUNNING: (*_OF_RANKS, EvidenceCaptured, CauseShown, HostsDone, DeadlineExpired, LoopStalled),
    State.CAPTURING: (*_LATE, *_OF_RANKS, HangSuspected, HostsDone),
    State.STOPPING: (*_LATE, *_OF_CAPTURES, HostsDone, StoreUnavailable),
    State.WAITING: (*_LATE, *_OF_CAPTURES, StoreUnavailable, OrphansGone),
    State.DIAGNOSING: (*_LATE, *_OF_CAPTURES, HostsDone, StoreUnavailable, OrphansGone, RankExited, StartFailed),
    State.BACKOFF: (
        *_LATE,
        *_OF_CAPTURES,
        *(HostsDone, StoreUnavailable, OrphansGone, RankExited, StartFailed, Diagnosed),
        *(JobAborted, JobLost, HostsUnreachable, HostsReachable),
    ),
    State.DONE: (),
}


class Supervisor:
    """One host's share of a launch.

    ``handle`` takes an event and returns the actions to be carried out, in order. ``deadline`` is the moment
    (monotonic seconds) at which a DeadlineExpired is due, or None.

    Args:
        policy: whether there is another attempt.
        limits: of the phases.
        hang_policy: what is done about hangs.
        job: how this host stands to the others.
        orphans: what is done about processes that work on after ranks that ended well.
    """

    # Tests set it: an event that neither table has is an error then. Otherwise it is ignored, and the story says so.
    is_strict = False

    def __init__(
        self,
        policy: AttemptPolicy,
        limits: Limits,
        hang_policy: HangPolicy | None = None,
        job: JobPolicy | None = None,
        *,
        orphans: Literal["wait", "end", "leave"] = "wait",
    ) -> None:
        self._launch = LaunchState(policy, limits, hang_policy or HangPolicy(), job or JobPolicy(), orphans)
        self.story = Story()
        self.remark = ""  # why nothing followed from the last event; empty where something could

    @property
    def state(self) -> State:
        """Where the launch stands."""
        return self._launch.state

    @property
    def attempt(self) -> int:
        """The number of the attempt, from 0."""
        return self._launch.number

    @property
    def spares(self) -> tuple[str, ...]:
        """The hosts that can take the place of one, as the leader knows them."""
        return self._launch.spares

    @property
    def deadline(self) -> float | None:
        """When the phase has lasted as long as it may; None: it has no limit."""
        return self._launch.deadline

    def can_replace(self, faults: Sequence[FaultyHost]) -> bool:
        """Whether spares can take the places of these hosts, as the leader knows them."""
        launch = self._launch
        if not (launch.leads and launch.spares and faults):
            return False
        from saferun.supervisor.policy.faulty_hosts import may_replace

        return may_replace(faults, launch.spares, moves_leader=launch.job.moves_leader)

    def take_waits(self, waits_s: Sequence[float]) -> None:
        """The waits before retries, as they have been drawn up beside the launch."""
        self._launch.policy.take_waits(waits_s)

    def handle(self, event: Event) -> list[Action]:
        """React to an event. Events of an attempt that is over are dropped here, and only here."""
        launch = self._launch
        before, actions = launch.state, []
        self.remark = self._why_not(event)
        if not self.remark:
            actions = TRANSITIONS[before][type(event)](launch, event)
        self.story.note(before, event, actions, launch.state, self.remark)
        return actions

    def _why_not(self, event: Event) -> str:
        """Why nothing follows from an event; empty where the table says what does."""
        launch = self._launch
        if event.attempt != launch.number:
            return "of another attempt"
        if launch.state is State.DONE:
            return "after the end"
        kind = type(event)
        if kind in TRANSITIONS[launch.state]:
            # A DeadlineExpired or LoopStalled posted for the previous phase does not end this one.
            is_early = (kind is DeadlineExpired or kind is LoopStalled) and not launch.is_due(event.at)
            return "not due" if is_early else ""
        if kind in IGNORED[launch.state]:
            return "ignored"
        if self.is_strict:
            raise UnlistedError(f"{kind.__name__} in {launch.state.value}: {event}")
        return "unlisted"
