"""The state machines of several hosts together: they fail as one, and end as one."""

from __future__ import annotations

import signal
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.model import Placement, RankAssignment
from saferun.supervisor.actions import (
    BroadcastAbort,
    BroadcastDecision,
    CaptureEvidence,
    Diagnose,
    Finish,
    HurryDiagnosis,
    PrintLine,
    ProbeHosts,
    ReportDecision,
    ReportFailure,
    SignalRanks,
    StartRanks,
)
from saferun.supervisor.events import (
    ChecksOver,
    ChecksPassed,
    DeadlineExpired,
    HangSuspected,
    HostsJoined,
    HostsReachable,
    HostsUnreachable,
    JobAborted,
    JobDecided,
    JobLost,
    LaunchRequested,
    OrphansGone,
    RankExited,
    RanksStarted,
    SignalReceived,
)
from saferun.supervisor.machine import Limits, State, Supervisor
from saferun.supervisor.policy import AttemptPolicy, HangPolicy, JobPolicy
from tests.examples import examples
from tests.unit.supervisor.fake_job import FAILED, KILLED, LIMITS, OK, Host, Job
from tests.unit.supervisor.fake_world import HANG


def codes(job: Job) -> list[int | None]:
    return [host.finish.exit_code if host.finish else None for host in job.hosts]


def started(hosts: int = 3, **options: object) -> Job:
    job = Job(hosts, **options)  # type: ignore[arg-type]
    job.run()
    return job


def test_a_job_ends_well_when_the_last_rank_of_the_last_host_has() -> None:
    """A host whose ranks are done waits: the exit code is the job's on every host."""
    job = started()
    for host in job.hosts[:2]:
        host.exit(OK)
        host.exit(OK)
    while any(host.inbox for host in job.hosts):
        for host in job.hosts:
            host.take()
    assert [host.state for host in job.hosts] == [State.WAITING, State.WAITING, State.RUNNING]
    job.hosts[2].exit(OK)
    job.hosts[2].exit(OK)
    job.settle()
    assert codes(job) == [0, 0, 0]


@pytest.mark.parametrize("failing", range(3))
def test_a_rank_that_dies_on_one_host_ends_the_job_on_all(failing: int) -> None:
    """Everybody looks at his ranks before he stops them, the first host decides, and all end alike."""
    job = started()
    job.hosts[failing].exit(KILLED)
    job.settle()
    assert codes(job) == [1, 1, 1]
    for host in job.hosts:
        assert any(isinstance(action, CaptureEvidence) for action in host.actions)
        kind = ReportFailure if host is job.leader else ReportDecision
        assert sum(isinstance(action, kind) for action in host.actions) == 1
    assert job.troubles == {0: "victim" if failing % 2 else "failure"}


def test_a_host_that_was_done_is_started_again_with_the_others() -> None:
    """The ranks of a world start together or not at all."""
    job = started(max_restarts=1)
    job.hosts[1].exit(OK)
    job.hosts[1].exit(OK)
    job.hosts[1].take()
    job.hosts[1].take()
    assert job.hosts[1].state is State.WAITING
    job.hosts[2].exit(FAILED)
    job.next_attempt()
    assert [host.supervisor.attempt for host in job.hosts] == [1, 1, 1]


def test_restarts_are_counted_by_the_job_not_by_each_host() -> None:
    """A rank of another host each time: torchrun's hosts would each count their own."""
    job = started(max_restarts=2)
    for attempt in range(3):
        assert {host.supervisor.attempt for host in job.hosts} == {attempt}
        job.hosts[attempt].exit(FAILED)
        if attempt < 2:
            job.next_attempt()
    job.settle()
    assert codes(job) == [1, 1, 1]


def test_a_signal_to_one_host_stops_the_job_and_uses_no_restart() -> None:
    """Whoever stops one of them means all of them."""
    job = started(max_restarts=3)
    job.hosts[1].signal(signal.SIGTERM)
    job.settle()
    assert codes(job) == [1, 1, 1]
    assert job.number == 0
    assert [host.finish.by_signal for host in job.hosts if host.finish is not None] == [True] * 3


def test_ctrl_c_on_one_host_waits_for_no_evidence_on_any() -> None:
    """The user is at the keyboard."""
    job = started()
    job.hosts[0].signal(signal.SIGINT)
    job.settle()
    assert codes(job) == [1, 1, 1]
    assert not any(isinstance(action, CaptureEvidence) for host in job.hosts for action in host.actions)


