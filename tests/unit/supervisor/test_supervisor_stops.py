"""The state machine when a start fails, and when somebody wants the job to end."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import (
    CaptureEvidence,
    Diagnose,
    Finish,
    HurryDiagnosis,
    PrintLine,
    ReportFailure,
    SignalRanks,
    SweepOrphans,
)
from saferun.supervisor.events import DeadlineExpired, Diagnosed, SignalReceived, StartFailed
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy
from tests.unit.supervisor.fake_world import (
    DIAGNOSIS,
    FAILED,
    KILLED,
    LIMITS,
    World,
    only,
    running,
)

# --------------------------------------------------------------------------------------------------------------------
# Starts that fail


def test_bad_input_is_not_tried_again() -> None:
    """The port is taken, the program does not exist: a restart would meet the same."""
    world = World(max_restarts=3)
    world.launch()
    world.deliver(StartFailed(world.now, 0, "port 29500 is in use", "pass another", 2))
    diagnose = only(Diagnose, world.actions)
    assert (diagnose.error, diagnose.error_hint) == ("port 29500 is in use", "pass another")
    world.answers = [Diagnosed(world.now, 0, DIAGNOSIS)]
    world.answer()
    assert world.finish == Finish(2)


def test_when_a_rank_cannot_be_started_those_before_it_are_ended() -> None:
    """Half a job must not run on, and ranks that were never started are not waited for."""
    world = World(ranks=3)
    world.launch()
    world.answer_until(State.STARTING)
    world.fail_start(started=1)
    world.answer()
    stopped = only(SignalRanks, world.actions)
    assert stopped.signum == signal.SIGTERM
    assert stopped.local_ranks == (0,)
    world.exit(0, KILLED)
    world.answer_until(State.DONE)
    assert world.actions.index(stopped) < world.actions.index(only(SweepOrphans, world.actions))
    assert only(Diagnose, world.actions).abandoned == ()


def test_when_no_rank_could_be_started_nobody_is_waited_for() -> None:
    """The usual case: the program does not exist."""
    world = World(ranks=3)
    world.launch()
    world.answer_until(State.STARTING)
    assert world.fail_start(started=0) == [SweepOrphans(0, LIMITS.sweep_term_s)]
    world.answer_until(State.DONE)
    assert world.finish == Finish(1)


def test_evidence_comes_before_signals_also_when_a_start_fails() -> None:
    """The law knows one exception, and this is not it: ranks that hang during the start are the interesting ones."""
    world = World(ranks=2)
    world.launch()
    world.answer_until(State.STARTING)
    kinds = [type(action) for action in world.supervisor.handle(DeadlineExpired(world.now + LIMITS.start_s, 0))]
    assert kinds == [CaptureEvidence]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_were_never_started_are_not_called_unkillable(signum: int) -> None:
    """A signal that overtakes the news of a failed start must not end in 40 s of waiting for nobody."""
    world = World(ranks=2)
    world.launch()
    world.answer_until(State.STARTING)
    world.signal(signum)
    world.fail_start(started=0)
    while world.state is not State.DONE:
        if world.answers:
            world.answer()
        else:
            world.expire()
    assert only(Diagnose, world.actions).abandoned == ()


# --------------------------------------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize("state", [State.NEW, State.CHECKING, State.JOINING])
def test_a_signal_before_ranks_run_ends_saferun_as_it_would_end_any_program(state: State) -> None:
    """Nothing runs yet that would need care."""
    world = World()
    if state is not State.NEW:
        world.launch()
        world.answer_until(state)
    assert world.signal(signal.SIGTERM) == [Finish(1, reraise=signal.SIGTERM)]


OUTSIDE = pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])


def finish_stopped(world: World, signum: int) -> None:
    """The ranks end well, and the launch with them."""
    world.exit(0)
    world.exit(1)
    while world.state is not State.DONE:
        world.answer()
    assert only(Diagnose, world.actions).stop_signum == signum
    assert world.finish == Finish(1)  # also where every rank ended well: the job was not completed


@OUTSIDE
@pytest.mark.parametrize("idle_s", [0.0, 9.9])
@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING])
def test_a_signal_from_outside_reaches_ranks_that_work_at_once(state: State, signum: int, idle_s: float) -> None:
    """What they have left of their time is for a checkpoint; torchrun would not take a second of it."""
    world = World()
    world.launch()
    world.answer_until(state)
    world.answers.clear()
    say, stop = world.signal(signum, idle_s)
    assert isinstance(say, PrintLine)
    assert signal.Signals(signum).name in say.text
    assert stop == SignalRanks(0, (0, 1), signum)
    assert CaptureEvidence not in [type(action) for action in world.actions]
    finish_stopped(world, signum)


@pytest.mark.parametrize("why", ["", "the parent process has ended"])
def test_a_line_about_a_signal_says_that_it_is_one_and_the_end_of_a_parent_is_none(why: str) -> None:
    """Of hosts that share a console one alone prints the first, since a scheduler signals all of them."""
    world = running()
    say, _ = world.deliver(SignalReceived(world.now, 0, signal.SIGTERM, why))
    assert isinstance(say, PrintLine)
    assert say.of_signal is (not why)


@OUTSIDE
def test_ranks_that_are_still_there_at_half_of_their_grace_are_looked_at(signum: int) -> None:
    """Whoever does not stop when it is told to may hang; and the kill comes when it was to come."""
    world = running()
    began = world.now
    world.signal(signum)
    world.exit(0)
    assert world.expire() == [CaptureEvidence(0, (1,), min(LIMITS.capture_s, LIMITS.grace_s / 2 * 0.8))]
    assert world.now == began + LIMITS.grace_s / 2
    assert (world.state, world.supervisor.deadline) == (State.STOPPING, began + LIMITS.grace_s)
    assert world.answer() == []
    assert world.expire() == [SignalRanks(0, (1,), signal.SIGKILL)]
    assert world.now == began + LIMITS.grace_s


def test_the_late_look_is_taken_before_the_kill_or_not_at_all() -> None:
    """Its deadline may come late, with that of the grace."""
    world = running()
    world.signal(signal.SIGTERM)
    world.now += LIMITS.grace_s
    assert world.deliver(DeadlineExpired(world.now, 0)) == [SignalRanks(0, (0, 1), signal.SIGKILL)]


@OUTSIDE
def test_where_nothing_has_moved_the_stacks_come_before_the_signal(signum: int) -> None:
    """A job that ran into its time limit is often a job that hung, and this is the last chance to see where."""
    world = running()
    began = world.now
    say, capture = world.signal(signum, 10.0)
    assert isinstance(say, PrintLine)
    assert "no sign of progress for 10 s" in say.text
    assert capture == CaptureEvidence(0, (0, 1), 2.0)
    assert world.supervisor.deadline == began + 2.0
    assert world.answer() == [SignalRanks(0, (0, 1), signum)]
    # It has been looked at; there is no second look.
    assert world.supervisor.deadline == world.now + LIMITS.grace_s
    finish_stopped(world, signum)


def test_a_look_that_takes_too_long_does_not_hold_the_signal_up() -> None:
    """Two seconds are what it may cost, whatever the look waits for."""
    world = running()
    began = world.now
    world.signal(signal.SIGTERM, 300.0)
    assert world.expire() == [SignalRanks(0, (0, 1), signal.SIGTERM)]
    assert world.now == began + 2.0


@pytest.mark.parametrize("hangs", [False, True])
def test_a_signal_while_ranks_are_looked_at_cuts_that_short(hangs: bool) -> None:
    """Evidence of a failure or a hang comes first, and the time of the grace does not go into it."""
    world = running()
    if hangs:
        world.hang()
    else:
        world.exit(0, FAILED)
    began = world.now
    world.signal(signal.SIGTERM)
    assert world.state is State.CAPTURING
    assert world.supervisor.deadline == began + 2.0
    assert only(SignalRanks, world.expire()).signum == signal.SIGTERM


@pytest.mark.parametrize("idle_s", [0.0, 300.0])
def test_the_user_at_the_keyboard_does_not_wait_for_evidence(idle_s: float) -> None:
    """Ctrl-C goes straight through, and whoever pressed it watches the ranks end."""
    world = running()
    say, act = world.signal(signal.SIGINT, idle_s)
    assert isinstance(say, PrintLine)
    assert act == SignalRanks(0, (0, 1), signal.SIGINT)
    assert world.expire() == [SignalRanks(0, (0, 1), signal.SIGKILL)]


def test_a_second_ctrl_c_kills() -> None:
    """Nobody who presses it twice wants to wait for the grace."""
    world = running()
    world.signal(signal.SIGINT)
    world.now += 0.6
    assert only(SignalRanks, world.signal(signal.SIGINT)) == SignalRanks(0, (0, 1), signal.SIGKILL)


def test_a_ctrl_c_that_a_wrapper_passes_on_as_well_is_one() -> None:
    """The terminal sends it to all processes; ranks that save a checkpoint then were killed at once."""
    world = running()
    world.signal(signal.SIGINT)
    for _ in range(3):
        world.now += 0.1
        assert world.signal(signal.SIGINT) == []
    world.now += 0.3
    assert only(SignalRanks, world.signal(signal.SIGINT)) == SignalRanks(0, (0, 1), signal.SIGKILL)


def test_a_third_ctrl_c_does_not_put_off_that_a_rank_is_given_up() -> None:
    """What SIGKILL does not end (an uninterruptible sleep) was waited for as long as somebody pressed it."""
    world = running()
    for _ in range(2):
        world.signal(signal.SIGINT)
        world.now += 3.0
    deadline = world.supervisor.deadline
    for _ in range(2):
        assert world.signal(signal.SIGINT) == []
        world.now += 3.0
    assert world.supervisor.deadline == deadline
    world.expire()
    world.answer_until(State.DIAGNOSING)
    assert only(Diagnose, world.actions).abandoned == (0, 1)


def diagnosing() -> World:
    """A job of one host, one of whose ranks has failed, while the cause is looked for."""
    world = running(max_restarts=3)
    world.exit(0, FAILED)
    world.answer()
    world.exit(1, KILLED)
    world.answer_until(State.DIAGNOSING)
    return world


def test_a_signal_during_the_diagnosis_leaves_it_seconds() -> None:
    """The scheduler's SIGKILL follows, and cores may take a minute to read: there would be no report."""
    world = diagnosing()
    text = "SIGTERM: the report follows in 4 s at most"
    assert world.signal(signal.SIGTERM) == [PrintLine(text, of_signal=True), HurryDiagnosis(0, 3.0)]
    assert world.supervisor.deadline == world.now + 4.0
    world.now += 1.0
    assert world.signal(signal.SIGTERM) == []
    assert isinstance(world.expire()[0], ReportFailure)
    assert world.finish == Finish(1)


