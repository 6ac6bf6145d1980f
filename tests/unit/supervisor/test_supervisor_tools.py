"""The state machine and tools that ranks run under: they have their time when the script has ended."""

from __future__ import annotations

import signal

from saferun.model import Placement, RankAssignment
from saferun.supervisor.actions import PrintLine, SignalRanks, SweepOrphans
from saferun.supervisor.events import (
    ChecksPassed,
    HostsJoined,
    LaunchRequested,
    RanksStarted,
    SignalReceived,
    ToolAtWork,
)
from saferun.supervisor.machine import Limits, Supervisor
from saferun.supervisor.policy import AttemptPolicy, JobPolicy
from tests.unit.supervisor.fake_world import KILLED, LIMITS, OK, running


def test_a_tool_whose_script_has_ended_has_more_time_and_all_other_ranks_have_not() -> None:
    """A profiler writes its report then, which may take minutes."""
    world = running()
    world.signal(signal.SIGINT)
    assert world.supervisor.deadline is not None
    world.now = world.supervisor.deadline
    line, killed = world.deliver(ToolAtWork(world.now, 0, (1,)))
    assert killed == SignalRanks(0, (0,), signal.SIGKILL)
    assert line == PrintLine("the script of 1 rank ended, its tool has not: SIGKILL follows in 300 s, or at Ctrl-C")
    world.exit(0, KILLED)
    world.now = world.supervisor.deadline
    assert world.deliver(ToolAtWork(world.now, 0, (1,))) == []
    world.exit(1, OK)
    assert isinstance(world.actions[-1], SweepOrphans)


def test_a_tool_is_not_waited_for_for_ever() -> None:
    """It may hang."""
    world = running()
    world.signal(signal.SIGINT)
    began = world.now
    while SignalRanks(0, (0, 1), signal.SIGKILL) not in world.actions:
        assert world.supervisor.deadline is not None
        world.now = max(world.now, world.supervisor.deadline)
        world.deliver(ToolAtWork(world.now, 0, (0, 1)))
        assert world.now <= began + LIMITS.grace_s + LIMITS.tools_s


def test_a_scheduler_that_kills_soon_waits_for_no_tool() -> None:
    """All has to be done by then."""
    supervisor = Supervisor(AttemptPolicy(0), Limits(grace_s=30.0), None, JobPolicy(scheduler_kills_soon=True))
    placement = Placement(0, 1, 1, 1, (RankAssignment(0, 0, 0),), "a", 1, "job")
    for event in (LaunchRequested(0, 0), ChecksPassed(0, 0), HostsJoined(0, 0, placement), RanksStarted(0, 0, (1,))):
        supervisor.handle(event)
    supervisor.handle(SignalReceived(100.0, 0, signal.SIGINT, idle_s=0.0))
    assert supervisor.deadline == 130.0
    assert supervisor.handle(ToolAtWork(130.0, 0, (0,))) == [SignalRanks(0, (0,), signal.SIGKILL)]
