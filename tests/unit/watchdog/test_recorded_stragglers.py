"""The rank on a GPU that the others wait for is named by Flight Recorders, and an even rank never is. Simulated."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.recorder_waits import calls_of, rows_of
from saferun.watchdog.recorded_stragglers import RecordedStragglers, recorded_rows
from tests.breadth import slow_but
from tests.unit.diagnosis import nccl_meshes
from tests.unit.diagnosis.nccl_meshes import SHAPES
from tests.unit.watchdog.recorded_jobs import CPU_BOUND, DUMPS, INTERVAL_S, Pace, Recorders, TimedJob, named_of

LASTS_S = (DUMPS + 0.1) * INTERVAL_S
CLOCKS = (0.0, 3.7, -12.5, 1.2)
MEASURED, BY_CALLS = Recorders(), Recorders(is_measured=False)


def job_of(shape: str, pace: Pace, *, world: int = 8, seed: int = 0) -> TimedJob:
    return TimedJob(getattr(nccl_meshes, shape)(Random(seed), world), LASTS_S, pace, seed)  # noqa: S311


@pytest.mark.parametrize("shape", ["data", "fsdp", "tensor", "expert"])
@pytest.mark.parametrize("hosts", slow_but([1, 2], "2"))
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_gpu_that_is_30_percent_slower_is_named_by_durations(shape: str, hosts: int, seed: int) -> None:
    """Whatever the hosts' clocks say."""
    slow = 2 + seed
    job = job_of(shape, Pace(slow=(slow,)), seed=seed)
    assert named_of(job, MEASURED._replace(clocks_s=CLOCKS), hosts=hosts) == {(slow,)}


@pytest.mark.parametrize("shape", ["data", "fsdp", "tensor", "expert"])
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_whose_cpu_is_slower_is_named_by_when_it_calls(shape: str, seed: int) -> None:
    """On one host, whose ranks have one clock."""
    job = job_of(shape, CPU_BOUND._replace(slow=(seed,)), seed=seed)
    assert named_of(job, BY_CALLS) == {(seed,)}


def test_among_hosts_whose_clocks_differ_the_time_from_call_to_end_counts() -> None:
    job = job_of("data", CPU_BOUND._replace(slow=(5,), factor=2.0), seed=1)
    assert named_of(job, BY_CALLS._replace(clocks_s=CLOCKS), hosts=8) <= {(5,)}


PACES: dict[str, Pace] = {
    "little jitter": Pace(),
    "much jitter": Pace(jitter=0.2),
    "more than that": Pace(jitter=0.4),
    "the CPU is the limit": CPU_BOUND,
    "the CPU is the limit, with jitter": CPU_BOUND._replace(jitter=0.2),
    "rank 0 evaluates": Pace(jitter=0.1, breaks=((5.0, 2.0),)),
    "rank 0 evaluates once": Pace(breaks=((20.0, 6.0),)),
    "long collectives": Pace(comm_s=0.05, jitter=0.1),
    "the CPU is nearly the limit": Pace(cpu_s=0.04, jitter=0.1),
}


@pytest.mark.parametrize("pace", slow_but(PACES, "rank 0 evaluates"))
@pytest.mark.parametrize("shape", slow_but(SHAPES, "data", "pipeline"))
def test_no_rank_of_an_even_job_is_named(shape: str, pace: str) -> None:
    """Neither by durations nor by calls, on one host or several."""
    job = job_of(shape, PACES[pace], seed=len(pace))
    for recorders in (MEASURED, BY_CALLS):
        for hosts in (1, 4):
            assert named_of(job, recorders._replace(clocks_s=CLOCKS), hosts=hosts) == set()


@pytest.mark.parametrize("shape", slow_but(SHAPES, "data"))
def test_a_rank_whose_cpu_is_later_while_its_gpu_is_the_limit_is_not_named_by_its_calls(shape: str) -> None:
    """Its GPU has enough to do all the same. Where it has not, after each wait for the GPU, durations may show it."""
    job = job_of(shape, Pace(cpu_s=0.02, late_cpus=(3,)), seed=4)
    for hosts in (1, 4):
        assert named_of(job, BY_CALLS._replace(clocks_s=CLOCKS), hosts=hosts) == set()
        assert named_of(job, MEASURED._replace(clocks_s=CLOCKS), hosts=hosts) <= {(3,)}


@pytest.mark.slow
@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize("shape", SHAPES)
def test_no_rank_of_a_larger_even_job_is_named(shape: str, pace: str) -> None:
    for seed in range(2):
        job = job_of(shape, PACES[pace], world=16, seed=seed)
        for recorders in (MEASURED, BY_CALLS):
            for hosts in (1, 2, 16):
                assert named_of(job, recorders._replace(clocks_s=CLOCKS), hosts=hosts) == set()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_in_a_pipeline_the_slow_rank_is_named_or_none(seed: int) -> None:
    """The others of its replica wait for it in their sends, and the other replicas for all of them."""
    for slow in range(0, 8, 3 if seed == 0 else 1):
        job = job_of("pipeline", Pace(slow=(slow,)), seed=seed)
        assert named_of(job, MEASURED, hosts=2) <= {(slow,)}


def test_three_dumps_name_nobody() -> None:
    """What they show may have been a moment's."""
    job = job_of("data", Pace(slow=(3,)))
    assert named_of(job, MEASURED, dumps=3) == set()
    assert named_of(job, MEASURED, dumps=4) == {(3,)}


def test_recorders_that_have_no_time_in_common_are_not_compared() -> None:
    """A small one holds less than passes between two dumps."""
    job = job_of("data", Pace(slow=(3,)))
    assert named_of(job, MEASURED._replace(size=10)) == set()


# ------------------------------------------------------------------------------------------------- what others report

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda items: st.lists(items, max_size=9) | st.dictionaries(st.text(max_size=3), items, max_size=3),
    max_leaves=40,
)
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "profiling_name": JSON | st.just("nccl:all_reduce") | st.just("nccl:send 0->1"),
        "process_group": JSON | st.just(["0", ""]),
        "collective_seq_id": JSON,
        "time_created_ns": JSON | st.integers(0, 1 << 62),
        "time_discovered_completed_ns": JSON | st.integers(0, 1 << 62),
        "duration_ms": JSON,
        "is_p2p": JSON,
        "retired": st.just(value=True),
    },
)


@given(st.lists(ENTRY, max_size=60), JSON)
def test_whatever_a_rank_answers_is_read_or_left_out(entries: list[Any], config: Any) -> None:
    """A rank's answer is not to be trusted."""
    recorded = calls_of({"entries": entries, "pg_config": config})
    assert isinstance(rows_of({0: recorded, 1: recorded}), list)


@given(JSON | st.lists(st.lists(st.integers(-3, 1 << 70), min_size=7, max_size=12), max_size=8))
def test_whatever_a_host_reports_breaks_nothing(raw: Any) -> None:
    stragglers = RecordedStragglers(INTERVAL_S, 2)
    for now in (20.0, 40.0):
        stragglers.take_rows("node0", recorded_rows(raw), range(8), now)
        stragglers.judge(now)
