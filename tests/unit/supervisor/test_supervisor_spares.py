"""Spare hosts: they wait without ranks, take the place of a host that is itself at fault, and end as the job does."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saferun.supervisor.actions import (
    BroadcastAbort,
    BroadcastDecision,
    CaptureEvidence,
    Diagnose,
    PrintLine,
    ReportDecision,
    SignalRanks,
    StartRanks,
)
from saferun.supervisor.events import JobLost, RestartRequested, SpareLost, StartFailed, StopRequested
from saferun.supervisor.machine import State
from saferun.supervisor.policy import HangPolicy
from tests.examples import examples
from tests.unit.supervisor.fake_job import FAILED, OK, Host, Job


def started(**options: Any) -> Job:
    """Three hosts that train, and one spare."""
    job = Job(4, spares=1, **options)
    job.run()
    return job


def lines(host: Host) -> str:
    return "\n".join(action.text for action in host.actions if isinstance(action, PrintLine))


def codes(job: Job) -> list[int | None]:
    return [host.finish.exit_code if host.finish else None for host in job.hosts]


def all_end_well(job: Job) -> None:
    for host in job.hosts:
        while host.alive and host.runs:
            host.exit(OK)
    job.settle()


def ranks_of(host: Host) -> list[tuple[int, ...]]:
    """Those of each attempt."""
    return [tuple(one.rank for one in a.placement.ranks) for a in host.actions if isinstance(a, StartRanks)]


def test_a_spare_waits_without_ranks_and_ends_well_with_the_job() -> None:
    """It starts nothing, and is no failure."""
    job = started()
    spare = job.hosts[3]
    assert spare.state is State.WAITING
    assert lines(spare) == "node3: this spare host waits to take the place of one that fails"
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]
    assert not ranks_of(spare)


@pytest.mark.parametrize("max_restarts", [0, 2])
def test_a_spare_takes_the_place_and_the_ranks_of_a_host_that_is_at_fault(max_restarts: int) -> None:
    """All others keep their ranks, and no restart is used up."""
    job = started(max_restarts=max_restarts)
    job.faulty[1] = "GPU 3 has fallen off the bus"
    job.hosts[1].exit(FAILED)
    job.next_attempt()
    assert [ranks_of(host) for host in job.hosts] == [[(0, 1)] * 2, [(2, 3)], [(4, 5)] * 2, [(2, 3)]]
    decision = next(a for a in job.hosts[0].actions if isinstance(a, BroadcastDecision))
    assert (decision.excluded, decision.restarts) == (1, 1)
    assert decision.decision is not None
    assert decision.decision.message == (
        "starting again: node1 is left out (GPU 3 has fallen off the bus); node3, a spare, takes its place;"
        " no spare is left"
    )
    assert any(isinstance(action, ReportDecision) for action in job.hosts[3].actions)
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]  # a launcher may end all at the first bad exit code


def unfit_at_start(*hosts: int, spares: int = 1, **options: Any) -> Job:
    """A job of which the checks before the ranks find hosts unfit; its first attempt is under way."""
    job = Job(3 + spares, spares=spares, **options)
    job.unfit = dict.fromkeys(hosts, "GPU 3 fell off the bus")
    return job


def test_a_host_that_the_checks_find_unfit_is_replaced_before_any_rank_is_started() -> None:
    """No restart is used up, the ranks have not begun, and the host that leaves ends well."""
    job = unfit_at_start(1)
    for _ in range(300):
        for host in job.hosts:
            host.take()
            if host.state is State.BACKOFF:
                host.expire()
    assert [ranks_of(host) for host in job.hosts] == [[(0, 1)], [], [(4, 5)], [(2, 3)]]
    decision = next(a for a in job.hosts[0].actions if isinstance(a, BroadcastDecision))
    assert (decision.excluded, decision.restarts) == (1, 0)
    assert decision.decision is not None
    assert decision.decision.message == (
        "starting again: node1 is left out (GPU 3 fell off the bus); node3, a spare, takes its place; no spare is left"
    )
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


@pytest.mark.parametrize(("unfit", "moves"), [((1, 2), False), ((0,), False)])
def test_without_enough_spares_the_ranks_are_started_with_an_unfit_host(unfit: tuple[int, ...], moves: bool) -> None:
    """As if nobody had looked: the job may work all the same."""
    job = unfit_at_start(*unfit, moves=moves)
    job.run()
    assert job.number == 0
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


def test_two_unfit_hosts_are_replaced_one_after_the_other() -> None:
    """A decision names one host that leaves."""
    job = unfit_at_start(1, 2, spares=2)
    for _ in range(600):
        for host in job.hosts:
            host.take()
            if host.state is State.BACKOFF:
                host.expire()
    assert [ranks_of(host) for host in job.hosts] == [[(0, 1)], [], [], [(2, 3)], [(4, 5)]]
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0, 0]


def test_an_unfit_leader_is_replaced_where_that_is_possible() -> None:
    job = unfit_at_start(0, moves=True)
    for _ in range(300):
        for host in job.hosts:
            host.take()
            if host.state is State.BACKOFF:
                host.expire()
    assert job.leader is job.hosts[3]
    assert [ranks_of(host) for host in job.hosts] == [[], [(2, 3)], [(4, 5)], [(0, 1)]]
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


def test_a_spare_that_is_gone_when_it_is_wanted_ends_no_job() -> None:
    """All hosts meet again, and the ranks are started without it."""
    job = unfit_at_start(1)
    while not any(isinstance(event, StartFailed) for event in job.hosts[0].inbox):
        for host in job.hosts:
            host.take()
    job.hosts[0].inbox.appendleft(SpareLost(job.now, 0, "node3", "it does not answer"))
    job.hosts[3].is_dead = True
    job.next_attempt()
    assert [ranks_of(host) for host in job.hosts] == [[(0, 1)], [(2, 3)], [(4, 5)], []]
    decision = next(a.decision for a in job.hosts[0].actions if isinstance(a, BroadcastDecision))
    assert decision is not None
    assert decision.message == "starting again: no spare is left that could take the place of node1"
    all_end_well(job)
    assert codes(job) == [0, 0, 0, None]


def test_a_signal_while_an_unfit_host_is_replaced_ends_the_job() -> None:
    job = unfit_at_start(1)
    while not any(isinstance(event, StartFailed) for event in job.hosts[0].inbox):
        for host in job.hosts:
            host.take()
    job.hosts[0].signal(signal.SIGTERM)
    job.settle()
    assert all(host.finish is not None for host in job.hosts)
    assert not any(ranks_of(host) for host in job.hosts)


def test_a_host_that_is_switched_off_is_replaced() -> None:
    job = started()
    job.power_off(job.hosts[2])
    job.next_attempt()
    assert ranks_of(job.hosts[3]) == [(4, 5)]
    all_end_well(job)
    assert codes(job) == [0, 0, None, 0]


def test_a_rank_that_fails_by_itself_uses_no_spare() -> None:
    """Its exception is the script's: --max-restarts says whether there is another attempt, with the same hosts."""
    job = started(max_restarts=1)
    job.hosts[1].exit(FAILED)
    job.next_attempt()
    assert job.is_spare(job.hosts[3])
    job.hosts[1].exit(FAILED)
    job.settle()
    assert codes(job) == [1, 1, 1, 1]
    assert not ranks_of(job.hosts[3])


