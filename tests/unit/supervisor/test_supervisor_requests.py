"""The state machine when a user ends a job with saferunctl."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import (
    Action,
    BroadcastAbort,
    BroadcastRequest,
    CaptureEvidence,
    Diagnose,
    Finish,
    PrintLine,
    ReportFailure,
    ReportRestart,
    RequestCheckpoint,
    SignalRanks,
    SweepOrphans,
)
from saferun.supervisor.events import (
    CheckpointRequested,
    JobAborted,
    OrphansGone,
    RankExited,
    RestartRequested,
    StopRequested,
)
from saferun.supervisor.machine import State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, JobPolicy
from tests.unit.supervisor.fake_job import Job
from tests.unit.supervisor.fake_world import FAILED, HUNG_S, KILLED, LIMITS, OK, World, only, placement_of, running


def end_of(world: World) -> Finish:
    """How the launch ends when the ranks are gone."""
    for rank in sorted(world.alive):
        world.exit(rank, KILLED)
    world.answer_until(State.DONE)
    assert world.finish is not None
    return world.finish


@pytest.mark.parametrize(("at_once", "signum", "code"), [(False, signal.SIGTERM, 143), (True, signal.SIGKILL, 137)])
def test_a_request_signals_the_ranks_and_the_exit_code_says_so(at_once: bool, signum: int, code: int) -> None:
    """As a shell has it for a program that such a signal ended; there is no restart."""
    world = running(max_restarts=3)
    actions = world.request(at_once=at_once)
    assert only(SignalRanks, actions) == SignalRanks(0, (0, 1), signum)
    assert "saferunctl" in only(PrintLine, actions).text
    assert end_of(world) == Finish(code, by="saferunctl", at_once=at_once, ours=True)
    assert only(Diagnose, world.actions).stopped_by == "saferunctl"
    assert "stopped by saferunctl" in str(only(ReportFailure, world.actions).decision)


def test_a_job_that_hangs_is_captured_before_it_is_stopped() -> None:
    """As for a signal; a kill waits for nothing."""
    world = running()
    assert [type(action) for action in world.request(idle_s=HUNG_S)] == [PrintLine, CaptureEvidence]
    world = running()
    assert [type(action) for action in world.request(at_once=True, idle_s=HUNG_S)] == [PrintLine, SignalRanks]


def test_a_kill_ends_the_grace_of_a_stop() -> None:
    world = running()
    world.request()
    assert world.request() == []
    actions = world.request(at_once=True)
    assert only(SignalRanks, actions).signum == signal.SIGKILL
    assert end_of(world) == Finish(137, by="saferunctl", at_once=True, ours=True)


def test_a_kill_ends_the_capture_of_a_failure() -> None:
    world = running(max_restarts=3)
    world.exit(0, FAILED)
    assert world.state is State.CAPTURING
    assert only(SignalRanks, world.request(at_once=True)) == SignalRanks(0, (1,), signal.SIGKILL)
    assert end_of(world) == Finish(137, by="saferunctl", at_once=True, ours=True)


def test_a_request_while_an_attempt_is_diagnosed_or_waited_for_is_the_end() -> None:
    """There is no other attempt."""
    world = running(max_restarts=3)
    world.exit(0, FAILED)
    world.exit(1, KILLED)
    world.answer_until(State.DIAGNOSING)
    world.request()
    world.answer_until(State.DONE)
    assert world.finish == Finish(143, by="saferunctl", ours=True)
    world = running(max_restarts=3)
    for rank in range(2):
        world.exit(rank, FAILED)
    world.answer_until(State.BACKOFF)
    world.request()
    assert world.finish == Finish(143, by="saferunctl", ours=True)


def test_ranks_that_ended_well_have_not_been_stopped() -> None:
    """What they left behind is waited for no longer."""
    world = running()
    world.exit(0)
    world.exit(1)
    assert world.state is State.STOPPING
    assert only(SweepOrphans, world.request()).wait_s == 0.0
    world.answers = world.answers[-1:]
    world.answer_until(State.DONE)
    assert world.finish == Finish(0)


# ------------------------------------------------------------------------------------- another attempt, a checkpoint


def restart(world: World) -> list[Action]:
    """A user asks for another attempt."""
    return world.deliver(RestartRequested(world.now, world.attempt, "saferunctl restart"))


def test_a_restart_is_another_attempt_that_uses_up_none() -> None:
    """Ranks that do not end well on their way out have not failed."""
    world = running(max_restarts=0)
    assert only(SignalRanks, restart(world)).signum == signal.SIGTERM
    for rank in range(2):
        world.exit(rank, KILLED)
    world.answer_until(State.BACKOFF)
    assert only(ReportRestart, world.actions).by == "saferunctl restart"
    world.expire()
    world.answer_until(State.RUNNING)
    assert world.attempt == 1
    assert not [action for action in world.actions if isinstance(action, Diagnose | ReportFailure)]
    world.actions.clear()
    world.exit(0, FAILED)
    world.exit(1, KILLED)
    world.answer_until(State.DONE)
    assert world.finish == Finish(1), "of --max-restarts 0 there is still none left"


def test_a_stop_prevails_over_a_restart() -> None:
    world = running()
    restart(world)
    world.request()
    assert end_of(world) == Finish(143, by="saferunctl", ours=True)


def test_a_restart_is_asked_for_too_late_where_the_ranks_end() -> None:
    world = running()
    world.request()
    assert restart(world) == []
    assert end_of(world) == Finish(143, by="saferunctl", ours=True)


def checkpoint(world: World) -> list[Action]:
    """A user asks for a checkpoint and the end."""
    return world.deliver(CheckpointRequested(world.now, world.attempt, "saferunctl stop", signal.SIGUSR1))


def test_after_a_checkpoint_the_ranks_end_by_themselves() -> None:
    """With 0, as their script says."""
    world = running(max_restarts=3)
    assert checkpoint(world) == [RequestCheckpoint(0, (0, 1), signal.SIGUSR1, "saferunctl stop")]
    assert world.state is State.RUNNING
    world.exit(0)
    world.exit(1)
    world.answer_until(State.DONE)
    assert world.finish == Finish(0)


def test_a_rank_that_fails_over_its_checkpoint_has_failed_and_is_not_started_again() -> None:
    world = running(max_restarts=3)
    checkpoint(world)
    world.exit(0, FAILED)
    world.exit(1, KILLED)
    world.answer_until(State.DONE)
    assert world.finish == Finish(1)
    assert "stopped by saferunctl stop" in str(only(ReportFailure, world.actions).decision)


# ------------------------------------------------------------------------------------------------------ several hosts


def one_of_two(*, may_leave: bool = False) -> tuple[World, Supervisor]:
    """A host of a job of two, whose ranks run."""
    world = World()
    world.supervisor = Supervisor(AttemptPolicy(), LIMITS, None, JobPolicy(spans_hosts=True))
    world.launch()
    world.answer_until(State.JOINING)
    joined = world.answers.pop(0)
    world.deliver(joined._replace(placement=placement_of(2), may_leave=may_leave))  # type: ignore[call-arg]
    world.answer_until(State.RUNNING)
    return world, world.supervisor


@pytest.mark.parametrize("may_leave", [False, True])
def test_all_hosts_end_also_those_of_a_job_that_could_go_on_without_this_one(may_leave: bool) -> None:
    """A signal to one host of an elastic job means that host; a request means the job."""
    world, _ = one_of_two(may_leave=may_leave)
    actions = world.request()
    assert only(BroadcastAbort, actions).reason == "request"
    assert only(BroadcastRequest, actions) == BroadcastRequest(0, "saferunctl", at_once=False)


def test_a_kill_after_a_stop_reaches_the_other_hosts() -> None:
    """Of aborts only the first counts, so it goes by another message."""
    world, _ = one_of_two()
    world.request()
    actions = world.request(at_once=True)
    assert only(BroadcastRequest, actions).at_once
    assert not [action for action in actions if isinstance(action, BroadcastAbort)]


def test_a_request_on_another_host_is_not_sent_again() -> None:
    """It reaches a host twice: as the reason of the abort, and by itself."""
    world, supervisor = one_of_two()
    aborted = JobAborted(world.now, 0, "request", "saferunctl kill", "node2", signum=signal.SIGKILL)
    assert supervisor.handle(aborted) == [SignalRanks(0, (0, 1), signal.SIGKILL)]
    again = supervisor.handle(StopRequested(world.now, 0, "saferunctl kill", at_once=True, ours=False))
    assert [type(action) for action in again] == [PrintLine]
    for rank in range(2):
        supervisor.handle(RankExited(world.now, 0, rank, OK))
    assert supervisor.state is State.STOPPING


def test_of_several_hosts_the_one_that_is_asked_starts_again_when_it_reads_it_as_the_others_do() -> None:
    """Another end of the attempt may be in the job's log before."""
    world, supervisor = one_of_two()
    asked = RestartRequested(world.now, 0, "saferunctl restart")
    line, announced = supervisor.handle(asked)
    assert isinstance(line, PrintLine)
    assert announced == BroadcastAbort(0, "restart", "saferunctl restart", signal.SIGTERM)
    assert supervisor.handle(asked) == []
    assert supervisor.state is State.RUNNING
    aborted = JobAborted(world.now, 0, "restart", "saferunctl restart", "node1", ours=True, signum=signal.SIGTERM)
    assert supervisor.handle(aborted) == [SignalRanks(0, (0, 1), signal.SIGTERM)]


