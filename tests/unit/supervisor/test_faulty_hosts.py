"""Hosts that are at fault, and progress: what they decide about another attempt."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.host_fault import HostFault
from saferun.evidence.job_evidence import HostView
from saferun.launch.hosts_at_fault import faulty_hosts
from saferun.supervisor.policy import AttemptPolicy, Decision, FailureFacts
from saferun.supervisor.policy.faulty_hosts import FaultyHost, decision_before_ranks

SICK = FaultyHost(1, "node2", "GPU 3 has fallen off the bus")


def failed(step: int = -1, **more: Any) -> FailureFacts:
    return FailureFacts("python_exception", **{"is_start_over": True, "message": "it failed", "step": step, **more})


def after(policy: AttemptPolicy, *attempts: FailureFacts) -> list[Decision]:
    """What is decided after each of them."""
    decisions: list[Decision] = []
    for facts in attempts:
        decisions.append(policy.decide(facts, restarts=sum(one.is_counted for one in decisions)))
    return decisions


# --------------------------------------------------------------------------------------------------------------- spares


def test_a_spare_uses_up_neither_restarts_nor_retries() -> None:
    """They are all there for failures of other kinds; the ranks see one restart more."""
    policy = AttemptPolicy(1)
    first = policy.decide(failed(faulty=(SICK,)), hosts=3, least_hosts=3, spares=["node4", "node5"])
    assert (first.next_step, first.exclude, first.is_counted) == ("replace", 1, True)
    assert first.message.endswith("node4, a spare, takes its place; 1 spare is left")
    second = policy.decide(failed(), restarts=1)
    assert (second.next_step, second.message) == ("restart", "starting again at once (restart 1 of 1): it failed")
    assert policy.decide(failed(), restarts=2).message == "not started again: the restart is used up: it failed"


def test_a_start_that_a_host_was_to_blame_for_is_no_restart_of_the_ranks() -> None:
    """As with a retry: they have not begun."""
    decision = AttemptPolicy(0).decide(
        failed(faulty=(SICK,), is_start_over=False), hosts=3, least_hosts=3, spares=["node4"]
    )
    assert (decision.next_step, decision.is_counted) == ("replace", False)


def test_several_hosts_are_replaced_where_there_are_as_many_spares() -> None:
    """With fewer, none is, since the job needs all of them."""
    faults = (SICK._replace(is_lost=True), FaultyHost(2, "node3", "it does not answer", is_lost=True))
    facts = failed(faulty=faults)
    both = AttemptPolicy(0).decide(facts, hosts=3, least_hosts=3, spares=["a", "b"])
    assert (both.next_step, both.exclude) == ("replace", None)  # they cannot hear of it
    assert "2 hosts are left out (node2: GPU 3 has fallen off the bus; node3: it does not answer)" in both.message
    assert AttemptPolicy(0).decide(facts, hosts=3, least_hosts=3, spares=["a"]).next_step == "finish"


def test_of_hosts_that_live_one_is_replaced_at_a_time() -> None:
    """A decision names one that leaves, the leader first; the next one is named when it fails again."""
    other = FaultyHost(2, "node3", "its memory is broken")
    lost = FaultyHost(3, "node4", "it does not answer", is_lost=True)
    leader = FaultyHost(0, "node1", "GPU 0 is lost")
    facts = failed(faulty=(SICK, other, lost))
    decision = AttemptPolicy(0).decide(facts, hosts=4, least_hosts=4, spares=["a", "b", "c"])
    assert (decision.exclude, decision.faulty) == (1, (SICK, lost))
    assert decision.message.endswith("spares take their places; 1 spare is left")
    facts = failed(faulty=(SICK, leader))
    decision = AttemptPolicy(0).decide(facts, hosts=4, least_hosts=4, spares=["a", "b"], moves_leader=True)
    assert (decision.exclude, decision.faulty) == (0, (leader,))


@pytest.mark.parametrize(
    ("spares", "may_go_on", "step"),
    [(["a"], True, "replace"), (["a"], False, "replace"), ([], True, "retry"), ([], False, None)],
)
def test_what_is_found_before_the_ranks_uses_a_spare_or_changes_nothing(
    spares: list[str], may_go_on: bool, step: str | None
) -> None:
    decision = decision_before_ranks((SICK,), spares, moves_leader=False, may_go_on=may_go_on)
    assert (decision.next_step if decision is not None else None) == step
    assert decision is None or (decision.wait_s, decision.is_counted) == (0.0, False)


def test_a_signal_ends_the_job_whatever_hosts_are_at_fault() -> None:
    facts = failed(faulty=(SICK,), restarting_allowed=False, stop_reason="stopped by SIGTERM")
    assert AttemptPolicy(3).decide(facts, hosts=3, least_hosts=3, spares=["node4"]).next_step == "finish"


@pytest.mark.parametrize("least", [2, 3])
def test_an_elastic_job_leaves_a_host_out_that_is_at_fault_where_the_others_suffice(least: int) -> None:
    """It would rejoin, and fail again. It uses up a restart as any failure, so without one the job ends."""
    decision = AttemptPolicy(2).decide(failed(faulty=(SICK,)), hosts=3, least_hosts=least)
    assert (decision.next_step, decision.exclude) == ("restart", 1 if least == 2 else None)
    assert AttemptPolicy(0).decide(failed(faulty=(SICK,)), hosts=3, least_hosts=2).next_step == "finish"


@pytest.mark.parametrize(("needed", "excluded"), [((1,), None), ((0, 2), 1)])
def test_a_host_without_which_the_others_cannot_meet_again_is_not_left_out(
    needed: tuple[int, ...], excluded: int | None
) -> None:
    """With c10d another one than the leader may serve torch's rendezvous, and its store ends with it."""
    decision = AttemptPolicy(2).decide(failed(faulty=(SICK,)), hosts=3, least_hosts=2, needed=needed)
    assert (decision.next_step, decision.exclude) == ("restart", excluded)
    assert ("without node2" in decision.message) == (excluded is not None)


