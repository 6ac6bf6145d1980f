"""Which hosts have ranks that have not ended well, as the leader knows it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster import task_states
from saferun.cluster.join_messages import Peer
from saferun.cluster.messages import task_of
from saferun.cluster.roster import Roster
from saferun.cluster.task_states import TaskStates
from saferun.model import RANKS_DONE, RANKS_HELD, RANKS_LEFT_OVER, RANKS_RUN


def roster_of(hosts: int) -> Roster:
    """The leader's view of so many hosts."""
    return Roster(0, 0, has_tasks=True, peers=[Peer(host, f"node{host}", (), host, 1) for host in range(hosts)])


REPORTS = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.integers(0, 2),
        st.sampled_from([RANKS_RUN, RANKS_DONE, RANKS_HELD, RANKS_LEFT_OVER, "gone"]),
    )
)


@given(REPORTS)
def test_a_host_lives_until_each_of_its_saferuns_has_reported_that_its_ranks_are_done(
    reports: list[tuple[int, int, str]],
) -> None:
    """A later report counts, and a host that has reported nothing lives."""
    states = TaskStates(roster_of(4))
    latest: dict[str, str] = {}
    for host, task, state in reports:
        states.add(f"{host}/{task}", {"s": state})
        latest[f"{host}/{task}"] = state
    unknown = set(range(4)) - {task_of(key)[0] for key in latest}
    assert states.living() == unknown | {task_of(key)[0] for key, state in latest.items() if state != RANKS_DONE}


def test_the_question_costs_no_work_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with every message about every host: where half of them are cut off, thousands of times."""
    states = TaskStates(roster_of(1000))
    for host in range(1000):
        states.add(f"{host}/0", {"s": RANKS_RUN if host % 2 else RANKS_DONE})
    asked: list[object] = []
    monkeypatch.setattr(task_states, "task_of", asked.append)
    assert states.living() == set(range(1, 1000, 2))
    assert asked == []
