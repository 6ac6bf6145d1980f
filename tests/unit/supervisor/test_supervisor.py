"""The state machine, event by event. What always holds is checked by the world on every event."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import (
    CaptureEvidence,
    Diagnose,
    Finish,
    JoinHosts,
    ReportFailure,
    RunChecks,
    ServeStore,
    SignalRanks,
    StartRanks,
    SweepOrphans,
)
from saferun.supervisor.ending import Failed
from saferun.supervisor.events import (
    ChecksPassed,
    DeadlineExpired,
    EvidenceCaptured,
    OrphansGone,
    RankExited,
    StartFailed,
    StoreServed,
    StoreUnavailable,
)
from saferun.supervisor.machine import State
from tests.unit.supervisor.fake_world import (
    DIAGNOSIS,
    FAILED,
    KILLED,
    LIMITS,
    World,
    fail_and_back_off,
    only,
    placement_of,
    running,
)

# --------------------------------------------------------------------------------------------------------------------
# All goes well


def test_a_launch_that_goes_well_takes_every_step_once() -> None:
    """Nothing is asked for that a good launch does not need: no capture, no signal, no diagnosis."""
    world = World(ranks=2)
    world.launch()
    world.answer_until(State.RUNNING)
    world.exit(0)
    assert world.state is State.RUNNING
    world.exit(1)
    world.answer()
    assert world.actions == [
        RunChecks(0),
        JoinHosts(0),
        StartRanks(0, placement_of(2)),
        ServeStore(0),
        SweepOrphans(0, LIMITS.grace_s, LIMITS.orphans_s, 60.0),
        Finish(0),
    ]


@pytest.mark.parametrize(
    ("state", "limit_s", "what"),
    [
        (State.CHECKING, LIMITS.checks_s, "the checks before the start timed out"),
        (State.JOINING, LIMITS.join_s, "the preparation of the ranks timed out"),
        (State.STARTING, LIMITS.start_s, "the ranks did not start in time"),
    ],
)
def test_each_phase_before_the_ranks_ends_the_launch_at_its_deadline(state: State, limit_s: float, what: str) -> None:
    """A phase that can last forever is a defect."""
    world = World()
    world.launch()
    world.answer_until(state)
    assert world.supervisor.deadline == world.now + limit_s
    world.expire()
    if state is State.STARTING:
        assert world.state is State.CAPTURING
        world.answers = [EvidenceCaptured(world.now, 0, ())]
        world.answer()
        for rank in sorted(world.alive):
            world.exit(rank, KILLED)
        world.answers = [OrphansGone(world.now, 0, ())]
        world.answer()
    assert world.state is State.DIAGNOSING
    diagnose = only(Diagnose, world.actions)
    assert diagnose.error == what
    assert diagnose.error_hint
    world.answer_until(State.DONE)
    assert world.finish == Finish(1)


def test_ranks_may_run_for_as_long_as_they_like() -> None:
    """Training takes weeks."""
    assert running().supervisor.deadline is None


def test_a_rank_may_end_before_the_last_one_runs() -> None:
    """With many ranks the first can be done before the last is started; its end is an end like any other."""
    world = World(ranks=2)
    world.launch()
    world.answer_until(State.STARTING)
    world.exit(0)
    assert world.state is State.RUNNING
    world.exit(1)
    world.answers = [OrphansGone(world.now, 0, ())]
    world.answer()
    assert world.finish == Finish(0)


def test_events_that_make_no_sense_now_change_nothing() -> None:
    """Late answers and double ones are a fact of life."""
    world = running()
    for event in (
        ChecksPassed(world.now, 0),
        EvidenceCaptured(world.now, 0, ()),
        StoreServed(world.now, 0),
        DeadlineExpired(world.now, 0),
    ):
        assert world.deliver(event) == []
        assert world.state is State.RUNNING


# --------------------------------------------------------------------------------------------------------------------
# A rank fails


def test_evidence_is_captured_before_any_signal() -> None:
    """A stack that was not taken before SIGTERM is lost."""
    world = running(ranks=3)
    actions = world.exit(1, FAILED)
    assert actions == [CaptureEvidence(0, (0, 2), LIMITS.capture_s)]
    assert world.state is State.CAPTURING
    assert world.answer() == [SignalRanks(0, (0, 2), signal.SIGTERM)]


def test_a_failed_launch_is_diagnosed_reported_and_finished_with_1() -> None:
    """Torchrun's exit code for nearly everything is 1, whatever the rank's own was."""
    world = running()
    world.exit(0, FAILED)
    world.answer()
    world.exit(1, KILLED)
    assert world.state is State.STOPPING
    world.answer()
    assert only(Diagnose, world.actions) == Diagnose(0, Failed(local_rank=0))
    report, finish = world.answer()
    assert isinstance(report, ReportFailure)
    assert (report.diagnosis, report.restarting, finish) == (DIAGNOSIS, False, Finish(1))


def test_when_the_last_rank_fails_nobody_is_captured_or_signalled() -> None:
    """Nobody is left."""
    world = running(ranks=1)
    assert world.exit(0, FAILED) == [SweepOrphans(0, LIMITS.sweep_term_s)]


def test_ranks_that_end_while_they_are_captured_need_no_signal() -> None:
    """A failure often takes the others down by itself."""
    world = running()
    world.exit(0, FAILED)
    assert world.exit(1, FAILED) == [SweepOrphans(0, LIMITS.sweep_term_s)]
    assert world.answer() == []  # the capture, late
    assert world.state is State.STOPPING


def test_a_capture_that_takes_too_long_is_not_waited_for() -> None:
    """Evidence is worth a while, not a hang."""
    world = running()
    world.exit(0, FAILED)
    assert world.supervisor.deadline == world.now + LIMITS.capture_s
    assert world.expire() == [SignalRanks(0, (1,), signal.SIGTERM)]


def test_a_rank_that_ignores_sigterm_is_killed_after_its_grace() -> None:
    """The grace is bounded."""
    world = running()
    world.exit(0, FAILED)
    world.answer()
    assert world.supervisor.deadline == world.now + LIMITS.grace_s
    assert world.expire() == [SignalRanks(0, (1,), signal.SIGKILL)]
    assert world.supervisor.deadline == world.now + LIMITS.kill_s
    world.exit(1, KILLED)
    assert world.state is State.STOPPING


def test_a_rank_that_cannot_be_killed_is_named_and_left() -> None:
    """A process in state D may stay for hours; the others' launch must end."""
    world = running(ranks=3)
    world.exit(0, FAILED)
    world.answer()
    world.exit(1, KILLED)
    world.expire()
    assert world.expire() == [SweepOrphans(0, LIMITS.sweep_term_s)]
    world.answer()
    assert only(Diagnose, world.actions).abandoned == (2,)
    world.exit(2, KILLED)  # at last
    world.answer()
    assert world.finish == Finish(1)