def test_one_ctrl_c_that_a_launcher_sends_to_every_host_is_one() -> None:
    """The news of another host's may be quicker than one's own; a second one is impatience on every host."""
    job = started()
    job.hosts[0].signal(signal.SIGINT)
    slow = job.hosts[1]
    slow.take()
    assert slow.state is State.STOPPING
    slow.signal(signal.SIGINT)
    sent = [action.signum for action in slow.actions if isinstance(action, SignalRanks)]
    assert sent == [signal.SIGINT]
    assert slow.supervisor.handle(SignalReceived(job.now + 1, 0, signal.SIGINT))[-1] == SignalRanks(
        0, (0, 1), signal.SIGKILL
    )
    job.settle()
    assert codes(job) == [1, 1, 1]


def test_a_lost_host_ends_a_fixed_job() -> None:
    """Its ranks cannot be replaced."""
    job = started(max_restarts=1)
    job.power_off(job.hosts[1])
    job.settle()
    assert codes(job)[0] == 1
    assert codes(job)[2] == 1


def test_each_host_decides_for_itself_where_the_one_that_decides_is_gone() -> None:
    """They capture, stop, report to their own disk and end; nobody waits for a word that cannot come."""
    job = started()
    job.power_off(job.hosts[0])
    job.settle()
    assert codes(job)[1:] == [1, 1]
    for host in job.hosts[1:]:
        assert any(isinstance(action, ReportFailure) for action in host.actions)


def test_a_host_that_has_judged_judges_anew_when_it_learns_that_the_one_that_decides_is_gone() -> None:
    """Its ranks have failed because they lost their connections to that host, and looked like the cause."""
    job = started()
    host = job.hosts[1]
    host.exit(FAILED)
    while host.state is not State.DIAGNOSING or host.inbox:
        host.take()
    job.power_off(job.hosts[0])
    job.settle()
    asked = [action.alone for action in host.actions if isinstance(action, Diagnose)]
    assert asked == [False, True]
    (report,) = [action for action in host.actions if isinstance(action, ReportFailure)]
    assert not report.restarting
    assert codes(job)[1:] == [1, 1]


@pytest.mark.parametrize("class_name", ["", "store_lost"])
def test_a_leader_that_is_lost_while_a_host_prepares_its_ranks_leaves_it_none_to_start(class_name: str) -> None:
    """They have met, and its log files are made on a slow file system; its ranks would look for the store for long."""
    job = Job(3, max_restarts=1)
    host = job.hosts[1]
    while host.state is not State.JOINING or job.number < 0:
        for other in job.hosts:
            if other is not host or other.state is not State.JOINING:
                other.take()
    (met,) = host.inbox
    assert isinstance(met, HostsJoined)
    host.deliver(JobLost(job.now, 0, "node0 is gone", "look", class_name=class_name))
    while host.inbox:
        host.take()
    assert not any(isinstance(action, StartRanks) for action in host.actions)
    assert (host.supervisor.state is State.BACKOFF) == bool(class_name)
    assert (host.finish is None) == bool(class_name)


@pytest.mark.parametrize("next_step", ["restart", "finish"])
def test_a_decision_counts_where_the_own_diagnosis_does_not_come(next_step: Literal["restart", "finish"]) -> None:
    """The others would wait for this host in the next attempt."""
    job = Job(2, max_restarts=1)
    job.run()
    host = job.hosts[1]
    host.exit(FAILED)
    while host.state is not State.DIAGNOSING:
        host.take()
    host.inbox.clear()
    host.deliver(JobDecided(job.now, 0, next_step, 7, 0.0, 1))
    host.expire()
    assert host.supervisor.state is (State.BACKOFF if next_step == "restart" else State.DONE)
    assert host.finish is None or host.finish.exit_code == 7


def test_a_decision_that_was_heard_counts_where_the_line_breaks_later() -> None:
    """The host that decides may be gone a moment after its last word."""
    job = started()
    job.hosts[1].exit(FAILED)
    while not any(isinstance(action, BroadcastDecision) for action in job.leader.actions):
        for host in job.hosts:
            host.take()
    for host in job.hosts[1:]:
        host.take()
    job.settle()
    assert codes(job) == [1, 1, 1]


