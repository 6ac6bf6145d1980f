"""The state machine and what works on after ranks that ended well."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import Finish, PrintLine, SweepOrphans
from saferun.supervisor.events import (
    DeadlineExpired,
    JobAborted,
    JobDecided,
    JobLost,
    LoopStalled,
    OrphansGone,
)
from saferun.supervisor.machine import State, Supervisor
from saferun.supervisor.policy import AttemptPolicy
from tests.unit.supervisor.fake_job import Job
from tests.unit.supervisor.fake_world import FAILED, LIMITS, OK, World, only, running

IDLE_S = 60.0
WAITED_FOR = SweepOrphans(0, LIMITS.grace_s, LIMITS.orphans_s, IDLE_S)
ENDED = SweepOrphans(0, LIMITS.sweep_term_s)


def well_ended(leftovers: str = "wait") -> World:
    world = running(ranks=1)
    world.supervisor._launch.orphans = leftovers  # type: ignore[assignment]
    world.exit(0)
    world.answers.clear()  # something is left
    return world


def test_what_works_after_ranks_that_ended_well_is_waited_for_and_not_for_ever() -> None:
    """An upload of the last checkpoint; torchrun leaves it alone."""
    world = well_ended()
    assert only(SweepOrphans, world.actions) == WAITED_FOR
    began = world.now
    assert world.expire() == [Finish(0)]
    assert world.now - began >= LIMITS.orphans_s


def test_what_works_on_has_the_time_again_in_which_saferun_was_suspended() -> None:
    """Else the end of the launch would kill it at once when a suspended job goes on."""
    world = well_ended()
    now = world.now + 7200.0
    assert world.supervisor.handle(LoopStalled(now, 0, 300.0)) == []
    assert (world.supervisor.state, world.supervisor.deadline) == (State.STOPPING, now + 300.0 + LIMITS.sweep_s)
    assert world.supervisor.handle(DeadlineExpired(now + 400.0, 0)) == [Finish(0)]


def test_what_is_ended_after_a_failure_has_no_time_again() -> None:
    world = running(ranks=1, max_restarts=1)
    world.exit(0, FAILED)
    world.supervisor.handle(LoopStalled(world.now + 7200.0, 0, 300.0))
    assert world.supervisor.state is not State.STOPPING


@pytest.mark.parametrize(
    ("mode", "action"),
    [("end", SweepOrphans(0, LIMITS.grace_s, ends_all=True)), ("leave", SweepOrphans(0, 0.0, leave=True))],
)
def test_it_is_ended_or_left_where_the_user_says_so(mode: str, action: SweepOrphans) -> None:
    assert only(SweepOrphans, well_ended(mode).actions) == action


@pytest.mark.parametrize("grace_s", [0.0, 0.5, 100.0])
def test_the_grace_of_ranks_decides_neither_about_idleness_nor_shortens_the_end(grace_s: float) -> None:
    """With --shutdown-timeout 0 an upload after ranks that ended well got SIGKILL at once."""
    world = running(ranks=1)
    world.supervisor._launch.limits = LIMITS._replace(grace_s=grace_s)
    world.exit(0)
    term_s = max(grace_s, LIMITS.sweep_term_s)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, term_s, LIMITS.orphans_s, IDLE_S)


def test_with_no_time_to_wait_all_are_ended() -> None:
    world = running(ranks=1)
    world.supervisor._launch.limits = LIMITS._replace(orphans_s=0.0)
    world.exit(0)
    assert only(SweepOrphans, world.actions) == SweepOrphans(0, LIMITS.grace_s, ends_all=True)


@pytest.mark.parametrize(("mode", "ends_all"), [("wait", False), ("leave", False), ("end", True)])
def test_after_a_failure_those_that_were_detached_are_ended_only_where_the_user_says_so(
    mode: str, ends_all: bool
) -> None:
    """Torchrun leaves the upload of a checkpoint alone, from which the next attempt may begin."""
    world = running(ranks=1, max_restarts=1)
    world.supervisor._launch.orphans = mode  # type: ignore[assignment]
    assert world.exit(0, FAILED) == [SweepOrphans(0, LIMITS.sweep_term_s, ends_all=ends_all)]


def test_after_a_failure_nothing_is_waited_for() -> None:
    """It would hold memory of the GPUs, ports and files of the next attempt."""
    world = running(ranks=1, max_restarts=1)
    assert world.exit(0, FAILED) == [ENDED]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait_and_the_job_has_ended_well_all_the_same(signum: int) -> None:
    world = well_ended()
    say, sweep = world.signal(signum)
    assert isinstance(say, PrintLine)
    assert sweep == ENDED
    assert world.supervisor.deadline == world.now + LIMITS.sweep_s
    assert world.signal(signum) == []
    assert world.deliver(OrphansGone(world.now, 0, (12,))) == [Finish(0)]


def waiting_host(elastic: bool = False) -> tuple[Job, Supervisor]:
    """The second of two hosts, whose ranks are done while something of theirs works on."""
    job = Job(2, 1, least=1 if elastic else None)
    job.run()
    host = job.hosts[1]
    host.exit(OK)
    host.exit(OK)
    host.inbox.clear()  # something is left
    assert host.state is State.STOPPING
    return job, host.supervisor


def test_a_failure_on_another_host_ends_the_wait() -> None:
    """All start again together, and do not wait ten minutes for one host's upload."""
    job, supervisor = waiting_host()
    actions = supervisor.handle(JobAborted(job.now, 0, "failure", "rank 0", "node0"))
    assert actions == [ENDED]
    supervisor.handle(OrphansGone(job.now, 0, ()))
    assert supervisor.state is State.DIAGNOSING


def test_a_job_that_cannot_be_reached_any_more_ends_the_wait() -> None:
    job, supervisor = waiting_host()
    assert supervisor.handle(JobLost(job.now, 0, "gone", "look")) == [ENDED]
    ended = supervisor.handle(OrphansGone(job.now, 0, ()))
    assert ended == [PrintLine("gone; all ranks of this host ended well"), Finish(0)]


def test_what_was_decided_during_the_wait_is_done_after_it() -> None:
    job, supervisor = waiting_host()
    assert supervisor.handle(JobDecided(job.now, 0, "finish", 1, 0.0, 0, ("why",))) == [ENDED]
    supervisor.handle(OrphansGone(job.now, 0, ()))
    assert supervisor.state is State.DONE


def test_the_policy_of_an_ordinary_supervisor_is_to_wait() -> None:
    assert Supervisor(AttemptPolicy(0), LIMITS)._launch.orphans == "wait"
