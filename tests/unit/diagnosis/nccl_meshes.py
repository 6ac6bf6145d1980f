"""Programs of jobs on GPUs for the simulator: data, tensor, pipeline, expert and sharded data parallelism."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from tests.unit.diagnosis.nccl_job import Mesh, Step

Shape = tuple[Mesh, list[list[Step]]]
KERNEL = Step("kernel")
SYNC = Step("sync")


class _Groups:
    """The process groups of a mesh; the first is that of all ranks."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._members: list[tuple[int, ...]] = []
        self._descriptions: list[str] = []
        self._dimension: list[int] = []
        self.add([range(world)], "default_pg")

    def add(self, groups: Iterable[Iterable[int]], description: str) -> dict[int, int]:
        """Groups of one dimension of the mesh. Returns each rank's."""
        dimension = len({*self._dimension})
        own = {}
        for members in groups:
            ranks = tuple(members)
            for rank in ranks:
                own[rank] = len(self._members)
            self._members.append(ranks)
            self._descriptions.append(description)
            self._dimension.append(dimension)
        return own

    def mesh(self) -> Mesh:
        """All of them."""
        return Mesh(self.world, tuple(self._members), tuple(self._descriptions), tuple(self._dimension))


def data(pick: Random, world: int) -> Shape:
    """Gradients in buckets that are summed up while the backward pass goes on."""
    groups = _Groups(world)
    buckets, steps = pick.randint(2, 6), pick.randint(2, 4)
    sizes = [pick.choice((1000, 2000, 4000)) for _ in range(buckets)]
    program = [Step("call", 0, "broadcast", 500)]
    for _ in range(steps):
        program += [KERNEL, KERNEL]
        for size in sizes:
            program += [KERNEL, Step("call", 0, "all_reduce", size, waits=False)]
        program += [Step("call", 0, "all_reduce", 1), KERNEL, SYNC]
    program += [Step("call", 0, "barrier"), SYNC]
    return groups.mesh(), [list(program) for _ in range(world)]


def fsdp(pick: Random, world: int) -> Shape:
    """Parameters gathered ahead of each layer; hybrid where there are several groups that shard."""
    shard = pick.choice([size for size in (4, 8, 16, 32, world) if world % size == 0 and size <= world])
    groups = _Groups(world)
    sharded = groups.add([range(first, first + shard) for first in range(0, world, shard)], "mesh_fsdp")
    replicas = groups.add([range(first, world, shard) for first in range(shard)], "mesh_replicate")
    layers, steps = pick.randint(2, 5), pick.randint(2, 3)
    sizes = [pick.choice((256, 512, 1024)) for _ in range(layers)]
    programs = []
    for rank in range(world):
        own, across = sharded[rank], replicas[rank]
        program: list[Step] = []
        for _ in range(steps):
            for size in sizes:
                program += [Step("call", own, "_all_gather_base", size), KERNEL]
            for size in reversed(sizes):
                program += [Step("call", own, "_all_gather_base", size), KERNEL]
                program += [Step("call", own, "_reduce_scatter_base", size, waits=False)]
                if shard < world:
                    program += [Step("call", across, "all_reduce", size, waits=False)]
            program += [Step("call", 0, "all_reduce", 1), KERNEL, SYNC]
        programs.append(program)
    return groups.mesh(), programs


def tensor(pick: Random, world: int) -> Shape:
    """Layers split over the GPUs of a host, gradients summed up between hosts."""
    split = pick.choice([size for size in (2, 4, 8) if world % size == 0 and size < world])
    groups = _Groups(world)
    inner = groups.add([range(first, first + split) for first in range(0, world, split)], "TENSOR_PARALLEL")
    outer = groups.add([range(first, world, split) for first in range(split)], "DATA_PARALLEL")
    layers, steps = pick.randint(2, 4), pick.randint(2, 3)
    programs = []
    for rank in range(world):
        program: list[Step] = []
        for _ in range(steps):
            program += [Step("call", inner[rank], "broadcast", 64), KERNEL]
            for _ in range(2 * layers):
                program += [KERNEL, Step("call", inner[rank], "all_reduce", 4096)]
            for size in (3000, 1500):
                program += [KERNEL, Step("call", outer[rank], "all_reduce", size, waits=False)]
            program += [Step("call", inner[rank], "all_reduce", 1), Step("call", 0, "all_reduce", 1), KERNEL, SYNC]
        programs.append(program)
    return groups.mesh(), programs