@pytest.mark.parametrize(("on_hang", "restarts"), [("report", 0), ("stop", 0), ("restart", 1)])
def test_a_hang_is_captured_on_all_hosts_and_acted_upon_by_all(on_hang: str, restarts: int) -> None:
    """All look at the same moment; the first host tells of it, and what follows is the same everywhere."""
    job = started(max_restarts=restarts, hang_policy=HangPolicy(on_hang))  # type: ignore[arg-type]
    job.hang()
    for _ in range(6):
        for host in job.hosts:
            host.take()
    assert all(any(isinstance(action, CaptureEvidence) for action in host.actions) for host in job.hosts)
    if on_hang == "report":
        assert all(host.state is State.RUNNING for host in job.hosts)
        return
    assert job.troubles == {0: "hang"}
    if on_hang == "stop":
        job.settle()
        assert codes(job) == [1, 1, 1]
        return
    job.next_attempt()
    assert job.number == 1


@pytest.mark.parametrize("has_noticed", [True, False])
def test_the_culprits_of_a_hang_leave_cores_on_a_host_that_still_captures_it(*, has_noticed: bool) -> None:
    """The leader does not wait for what a slow host captures; one whose ranks are being started notices no hang."""
    job = started(hang_policy=HangPolicy("stop", abort_culprits=True))
    host = job.hosts[1]
    if has_noticed:
        host.deliver(HangSuspected(job.now, 0, HANG))
    host.deliver(JobAborted(job.now, 0, "hang", "", "node0", culprits=(1,)))
    assert host.state is State.CAPTURING
    before = len(host.actions)
    host.expire()
    assert host.actions[before:] == [SignalRanks(0, (1,), signal.SIGABRT), SignalRanks(0, (0,), signal.SIGTERM)]
    job.settle()
    (diagnose,) = (action for action in host.actions if isinstance(action, Diagnose))
    assert diagnose.hung


def test_a_host_whose_ranks_have_ended_well_meanwhile_did_not_hang() -> None:
    """It has to end with the others all the same."""
    job = started(hang_policy=HangPolicy("stop"))
    host = job.hosts[1]
    host.deliver(HangSuspected(job.now, 0, HANG))
    host.exit(OK)
    host.exit(OK)
    while host.alive or host.state is State.CAPTURING:
        host.take()
    assert host.state is State.STOPPING
    host.deliver(JobAborted(job.now, 0, "hang", "", "node0", culprits=(0,)))
    job.settle()
    (diagnose,) = (action for action in host.actions if isinstance(action, Diagnose))
    assert not diagnose.hung
    assert host.finish == Finish(1)


def test_a_signal_during_the_diagnosis_leaves_the_other_hosts_their_decision() -> None:
    """The leader waits for their evidence, and they for what it decides: only what is read here is cut short."""
    job = started()
    leader = job.hosts[0]
    job.hosts[1].exit(FAILED)
    while leader.state is not State.DIAGNOSING:
        for host in job.hosts:
            if host.state is not State.DIAGNOSING:
                host.take()
    deadline, before = leader.supervisor.deadline, len(leader.actions)
    leader.signal(signal.SIGTERM)
    line = PrintLine("SIGTERM: finishing the report", of_signal=True)
    assert leader.actions[before:] == [line, HurryDiagnosis(0, 3.0)]
    assert leader.supervisor.deadline == deadline
    job.settle()
    assert codes(job) == [1, 1, 1]


@pytest.mark.parametrize("which", [0, 1])
def test_ranks_that_ended_well_end_a_host_well_where_the_others_cannot_be_heard(which: int) -> None:
    """After a bounded wait, in which they may be heard again."""
    job = started(2)
    host = job.hosts[which]
    host.deliver(HostsUnreachable(job.now, 0, "no answer from node9"))
    host.exit(OK)
    host.exit(OK)
    while host.inbox:
        host.take()
    assert host.state is State.WAITING
    due = [host.supervisor.deadline]
    host.deliver(HostsReachable(job.now, 0))
    assert [*due, host.supervisor.deadline] == [job.now + LIMITS.unreachable_s, None]
    waiting = "no answer from node9; every rank that has reported ended with exit code 0; waiting for 300 s at most"
    assert PrintLine(waiting) in host.actions
    host.deliver(HostsUnreachable(job.now, 0, "no answer from node9"))
    actions = host.supervisor.handle(DeadlineExpired(job.now + LIMITS.unreachable_s, 0))
    say, *told, finish = actions
    assert say == PrintLine("no answer from node9 for 300 s; every rank that has reported ended with exit code 0")
    assert [type(action) for action in told] == [BroadcastDecision] * (which == 0)
    assert finish == Finish(0)