def test_a_second_ctrl_c_during_the_diagnosis_takes_what_is_there() -> None:
    """Also where the first one came while the ranks worked: they have ended since."""
    world = diagnosing()
    line, _ = world.signal(signal.SIGINT)
    assert line == PrintLine("SIGINT: the report follows in 4 s at most, or at the next Ctrl-C", of_signal=True)
    world.now += 0.3
    assert world.signal(signal.SIGINT) == []  # a wrapper passes it on
    world.now += 0.7
    assert world.signal(signal.SIGINT) == [HurryDiagnosis(0, 0.0)]
    assert world.supervisor.deadline == world.now + 1.0
    world.expire()
    assert world.finish == Finish(1)


def test_a_signal_never_prolongs_the_diagnosis() -> None:
    world = diagnosing()
    assert world.supervisor.deadline is not None
    world.now = deadline = world.supervisor.deadline - 1.0
    world.signal(signal.SIGINT)
    assert world.supervisor.deadline == deadline + 1.0


def test_ctrl_c_ends_a_capture() -> None:
    """Also the evidence can take too long for the person who waits."""
    world = running()
    world.signal(signal.SIGTERM)
    assert only(SignalRanks, world.signal(signal.SIGINT)) == SignalRanks(0, (0, 1), signal.SIGKILL)