def expert(pick: Random, world: int) -> Shape:
    """Tokens sent to the experts of other ranks and back."""
    split = pick.choice([size for size in (4, 8, 16) if world % size == 0])
    groups = _Groups(world)
    inner = groups.add([range(first, first + split) for first in range(0, world, split)], "EXPERT_PARALLEL")
    outer = groups.add([range(first, world, split) for first in range(split)], "EXPERT_DATA_PARALLEL")
    layers, steps = pick.randint(2, 4), pick.randint(2, 3)
    programs = []
    for rank in range(world):
        program: list[Step] = []
        for _ in range(steps):
            for _ in range(layers):
                program += [KERNEL, Step("call", inner[rank], "all_gather", 8), SYNC]
                program += [Step("call", inner[rank], "all_to_all_single", 512), KERNEL]
                program += [Step("call", inner[rank], "all_to_all_single", 512), KERNEL]
            if len({*outer.values()}) < world:
                program += [Step("call", outer[rank], "all_reduce", 800, waits=False)]
            program += [
                Step("call", 0, "all_reduce", 2000, waits=False),
                Step("call", 0, "all_reduce", 1),
                KERNEL,
                SYNC,
            ]
        programs.append(program)
    return groups.mesh(), programs


def pipeline(pick: Random, world: int) -> Shape:
    """Stages that send to each other, each of several replicas, whose layers may be split over GPUs."""
    split = pick.choice([size for size in (1, 2, 4) if world % (4 * size) == 0])
    stages = pick.choice([size for size in (2, 4, 8) if world % (size * split) == 0])
    replicas = world // (split * stages)
    groups = _Groups(world)

    def number(stage: int, replica: int, index: int) -> int:
        return (stage * replicas + replica) * split + index

    columns = [(replica, index) for replica in range(replicas) for index in range(split)]
    inner = groups.add(
        [[number(s, r, t) for t in range(split)] for s in range(stages) for r in range(replicas)], "TENSOR_PARALLEL"
    )
    outer = groups.add(
        [[number(s, r, t) for r in range(replicas)] for s in range(stages) for t in range(split)], "DATA_PARALLEL"
    )
    along = groups.add([[number(s, r, t) for s in range(stages)] for r, t in columns], "PIPELINE_PARALLEL")
    ends = groups.add([[number(0, r, t), number(stages - 1, r, t)] for r, t in columns], "EMBEDDING")
    batches, is_batched = stages * pick.randint(1, 2), pick.random() < 0.6
    steps = pick.randint(2, 3)
    programs = []
    for rank in range(world):
        stage = rank // (replicas * split)
        layer = [KERNEL]
        if split > 1:
            layer += [Step("call", inner[rank], "all_reduce", 4096), KERNEL]
        schedule = _one_forward_one_backward if is_batched else _all_forward_first
        program: list[Step] = []
        for _ in range(steps):
            program += schedule(layer, along[rank], rank, stage, stages, batches, replicas * split)
            if replicas > 1:
                program += [KERNEL, Step("call", outer[rank], "all_reduce", 3000, waits=False)]
            if stage in {0, stages - 1}:
                program += [Step("call", ends[rank], "all_reduce", 700)]
            program += [Step("call", 0, "all_reduce", 1), KERNEL, SYNC]
        programs.append(program)
    return groups.mesh(), programs


def _all_forward_first(
    layer: list[Step], group: int, rank: int, stage: int, stages: int, batches: int, apart: int
) -> list[Step]:
    """Single sends, which are not waited for, and receives, which are."""
    program: list[Step] = []
    for _ in range(batches):
        if stage > 0:
            program.append(Step("recv", group, size=9000, peer=rank - apart))
        program += layer
        if stage < stages - 1:
            program.append(Step("send", group, size=9000, peer=rank + apart, waits=False))
    for _ in range(batches):
        if stage < stages - 1:
            program.append(Step("recv", group, size=9000, peer=rank + apart))
        program += layer
        if stage > 0:
            program.append(Step("send", group, size=9000, peer=rank - apart, waits=False))
    return program


def _one_forward_one_backward(
    layer: list[Step], group: int, rank: int, stage: int, stages: int, batches: int, apart: int
) -> list[Step]:
    """As Megatron has it: what goes to a neighbour and what comes from it are one batch."""
    program: list[Step] = []
    before, behind = rank - apart, rank + apart
    is_first, is_last = stage == 0, stage == stages - 1

    def batch(*parts: tuple[str, int]) -> None:
        wanted = tuple((do, peer) for do, peer in parts if not (is_first and peer == before))
        wanted = tuple((do, peer) for do, peer in wanted if not (is_last and peer == behind))
        if wanted:
            program.append(Step("batch", group, size=9000, parts=wanted))

    warm = min(stages - stage - 1, batches)
    for _ in range(warm):
        batch(("recv", before))
        program.extend(layer)
        batch(("send", behind))
    rest = batches - warm
    if rest:
        batch(("recv", before))
    for index in range(rest):
        program.extend(layer)
        batch(("send", behind), ("recv", behind))
        program.extend(layer)
        if index == rest - 1:
            batch(("send", before))
        else:
            batch(("send", before), ("recv", before))
    for _ in range(warm):
        batch(("recv", behind))
        program.extend(layer)
        batch(("send", before))
    return program


SHAPES = {"data": data, "fsdp": fsdp, "tensor": tensor, "expert": expert, "pipeline": pipeline}