def waiting(number: int, *, c10d: bool) -> tuple[Job, Host]:
    """A job of two hosts, of which this one's ranks have ended well."""
    job = started(2)
    host = job.hosts[number]
    launch = host.supervisor._launch
    launch.job = launch.job._replace(outlives_leader=c10d)
    host.exit(OK)
    host.exit(OK)
    while host.inbox:
        host.take()
    assert host.state is State.WAITING
    return job, host


@pytest.mark.parametrize("c10d", [False, True])
def test_ranks_that_ended_well_end_a_host_well_where_the_leader_ends_unheard(*, c10d: bool) -> None:
    """As at torchrun's exit barrier. Its last words may have come while this host was stopped for a while."""
    job, host = waiting(1, c10d=c10d)
    assert host.supervisor.handle(JobLost(job.now, 0, "node1 is up, but saferun is not running there", "look")) == [
        PrintLine("node1 is up, but saferun is not running there; all ranks of this host ended well"),
        Finish(0),
    ]


@pytest.mark.parametrize(("number", "c10d"), [(1, False), (0, False), (1, True)])
def test_where_the_stores_are_lost_a_host_whose_ranks_ended_well_ends_well(number: int, *, c10d: bool) -> None:
    """In a static job ranks train on without them, and find that the leader's host is up. So the leader stays."""
    job, host = waiting(number, c10d=c10d)
    lost = JobLost(job.now, 0, "the coordinator of node0 ended", "look", class_name="store_lost")
    assert (Finish(0) in host.supervisor.handle(lost)) is (number == 1 and not c10d)


def test_an_elastic_job_outlives_its_leader_though_ranks_have_ended() -> None:
    """The others are to form it anew."""
    job = started(2, least=1)
    host = job.hosts[1]
    host.exit(OK)
    host.exit(OK)
    while host.inbox:
        host.take()
    host.deliver(JobLost(job.now, 0, "gone", "look"))
    assert host.state is not State.DONE


def test_a_host_that_cannot_be_heard_waits_for_no_decision() -> None:
    """Its rank has failed: it says why, and ends."""
    job = started(2)
    host = job.hosts[1]
    host.deliver(HostsUnreachable(job.now, 0, "node1 cannot be reached"))
    host.exit(FAILED)
    while host.finish is None and host.inbox:
        if isinstance(host.inbox[0], JobAborted):
            host.inbox.popleft()  # it reads nothing
        else:
            host.take()
    assert host.finish is not None
    assert host.finish.exit_code == 1
    assert any(isinstance(action, ReportFailure) for action in host.actions)


@pytest.mark.parametrize("ended", [False, True])
def test_a_host_that_reads_the_log_again_waits_for_the_decision(ended: bool) -> None:
    """That the leader is heard again is found a moment later; all hosts are to end alike."""
    job = started(3, max_restarts=1)
    host = job.hosts[1]
    if ended:
        for status in (OK, OK):
            host.exit(status)
        while host.inbox:
            host.take()
    host.deliver(HostsUnreachable(job.now, 0, "node0 cannot be reached"))
    job.hosts[2].exit(FAILED)
    job.next_attempt()
    assert [other.supervisor.attempt for other in job.hosts] == [1, 1, 1]


@pytest.mark.parametrize("state", [State.BACKOFF, State.CHECKING, State.JOINING])
def test_a_host_that_is_to_meet_the_others_again_ends_where_the_leader_has_ended_the_job(state: State) -> None:
    """A user has asked one host for another attempt, and another one for the end, at the same moment."""
    job = started(3)
    host = job.hosts[1]
    job.interrupted = True
    host.deliver(JobAborted(job.now, 0, "restart", "saferunctl restart", "node2", signum=signal.SIGTERM))
    while host.state is not state:
        host.take() if host.inbox else host.expire()
    attempt = host.supervisor.attempt
    host.deliver(JobDecided(job.now, attempt, "restart", 1, 0.0, 1))
    assert host.state is state
    host.deliver(JobDecided(job.now, attempt, "finish", 143, 0.0, 0))
    assert host.finish is not None
    assert host.finish.exit_code == 143


def test_a_host_that_has_lost_the_leader_does_not_look_for_it_because_of_a_restart() -> None:
    """It was frozen when the user asked for another attempt, and then for the end."""
    job = started(3)
    host = job.hosts[1]
    job.interrupted = True
    host.deliver(JobAborted(job.now, 0, "restart", "saferunctl restart", "node2", signum=signal.SIGTERM))
    host.deliver(JobLost(job.now, 0, "node0 is gone", "look"))
    while host.finish is None and host.inbox:
        host.take()
    assert host.finish is not None
    assert job.now == 100.0, "nothing was waited for"


