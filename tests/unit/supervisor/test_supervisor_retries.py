"""Starts that fail and are tried again: what the machine does with a decision."""

from __future__ import annotations

import signal

import pytest

from saferun.supervisor.actions import (
    Action,
    BroadcastAbort,
    BroadcastDecision,
    Diagnose,
    Finish,
    JoinHosts,
    ReportFailure,
    RunChecks,
)
from saferun.supervisor.events import (
    ChecksOver,
    ChecksPassed,
    DeadlineExpired,
    Diagnosed,
    HostsJoined,
    JobAborted,
    JobDecided,
    LaunchRequested,
    StartFailed,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, FailureFacts, Fingerprint, JobPolicy
from saferun.supervisor.policy.faulty_hosts import FaultyHost
from tests.unit.supervisor.fake_job import Job
from tests.unit.supervisor.fake_world import DIAGNOSIS, FAILED, KILLED, World, only, placement_of, running


def retrying(retries: int = 3) -> AttemptPolicy:
    return AttemptPolicy(0, retries, wait=lambda retry: 2.0 * retry)


def launched(policy: AttemptPolicy, job: JobPolicy | None = None) -> Supervisor:
    supervisor = Supervisor(policy, Limits(), None, job)
    supervisor.handle(LaunchRequested(0.0, 0))
    return supervisor


def test_a_port_that_is_in_use_is_tried_again() -> None:
    """Nothing had been started: the launch waits, checks anew, and goes on."""
    supervisor = launched(retrying())
    failed = StartFailed(1.0, 0, "port 29500 is in use", "stop it", 1, class_name="port_in_use")
    supervisor.handle(failed)
    assert supervisor.state is State.DIAGNOSING
    (report,) = supervisor.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    assert isinstance(report, ReportFailure)
    assert report.decision is not None
    assert report.decision.message == "starting again in 2.0 s (retry 1 of 3): port 29500 is in use"
    assert (supervisor.state, supervisor.deadline) == (State.BACKOFF, 3.0)


@pytest.mark.parametrize("retries", [2, 0])
@pytest.mark.parametrize("restarts", [1, 0])
def test_hosts_that_can_meet_again_decide_so_each_for_itself(retries: int, restarts: int) -> None:
    """As long as retries of the start, or restarts, are left: one was gone when torch's rendezvous was complete."""
    policy = AttemptPolicy(restarts, retries, wait=lambda _: 1.0)
    supervisor = launched(policy, JobPolicy(spans_hosts=True, outlives_leader=True))

    def fail(number: int) -> list[Action]:
        supervisor.handle(ChecksPassed(1.0, number))
        assert supervisor.state is State.JOINING
        supervisor.handle(StartFailed(1.0, number, "node2 left", "see there", 1, class_name="host_lost"))
        return supervisor.handle(Diagnosed(1.0, number, DIAGNOSIS))

    for number in range(retries + restarts):
        decision = only(ReportFailure, fail(number)).decision
        assert decision is not None
        assert decision.message.startswith("starting again in 1.0 s (")
        assert decision.message.endswith(": node2 left")
        supervisor.handle(DeadlineExpired(2.0, number))
    assert only(Finish, fail(retries + restarts)).exit_code == 1
    assert supervisor.state is State.DONE


def test_hosts_that_do_not_meet_in_time_are_named_as_the_reason() -> None:
    """Of several hosts; one alone only prepares its ranks then."""
    supervisor = launched(retrying(), JobPolicy(spans_hosts=True))
    supervisor.handle(ChecksPassed(1.0, 0))
    (action,) = supervisor.handle(DeadlineExpired(supervisor.deadline or 0.0, 0))
    assert isinstance(action, Diagnose)
    assert action.error == "the rendezvous of the hosts timed out"


def test_a_diagnosis_that_does_not_come_costs_no_restart() -> None:
    """It would not end the restarts of torchrun, which has none."""
    world = running(ranks=1, max_restarts=1)
    world.exit(0, FAILED)
    world.expire()
    report = only(ReportFailure, world.expire())
    assert report.diagnosis.headline == "the attempt failed"
    assert report.restarting
    assert world.supervisor.state is State.BACKOFF


def test_a_diagnosis_of_a_job_that_was_stopped_and_that_does_not_come_names_the_signal() -> None:
    world = running(ranks=1)
    world.signal(signal.SIGTERM)
    world.exit(0, KILLED)
    world.answer_until(State.DIAGNOSING)
    report = only(ReportFailure, world.expire())
    assert report.diagnosis.headline == "stopped by SIGTERM"


def test_a_check_that_finds_what_will_not_pass_ends_the_launch() -> None:
    """Without a class there is nothing that another try could change."""
    supervisor = launched(retrying())
    supervisor.handle(StartFailed(1.0, 0, "there is no interface eht0", "eth0?", 2))
    actions = supervisor.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    assert actions[-1] == Finish(2)


def test_a_failed_start_of_ranks_is_tried_again_and_uses_no_restart() -> None:
    """TORCHELASTIC_RESTART_COUNT counts failures of training, which this one never came to."""
    world = World()
    world.supervisor = Supervisor(retrying(), Limits(), None)
    world.launch()
    world.answer_until(State.RUNNING)
    world.exit(0, FAILED)
    world.answer()
    world.exit(1, KILLED)
    world.answer()
    facts = FailureFacts("rendezvous_store_failure", is_start_over=False, message="the ranks did not meet")
    world.deliver(Diagnosed(world.now, 0, DIAGNOSIS, facts=facts))
    assert world.state is State.BACKOFF
    assert world.expire() == [RunChecks(1)]
    world.answer_until(State.RUNNING)
    assert JoinHosts(1, 0) in world.actions


def test_of_several_hosts_the_one_that_leads_decides_on_a_retry() -> None:
    """The others wait as long, and come again."""
    together = JobPolicy(spans_hosts=True)
    leader, follower = launched(retrying(), together), launched(retrying(), together)
    joined = HostsJoined(0.0, 0, placement_of(1), 0, leads=True, probes=True)
    for supervisor, leads in ((leader, True), (follower, False)):
        supervisor.handle(ChecksPassed(0.0, 0))
        supervisor.handle(joined._replace(leads=leads))
    leader.handle(StartFailed(1.0, 0, "node2 does not answer", "look", 2, class_name="network_cut"))
    actions = leader.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    told = only(BroadcastDecision, actions)
    assert (told.next_step, told.wait_s, told.restarts) == ("restart", 2.0, 0)
    follower.handle(JobDecided(1.0, 0, told.next_step, told.exit_code, told.wait_s, told.restarts))
    assert (leader.state, follower.state) == (State.BACKOFF, State.BACKOFF)
    assert (leader.deadline, follower.deadline) == (3.0, 3.0)


@pytest.mark.parametrize("leads", [True, False])
def test_a_host_that_cannot_start_once_the_hosts_have_met_says_so_to_all(leads: bool) -> None:
    """They have begun to start their ranks, and would take it for one that was killed."""
    supervisor = launched(retrying(), JobPolicy(spans_hosts=True))
    supervisor.handle(ChecksPassed(0.0, 0))
    joined = HostsJoined(0.0, 0, placement_of(1), 0, leads=leads)
    actions = supervisor.handle(StartFailed(1.0, 0, "no such tool", "install it", 2, joined=joined))
    assert only(BroadcastAbort, actions) == BroadcastAbort(0, "start", "no such tool", 0, "install it")
    assert (supervisor.state, only(Diagnose, actions).alone) == (State.DIAGNOSING, False)
    actions = supervisor.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    if leads:
        assert only(BroadcastDecision, actions).exit_code == 2
    else:
        assert actions == []  # the leader decides
        actions = supervisor.handle(JobDecided(2.0, 0, "finish", 1, 0.0, 0))
    assert only(Finish, actions).exit_code == 2


def test_a_host_that_prepares_its_ranks_for_too_long_says_so_to_all() -> None:
    """Else they would wait without end for ranks of which none has failed."""
    supervisor = launched(retrying(), JobPolicy(spans_hosts=True))
    supervisor.handle(ChecksPassed(0.0, 0))
    joined = HostsJoined(0.0, 0, placement_of(1), 0, leads=False)
    actions = supervisor.handle(DeadlineExpired(supervisor.deadline or 0.0, 0, joined))
    hint = "see events.jsonl in the run directory for the last event"
    said = only(BroadcastAbort, actions)
    assert said == BroadcastAbort(0, "start", "the preparation of the ranks timed out", 0, hint)
    assert not only(Diagnose, actions).alone


def test_a_host_that_cannot_start_leaves_a_job_that_goes_on_without_it() -> None:
    """As one does that gets a signal: the others do not fail."""
    supervisor = launched(retrying(), JobPolicy(spans_hosts=True, least_hosts=1))
    supervisor.handle(ChecksPassed(0.0, 0))
    joined = HostsJoined(0.0, 0, placement_of(1), 0, leads=False, may_leave=True)
    actions = supervisor.handle(StartFailed(1.0, 0, "no such tool", "install it", 2, joined=joined))
    assert only(BroadcastAbort, actions).reason == "leave"
    assert only(Diagnose, actions).alone
    actions = supervisor.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    assert only(Finish, actions) == Finish(2, leaves=True)


def test_a_master_whose_port_is_taken_tries_again_while_the_others_wait_for_it() -> None:
    """They know nothing of this attempt yet."""
    supervisor = launched(retrying(), JobPolicy(spans_hosts=True))
    supervisor.handle(StartFailed(1.0, 0, "port 29500 is in use", "stop it", 1, class_name="port_in_use"))
    actions = supervisor.handle(Diagnosed(1.0, 0, DIAGNOSIS))
    assert not any(isinstance(action, BroadcastDecision) for action in actions)
    assert supervisor.state is State.BACKOFF


@pytest.mark.parametrize(("needed", "excluded"), [((), 1), ((1,), -1)])
def test_an_elastic_job_keeps_the_host_without_which_no_other_could_meet_again(
    needed: tuple[int, ...], excluded: int
) -> None:
    """Its GPU failed; it serves torch's rendezvous, which the leader has from the hosts' agreement."""
    leader = launched(AttemptPolicy(3), JobPolicy(spans_hosts=True, outlives_leader=True, least_hosts=2))
    faulty = FaultyHost(1, "node2", "GPU 3 has fallen off the bus")
    facts = FailureFacts("gpu_hardware_error", is_start_over=True, message="GPU 3 is lost", faulty=(faulty,))
    placement = placement_of(1)._replace(group_world_size=3)
    leader.handle(ChecksPassed(0.0, 0))
    leader.handle(HostsJoined(0.0, 0, placement, 0, probes=True, needed=needed))
    leader.handle(JobAborted(0.0, 0, "failure", "a GPU fails", "node2"))
    decision = only(BroadcastDecision, leader.handle(Diagnosed(1.0, 0, DIAGNOSIS, facts=facts)))
    assert (decision.next_step, decision.excluded) == ("restart", excluded)


def test_a_host_that_is_left_out_leaves_and_the_others_go_on() -> None:
    """It caused the same failure twice."""
    policy = AttemptPolicy(3, 0, exclude_bad_hosts=True)
    leader = launched(policy, JobPolicy(spans_hosts=True, least_hosts=1))
    bad = launched(AttemptPolicy(3), JobPolicy(spans_hosts=True, least_hosts=1))
    facts = FailureFacts(
        "gpu_hardware_error", Fingerprint("gpu_hardware_error", (2,), "train.py:3"), is_start_over=True
    )
    facts = facts._replace(host=1, host_label="node2", message="a GPU fails")
    last: list[Action] = []
    for attempt in range(2):
        for supervisor, number in ((leader, 0), (bad, 1)):
            placement = placement_of(1)._replace(group_rank=number, group_world_size=2, restarts=attempt)
            supervisor.handle(ChecksPassed(0.0, attempt))
            supervisor.handle(HostsJoined(0.0, attempt, placement, attempt, leads=number == 0, probes=True))
            supervisor.handle(JobAborted(0.0, attempt, "failure", "a GPU fails", "node2"))
            assert supervisor.state is State.DIAGNOSING
        actions = leader.handle(Diagnosed(1.0, attempt, DIAGNOSIS, facts=facts))
        told = only(BroadcastDecision, actions)
        assert told.excluded == (1 if attempt else -1)
        bad.handle(Diagnosed(1.0, attempt, DIAGNOSIS))
        decided = JobDecided(1.0, attempt, "restart", 1, told.wait_s, told.restarts, ("why",), told.excluded)
        last = bad.handle(decided)
        leader.handle(_expiry(leader))
        if not attempt:
            bad.handle(_expiry(bad))
    # A launcher may end all hosts at the first bad exit code.
    assert last[-1] == Finish(0, leaves=True)
    assert leader.state is State.CHECKING


def _expiry(supervisor: Supervisor) -> DeadlineExpired:
    return DeadlineExpired(supervisor.deadline or 0.0, supervisor.attempt)


def test_where_nothing_but_checks_is_wanted_one_host_ends_after_its_own() -> None:
    """With their exit code."""
    supervisor = launched(retrying())
    assert supervisor.handle(ChecksOver(1.0, 0, 2)) == [Finish(2)]


def test_the_hosts_of_a_job_come_again_after_checks_that_may_get_better() -> None:
    """All of them, and then they run."""
    job = Job(3, bad_checks={0})
    job.passing = True
    job.settle()
    assert [host.state for host in job.hosts] == [State.RUNNING] * 3
