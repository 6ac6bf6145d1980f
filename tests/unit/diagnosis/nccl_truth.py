"""Faults in simulated jobs, and whether the verdict names the rank that has it.

Some faults of a GPU leave the same evidence whichever rank has them: where all members of a group are in a call that
ends nowhere, nobody can tell. Then the right answer is all those ranks and no other: that another rank is in the answer
counts as right if and only if a job with the fault on that rank leaves the same evidence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random
from typing import Any, NamedTuple

from saferun.captures.recorder_content import read_groups
from saferun.diagnosis.collectives import CollectiveFindings, compare
from saferun.evidence.job_evidence import RankCollectives
from tests.unit.diagnosis.nccl_job import Fault, Job, Recorder, dump, open_calls, same_evidence
from tests.unit.diagnosis.nccl_meshes import SHAPES, Shape

STOPS, GPU, CALLS = "stops", ("gpu", "kernel"), ("skips", "dtype", "size", "op")
KINDS = ("stage asleep", "rank asleep", "gpu", "kernel", "skips", "dtype", "size", "op", "two")
_CHECKED = 6


class Case(NamedTuple):
    """One job with a fault."""

    shape: str
    world: int
    seed: int
    kind: str


class Answer(NamedTuple):
    """What was found, and what is right.

    ``verdict``: ``exact``; ``alike`` (some more, whose fault would have left the same evidence), which is right as
    well; ``healthy`` (healthy ranks alone), ``nobody``, ``not all``, ``too many``.
    """

    case: Case
    faulty: tuple[int, ...]
    named: tuple[int, ...]
    verdict: str


def cases(shapes: Iterable[str], worlds: Iterable[int], seeds: Iterable[int]) -> Iterator[Case]:
    """Each shape of each size with each fault."""
    for seed in seeds:
        for shape in shapes:
            for world in worlds:
                for kind in KINDS:
                    yield Case(shape, world, seed, kind)


def judge(case: Case) -> Answer | None:
    """The answer to one case; None where the fault has not stopped the job."""
    pick = Random(f"{case.shape} {case.world} {case.seed} {case.kind}")  # noqa: S311 - no secret
    mesh, programs = shape = SHAPES[case.shape](pick, case.world)
    settings: dict[str, Any] = {"eager_bytes": pick.choice((0, 0, 10_000)), "pair_streams": pick.random() < 0.7}
    faults = _faults(pick, case.kind, shape, settings)
    if not faults:
        return None
    job = Job(mesh, programs, faults, **settings)
    faulty = _showing(job, faults, shape, settings)
    if job.is_over or not faulty or not any(open_calls(job, rank) for rank in range(case.world)):
        return None
    recorder = Recorder(
        size=pick.choice((2000, 2000, 60)),
        names=pick.choice(("numbers", "dimension", "salted")),
        backend=pick.choice(("nccl", "nccl", "nccl2")),
        has_starts=pick.random() < 0.3,
    )
    found = findings_of(job, recorder)
    named = tuple(sorted({*found.culprits, *found.suspects}))
    return Answer(case, faulty, named, _verdict(job, faults, faulty, named, shape, settings))


def findings_of(job: Job, recorder: Recorder) -> CollectiveFindings:
    """What saferun finds in the recorders of a job."""
    world = range(job.mesh.world)
    name = "dump_nccl_trace_json" if recorder.backend == "nccl" else "fr_trace_json"
    return compare([RankCollectives(rank, read_groups(dump(job, rank, recorder), name)) for rank in world], world)


def _faults(pick: Random, kind: str, shape: Shape, settings: dict[str, Any]) -> list[Fault]:
    mesh, programs = shape
    if kind == "two":
        first = _faults(pick, pick.choice(("rank asleep", "gpu")), shape, settings)
        second = _faults(pick, pick.choice(("rank asleep", "gpu")), shape, settings)
        return [*first, *(fault for fault in second if not first or fault.rank != first[0].rank)]
    rank = pick.randrange(mesh.world)
    steps = programs[rank]
    if kind == "stage asleep":
        along = {"PIPELINE_PARALLEL", "EMBEDDING"}
        own = [group for group, members in enumerate(mesh.groups) if rank in members and group > 0]
        group = pick.choice([group for group in own if mesh.descriptions[group] not in along] or [0])
        at = pick.randrange(1, len(steps) - 1)
        ranks = mesh.groups[group] if 0 < len(mesh.groups[group]) < mesh.world else (rank,)
        return [Fault(one, STOPS, min(at, len(programs[one]) - 2)) for one in ranks]
    if kind == "rank asleep":
        return [Fault(rank, STOPS, pick.randrange(len(steps) - 1))]
    if kind in GPU:
        return [Fault(rank, kind, pick.randrange(1, _things(shape, rank, kind)), others_finish=pick.random() < 0.4)]
    calls = [at for at, step in enumerate(steps) if step.do == "call" and step.op != "barrier"]
    if kind == "op":
        calls = [at for at in calls if steps[at].size > 1]
    return [Fault(rank, kind, pick.choice(calls))] if calls else []


def _things(shape: Shape, rank: int, kind: str) -> int:
    """How much a rank's GPU has to do."""
    steps = shape[1][rank]
    waits = sum(1 for step in steps if step.do not in {"kernel", "sync"} and step.waits)
    kernels = sum(1 for step in steps if step.do == "kernel")
    calls = sum(1 for step in steps if step.do not in {"kernel", "sync"})
    return max(2, (kernels + calls + waits) - 2 if kind == "gpu" else kernels + waits - 1)


