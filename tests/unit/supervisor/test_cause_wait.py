"""After a victim's failure, ranks that may show its cause are left alive for a moment, and for no other reason."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import AwaitCause, SignalRanks
from saferun.supervisor.events import CauseShown, EvidenceCaptured
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