def test_nobody_tells_twice() -> None:
    """Ten thousand ranks may fail at once."""
    job = started()
    for host in job.hosts:
        host.exit(FAILED)
        host.exit(FAILED)
    job.settle()
    for host in job.hosts:
        assert sum(isinstance(action, BroadcastAbort) for action in host.actions) <= 1


# --------------------------------------------------------------------------------------------------------------- checks


def test_the_ranks_are_started_when_the_hosts_have_looked_at_each_other() -> None:
    """Not before: what is found may save the job hours of waiting for nothing."""
    job = started()
    for host in job.hosts:
        kinds = [type(action) for action in host.actions]
        assert kinds.index(ProbeHosts) < kinds.index(StartRanks)


def test_what_the_checks_between_the_hosts_find_ends_the_job_on_all_of_them() -> None:
    """With exit code 2, before any rank is started, and told by the host that leads."""
    job = Job(3, bad_checks={0})
    job.settle()
    assert [host.finish for host in job.hosts] == [Finish(2)] * 3
    assert not any(isinstance(action, StartRanks) for host in job.hosts for action in host.actions)
    told = [action for action in job.hosts[0].actions if isinstance(action, BroadcastAbort)]
    assert [(action.reason, action.message) for action in told] == [("start", "node2: eth1 does not answer")]


def test_where_only_checks_are_wanted_they_are_all_there_is() -> None:
    """The host that leads says what came of it, and all end with the same exit code."""
    placement = Placement(0, 2, 2, 2, (RankAssignment(0, 0, 0),), "a", 1, "job")
    supervisor = Supervisor(AttemptPolicy(0), Limits(), None, JobPolicy(spans_hosts=True))
    joined = HostsJoined(0, 0, placement, 0, probes=True)
    for event in (LaunchRequested(0, 0), ChecksPassed(0, 0), joined):
        supervisor.handle(event)
    assert supervisor.state is State.PROBING
    assert supervisor.handle(ChecksOver(1, 0, 2)) == [BroadcastDecision(0, "finish", 2), Finish(2)]
    follower = Supervisor(AttemptPolicy(0), Limits(), None, JobPolicy(spans_hosts=True))
    for event in (LaunchRequested(0, 0), ChecksPassed(0, 0), joined._replace(leads=False)):
        follower.handle(event)
    assert follower.handle(JobDecided(1, 0, "finish", 2, 0.0, 0))[-1] == Finish(2)


def test_no_other_host_can_say_that_all_went_well_here() -> None:
    """Where ranks of this host still run, or have failed, a decision with exit code 0 is not believed."""
    for leave in ((), (FAILED,)):
        job = started(2)
        host = job.hosts[1]
        for status in leave:
            host.exit(status)
        host.deliver(JobDecided(job.now, 0, "finish", 0, 0.0, 0, ("all fine",)))
        job.settle()
        assert host.finish == Finish(1)


@pytest.mark.parametrize("state", [State.STARTING, State.RUNNING, State.CAPTURING])
@pytest.mark.parametrize("next_step", ["finish", "restart"])
def test_a_decision_that_no_abort_came_before_ends_the_ranks_whatever_this_host_does_just_then(
    state: State, next_step: Literal["finish", "restart"]
) -> None:
    """No other message follows it: where it is only noted, the ranks of this host run forever.

    The leader decides so when a host cannot be reached for long; that host reads it while it starts its ranks, or while
    it captures them because they wait for the others.
    """
    job = Job(2)
    host = job.hosts[1]
    while host.state is not State.STARTING:
        for each in job.hosts:
            each.take()
    if state is not State.STARTING:
        host.take()
    if state is State.CAPTURING:
        host.deliver(HangSuspected(job.now, 0, HANG))
    assert host.state is state, host.state
    host.deliver(JobDecided(job.now, 0, next_step, 1, 1.0, 1))
    for _ in range(20):
        host.take()
    assert not host.alive
    assert host.finish == (Finish(1) if next_step == "finish" else None)
    assert host.supervisor.state is (State.DONE if next_step == "finish" else State.BACKOFF)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "take", "take", "ok", "fail", "term", "int", "hup", "off", "hang", "expire", "join"]
        ),
        st.integers(0, 3),
    ),
    max_size=60,
)


