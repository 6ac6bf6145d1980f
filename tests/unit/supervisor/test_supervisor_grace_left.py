"""The state machine where ranks end at a signal before what they have started, as a shell that does not exec does."""

from __future__ import annotations

import signal

import pytest

from saferun.model import ExitStatus
from saferun.supervisor.actions import SweepOrphans
from saferun.supervisor.events import JobAborted, RankExited, RestartRequested, SignalReceived
from saferun.supervisor.machine import State
from tests.unit.supervisor.fake_world import FAILED, HUNG_S, KILLED, LIMITS, OK, World, only, running
from tests.unit.supervisor.test_supervisor_jobs import started

SOON_S = 0.25


def ended(signum: int, status: ExitStatus | None = None) -> World:
    """Both ranks have ended soon after a signal."""
    world = running(max_restarts=1)
    world.signal(signum)
    world.now += SOON_S
    for rank in (0, 1):
        world.exit(rank, status or ExitStatus(None, signum))
    return world


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("status", [None, OK, FAILED])
def test_what_handles_the_signal_keeps_the_grace_when_its_rank_has_ended(
    signum: int, status: ExitStatus | None
) -> None:
    """Bash dies at once of the SIGTERM that its group gets, and Python writes its checkpoint: it had two seconds."""
    world = ended(signum, status)
    left_s = LIMITS.grace_s - SOON_S
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.sweep_term_s, signum=signum, grace_s=left_s)
    assert world.supervisor.deadline == world.now + left_s + LIMITS.sweep_s
    world.answer_until(State.DONE)


@pytest.mark.parametrize("left_s", [LIMITS.sweep_term_s, LIMITS.sweep_term_s / 2])
def test_a_grace_that_is_nearly_over_is_no_shorter_than_none(left_s: float) -> None:
    """What a rank leaves behind has SIGTERM and two seconds; with what is left of the grace it would have less."""
    world = running(max_restarts=1)
    world.signal(signal.SIGTERM)
    world.now += LIMITS.grace_s - left_s
    for rank in (0, 1):
        world.exit(rank, OK)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.sweep_term_s)


def test_saferunctl_stop_leaves_it_to_them_too() -> None:
    world = running(ranks=1)
    world.request()
    world.exit(0, ExitStatus(None, signal.SIGTERM))
    assert only(SweepOrphans, world.actions).grace_s == LIMITS.grace_s


def test_a_signal_to_another_host_leaves_it_to_them_too() -> None:
    job = started(2)
    host = job.hosts[1].supervisor
    host.handle(JobAborted(job.now, 0, "signal", "SIGTERM", "node0", signum=signal.SIGTERM))
    host.handle(RankExited(job.now, 0, 0, KILLED))
    (sweep,) = host.handle(RankExited(job.now, 0, 1, KILLED))
    assert sweep == SweepOrphans(0, LIMITS.sweep_term_s, signum=signal.SIGTERM, grace_s=LIMITS.grace_s)


def test_a_host_that_leaves_its_job_leaves_it_to_them_too() -> None:
    """The others go on without it, and what ran here has its checkpoint to write."""
    job = started(3, least=2)
    host = job.hosts[1].supervisor
    host.handle(SignalReceived(job.now, 0, signal.SIGTERM))
    host.handle(RankExited(job.now, 0, 0, KILLED))
    (sweep,) = host.handle(RankExited(job.now, 0, 1, KILLED))
    assert sweep == SweepOrphans(0, LIMITS.sweep_term_s, signum=signal.SIGTERM, grace_s=LIMITS.grace_s)


def test_no_grace_is_left_once_it_is_over() -> None:
    """SIGKILL to the ranks ends it for what they have started, too."""
    world = running()
    world.signal(signal.SIGTERM)
    world.expire()  # half of the grace: a capture
    world.expire()
    for rank in (0, 1):
        world.exit(rank, KILLED)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.sweep_term_s)


def test_after_a_failure_there_is_none_also_where_a_signal_follows_it() -> None:
    """The next attempt needs the GPUs; and what has failed saves nothing."""
    world = running()
    world.exit(0, FAILED)
    world.answer()
    world.signal(signal.SIGTERM)
    world.exit(1, KILLED)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.sweep_term_s)


def test_a_restart_that_the_user_asks_for_has_none() -> None:
    """The next attempt needs the GPUs."""
    world = running(ranks=1)
    world.deliver(RestartRequested(world.now, 0, "saferunctl"))
    world.exit(0, KILLED)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.sweep_term_s)


def test_a_scheduler_s_sigkill_bounds_it() -> None:
    """The grace counts from the scheduler's signal, not from the one that the ranks got after a capture."""
    world = running()
    world.supervisor._launch.job = world.supervisor._launch.job._replace(scheduler_kills_soon=True)
    world.signal(signal.SIGTERM, HUNG_S)
    world.now += SOON_S
    world.answer()
    for rank in (0, 1):
        world.exit(rank, KILLED)
    assert only(SweepOrphans, world.actions).grace_s == LIMITS.grace_s - SOON_S


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_ends_it(signum: int) -> None:
    """The phase ends soon as well, whatever SIGKILL does not end."""
    world = ended(signum)
    world.now += 1.0
    assert world.signal(signal.SIGINT) == [SweepOrphans(0, 0.0)]
    assert world.supervisor.deadline == world.now + LIMITS.sweep_s


def test_saferunctl_kill_ends_it() -> None:
    world = ended(signal.SIGTERM)
    assert world.request(at_once=True)[-1] == SweepOrphans(0, 0.0)
    assert world.supervisor.deadline == world.now + LIMITS.sweep_s


def test_no_signal_prolongs_it() -> None:
    """A sweep that is nearly over is not given another ten seconds."""
    world = ended(signal.SIGTERM)
    deadline = world.supervisor.deadline
    assert deadline is not None
    world.now = deadline - 1.0
    world.signal(signal.SIGINT)
    assert world.supervisor.deadline == deadline


def test_another_sigterm_changes_nothing() -> None:
    """Schedulers send it to every process, and again."""
    world = ended(signal.SIGTERM)
    deadline = world.supervisor.deadline
    assert world.signal(signal.SIGTERM) == []
    assert world.supervisor.deadline == deadline
