"""Whether the rank that is at fault is named, in simulated jobs on GPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from random import Random

import pytest

from saferun.captures.recorder_content import read_groups
from saferun.diagnosis.collectives import compare
from saferun.evidence.job_evidence import RankCollectives
from tests.unit.diagnosis.nccl_job import Fault, Job, Mesh, Recorder, Step, dump
from tests.unit.diagnosis.nccl_meshes import KERNEL, SHAPES, SYNC
from tests.unit.diagnosis.nccl_truth import KINDS, Case, cases, figures, findings_of, judge

SEEN = range(12)
"""What was looked at while the rules were written. The others never were: they only measure."""
HELD_OUT = range(7000, 7008)
PLAIN = Recorder()


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_fault_a_job_comes_to_its_end(shape: str) -> None:
    """Whether sends are small or large, whatever streams they have."""
    for seed in range(3):
        mesh, programs = SHAPES[shape](Random(seed), 8)  # noqa: S311 - no secret
        for eager_bytes in (0, 10_000):
            for pair_streams in (True, False):
                job = Job(mesh, programs, eager_bytes=eager_bytes, pair_streams=pair_streams)
                assert job.is_over, (shape, seed, eager_bytes, pair_streams)
                assert findings_of(job, PLAIN).culprits == ()


def assert_right(found: Mapping[str, Mapping[str, int]], *, at_least: int) -> None:
    """98 % are right, and healthy ranks are never named without the faulty one."""
    of_all = found["all"]
    number = sum(of_all.values())
    print({kind: dict(verdicts) for kind, verdicts in found.items()})
    assert number >= at_least
    assert "healthy" not in of_all
    assert "nobody" not in of_all
    assert of_all["exact"] + of_all["alike"] >= 0.98 * number, found


def test_the_faulty_rank_is_named() -> None:
    """Jobs of eight ranks: each mesh, each fault."""
    answers = [judge(case) for case in cases(SHAPES, (8,), (2, 3))]
    assert_right(figures(answer for answer in answers if answer is not None), at_least=75)


@pytest.mark.slow
@pytest.mark.limit_s(900)  # a minute of computing, beside other tests
@pytest.mark.parametrize("worlds", [(8, 16), (24, 32)])
@pytest.mark.parametrize("seeds", [SEEN, HELD_OUT], ids=["seen", "held out"])
def test_the_faulty_rank_is_named_in_larger_jobs(seeds: range, worlds: tuple[int, ...]) -> None:
    answers = [judge(case) for case in cases(SHAPES, worlds, seeds)]
    assert_right(figures(answer for answer in answers if answer is not None), at_least=400)


@pytest.mark.slow
@pytest.mark.limit_s(900)  # half a minute of computing, beside other tests
def test_the_faulty_rank_is_named_among_128() -> None:
    """Each mesh with each fault, three times."""
    picked = [
        Case(shape, 128, 100 * seed + index, kind)
        for seed in (71, 72, 73)
        for index, shape in enumerate(SHAPES)
        for kind in KINDS
    ]
    answers = [judge(case) for case in picked]
    assert_right(figures(answer for answer in answers if answer is not None), at_least=120)


@pytest.mark.slow
@pytest.mark.limit_s(900)
def test_the_faulty_rank_is_named_among_1024() -> None:
    """Each mesh once, with the faults in turn."""
    picked = [Case(shape, 1024, 7100 + index, KINDS[index % len(KINDS)]) for index, shape in enumerate(SHAPES)]
    answers = [judge(case) for case in picked]
    assert_right(figures(answer for answer in answers if answer is not None), at_least=4)


def calls_of(shape: str, world: int, kind: str) -> int:
    """How many functions a comparison of all ranks calls."""
    mesh, programs = SHAPES[shape](Random(7), world)  # noqa: S311 - no secret
    at = next(at for at, step in enumerate(programs[5]) if at > 8 and step.do == "call")
    job = Job(mesh, programs, [Fault(5, kind, at)])
    recorder = PLAIN._replace(names="salted")
    known = [
        RankCollectives(rank, read_groups(dump(job, rank, recorder), "dump_nccl_trace_json")) for rank in range(world)
    ]
    count = 0

    def take(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(take)
    try:
        compare(known, range(world))
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("kind", ["stops", "gpu", "skips"])
@pytest.mark.parametrize("shape", ["data", "pipeline"])
def test_twice_the_ranks_are_twice_the_work(shape: str, kind: str) -> None:
    """Some 400 calls for each rank of a pipeline; nothing grows with the square of the ranks or of the groups."""
    small, large = (calls_of(shape, world, kind) for world in (32, 64))
    assert large < 2.2 * small
    assert large < 700 * 64


# ------------------------------------------------------------------------------- the four kinds of recorded GPU faults


def of(job: Job, recorder: Recorder = PLAIN) -> tuple[tuple[int, ...], tuple[int, ...]]:
    found = findings_of(job, recorder)
    return found.culprits, found.suspects


PAIRS = Mesh(4, ((0, 1, 2, 3), (0, 1), (2, 3)), ("default_pg", "TENSOR", "TENSOR"), (0, 1, 1))


def pairs() -> list[list[Step]]:
    """Tensor parallelism in pairs, then a sum over all; nobody waits for the CPU."""
    return [
        [KERNEL, Step("call", 1 + rank // 2, "all_reduce", 8), KERNEL, Step("call", 0, "all_reduce", 4), KERNEL] * 3
        for rank in range(4)
    ]


def test_a_rank_whose_gpu_hangs_has_called_all_that_the_others_have() -> None:
    """Its CPU is ahead, as theirs are; the pair that does not get on is where it is."""
    job = Job(PAIRS, pairs(), [Fault(2, "gpu", 7)])
    assert all(rank.next_step == len(rank.program) for rank in job.ranks)
    assert of(job) == ((), (2, 3))
    # With the times of the kernels it is seen whose has not begun.
    assert of(Job(PAIRS, pairs(), [Fault(2, "kernel", 6)]), PLAIN._replace(has_starts=True)) == ((), (2,))


def test_a_call_that_has_ended_on_some_makes_the_others_suspects() -> None:
    job = Job(PAIRS, pairs(), [Fault(1, "gpu", 4, others_finish=True)])
    found = findings_of(job, PLAIN)
    assert (found.culprits, found.suspects) == ((), (1,))
    assert found.stuck[0].message == (
        "rank 1 waits in collective 1 (all_reduce) of group default_pg, which has ended on ranks 0, 2-3"
    )


STAGES = Mesh(3, ((0, 1, 2),), ("default_pg",), (0,))


def stages(batches: int = 3) -> list[list[Step]]:
    """Three stages that hand on what they have made; the first is far ahead."""
    first, middle, last = [], [], []
    for _ in range(batches):
        first += [KERNEL, Step("batch", 0, size=9, parts=(("send", 1),))]
        middle += [Step("batch", 0, size=9, parts=(("recv", 0),)), KERNEL]
        middle += [Step("batch", 0, size=9, parts=(("send", 2),))]
        last += [Step("batch", 0, size=9, parts=(("recv", 1),)), KERNEL]
    end = [Step("call", 0, "all_reduce", 4), SYNC]
    return [first + end, middle + end, last + end]


def test_the_peer_of_a_call_without_its_other_end_may_be_held_up_itself() -> None:
    """Stage 1 has not sent because stage 0 sleeps, and stage 2 waits for stage 1."""
    assert of(Job(STAGES, stages(), [Fault(0, "stops", 2)])) == ((0,), ())


def test_the_numbers_of_sends_are_not_those_of_collectives() -> None:
    """A middle stage sends more often than one at an end; its status says so for all calls."""
    job = Job(STAGES, stages(), [Fault(2, "stops", 3)])
    (content,) = [dump(job, 1, PLAIN)]
    assert content["pg_status"]["0"]["last_enqueued_collective"] != dump(job, 0, PLAIN)["pg_status"]["0"]
    assert of(job) == ((2,), ())


# ---------------------------------------------------------------------------------------------------------- the groups


def test_groups_of_one_name_and_groups_of_different_names_on_each_rank() -> None:
    """Up to torch 2.12 a dimension's groups have one name; since 2.13 a group's name may differ between its ranks."""
    for names in ("dimension", "salted"):
        job = Job(PAIRS, pairs(), [Fault(3, "stops", 6)])
        found = findings_of(job, PLAIN._replace(names=names))
        assert found.culprits == (3,), names
        assert [stand.group for stand in found.groups] == ["TENSOR (ranks 0-1)", "default_pg", "TENSOR (ranks 2-3)"]


def test_two_groups_of_the_same_ranks_and_description_are_told_apart_by_the_order_in_which_they_were_made() -> None:
    """Their names are of no use where they are salted."""
    twins = Mesh(2, ((0, 1), (0, 1), (0, 1)), ("default_pg", "undefined", "undefined"), (0, 1, 2))
    calls = [Step("call", 1, "all_reduce", 4), Step("call", 2, "broadcast", 4), Step("call", 1, "all_reduce", 4)]
    job = Job(twins, [calls, calls], [Fault(1, "stops", 2)])
    found = findings_of(job, PLAIN._replace(names="salted"))
    assert found.culprits == (1,)
    assert not found.mismatched
    assert [len(stand.progress) for stand in found.groups] == [2, 2]


ROOTED = pytest.mark.parametrize("op", ["gather", "scatter"])
BACKEND = pytest.mark.parametrize("backend", ["nccl", "nccl2"])
WORLD = Mesh(3, ((0, 1, 2),), ("default_pg",), (0,))


@ROOTED
@BACKEND
def test_a_gather_of_two_roots_is_told(op: str, backend: str) -> None:
    """Each rank that takes itself for the root has room for what comes, or what is to be sent."""
    call = Step("call", 0, op, 4, root=0)
    programs = [[call], [call], [call._replace(root=2)]]
    found = findings_of(Job(WORLD, programs), PLAIN._replace(backend=backend))
    assert found.lines[0] == (f"ranks 0, 2 each call themselves the root of {op}, collective 1 of group default_pg")
    assert found.culprits == (0, 2)


@ROOTED
@BACKEND
def test_a_gather_that_all_have_called_with_one_root_is_no_mismatch(op: str, backend: str) -> None:
    """NCCL records an undefined tensor where a rank has none."""
    job = Job(WORLD, [[Step("call", 0, op, 4, root=0), SYNC]] * 3, [Fault(1, "gpu", 0)])
    found = findings_of(job, PLAIN._replace(backend=backend))
    assert not found.mismatched
    assert [one.waiting for one in found.stuck] == [(0, 1, 2)]


def test_another_type_is_told_with_its_name() -> None:
    job = Job(PAIRS, pairs(), [Fault(2, "dtype", 1)])
    found = findings_of(job, PLAIN)
    assert found.culprits == (2,)
    assert found.lines[0] == (
        "rank 2 called all_reduce of shape [8], Float as collective 1 of group TENSOR (ranks 2-3) "
        "where rank 3 called all_reduce of shape [8], BFloat16"
    )


def test_a_rank_whose_recorder_has_failed_is_the_first_suspect() -> None:
    """Where CUDA has a sticky error the recorder answers with status 500."""
    job = Job(PAIRS, pairs(), [Fault(2, "gpu", 7)])
    recorders = [
        RankCollectives(rank, read_groups(dump(job, rank, PLAIN), "dump_nccl_trace_json")) for rank in range(4)
    ]
    recorders[2] = recorders[2]._replace(incomplete="NCCL's recorder has not sent its calls", has_failed=True)
    assert compare(recorders, range(4)).suspects == (2,)


def test_a_rank_whose_recorder_was_only_slow_is_no_suspect() -> None:
    """It has not sent all in its share of the time."""
    job = Job(WORLD, [[Step("call", 0, "all_reduce", 4), SYNC]] * 3, [Fault(1, "gpu", 0)])
    recorders = [
        RankCollectives(rank, read_groups(dump(job, rank, PLAIN), "dump_nccl_trace_json")) for rank in range(3)
    ]
    recorders[2] = recorders[2]._replace(incomplete="NCCL's recorder has not sent the calls that are over")
    assert compare(recorders, range(3)).suspects == (0, 1, 2)
