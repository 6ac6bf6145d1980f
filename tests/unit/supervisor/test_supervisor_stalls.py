"""What a supervisor that was stopped, suspended or held up itself owes to those that it waits for."""

from __future__ import annotations

import pytest

from saferun.supervisor.events import (
    ChecksAsked,
    ChecksPassed,
    DeadlineExpired,
    HostsAwaited,
    LaunchRequested,
    LoopStalled,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy


def started() -> Supervisor:
    supervisor = Supervisor(AttemptPolicy(0, 0, 1.0), Limits())
    supervisor.handle(LaunchRequested(100.0, 0))
    return supervisor


def test_a_phase_that_ended_while_the_loop_did_not_run_has_its_time_again() -> None:
    """Ctrl-Z and fg, a laptop that was closed, a container that was frozen: nobody has failed."""
    supervisor = started()
    assert supervisor.deadline == 160.0
    assert supervisor.handle(LoopStalled(5000.0, 0, 57.0)) == []
    assert (supervisor.state, supervisor.deadline) == (State.CHECKING, 5057.0)
    supervisor.handle(ChecksPassed(5001.0, 0))
    assert supervisor.state is State.JOINING


@pytest.mark.parametrize("at", [0.0, 159.0])
def test_a_stall_before_the_deadline_changes_nothing(at: float) -> None:
    supervisor = started()
    assert supervisor.handle(LoopStalled(at, 0, 57.0)) == []
    assert supervisor.deadline == 160.0


def test_the_time_of_the_checks_begins_when_they_are_asked() -> None:
    """What is done before, a name that is looked up for one, takes nothing of it."""
    supervisor = started()
    assert supervisor.handle(ChecksAsked(103.0, 0)) == []
    assert (supervisor.state, supervisor.deadline) == (State.CHECKING, 163.0)


@pytest.mark.parametrize("awaited_s", [0.0, 7200.0])
def test_a_coordinator_that_says_that_it_waits_is_waited_for_and_a_silent_one_is_not(awaited_s: float) -> None:
    """A host for which an elastic job has no place waits for days, and one of a fixed number of hosts does not."""
    supervisor = Supervisor(AttemptPolicy(0, 0, 1.0), Limits(join_s=600.0, awaited_s=awaited_s))
    supervisor.handle(LaunchRequested(100.0, 0))
    supervisor.handle(ChecksPassed(101.0, 0))
    for at in (131.0, 3700.0, 7300.0) if awaited_s else (131.0,):
        assert supervisor.handle(HostsAwaited(at, 0)) == []
        supervisor.handle(DeadlineExpired(at + 560.0, 0))
        assert supervisor.state is State.JOINING
    assert supervisor.deadline == (14500.0 if awaited_s else 701.0)
    supervisor.handle(DeadlineExpired(supervisor.deadline, 0))
    assert supervisor.state is State.DIAGNOSING