def test_without_a_spare_left_a_fault_is_as_without_spares() -> None:
    job = started()
    for number in (1, 2):
        job.faulty[number] = "its memory is broken"
        job.hosts[number].exit(FAILED)
        job.settle()
        if number == 1:
            assert codes(job) == [None, 0, None, None]
    assert codes(job) == [1, 0, 1, 1]


@pytest.mark.parametrize("seconds_between", [100.0, 400.0])
def test_a_link_is_its_hosts_fault_when_it_is_lost_twice_within_five_minutes(seconds_between: float) -> None:
    """Once, it may have been the switch, or the host at the other end."""
    job = started(max_restarts=9)
    job.is_link, job.faulty[1] = True, "eth1 lost its carrier"
    job.hosts[1].exit(FAILED)
    job.next_attempt()
    assert job.is_spare(job.hosts[3])
    job.now += seconds_between
    job.hosts[1].exit(FAILED)
    job.next_attempt()
    assert job.is_spare(job.hosts[3]) == (seconds_between > 300)


def test_a_spare_that_is_gone_costs_one_line() -> None:
    """And a host that fails later cannot be replaced."""
    job = started()
    job.power_off(job.hosts[3])
    while any(host.inbox for host in job.hosts if host.runs):
        for host in job.hosts:
            host.take()
    assert all(host.state is State.RUNNING for host in job.hosts[:3])
    expected = "node3, a spare host, is gone (it does not answer); the job goes on, no spare is left"
    assert lines(job.hosts[0]) == expected
    job.faulty[1] = "its memory is broken"
    job.hosts[1].exit(FAILED)
    job.settle()
    assert codes(job) == [1, 1, 1, None]


