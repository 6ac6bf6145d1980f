"""Hosts that end while the job goes on without them, or waits for who takes their place."""

from __future__ import annotations

import signal

import pytest

from saferun.model import Placement, RankAssignment
from saferun.supervisor.actions import CaptureEvidence, Diagnose, Finish, PrintLine, ReportRestart, SignalRanks
from saferun.supervisor.ending import Stopped
from saferun.supervisor.events import (
    ChecksPassed,
    HostsJoined,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    LaunchRequested,
    OrphansGone,
    RankExited,
    RanksStarted,
    SignalReceived,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, JobPolicy
from tests.unit.supervisor.fake_job import Host, Job
from tests.unit.supervisor.fake_world import DIAGNOSIS, FAILED, OK
from tests.unit.supervisor.test_supervisor_jobs import codes, started


def test_the_others_go_on_where_a_host_leaves_an_elastic_job() -> None:
    """It is no failure: none of the restarts is used up, and there is none to be had here."""
    job = started(least=1)
    job.hosts[2].signal(signal.SIGTERM)
    job.next_attempt()
    assert job.hosts[2].finish == Finish(1, leaves=True)
    assert [host.supervisor.attempt for host in job.hosts[:2]] == [1, 1]
    for host in job.hosts[:2]:
        host.exit(OK)
        host.exit(OK)
    job.settle()
    assert codes(job)[:2] == [0, 0]


def test_ranks_are_stopped_at_once_where_a_host_comes() -> None:
    """Nothing has failed: a capture of all of them would hold up the hosts for as long as 20 s."""
    job = started(least=1)
    (first, *others) = job.hosts
    actions = first.supervisor.handle(JobAborted(job.now, 0, "membership", "a host wants to join", "node9"))
    assert first.state is State.STOPPING
    (sent,) = (action for action in actions if isinstance(action, SignalRanks))
    assert (sent.signum, sent.local_ranks) == (signal.SIGTERM, (0, 1))
    assert not any(isinstance(action, CaptureEvidence) for action in actions)
    assert all(host.state is State.RUNNING for host in others)


def test_a_signal_while_the_hosts_regroup_stops_this_host() -> None:
    """Also in the sweep, after which all ranks would be started again."""
    job = started(least=1)
    host = job.hosts[1]
    host.deliver(JobAborted(job.now, 0, "membership", "a host wants to join", "node9"))
    while (
        host.state is not State.STOPPING or host.alive or host.supervisor._launch.attempt.stopping.stage != "sweeping"
    ):
        host.take()
    host.signal(signal.SIGTERM)
    job.settle()
    assert host.finish == Finish(1, leaves=True)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("state", [State.CAPTURING, State.STOPPING, State.DIAGNOSING, State.BACKOFF, State.CHECKING])
def test_a_host_that_is_ended_before_a_restart_does_not_keep_the_others_from_it(state: State, number: int) -> None:
    """Two hosts are reclaimed within seconds, or one while a failure of another one is captured."""
    job = started(least=1, max_restarts=2)
    host = job.hosts[number]
    job.hosts[2].exit(FAILED)
    while host.state is not state:
        is_between = not host.inbox and state is State.CHECKING and host.state is State.BACKOFF
        if is_between or not any(one.inbox for one in job.hosts):
            host.expire()
        for one in job.hosts:
            if host.state is not state:
                one.take()
    host.signal(signal.SIGTERM)
    job.next_attempt()
    assert host.finish is not None
    assert (host.finish.exit_code, host.finish.leaves) == (1, True)
    assert [one.supervisor.attempt for one in job.hosts if one is not host] == [1, 1]


@pytest.mark.parametrize(
    ("signum", "max_restarts", "is_awaited"), [("TERM", 1, True), ("TERM", 0, False), ("INT", 1, False)]
)
def test_a_host_whose_place_can_be_taken_is_waited_for(signum: str, max_restarts: int, is_awaited: bool) -> None:
    """A pod that is evicted comes again: torch's rendezvous handlers wait for it, if restarts are left.

    A user who presses Ctrl-C wants an end, and so does one who allows no restart.
    """
    job = started(max_restarts=max_restarts, handler=True)
    job.hosts[2].signal(signal.Signals[f"SIG{signum}"])
    if not is_awaited:
        job.settle()
        assert codes(job) == [1, 1, 1]
        return
    for _ in range(100):
        for host in job.hosts:
            host.take()
            if host.state is State.BACKOFF:
                host.expire()
    assert job.hosts[2].finish == Finish(1, leaves=True)
    assert [host.state for host in job.hosts[:2]] == [State.JOINING] * 2
    assert [host.supervisor._launch.restarts for host in job.hosts[:2]] == [1, 1]


def test_a_host_that_was_signalled_during_an_upload_does_not_wait_for_the_others_to_come_again() -> None:
    """All got the signal, and its ranks had ended well before: what they have left behind is waited for no more."""
    job = started(hosts=2, max_restarts=1, handler=True)
    done, other = job.hosts[1], job.hosts[0]
    done.exit(OK)
    done.exit(OK)
    assert done.state is State.STOPPING
    for host in job.hosts:
        host.signal(signal.SIGTERM)
    job.settle()
    assert [host.finish is not None and host.finish.exit_code for host in (done, other)] == [1, 1]


def test_a_process_on_which_others_of_its_host_depend_does_not_end_alone() -> None:
    """Its coordinator would end with it."""
    job = started()
    host = job.hosts[2]
    host.supervisor._launch.job = host.supervisor._launch.job._replace(serves_tasks=True)
    for status in (OK, OK):
        host.exit(status)
    while host.state is not State.WAITING:
        host.take()
    host.signal(signal.SIGTERM)
    job.settle()
    assert codes(job) == [1, 1, 1]


def test_hosts_leave_no_more_often_than_the_job_may_be_restarted() -> None:
    """Whatever another host says."""
    job = started(handler=True)
    job.interrupted = True
    for host in job.hosts:
        host.deliver(JobAborted(job.now, 0, "leave", "SIGTERM", "node2", signum=signal.SIGTERM))
    job.settle()
    assert codes(job) == [1, 1, 1]


def test_a_host_that_comes_when_the_job_is_over_does_not_begin_it_again() -> None:
    """What the ranks have left behind, an upload for instance, is waited for as before."""
    job = started(hosts=1, handler=True)
    (host,) = job.hosts
    host.exit(OK)
    host.exit(OK)
    actions = host.supervisor.handle(JobAborted(job.now, 0, "membership", "a host wants to join", "node9"))
    assert actions == []
    job.settle()
    assert codes(job) == [0]


def test_a_host_whose_ranks_have_ended_well_may_be_ended_without_harm_to_the_others() -> None:
    """As under torchrun: its node is drained while rank 0 writes the last checkpoint."""
    job = started()
    for status in (OK, OK):
        job.hosts[2].exit(status)
    while job.hosts[2].state is not State.WAITING:
        job.hosts[2].take()
    job.hosts[2].signal(signal.SIGTERM)
    assert job.hosts[2].finish == Finish(1, leaves=True)
    for host in job.hosts[:2]:
        assert host.state is State.RUNNING
        host.exit(OK)
        host.exit(OK)
    job.settle()
    assert codes(job) == [0, 0, 1]


@pytest.mark.parametrize("spans_hosts", [False, True])
def test_a_host_without_others_is_stopped_and_leaves_no_job(*, spans_hosts: bool) -> None:
    """Whatever its rendezvous could do: a launch on one host has torch's, too."""
    policy = JobPolicy(spans_hosts=spans_hosts, outlives_leader=True, awaits_replacement_host=True)
    supervisor = Supervisor(AttemptPolicy(3), Limits(), None, policy)
    supervisor.handle(LaunchRequested(0.0, 0))
    supervisor.handle(ChecksPassed(0.0, 0))
    (host,) = started(hosts=1, handler=True).hosts
    placement = host.supervisor._launch.attempt.placement
    assert placement is not None
    supervisor.handle(HostsJoined(0.0, 0, placement, 0, leads=True))
    supervisor.handle(RanksStarted(0.0, 0, (1, 2)))
    supervisor.handle(SignalReceived(1.0, 0, signal.SIGTERM))
    assert supervisor._launch.attempt.ending == Stopped(signal.SIGTERM)


def test_a_signal_during_an_upload_keeps_no_host_of_a_static_job_from_a_restart() -> None:
    """Its place could be taken by no other."""
    job = started()
    host = job.hosts[1]
    host.exit(OK)
    host.exit(OK)
    host.signal(signal.SIGTERM)
    host.deliver(JobAborted(job.now, 0, "restart", "saferunctl restart", "node0", signum=signal.SIGTERM))
    while host.state is State.STOPPING:
        host.take()
    assert host.state is State.BACKOFF


@pytest.mark.parametrize("has_advanced", [False, True])
def test_the_leader_knows_whether_a_job_that_gets_further_waits_for_a_successor(*, has_advanced: bool) -> None:
    """The host that leaves has seen the steps of its own ranks alone."""
    job = started(handler=True, by_progress=True)
    if has_advanced:
        progress = job.hosts[0].supervisor._launch.policy._progress
        assert progress is not None
        progress.note(100)
    job.hosts[1].signal(signal.SIGTERM)
    job.settle()
    assert job.hosts[1].finish == Finish(1, leaves=True)
    assert job.hosts[0].supervisor.attempt == int(has_advanced)  # nobody has taken the place in time
    assert codes(job) == [1, 1, 1]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("reason", ["leave", "membership", "restart"])
def test_a_host_that_looks_for_a_cause_already_meets_the_others_again(reason: str, number: int) -> None:
    """Its ranks failed because others had left them, before it read that in a log that is slow: no decision comes."""
    job = started(handler=reason != "membership", least=1 if reason == "membership" else None, max_restarts=3)
    host = job.hosts[number]
    if reason == "leave":
        job.hosts[2].signal(signal.SIGTERM)
    else:
        job.trouble(0, reason, job.hosts[2 if reason == "restart" else 0])
    late = list(host.inbox)
    host.inbox.clear()
    host.exit(FAILED)
    host.exit(FAILED)
    while host.inbox:
        host.take()
    states = [host.state]
    host.inbox.extend(late)
    host.take()
    assert [*states, host.state] == [State.DIAGNOSING, State.BACKOFF]
    said, followed = host.actions[-2:]
    found = DIAGNOSIS.headline if number else "rank 0 failed"  # the leader waits for the evidence of the others
    assert said == PrintLine(f"as the hosts were starting again, {found}")
    if reason == "restart":
        assert followed == ReportRestart(0, "words")
    else:
        assert isinstance(followed, PrintLine)
        assert "starting all ranks again" in followed.text
    assert host.supervisor._launch.restarts == int(reason == "leave")


def test_a_leader_that_is_signalled_waits_for_no_evidence_of_hosts_that_meet_again() -> None:
    job = started(least=1, max_restarts=3)
    (leader, *_) = job.hosts
    job.hosts[2].signal(signal.SIGTERM)
    late = list(leader.inbox)
    leader.inbox.clear()
    leader.exit(FAILED)
    leader.exit(FAILED)
    while leader.inbox:
        leader.take()
    assert leader.state is State.DIAGNOSING
    leader.signal(signal.SIGTERM)
    leader.inbox.extend(late)
    leader.take()
    diagnoses = [action.alone for action in leader.actions if isinstance(action, Diagnose)]
    assert diagnoses == [False, True]


def signalled_in_sweep(job: Job, number: int) -> Host:
    """A host whose ranks have ended well, and that was signalled while it waited for what they had left behind."""
    host = job.hosts[number]
    host.exit(OK)
    host.exit(OK)
    assert host.state is State.STOPPING
    assert host.supervisor._launch.attempt.stopping.stage == "sweeping"
    host.signal(signal.SIGTERM)
    return host


@pytest.mark.parametrize("handler", [False, True])
def test_a_signal_during_an_upload_ends_the_host_after_it(*, handler: bool) -> None:
    """As if the signal had come a moment later; the others go on."""
    job = started(handler=handler, max_restarts=3)
    host = signalled_in_sweep(job, 2)
    for _ in range(20):
        host.take()
    assert host.finish == Finish(1, leaves=True)
    for other in job.hosts[:2]:
        assert other.state is State.RUNNING
        other.exit(OK)
        other.exit(OK)
    job.settle()
    assert codes(job) == [0, 0, 1]


@pytest.mark.parametrize("number", [0, 2])
def test_a_host_that_was_signalled_during_an_upload_is_in_no_other_attempt(number: int) -> None:
    """Not even if a rank fails elsewhere meanwhile, and also where it leads."""
    job = started(handler=True, max_restarts=3)
    host = signalled_in_sweep(job, number)
    job.hosts[1].exit(FAILED)
    job.settle()
    assert host.finish == Finish(1, leaves=True)
    assert job.hosts[1].supervisor.attempt == 1


@pytest.mark.parametrize("serves_tasks", [False, True])
def test_a_signal_during_an_upload_to_a_host_that_the_others_need_stops_a_static_job(*, serves_tasks: bool) -> None:
    """Its node is about to go: as if the signal had come a moment later."""
    job = started(max_restarts=3)
    number = 2 if serves_tasks else 0
    launch = job.hosts[number].supervisor._launch
    launch.job = launch.job._replace(serves_tasks=serves_tasks)
    signalled_in_sweep(job, number)
    job.settle()
    assert codes(job) == [1, 1, 1]


def test_a_leader_that_is_signalled_during_an_upload_leaves_an_elastic_job() -> None:
    job = started(least=1, max_restarts=3)
    leader = signalled_in_sweep(job, 0)
    for _ in range(10):
        leader.take()
    assert leader.state is State.WAITING
    leader.expire()
    job.next_attempt()
    assert leader.finish == Finish(1, leaves=True)
    assert [host.supervisor.attempt for host in job.hosts[1:]] == [1, 1]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("handler", [False, True])
def test_a_job_whose_last_ranks_were_those_of_a_host_that_was_signalled_then_is_done(
    number: int, *, handler: bool
) -> None:
    """As on one host: the signal came when nothing was left to be stopped but an upload."""
    job = started(handler=handler, max_restarts=3)
    launch = job.hosts[number].supervisor._launch
    launch.job = launch.job._replace(serves_tasks=True)
    for host in job.hosts:
        if host.number != number:
            host.exit(OK)
            host.exit(OK)
            while host.inbox:
                host.take()
            assert host.state is State.WAITING
    signalled_in_sweep(job, number)
    job.settle()
    assert codes(job) == [0, 0, 0]


@pytest.mark.parametrize("reason", ["failure", "restart"])
def test_a_leader_that_was_signalled_during_an_upload_begins_a_static_job_not_again(reason: str) -> None:
    """Whatever ends the attempt meanwhile: the place of the leader can be taken by no other."""
    job = started(max_restarts=3)
    leader = signalled_in_sweep(job, 0)
    if reason == "failure":
        job.hosts[1].exit(FAILED)
    else:
        job.interrupted = True
        job.trouble(0, reason, job.hosts[1], signal.SIGTERM)
    aborted = next(event for event in leader.inbox if isinstance(event, JobAborted))
    leader.inbox.remove(aborted)
    leader.deliver(aborted)
    for _ in range(20):
        for host in job.hosts:
            host.take()
    assert leader.finish is not None
    assert leader.finish.exit_code == 1
    assert job.number == 0


def test_news_of_silent_hosts_does_not_put_a_signal_off() -> None:
    job = started()
    leader = signalled_in_sweep(job, 0)
    for _ in range(10):
        leader.take()
    deadline = leader.supervisor.deadline
    leader.deliver(HostsUnreachable(job.now, 0, "node2 does not answer"))
    leader.deliver(HostsReachable(job.now, 0))
    assert deadline is not None
    assert (leader.state, leader.supervisor.deadline) == (State.WAITING, deadline)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_host_joins_a_job_while_another_process_of_the_only_host_has_ranks_that_run(processes: int) -> None:
    """The ranks of this process have ended; with them the job, if there are no others."""
    policy = JobPolicy(spans_hosts=True, outlives_leader=True, awaits_replacement_host=True)
    supervisor = Supervisor(AttemptPolicy(3), Limits(), None, policy)
    supervisor.handle(LaunchRequested(0.0, 0))
    supervisor.handle(ChecksPassed(0.0, 0))
    ranks = (RankAssignment(processes - 1, processes - 1, processes - 1),)
    placement = Placement(0, 1, processes, processes, ranks, "a", 1, "job", processes)
    supervisor.handle(HostsJoined(0.0, 0, placement, 0, leads=processes == 1))
    supervisor.handle(RanksStarted(0.0, 0, (1,)))
    supervisor.handle(RankExited(1.0, 0, processes - 1, OK))
    supervisor.handle(JobAborted(2.0, 0, "membership", "a host wants to join", "node9"))
    supervisor.handle(OrphansGone(3.0, 0, ()))
    assert supervisor.state is (State.BACKOFF if processes == 2 else State.WAITING)


@pytest.mark.parametrize("awaits_replacement_host", [False, True])
def test_a_leader_leaves_a_failed_job_to_the_others_only_if_they_wait_for_its_successor(
    *, awaits_replacement_host: bool
) -> None:
    """A batch system sends none."""
    job = started(handler=True, max_restarts=3)
    for host in job.hosts:
        launch = host.supervisor._launch
        launch.job = launch.job._replace(awaits_replacement_host=awaits_replacement_host)
    leader = job.hosts[0]
    job.hosts[1].exit(FAILED)
    while leader.state is not State.DIAGNOSING:
        for host in job.hosts:
            host.take()
    leader.signal(signal.SIGTERM)
    job.settle()
    assert leader.finish == Finish(1, leaves=awaits_replacement_host, by_signal=not awaits_replacement_host)
    assert job.hosts[1].supervisor.attempt == int(awaits_replacement_host)


@pytest.mark.parametrize("state", [State.BACKOFF, State.CHECKING])
def test_ctrl_c_between_attempts_ends_the_rendezvous(state: State) -> None:
    """The others learn by nothing else that this host does not come."""
    job = started(handler=True, max_restarts=3)
    host = job.hosts[1]
    host.exit(FAILED)
    while host.state is not state:
        for each in job.hosts:
            each.take()
        if host.state is State.BACKOFF and state is State.CHECKING:
            host.expire()
    host.signal(signal.SIGINT)
    assert host.finish is not None
    assert (host.finish.leaves, host.finish.by_signal) == (False, False)
