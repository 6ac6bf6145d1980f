"""After a victim's failure, ranks that may show its cause are left alive for a moment, and for no other reason."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import AwaitCause, BroadcastCause, SignalRanks
from saferun.supervisor.events import CauseShown, EvidenceCaptured, JobAborted
from saferun.supervisor.machine import State
from tests.unit.supervisor.fake_world import FAILED, HANG, HUNG_S, LIMITS, World, only, running


def waiting() -> World:
    """Rank 0 of three has failed, a victim; rank 2 may show why."""
    world = running(3)
    world.exit(0, FAILED)
    assert captured(world, (2,)) == [AwaitCause(0, (2,), LIMITS.cause_s)]
    assert world.state is State.CAPTURING
    assert world.supervisor.deadline == world.now + LIMITS.cause_s
    return world


def captured(world: World, suspects: tuple[int, ...]) -> list[object]:
    world.answers.clear()
    return list(world.deliver(EvidenceCaptured(world.now, 0, suspects=suspects)))


def test_when_the_cause_is_shown_the_ranks_that_live_are_stopped() -> None:
    world = waiting()
    assert world.exit(2, FAILED) == []
    assert world.deliver(CauseShown(world.now, 0)) == [SignalRanks(0, (1,), signal.SIGTERM)]
    assert world.state is State.STOPPING


def test_the_wait_has_an_end() -> None:
    world = waiting()
    assert world.expire() == [SignalRanks(0, (1, 2), signal.SIGTERM)]


def test_where_no_rank_may_show_it_nothing_is_waited_for() -> None:
    world = running(3)
    world.exit(0, FAILED)
    assert captured(world, ()) == [SignalRanks(0, (1, 2), signal.SIGTERM)]


def test_a_suspect_that_ended_during_the_capture_is_not_waited_for() -> None:
    world = running(3)
    world.exit(0, FAILED)
    world.exit(2, FAILED)
    assert captured(world, (2,)) == [SignalRanks(0, (1,), signal.SIGTERM)]


def test_a_hang_waits_for_no_cause() -> None:
    world = running(3)
    world.hang(HANG)
    assert not any(isinstance(action, AwaitCause) for action in captured(world, (2,)))


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_and_leaves_the_ranks_their_grace(signum: int) -> None:
    """The ranks have not been asked to end before."""
    world = waiting()
    assert only(SignalRanks, world.signal(signum)) == SignalRanks(0, (1, 2), signum)
    assert world.state is State.STOPPING
    assert world.supervisor.deadline == world.now + LIMITS.grace_s


def test_a_signal_that_came_before_leaves_no_time_for_it() -> None:
    world = running(3)
    world.exit(0, FAILED)
    world.signal(signal.SIGTERM, HUNG_S)
    assert not any(isinstance(action, AwaitCause) for action in captured(world, (2,)))


def test_an_answer_that_nobody_waits_for_changes_nothing() -> None:
    """It may come when the wait is over, or before it has begun."""
    world = running(3)
    world.exit(0, FAILED)
    assert world.deliver(CauseShown(world.now, 0)) == []
    assert world.state is State.CAPTURING
    world = waiting()
    world.expire()
    assert world.deliver(CauseShown(world.now, 0)) == []


def test_a_cause_that_another_host_shows_during_the_capture_is_not_waited_for() -> None:
    world = running(3)
    world.exit(0, FAILED)
    world.deliver(CauseShown(world.now, 0))
    assert captured(world, (2,)) == [SignalRanks(0, (1, 2), signal.SIGTERM)]


def abort(world: World, reason: str, *, ours: bool = False) -> list[object]:
    return list(world.deliver(JobAborted(world.now, 0, reason, "rank 5: exit code 1", "node4", ours=ours)))


def test_hosts_that_wait_for_a_cause_learn_of_it() -> None:
    """Each of them may have ranks that do not wait for others, and that could have been it."""
    world = running(3)
    abort(world, "victim")
    assert captured(world, (0, 1)) == [AwaitCause(0, (0, 1), LIMITS.cause_s)]
    assert world.exit(1, FAILED) == [BroadcastCause(0)]


def test_hosts_learn_of_a_cause_that_failed_at_the_same_time_as_the_victim() -> None:
    world = running(3)
    world.exit(0, FAILED)
    assert abort(world, "victim") == [BroadcastCause(0)]


def test_the_host_of_the_victim_says_no_more() -> None:
    world = running(3)
    world.exit(0, FAILED)
    assert abort(world, "victim", ours=True) == []
    assert world.exit(1, FAILED) == [BroadcastCause(0)]


@pytest.mark.parametrize("reason", ["failure", "signal", "lost"])
def test_a_job_that_ends_for_another_reason_waits_for_no_cause(reason: str) -> None:
    world = running(3)
    abort(world, reason)
    assert world.exit(1, FAILED) == []
