"""The state machine and hangs: captured, told, and then the job goes on, stops or starts again."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import (
    CaptureEvidence,
    Diagnose,
    Finish,
    JoinHosts,
    PrintLine,
    ReportFailure,
    ReportHang,
    RunChecks,
    SignalRanks,
)
from saferun.supervisor.events import CoreDumpSeen, EvidenceCaptured, HangSuspected, StoreUnavailable
from saferun.supervisor.machine import State
from saferun.supervisor.policy import HangPolicy
from tests.unit.supervisor.fake_world import FAILED, HANG, KILLED, LIMITS, SUSPICION, World, only, running

STOP = HangPolicy("stop")
RESTART = HangPolicy("restart")


def captured(world: World, culprits: tuple[int, ...] = ()) -> list[object]:
    """The capture that the world was asked for is there."""
    event = world.answers.pop(0)
    assert isinstance(event, EvidenceCaptured)
    return list(world.deliver(event._replace(at=world.now, culprits=culprits)))


def end_all(world: World) -> None:
    """The ranks obey, and everything is answered."""
    for rank in sorted(world.alive):
        world.exit(rank, KILLED)
    while world.answers:
        world.answer()


def test_a_hang_is_captured_and_told_and_the_job_goes_on() -> None:
    """The default: a picture of the hang, and nothing that the user did not ask for."""
    world = running()
    assert world.hang() == [CaptureEvidence(0, (0, 1), LIMITS.capture_s, HANG)]
    assert captured(world) == [ReportHang(0, "report")]
    assert world.state is State.RUNNING
    world.exit(0)
    world.exit(1)
    world.answer()
    assert world.finish == Finish(0)


def test_a_capture_has_the_number_of_its_own_hang() -> None:
    """The evidence of all hosts goes by it. The next hang may come before this one is captured, and is not."""
    world = running()
    first, second = (HangSuspected(world.now, 0, HANG, number) for number in (7, 8))
    assert world.deliver(first) == [CaptureEvidence(0, (0, 1), LIMITS.capture_s, HANG, 7)]
    assert world.deliver(second) == []


def test_a_hang_can_be_captured_again() -> None:
    """The picture an hour later may tell more."""
    world = running()
    for _ in range(3):
        world.hang()
        assert captured(world) == [ReportHang(0, "report")]
    assert world.state is State.RUNNING


def test_on_hang_stop_ends_the_job_and_uses_no_restart() -> None:
    """Stop means stop."""
    world = running(max_restarts=3, hang_policy=STOP)
    world.hang()
    assert captured(world) == [ReportHang(0, "stop"), SignalRanks(0, (0, 1), signal.SIGTERM)]
    end_all(world)
    assert only(Diagnose, world.actions).hung
    assert world.finish == Finish(1)


def test_on_hang_restart_starts_all_ranks_again() -> None:
    """A restart after a hang counts like one after a failure."""
    world = running(max_restarts=1, hang_policy=RESTART)
    world.hang()
    assert captured(world)[0] == ReportHang(0, "restart")
    end_all(world)
    assert only(ReportFailure, world.actions).restarting
    assert world.expire() == [RunChecks(1)]
    world.answer_until(State.RUNNING)
    assert JoinHosts(1, 1) in world.actions
    world.hang()
    assert captured(world)[0] == ReportHang(1, "stop")
    end_all(world)
    assert world.finish == Finish(1)


@pytest.mark.parametrize("policy", [STOP, RESTART])
def test_a_suspicion_is_told_and_never_acted_upon(policy: HangPolicy) -> None:
    """A rank that computes the same line for long is not proof enough to end a job of 512 GPUs."""
    world = running(max_restarts=1, hang_policy=policy)
    world.hang(SUSPICION)
    assert captured(world) == [ReportHang(0, "report")]
    assert world.state is State.RUNNING


def test_culprits_are_aborted_where_cores_are_kept() -> None:
    """SIGABRT makes a core of the hang without ptrace; the others are asked as always."""
    world = running(ranks=3, hang_policy=HangPolicy("stop", abort_culprits=True))
    world.hang()
    assert captured(world, culprits=(1,)) == [
        ReportHang(0, "stop"),
        SignalRanks(0, (1,), signal.SIGABRT),
        SignalRanks(0, (0, 2), signal.SIGTERM),
    ]


def test_where_all_are_culprits_nobody_is_asked_with_an_empty_list() -> None:
    """A signal to nobody would be a defect."""
    world = running(hang_policy=HangPolicy("stop", abort_culprits=True))
    world.hang()
    assert captured(world, culprits=(0, 1)) == [ReportHang(0, "stop"), SignalRanks(0, (0, 1), signal.SIGABRT)]


def test_a_job_that_came_to_life_while_it_was_looked_at_goes_on() -> None:
    """Ending it would turn a hiccup of a file system into a failure."""
    world = running(max_restarts=1, hang_policy=RESTART)
    world.hang()
    event = world.answers.pop(0)
    assert isinstance(event, EvidenceCaptured)
    assert world.deliver(event._replace(at=world.now, moved=True)) == [ReportHang(0, "report")]
    world.hang()
    assert captured(world)[0] == ReportHang(0, "restart"), "what moved then says nothing about now"


def test_a_rank_that_ended_well_while_the_hang_was_captured_shows_that_it_was_none() -> None:
    """The others may follow it in a moment."""
    world = running(hang_policy=STOP)
    world.hang()
    world.exit(1)
    assert captured(world, culprits=(1,)) == [ReportHang(0, "report")]
    assert world.state is State.RUNNING


def test_the_last_attempt_is_stopped_where_a_restart_was_asked_for() -> None:
    """Nobody is told of a restart that does not come."""
    world = running(max_restarts=0, hang_policy=RESTART)
    world.hang()
    assert captured(world)[0] == ReportHang(0, "stop")


def test_a_rank_that_fails_while_the_hang_is_captured_fails_the_attempt() -> None:
    """What was seen of the hang is the evidence; the failure is handled like any other."""
    world = running()
    world.hang()
    world.exit(0, FAILED)
    assert captured(world) == [SignalRanks(0, (1,), signal.SIGTERM)]
    end_all(world)
    assert not only(Diagnose, world.actions).hung
    assert world.finish == Finish(1)


def test_ranks_that_end_well_while_the_hang_is_captured_were_not_hung() -> None:
    """The capture of a job that is done interests nobody."""
    world = running()
    world.hang()
    world.exit(0)
    world.exit(1)
    while world.answers:
        world.answer()
    assert world.finish == Finish(0)


def test_a_store_that_is_missed_while_the_hang_is_captured_is_not_forgotten() -> None:
    """The ranks would wait for it forever."""
    world = running()
    world.hang()
    world.deliver(StoreUnavailable(world.now, 0, "the store is gone", "look"))
    assert captured(world) == [SignalRanks(0, (0, 1), signal.SIGTERM)]
    end_all(world)
    assert only(Diagnose, world.actions).error == "the store is gone"


def test_ctrl_c_does_not_wait_for_the_picture_of_a_hang() -> None:
    """Whoever is at the keyboard wants an end."""
    world = running()
    world.hang()
    line, act = world.signal(signal.SIGINT)
    assert act == SignalRanks(0, (0, 1), signal.SIGINT)
    text = "SIGINT: stopping 2 ranks, SIGKILL follows in 30 s or at the next Ctrl-C"
    assert line == PrintLine(text, of_signal=True)


def test_sigterm_waits_for_the_picture_of_a_hang() -> None:
    """The scheduler gives time, and the picture is what the user wants to find afterwards."""
    world = running()
    world.hang()
    text = "SIGTERM: stopping 2 ranks, SIGKILL follows in 30 s; their stacks are captured first"
    assert world.signal(signal.SIGTERM) == [PrintLine(text, of_signal=True)]
    assert world.signal(signal.SIGTERM) == []
    assert captured(world) == [SignalRanks(0, (0, 1), signal.SIGTERM)]
    end_all(world)
    assert only(Diagnose, world.actions).stop_signum == signal.SIGTERM


def test_a_capture_of_a_hang_that_never_ends_is_given_up_and_told() -> None:
    """Every phase has a deadline."""
    world = running()
    world.hang()
    assert world.expire() == [ReportHang(0, "report")]
    assert world.state is State.RUNNING


def test_a_hang_outside_of_running_changes_nothing() -> None:
    """It may have been found in the moment in which a rank failed."""
    world = running()
    world.exit(0, FAILED)
    assert world.hang() == []
    assert world.state is State.CAPTURING


def test_a_core_dump_in_progress_puts_the_kill_off() -> None:
    """SIGKILL would end the dump and leave half a core that no tool reads."""
    world = running(hang_policy=HangPolicy("stop", abort_culprits=True))
    world.hang()
    captured(world, culprits=(1,))
    deadline = world.supervisor.deadline
    assert deadline is not None
    world.now = deadline
    assert world.deliver(CoreDumpSeen(world.now, 0)) == []
    assert world.supervisor.deadline is not None
    assert world.supervisor.deadline > deadline


def test_a_core_dump_is_not_waited_for_for_ever() -> None:
    """It may be going to a file system that hangs."""
    world = running(hang_policy=HangPolicy("stop", abort_culprits=True))
    world.hang()
    captured(world, culprits=(1,))
    began = world.now
    while SignalRanks(0, (0, 1), signal.SIGKILL) not in world.actions:
        assert world.supervisor.deadline is not None
        world.now = max(world.now, world.supervisor.deadline)
        world.deliver(CoreDumpSeen(world.now, 0))
        assert world.now <= began + LIMITS.grace_s + LIMITS.dump_s
