"""Who takes part in the rendezvous of a job with spares, and in whose place."""

from __future__ import annotations

import pytest

from saferun.coordinator.assignments import (
    HostRecord,
    Successor,
    TaskRecord,
    assign,
    decode_assignment,
    encode_assignment,
)
from saferun.coordinator.members import Members


def never(_seat: int) -> bool:
    return False


def test_at_first_the_last_hosts_are_the_spares() -> None:
    members = Members(3, range(5))
    assert members.expected(never) == [0, 1, 2, 3, 4]
    assert members.arrange(range(5)) == (0, 1, 2, 3, 4)


def test_a_spare_gets_the_number_of_the_host_that_is_left_out() -> None:
    """All others keep theirs, and the host that is left out is not waited for."""
    members = Members(3, range(5))
    before = members.arrange(range(5))
    assert members.leave_out({1}) == [1]
    assert members.expected(never) == [0, 2, 3, 4]
    assert members.arrange({0, 2, 3, 4}) == (0, 3, 2, 4)
    assert members.replaced(before) == [(1, 3)]


def test_a_host_that_is_left_out_does_not_come_again() -> None:
    """It may write its record all the same."""
    members = Members(2, range(3))
    members.leave_out({1})
    assert members.arrange({0, 1, 2}) == (0, 2)


def test_a_host_that_has_not_come_is_replaced_and_a_spare_when_it_comes() -> None:
    """It comes behind all spares that are there."""
    members = Members(2, range(4))
    assert members.arrange({0, 2, 3}) == (0, 2, 3)
    assert members.expected(never) == [0, 2, 3]
    assert members.expected(lambda seat: seat == 1) == [0, 1, 2, 3]
    assert members.arrange({0, 1, 2, 3}) == (0, 2, 3, 1)


def test_a_spare_that_is_gone_takes_no_place() -> None:
    members = Members(2, range(4))
    members.arrange(range(4))
    members.leave_out({1, 2})
    assert members.arrange({0, 3}) == (0, 3)


def test_where_too_few_are_left_any_host_that_was_left_out_may_come_again() -> None:
    """One that has lost its place to another one is a spare, behind all that are there."""
    members = Members(3, range(5))
    members.arrange(range(5))
    members.leave_out({1, 4})
    members.arrange({0, 2, 3})
    members.leave_out({2})
    assert members.order == (0, 3, 2)
    assert members.expected(never) == [0, 3]
    members.readmit()
    assert members.expected(never) == [0, 1, 2, 3, 4]
    assert members.arrange({0, 3, 4, 1}) == (0, 3, 1, 4)
    assert members.arrange({0, 2, 3, 4}) == (0, 3, 4, 2)


def test_without_a_spare_there_are_fewer_than_the_job_needs() -> None:
    """Which its rendezvous does not accept; nothing is counted twice."""
    members = Members(2, range(2))
    assert members.arrange({0}) == (0,)


def test_a_spare_that_leads_has_the_number_of_the_first_host() -> None:
    """The first host, and whoever is not in the job any more, is not waited for; the order of all others stays."""
    members = Members(3, range(6))
    members.replace_leader((0, 3, 2, 4, 5), 4)
    assert members.expected(never) == [2, 3, 4, 5]
    before = (0, 3, 2, 4, 5)
    assert members.arrange({2, 3, 4, 5}) == (4, 3, 2, 5)
    assert members.replaced(before) == [(0, 4)]


def test_only_spares_know_whom_they_would_wait_for() -> None:
    """What the others get does not grow with the number of hosts."""
    records = [HostRecord(f"node{i}", (TaskRecord(2, "", 7),), (f"10.0.0.{i}",), 4000 + i) for i in range(12)]
    assigned = assign(records, spares=10, order=range(12))
    assert [one.order for one in assigned] == [(), (), *[tuple(range(12))] * 8, (), ()]
    assert [one.successors for one in assigned] == [assigned[0].successors] * 12
    assert assigned[0].successors[0] == Successor("node2", ("10.0.0.2",), 4002)
    assert len(assigned[0].successors) == 8
    assert decode_assignment(encode_assignment(assigned[2])) == assigned[2]


@pytest.mark.parametrize("tasks", [1, 2])
def test_a_spares_assignment_has_no_ranks_and_changes_nobody_elses(tasks: int) -> None:
    """Ranks, world size, labels and probes of the others are as without it."""
    records = [HostRecord(f"node{i}", (TaskRecord(2, "trainer", 7),) * tasks, probe_endpoint="{}") for i in range(3)]
    without, assigned = assign(records[:2]), assign(records, spares=1)
    spare = assigned[2]
    expected = [one._replace(spares=1, successors=spare.successors, chunk_limit_bytes=0) for one in without]
    assert [one._replace(chunk_limit_bytes=0) for one in assigned[:2]] == expected
    assert (spare.is_spare, spare.local_world_size, spare.probe_endpoints) == (True, 0, ())
    assert (spare.hosts, spare.members, spare.world_size) == (2, 3, 4 * tasks)
    assert decode_assignment(encode_assignment(spare)) == spare
    assert decode_assignment(encode_assignment(spare._replace(spares=0))) is None