def test_a_signal_to_a_spare_ends_that_spare_alone() -> None:
    """The ranks do not need it."""
    job = started()
    job.hosts[3].signal(signal.SIGTERM)
    assert lines(job.hosts[3]).endswith("SIGTERM on node3: this spare host ends")
    assert codes(job) == [None, None, None, 1]
    assert not any(isinstance(action, BroadcastAbort) for action in job.hosts[3].actions)
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 1]


def test_a_signal_to_another_host_ends_the_spare_when_the_leader_has_decided() -> None:
    """It has no evidence, captures nothing and diagnoses nothing."""
    job = started()
    job.hosts[1].signal(signal.SIGTERM)
    job.settle()
    assert codes(job) == [1, 1, 1, 1]
    assert not any(isinstance(a, CaptureEvidence | Diagnose | SignalRanks) for a in job.hosts[3].actions)


@pytest.mark.parametrize("at_once", [False, True])
def test_saferunctl_ends_a_job_by_a_spare(at_once: bool) -> None:
    """Every host can be asked."""
    job = started()
    spare = job.hosts[3]
    spare.deliver(StopRequested(job.now, 0, "saferunctl stop", at_once=at_once))
    assert spare.state is State.WAITING
    job.interrupted = True
    job.settle()
    assert all(host.finish is not None for host in job.hosts)


def test_saferunctl_restart_takes_the_spare_along() -> None:
    """It meets the others again, and waits again."""
    job = started()
    job.interrupted = True
    job.hosts[0].deliver(RestartRequested(job.now, 0, "saferunctl restart"))
    job.next_attempt()
    assert job.number == 1
    assert job.hosts[3].state is State.WAITING
    assert lines(job.hosts[3]).count("this spare host waits") == 1


def test_a_spare_that_loses_the_job_ends_without_an_error() -> None:
    """Either the job ends, or it goes on without this host: a bad exit code would end it under some launchers."""
    job = started()
    job.hosts[3].deliver(JobLost(job.now, 0, "node0 does not answer", "look"))
    assert codes(job)[3] == 0
    assert lines(job.hosts[3]).endswith("node0 does not answer; this spare host ends")


LOST_STORE = JobLost(100.0, 0, "the coordinator of node0 ended", "look", class_name="store_lost")


def test_a_spare_that_loses_only_the_store_ends_without_an_error_where_the_ranks_train_on() -> None:
    """The others need the store no more, and do not meet again: a bad exit code would end them under some launchers."""
    job = started()
    spare = job.hosts[3]
    spare.deliver(LOST_STORE)
    assert lines(spare).endswith("the coordinator of node0 ended; this spare host waits for the next rendezvous")
    while spare.finish is None:
        spare.take() if spare.inbox else spare.expire()
    assert codes(job) == [None, None, None, 0]
    assert all(host.state is State.RUNNING for host in job.hosts[:3])
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


def test_a_spare_that_loses_the_store_with_all_others_meets_them_again() -> None:
    """The leader serves another store."""
    job = started(max_restarts=1)
    for host in job.hosts:
        host.deliver(LOST_STORE)
    job.next_attempt()
    assert job.is_spare(job.hosts[3])
    assert job.hosts[3].state is State.WAITING
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


def test_a_spare_that_was_stopped_waits_for_no_store() -> None:
    """The user wants an end."""
    job = started()
    job.hosts[3].deliver(StopRequested(job.now, 0, "saferunctl stop"))
    job.hosts[3].deliver(LOST_STORE)
    assert job.hosts[3].finish is not None


def test_a_hang_is_retried_where_all_hosts_are_well_and_else_without_the_sick_one() -> None:
    """With no restart left, the spare decides whether there is another attempt."""
    job = started(hang_policy=HangPolicy("restart"))
    job.faulty[2] = "GPU 0 does not answer"
    job.hang()
    job.next_attempt()
    assert ranks_of(job.hosts[3]) == [(4, 5)]
    job.hang()
    job.settle()
    assert codes(job) == [1, 1, 0, 1]


def test_a_spare_takes_the_place_of_a_leader_that_is_lost() -> None:
    """Each host decides for itself, and all the same."""
    job = started(moves=True)
    job.power_off(job.hosts[0])
    job.next_attempt()
    assert job.leader is job.hosts[3]
    assert [ranks_of(host) for host in job.hosts[1:]] == [[(2, 3)] * 2, [(4, 5)] * 2, [(0, 1)]]
    all_end_well(job)
    assert codes(job) == [None, 0, 0, 0]