def test_ctrl_c_while_a_failed_attempt_is_stopped_kills() -> None:
    """The ranks have been told to stop already; the user sees it and is impatient."""
    world = running(max_restarts=3)
    world.exit(0, FAILED)
    world.answer()
    assert only(SignalRanks, world.signal(signal.SIGINT)) == SignalRanks(0, (1,), signal.SIGKILL)
    world.exit(1, KILLED)
    world.answer_until(State.DONE)
    assert world.finish == Finish(1)  # and there is no restart


def test_ctrl_c_during_the_sweep_ends_its_patience() -> None:
    """What is left gets SIGKILL now."""
    world = running()
    world.exit(0, FAILED)
    world.exit(1, FAILED)
    assert world.signal(signal.SIGINT) == [SweepOrphans(0, 0.0)]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_are_taken_once(signum: int) -> None:
    """Schedulers like to send SIGTERM to every process, and again."""
    world = running()
    world.signal(signum)
    deadline = world.supervisor.deadline
    assert world.signal(signum) == []
    assert world.supervisor.deadline == deadline


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("state", [State.CAPTURING, State.STOPPING, State.DIAGNOSING, State.BACKOFF])
def test_no_restart_after_a_signal(state: State, signum: int) -> None:
    """Whoever sent it wants the job to end."""
    world = running(max_restarts=5)
    world.exit(0, FAILED)
    while world.state is not state:
        if world.answers:
            world.answer()
        else:
            world.exit(1, KILLED)
    world.signal(signum)
    while world.state is not State.DONE:
        if world.answers:
            world.answer()
        elif world.alive:
            world.exit(1, KILLED)
        else:
            world.expire()
    assert world.attempt == 0
    assert world.finish == Finish(1)