def test_a_rank_that_cannot_be_killed_spoils_a_launch_that_was_asked_to_stop() -> None:
    """Whatever the reason for stopping, a process left behind is not an exit code 0."""
    world = running(ranks=1)
    world.signal(signal.SIGINT)
    world.expire()
    world.expire()
    world.answer_until(State.DONE)
    assert world.finish == Finish(1)


def test_a_sweep_that_takes_too_long_is_not_waited_for() -> None:
    """Leftovers in state D exist too."""
    world = running(ranks=1)
    world.exit(0, FAILED)
    assert world.supervisor.deadline == world.now + LIMITS.sweep_s
    world.expire()
    assert world.state is State.DIAGNOSING
    assert world.supervisor.deadline == world.now + LIMITS.diagnose_s
    world.expire()
    assert world.finish == Finish(1)


def test_a_clean_launch_survives_a_sweep_that_takes_too_long() -> None:
    """Every rank ended with 0; that is the launch's result."""
    world = running(ranks=1)
    world.exit(0)
    world.expire()
    assert world.finish == Finish(0)


def test_ranks_without_a_store_are_stopped_with_the_reason() -> None:
    """They would wait forever."""
    world = running()
    actions = world.deliver(StoreUnavailable(world.now, 0, "the store's process ended", "import torch"))
    assert actions == [CaptureEvidence(0, (0, 1), LIMITS.capture_s)]
    world.answer()
    world.exit(0, KILLED)
    world.exit(1, KILLED)
    world.answer()
    diagnose = only(Diagnose, world.actions)
    assert (diagnose.error, diagnose.error_hint) == ("the store's process ended", "import torch")


# --------------------------------------------------------------------------------------------------------------------
# Restarts


def test_a_failed_attempt_is_followed_by_another_while_restarts_are_left() -> None:
    """All is checked again, and the hosts meet again."""
    world = running(max_restarts=2)
    for attempt in range(2):
        fail_and_back_off(world)
        assert world.state is State.BACKOFF
        report = only(ReportFailure, world.actions[-1:])
        assert report._replace(decision=None) == ReportFailure(attempt, DIAGNOSIS, restarting=True)
        assert report.decision is not None
        assert report.decision.next_step == "restart"
        assert world.expire() == [RunChecks(attempt + 1)]
        world.answer_until(State.RUNNING)
        assert JoinHosts(attempt + 1, attempt + 1) in world.actions
        assert world.attempt == attempt + 1
    fail_and_back_off(world)
    assert world.finish == Finish(1)
    assert [action.attempt for action in world.actions if isinstance(action, RunChecks)] == [0, 1, 2]


def test_a_restart_that_goes_well_is_a_launch_that_went_well() -> None:
    """The failure before is reported, and over."""
    world = running(ranks=1, max_restarts=1)
    fail_and_back_off(world)
    world.expire()
    world.answer_until(State.RUNNING)
    world.exit(0)
    world.answer()
    assert world.finish == Finish(0)


def test_what_belongs_to_an_attempt_that_is_over_changes_nothing() -> None:
    """A late answer of try 1 once killed a healthy try 2."""
    world = running(max_restarts=1)
    fail_and_back_off(world)
    world.expire()
    world.answer_until(State.RUNNING)
    for event in (
        RankExited(world.now, 0, 1, FAILED),
        StartFailed(world.now, 0, "old", "old", 2),
        StoreUnavailable(world.now, 0, "old", "old"),
        DeadlineExpired(world.now, 0),
        RankExited(world.now, 2, 1, FAILED),
    ):
        assert world.deliver(event) == []
    assert world.state is State.RUNNING


def test_an_abandoned_rank_of_the_attempt_before_is_forgotten() -> None:
    """Each attempt has its own list."""
    world = running(ranks=1, max_restarts=1)
    world.deliver(StoreUnavailable(world.now, 0, "gone", "look"))
    world.answer()
    world.expire()
    world.expire()
    while world.state is not State.BACKOFF:
        world.answer()
    world.expire()
    world.answer_until(State.RUNNING)
    world.exit(0, FAILED)
    world.answer()
    diagnoses = [action for action in world.actions if isinstance(action, Diagnose)]
    assert [diagnose.abandoned for diagnose in diagnoses] == [(0,), ()]
    assert diagnoses[1].error == ""