def _showing(job: Job, faults: list[Fault], shape: Shape, settings: dict[str, Any]) -> tuple[int, ...]:
    """The faulty ranks, less those that would wait in the same call because of the others' faults alone."""
    mesh, programs = shape
    showing = []
    for fault in faults:
        rest = [other for other in faults if (other.kind, other.at) != (fault.kind, fault.at)]
        waiting = open_calls(job, fault.rank)
        if rest and waiting:
            others = open_calls(Job(mesh, programs, rest, **settings), fault.rank)
            places = [(calls[0].step, calls[0].number, calls[0].p2p_number) for calls in (waiting, others) if calls]
            if len(places) == 2 and places[0] == places[1]:
                continue
        showing.append(fault.rank)
    return tuple(sorted(showing))


def _verdict(
    job: Job,
    faults: list[Fault],
    faulty: tuple[int, ...],
    named: tuple[int, ...],
    shape: Shape,
    settings: dict[str, Any],
) -> str:
    if named == faulty:
        return "exact"
    if not named:
        return "nobody"
    if not {*named} & {*faulty}:
        return "healthy"
    if {*faulty} - {*named}:
        return "not all"
    others = [rank for rank in named if rank not in faulty]
    step = max(1, len(others) // _CHECKED)
    if all(_may_be(job, faults, rank, shape, settings) for rank in others[::step][:_CHECKED]):
        return "alike"
    return "too many"


def _may_be(job: Job, faults: list[Fault], rank: int, shape: Shape, settings: dict[str, Any]) -> bool:
    """Whether a fault on this rank, instead of one of those that there are, would have left the same evidence."""
    mesh, programs = shape
    for fault in faults:
        rest = [other for other in faults if other is not fault]
        for at in _moments(job, fault.kind, rank):
            for kind in GPU if fault.kind in GPU else (fault.kind,):
                for finish in (False, True):
                    other = Job(mesh, programs, [*rest, Fault(rank, kind, at, finish)], **settings)
                    if same_evidence(job, other):
                        return True
    return False


def _moments(job: Job, kind: str, number: int) -> list[int]:
    """When a fault on a rank may have led to where it stands."""
    rank, waiting = job.ranks[number], open_calls(job, number)
    if kind in GPU:
        around = range(-1, 3)
        moments = {rank.things_over + one for one in around} | {rank.kernels_over + one for one in around}
        return sorted(moments | ({waiting[0].after - 1, waiting[0].after} if waiting else set()))
    if kind == STOPS:
        return [*range(max(0, rank.next_step - 4), rank.next_step + 1)]
    return [at for at, step in enumerate(rank.program) if waiting and step == waiting[0].step]


def figures(answers: Iterable[Answer]) -> dict[str, Counter[str]]:
    """Verdicts by kind of fault, and of all."""
    found: dict[str, Counter[str]] = {"all": Counter()}
    for answer in answers:
        found.setdefault(answer.case.kind, Counter())[answer.verdict] += 1
        found["all"][answer.verdict] += 1
    return found