def test_a_signal_after_every_rank_ended_well_changes_nothing() -> None:
    """The job is complete; only what its ranks left behind is not waited for any longer."""
    world = running(ranks=1)
    world.exit(0)
    assert [type(action) for action in world.signal(signal.SIGTERM)] == [PrintLine, SweepOrphans]
    world.answer()
    assert world.finish == Finish(0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_comes_after_the_failure_is_not_its_cause(signum: int) -> None:
    """Rank 0 crashed, then the user pressed Ctrl-C: the report has to name the crash, not the keyboard."""
    world = running()
    world.exit(0, FAILED)
    world.answer()
    world.signal(signum)
    world.exit(1, KILLED)
    world.answer()
    assert only(Diagnose, world.actions).stop_signum is None


def test_a_deadline_of_the_phase_before_does_not_end_this_one() -> None:
    """An expiry that was posted just before the phase changed must not cost the ranks their grace."""
    world = running()
    world.exit(0, FAILED)
    assert world.supervisor.deadline is not None
    expired = DeadlineExpired(world.supervisor.deadline, 0)
    world.now = world.supervisor.deadline
    world.answer()
    assert world.state is State.STOPPING
    assert world.supervisor.handle(expired) == []


def test_no_grace_means_none() -> None:
    """``--shutdown-timeout 0``: the deadline is due at once."""
    supervisor = Supervisor(AttemptPolicy(0), Limits(grace_s=0.0))
    world = World(ranks=1)
    world.supervisor = supervisor
    world.launch()
    world.answer_until(State.RUNNING)
    world.signal(signal.SIGINT)
    assert supervisor.deadline == world.now