def test_memory_that_ran_out_is_not_replaced_and_a_lost_host_always_is() -> None:
    """The script would take as much on another host; and whoever is lost comes to no other attempt."""
    hosts = [
        HostView(0, "node1"),
        HostView(1, "node2"),
        HostView(2, "node3", lost_reason="cut", lost_message="cut off"),
    ]
    faults = [HostFault("node2", "memory", "out of memory", 1), HostFault("node1", "gpu", "Xid 79", 0)]
    found = faulty_hosts(faults, hosts)
    assert found == (FaultyHost(0, "node1", "Xid 79"), FaultyHost(2, "node3", "cut off", is_lost=True))


# ------------------------------------------------------------------------------------------------------------- progress


def test_by_default_progress_changes_nothing() -> None:
    """--max-restarts is torchrun's."""
    decisions = after(AttemptPolicy(1), failed(10), failed(1000))
    assert [one.next_step for one in decisions] == ["restart", "finish"]


def test_a_job_that_gets_further_goes_on_and_one_that_does_not_stops() -> None:
    decisions = after(AttemptPolicy(0, by_progress=True), failed(500), failed(900), failed(900))
    assert [one.message for one in decisions] == [
        "starting again at once (restart 1, step 500 was reached): it failed",
        "starting again at once (restart 2, step 900 was reached, 500 before): it failed",
        "not started again: no rank got further than step 900 (--restart-limit progress): it failed",
    ]


def test_max_restarts_limits_those_in_a_row_without_progress() -> None:
    """A failure at another moment may come before the step that was reached, so there may be more than one."""
    facts = (failed(500), failed(400), failed(450), failed(700), failed(650), failed(100), failed(-1))
    decisions = after(AttemptPolicy(2, by_progress=True), *facts)
    assert [one.next_step for one in decisions] == ["restart"] * 6 + ["finish"]
    assert decisions[1].message.startswith(
        "starting again at once (restart 2, 1 of 2 in a row with no further step than 500)"
    )
    assert decisions[-1].reason.startswith("no rank got further than step 700 in 3 attempts in a row")


def test_where_no_rank_reports_steps_the_number_of_restarts_counts() -> None:
    """Nothing is known of progress then."""
    decisions = after(AttemptPolicy(1, by_progress=True), failed(), failed())
    assert [one.next_step for one in decisions] == ["restart", "finish"]


def test_progress_does_not_undo_what_is_bound_to_repeat() -> None:
    """A signal, or a script that Python cannot read, ends the launch as ever."""
    policy = AttemptPolicy(3, by_progress=True)
    assert policy.decide(failed(500, restarting_allowed=False, stop_reason="stopped")).next_step == "finish"
    assert policy.decide(failed(600, unreadable=True)).next_step == "finish"