def test_a_restart_on_another_host_is_one_here() -> None:
    world, supervisor = one_of_two()
    aborted = JobAborted(world.now, 0, "restart", "saferunctl restart", "node2", signum=signal.SIGTERM)
    assert supervisor.handle(aborted) == [SignalRanks(0, (0, 1), signal.SIGTERM)]
    assert supervisor.handle(RankExited(world.now, 0, 0, KILLED)) == []
    assert [type(action) for action in supervisor.handle(RankExited(world.now, 0, 1, KILLED))] == [SweepOrphans]
    assert supervisor.handle(OrphansGone(world.now, 0, ())) == [ReportRestart(0, "saferunctl restart")]
    assert supervisor.state is State.BACKOFF


@pytest.mark.parametrize(("asked", "failing"), [(0, 1), (1, 2), (1, 0)])
@pytest.mark.parametrize("idle_s", [0.0, HUNG_S])
def test_a_restart_that_comes_after_a_failure_elsewhere_is_none(asked: int, failing: int, idle_s: float) -> None:
    """All other hosts end for the failure: the one that was asked would wait for them to meet again, in vain."""
    job = Job(3)
    job.run()
    job.interrupted = True
    began_at = job.now
    job.hosts[failing].exit(FAILED)
    job.hosts[asked].deliver(RestartRequested(job.now, 0, "saferunctl restart", idle_s))
    job.settle()
    assert [host.finish.exit_code for host in job.hosts if host.finish is not None] == [1, 1, 1]
    assert job.now == began_at, "no deadline was waited for"
    assert job.number == 0


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("state", [State.BACKOFF, State.CHECKING, State.JOINING])
def test_between_attempts_the_leader_has_all_hosts_end(state: State, ours: bool) -> None:
    """Those that wait for the others end when they read it of the leader. Once that is out, it is not said again."""
    world, supervisor = one_of_two()
    world.deliver(JobAborted(world.now, 0, "restart", "saferunctl restart", "node2", signum=signal.SIGTERM))
    for rank in range(2):
        world.exit(rank, KILLED)
    world.answer_until(State.BACKOFF)
    if state is not State.BACKOFF:
        world.expire()
        world.answer_until(state)
    actions = supervisor.handle(StopRequested(world.now, supervisor.attempt, "saferunctl stop", ours=ours))
    asked = [action for action in actions if isinstance(action, BroadcastRequest)]
    assert asked == ([BroadcastRequest(0, "saferunctl stop", at_once=False)] if state is State.BACKOFF else [])
    assert only(Finish, actions) == Finish(143, by="saferunctl stop", ours=ours)
    assert "there is no other attempt" in only(PrintLine, actions).text