def test_a_spare_that_leads_knows_which_restarts_used_up_none() -> None:
    """The leader before it has decided that, or each host for itself; the restart that the user allows is left."""
    job = Job(6, max_restarts=1, spares=3, moves=True)
    job.run()
    job.faulty[1] = "GPU 3 has fallen off the bus"
    job.hosts[1].exit(FAILED)
    job.next_attempt()
    job.power_off(job.hosts[0])
    job.next_attempt()
    job.hosts[2].exit(FAILED)
    job.next_attempt()
    assert job.leader is job.hosts[4]
    job.hosts[2].exit(FAILED)
    job.settle()
    decisions = [action.decision for action in job.leader.actions if isinstance(action, BroadcastDecision)]
    said = [decision.message for decision in decisions if decision is not None]
    assert said == [
        "starting again (restart 1 of 1): unknown",
        "not started again: the restart is used up: unknown",
    ]


def test_a_leader_that_is_itself_at_fault_leaves_the_job_to_a_spare() -> None:
    """All hear of it, so that nobody waits for its store, and it ends with exit code 0."""
    job = started(moves=True)
    job.faulty[0] = "GPU 0 has fallen off the bus"
    job.hosts[0].exit(FAILED)
    job.next_attempt()
    assert job.leader is job.hosts[3]
    assert codes(job) == [0, None, None, None]
    all_end_well(job)
    assert codes(job) == [0, 0, 0, 0]


@pytest.mark.parametrize("at_fault", [False, True])
def test_where_the_leader_cannot_be_replaced_its_loss_ends_the_job(at_fault: bool) -> None:
    """Its own decision, or that of each host."""
    job = started()
    if at_fault:
        job.faulty[0] = "GPU 0 has fallen off the bus"
        job.hosts[0].exit(FAILED)
        job.settle()
        assert codes(job) == [1, 1, 1, 1]
    else:
        job.power_off(job.hosts[0])
        job.settle()
        assert codes(job) == [None, 1, 1, 0]


def test_a_host_that_was_stopped_does_not_look_for_another_leader() -> None:
    """The user wants an end."""
    job = started(moves=True)
    job.hosts[1].signal(signal.SIGTERM)
    job.power_off(job.hosts[0])
    job.settle()
    assert codes(job)[1] == 1
    assert len(ranks_of(job.hosts[1])) == 1


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "take",
                "take",
                "take",
                "take",
                "ok",
                "fail",
                "bad",
                "bad",
                "term",
                "off",
                "hang",
                "expire",
                "stop",
                "restart",
            ]
        ),
        st.integers(0, 4),
    ),
    max_size=60,
)


def let_happen(job: Job, kind: str, host: Host) -> None:
    """One thing, if it can happen now."""
    match kind:
        case "take":
            host.take()
        case "ok" | "fail":
            host.exit({"ok": OK, "fail": FAILED}[kind])
        case "bad" if host.alive:
            job.faulty[host.number] = "its memory is broken"
            host.exit(FAILED)
        case "term":
            host.signal(signal.SIGTERM)
        case "off":
            job.power_off(host)
        case "expire" if host.state is State.BACKOFF:
            host.expire()
        case "hang" if job.met:
            job.hang()
        case "stop" if host.runs and host.state is not State.NEW:
            job.interrupted = True
            host.deliver(StopRequested(job.now, host.supervisor.attempt, "saferunctl stop"))
        case "restart" if host.runs and host.state is State.RUNNING:
            job.interrupted = True
            host.deliver(RestartRequested(job.now, host.supervisor.attempt, "saferunctl restart"))


@examples(200)
# A leader, and another host, that is stopped when the others have met it already.
@example(
    steps=[*(("take", number) for number in range(5)), ("stop", 0)],
    max_restarts=0,
    spares=1,
    hang="report",
    moves=False,
    unfit=set(),
)
@example(
    steps=[*(("take", number) for number in range(5)), ("stop", 1)],
    max_restarts=0,
    spares=1,
    hang="report",
    moves=False,
    unfit=set(),
)
@given(
    steps=STEPS,
    max_restarts=st.integers(0, 2),
    spares=st.integers(1, 2),
    hang=st.sampled_from(["report", "restart"]),
    moves=st.booleans(),
    unfit=st.sets(st.integers(0, 4), max_size=2),
)
def test_whatever_happens_with_spares_all_hosts_end(
    steps: list[tuple[str, int]], max_restarts: int, spares: int, hang: str, *, moves: bool, unfit: set[int]
) -> None:
    """In any order, with hosts that vanish, are unfit or at fault: nobody waits forever."""
    job = Job(5, max_restarts, hang_policy=HangPolicy(hang), spares=spares, moves=moves)  # type: ignore[arg-type]
    job.unfit = dict.fromkeys(unfit, "its memory is broken")
    for kind, number in steps:
        let_happen(job, kind, job.hosts[number])
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
