"""The rank that the others wait for is named within a minute, and an even rank never is."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.watchdog.stragglers import REPORTS, Straggler, Stragglers, WaitCount, WaitCounter, counts_from, differ
from tests.unit.watchdog.in_step import WINDOW_S, data_parallel, named, pipeline

# Some samples are missed by chance; one that is slower by 30 % is found at the next report then.
WITHIN_S = 61.0


@pytest.mark.parametrize("ranks", [2, 4, 16, 64])
@pytest.mark.parametrize("step_s", [0.05, 0.3, 1.0])
def test_a_rank_that_is_30_percent_slower_is_named_within_a_minute(ranks: int, step_s: float) -> None:
    """Whether a step is shorter or longer than the distance between samples."""
    slow = ranks // 2
    in_time = 0
    for seed in range(5 if ranks < 16 else 2):
        found = named(data_parallel(ranks, seed=seed, step_s=step_s, jitter=0.05, slow=[slow]), ranks, 1.3, seed=seed)
        assert {straggler.ranks for _, straggler in found} == {(slow,)}
        in_time += found[0][0] <= WITHIN_S
    assert in_time >= (4 if ranks < 16 else 1)


@pytest.mark.parametrize("hosts", [2, 4])
def test_a_slow_rank_is_named_among_several_hosts(hosts: int) -> None:
    """A host alone cannot tell a slow rank elsewhere from a slow collective: the shares are compared by the leader."""
    steps = data_parallel(16, jitter=0.05, slow=[5], collective_s=0.03)
    found = named(steps, 16, 2.0, hosts=hosts)
    assert {straggler.ranks for _, straggler in found} == {(5,)}


def test_with_one_rank_a_host_it_is_named() -> None:
    """No host sees more than its own rank."""
    found = named(data_parallel(4, jitter=0.05, slow=[3]), 4, 2.0, hosts=4)
    assert {straggler.ranks for _, straggler in found} == {(3,)}


def test_a_slow_host_is_named_with_all_its_ranks() -> None:
    """They wait for each other hardly more than one slow rank does."""
    found = named(data_parallel(16, jitter=0.05, slow=range(8, 16)), 16, 2.0, hosts=2)
    assert {straggler.ranks for _, straggler in found} == {tuple(range(8, 16))}


def test_long_steps_take_longer() -> None:
    """With one step in ten seconds a minute proves nothing, and some minutes do."""
    found = named(data_parallel(4, step_s=10.0, jitter=0.05, slow=[1]), 4, 10.0)
    assert {straggler.ranks for _, straggler in found} == {(1,)}
    assert found[0][0] > 2 * WINDOW_S


EVEN: dict[str, dict[str, Any]] = {
    "little jitter": {"jitter": 0.02},
    "some jitter": {"jitter": 0.1},
    "much jitter": {"jitter": 0.5},
    "jitter that lasts for some steps": {"jitter": 0.15, "memory": 0.8},
    "short steps": {"step_s": 0.05, "jitter": 0.3},
    "steps as long as the distance between samples": {"step_s": 0.19, "collective_s": 0.01, "jitter": 0.01},
    "long steps": {"step_s": 10.0, "jitter": 0.3},
    "long collectives": {"collective_s": 0.2},
    "rank 0 writes the log": {"breaks": [(0.3, 0.02)]},
    "rank 0 evaluates now and then": {"breaks": [(300.0, 60.0)]},
    "rank 0 evaluates every minute": {"breaks": [(60.0, 20.0)]},
    "rank 0 evaluates, and writes checkpoints": {"breaks": [(300.0, 60.0), (90.0, 10.0)]},
    "rank 0 writes short checkpoints": {"breaks": [(20.0, 2.0)]},
}


@pytest.mark.parametrize("case", EVEN)
@pytest.mark.parametrize(("ranks", "hosts", "minutes"), [(2, 1, 40), (4, 2, 20), (16, 4, 5)])
def test_even_ranks_are_never_named(case: str, ranks: int, hosts: int, minutes: int) -> None:
    """A thousand minutes in all."""
    seed = len(case) + ranks
    assert not named(data_parallel(ranks, seed=seed, **EVEN[case]), ranks, minutes, hosts=hosts, seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize("case", EVEN)
@pytest.mark.parametrize(("ranks", "hosts", "minutes"), [(2, 1, 600), (2, 2, 400), (4, 1, 300), (16, 4, 60)])
def test_even_ranks_are_not_named_in_days_either(case: str, ranks: int, hosts: int, minutes: int) -> None:
    """Fifteen thousand minutes in all."""
    seed = len(case) + ranks
    assert not named(data_parallel(ranks, seed=seed, **EVEN[case]), ranks, minutes, hosts=hosts, seed=seed)


@pytest.mark.parametrize(("stages", "batches"), [(2, 1), (2, 16), (4, 1), (4, 8), (8, 4)])
@pytest.mark.parametrize("hosts_alone", [True, False])
def test_the_stages_of_an_even_pipeline_are_not_named(stages: int, batches: int, *, hosts_alone: bool) -> None:
    """They wait for each other in turn; the first and the last one longest."""
    hosts = 1 if hosts_alone else stages
    assert not named(pipeline(stages, batches), stages, 15, hosts=hosts)


def test_a_stage_with_twice_the_work_is_what_the_others_wait_for() -> None:
    """That it is meant to be so nobody can see: the hint says it."""
    found = named(pipeline(2, 16, heavy=2.0), 2, 3)
    assert {straggler.ranks for _, straggler in found} == {(1,)}


def test_nothing_is_said_while_hosts_are_unknown() -> None:
    """Of a part of the job it cannot be known whom it waits for."""
    assert not named(data_parallel(16, slow=[5]), 16, 5, hosts=4, silent=[2])


def test_a_part_of_the_job_that_does_something_else_is_not_slow() -> None:
    """Four of sixteen ranks that never wait are no exception: they have another role."""
    assert not named(data_parallel(16, slow=range(4), factor=2.0), 16, 5)


# ----------------------------------------------------------------------------------------------------------- once only


def report_of(shares: list[float], samples: int = 75) -> tuple[WaitCount, ...]:
    """Ranks that waited in such shares of the samples, each time for one sample."""
    waits = [round(share * samples) for share in shares]
    return tuple(WaitCount(rank, samples, one, one, 3, one * one // 3) for rank, one in enumerate(waits))


def test_a_slow_rank_is_named_every_ten_minutes_at_most_and_ever_more_rarely() -> None:
    """A job that is meant to be uneven is not to fill its log."""
    stragglers = Stragglers(WINDOW_S, 4)
    at: list[float] = []
    for number in range(1, 4 * 120):
        now = number * WINDOW_S / REPORTS
        stragglers.take("node0", report_of([0.25, 0.0, 0.24, 0.26]), now)
        if stragglers.judge(now) is not None:
            at.append(now)
    assert [round(b - a) for a, b in pairwise(at)] == [600, 1200, 2400]
    assert stragglers.slow == (1,)


def test_another_rank_waits_its_ten_minutes_too() -> None:
    """The console gets one such line in ten minutes, whoever it is about."""
    stragglers = Stragglers(WINDOW_S, 4)
    found = []
    for number in range(1, 4 * 20):
        now = number * WINDOW_S / REPORTS
        slow = [0.25, 0.0, 0.24, 0.26] if number < 20 else [0.0, 0.25, 0.24, 0.26]
        stragglers.take("node0", report_of(slow), now)
        if (one := stragglers.judge(now)) is not None:
            found.append((round(now), one.ranks))
    assert [ranks for _, ranks in found] == [(1,), (0,)]
    assert found[1][0] - found[0][0] >= 600


def test_what_was_counted_before_a_hang_is_forgotten() -> None:
    """The time after it begins with nothing."""
    stragglers = Stragglers(WINDOW_S, 2)
    for number in range(4):
        stragglers.take("node0", report_of([0.25, 0.0]), number * 15.0)
    stragglers.forget()
    assert stragglers.judge(60.0) is None
    assert stragglers.slow == ()


def test_the_time_is_that_which_was_seen() -> None:
    """Long windows say so only after a long time."""
    stragglers = Stragglers(WINDOW_S, 2)
    for now in (15.0, 30.0):
        stragglers.take("node0", report_of([0.5, 0.0]), now)
    found = stragglers.judge(30.0)
    assert found == Straggler((1,), 0.0, 38 / 75, 30.0)


def test_a_rank_that_was_slow_is_not_named_when_it_keeps_up_again() -> None:
    """What was true some minutes ago sends nobody to look for it now."""
    stragglers = Stragglers(WINDOW_S, 4)
    for number in range(40):
        slow = [0.25, 0.0, 0.24, 0.26] if number < 30 else [0.01, 0.0, 0.01, 0.01]
        stragglers.take("node0", report_of(slow), number * 15.0)
    assert stragglers.judge(40 * 15.0) is None


# ------------------------------------------------------------------------------------------------------------ counting


def counts_of(samples: list[dict[int, bool]], *, is_alone: bool) -> list[list[int]]:
    counter = WaitCounter(is_alone=is_alone)
    for sample in samples:
        counter.take(sample)
    return counter.report()


def test_samples_in_which_all_ranks_wait_count_among_several_hosts_only() -> None:
    """On one host they are the collective itself; elsewhere somebody may be late."""
    samples = [{0: False, 1: True}, {0: True, 1: True}, {0: False, 1: False}]
    assert counts_of(samples, is_alone=True) == [[0, 2, 0, 0, 1, 0], [1, 2, 1, 1, 1, 1]]
    assert counts_of(samples, is_alone=False) == [[0, 3, 1, 1, 1, 1], [1, 3, 2, 4, 1, 4]]


def test_a_wait_that_goes_on_does_not_count_yet() -> None:
    """How long it is decides what it is worth."""
    counter = WaitCounter(is_alone=True)
    for _ in range(100):
        counter.take({0: False, 1: True})
    assert counter.report() == [[0, 100, 0, 0, 4, 0]]
    counter.take({0: False, 1: False})
    assert counter.report()[1] == [1, 101, 100, 10000, 1, 10000]


def test_a_block_of_a_few_samples_waits_for_the_next_report() -> None:
    """Beside whole blocks it would look like a few seconds without waits."""
    counter = WaitCounter(is_alone=False)
    sample = [{0: True, 1: False}, {0: False, 1: False}]
    for number in range(54):
        counter.take(sample[number % 2])
    assert counter.report() == [[0, 50, 25, 25, 2, 313], [1, 50, 0, 0, 2, 0]]
    for number in range(21):
        counter.take(sample[number % 2])
    assert counter.report() == [[0, 24, 12, 12, 1, 144], [1, 25, 0, 0, 1, 0]]


def test_a_few_samples_are_reported_where_there_are_no_more() -> None:
    """With many ranks on a slow machine a sample takes so long that they come every few seconds."""
    counter = WaitCounter(is_alone=False)
    for _ in range(3):
        counter.take({0: True, 1: False})
        counter.take({0: False, 1: False})
        assert counter.report() == [[0, 2, 1, 1, 1, 1], [1, 2, 0, 0, 1, 0]]
    assert counter.report() == []


def test_a_rank_that_has_ended_is_no_longer_counted() -> None:
    """The others notice it soon."""
    counter = WaitCounter(is_alone=True)
    counter.take({0: False, 1: True})
    counter.take({0: False, 1: False})
    counter.drop(1)
    assert [row[0] for row in counter.report()] == [0]


# ------------------------------------------------------------------------------------------------- what others report

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda items: st.lists(items, max_size=7) | st.dictionaries(st.text(max_size=3), items, max_size=3),
    max_leaves=40,
)


@given(ANYTHING)
def test_whatever_a_host_reports_is_read_or_left_out(raw: Any) -> None:
    """A message ends nothing."""
    for count in counts_from(raw, range(8)):
        assert count.rank in range(8)
        assert 0.0 <= count.share <= 1.0
        assert count.variance >= 0.0


@given(st.lists(st.lists(st.integers(-3, 1 << 70), min_size=6, max_size=6), max_size=8))
def test_no_numbers_break_the_comparison(rows: list[list[int]]) -> None:
    """Also where they are rows of numbers."""
    stragglers = Stragglers(WINDOW_S, 2)
    stragglers.take("node0", counts_from(rows, range(8)), 15.0)
    stragglers.judge(15.0)


def test_a_host_reports_its_own_ranks_only() -> None:
    """Each once."""
    rows = [[5, 75, 10, 10, 3, 40], [5, 75, 1, 1, 3, 1], [9, 75, 10, 10, 3, 40]]
    assert [count.rank for count in counts_from(rows, range(4, 8))] == [5]


@pytest.mark.parametrize(
    ("shares", "alone", "among_others"),
    [
        ([], False, False),
        ([0.0, 0.0], False, False),
        ([0.2, 0.0], True, True),
        ([0.2, 0.2], False, True),  # the rank that they wait for is elsewhere
        ([0.01, 0.05], False, False),
        ([1.0, 1.0], False, False),  # they hang
    ],
)
def test_whether_ranks_may_be_waiting_for_another_one(shares: list[float], alone: bool, among_others: bool) -> None:
    rows = [list(count) for count in report_of(shares)]
    assert differ(rows, is_alone=True) == alone
    assert differ(rows, is_alone=False) == among_others
    assert not differ([[0, 0, 0, 0, 1, 0]], is_alone=alone)