def let_happen(job: Job, kind: str, host: Host) -> None:
    """One thing, if it can happen now."""
    with_argument = {"ok": OK, "fail": FAILED}
    signals = {"term": signal.SIGTERM, "int": signal.SIGINT, "hup": signal.SIGHUP}
    if kind == "take":
        host.take()
    elif kind == "off":
        job.power_off(host)
    elif kind in with_argument:
        host.exit(with_argument[kind])
    elif kind in signals:
        host.signal(signals[kind])
    elif kind == "expire" and host.state is State.BACKOFF:
        host.expire()
    elif job.met and kind == "hang":
        job.hang()
    elif job.met and kind == "join" and job.leader.runs:
        job.trouble(job.number, "membership", job.leader)


@examples(300)
@given(steps=STEPS, max_restarts=st.integers(0, 2), least=st.integers(1, 3), hang=st.sampled_from(["report", "stop"]))
def test_whatever_happens_all_hosts_end_and_end_alike(
    steps: list[tuple[str, int]], max_restarts: int, least: int, hang: str
) -> None:
    """In any order, with hosts that vanish: no host waits forever for another."""
    job = Job(3, max_restarts, least, HangPolicy(hang))  # type: ignore[arg-type]
    for kind, number in steps:
        let_happen(job, kind, job.hosts[number % 3])
    # From here on every rank that is started ends well.
    for _ in range(200):
        job.settle()
        running = [host for host in job.hosts if host.runs and host.alive]
        if not running:
            break
        for host in running:
            host.exit(OK)
    job.settle()
    for host in job.hosts:
        assert host.is_dead or host.finish is not None, [other.state for other in job.hosts]


def test_a_signal_to_another_host_stops_ranks_that_work_at_once() -> None:
    """Their grace has begun there; where nothing moves here, the stacks are taken first, as on that host."""
    job = started()
    told = JobAborted(job.now, 0, "signal", "SIGTERM", "node2", signum=signal.SIGTERM)
    (stop,) = job.hosts[0].supervisor.handle(told)
    assert stop == SignalRanks(0, (0, 1), signal.SIGTERM)
    (look,) = job.hosts[2].supervisor.handle(told._replace(idle_s=10.0))
    assert look == CaptureEvidence(0, (0, 1), 2.0)


def test_under_a_scheduler_the_grace_ends_when_its_sigkill_comes() -> None:
    """It counts from the scheduler's signal, whatever was done first; not a second less than under torchrun."""
    policy = JobPolicy(scheduler_kills_soon=True)
    supervisor = Supervisor(AttemptPolicy(0), Limits(grace_s=30.0, capture_s=25.0), None, policy)
    placement = Placement(0, 1, 1, 1, (RankAssignment(0, 0, 0),), "a", 1, "job")
    for event in (LaunchRequested(0, 0), ChecksPassed(0, 0), HostsJoined(0, 0, placement), RanksStarted(0, 0, (1,))):
        supervisor.handle(event)
    supervisor.handle(SignalReceived(100.0, 0, signal.SIGTERM, idle_s=300.0))
    assert supervisor.deadline == 102.0
    supervisor.handle(DeadlineExpired(102.0, 0))
    assert supervisor.state is State.STOPPING
    assert supervisor.deadline == 130.0


@pytest.mark.parametrize(("ended_at", "within_s"), [(101.0, 24.0), (129.0, 3.0), (140.0, 3.0)])
def test_under_a_scheduler_what_dead_ranks_left_is_read_until_its_sigkill_comes(
    ended_at: float, within_s: float
) -> None:
    """Cores may take a minute, and there would be no report. The examiner gets the limit with its request."""
    policy = JobPolicy(scheduler_kills_soon=True)
    supervisor = Supervisor(AttemptPolicy(0), Limits(grace_s=30.0), None, policy)
    placement = Placement(0, 1, 1, 1, (RankAssignment(0, 0, 0),), "a", 1, "job")
    for event in (LaunchRequested(0, 0), ChecksPassed(0, 0), HostsJoined(0, 0, placement), RanksStarted(0, 0, (1,))):
        supervisor.handle(event)
    supervisor.handle(SignalReceived(100.0, 0, signal.SIGTERM))
    supervisor.handle(RankExited(ended_at, 0, 0, KILLED))
    hurried, diagnose = supervisor.handle(OrphansGone(ended_at, 0, ()))
    assert isinstance(diagnose, Diagnose)
    assert hurried == HurryDiagnosis(0, within_s)
