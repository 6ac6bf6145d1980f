"""saferun.debug in one gloo job: the import of torch is what costs, so all of it is in there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from saferun.api.script.device_comparison import compare_devices
from saferun.api.script.rank_agreement import _hash, _tensors, compare_across_ranks
from tests.process.launching import running

PROGRAM = """
import math, os, random, sys, time
os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(os.getcwd(), "inductor")
import saferun
assert "torch" not in sys.modules
debug = saferun.debug
assert "torch" not in sys.modules
debug.locked_print("before torch")
assert "host" in debug.memory_line()
debug.barrier(5)
debug.print_in_order("alone") if os.environ["RANK"] == "0" else None
import torch
import torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
HALF, LAST = SIZE // 2, SIZE - 1
# Halves of the ranks: pairs of four.
halves = [dist.new_group(list(range(HALF))), dist.new_group(list(range(HALF, SIZE)))]
half = halves[RANK // HALF]
several = half if HALF > 1 else None
# How the texts name the rank HALF and the others, rank 1 and the others, and all but rank 0.
ODD, ONE, REST = {
    2: ("rank 0; rank 1", "rank 0; rank 1", "rank 1"),
    4: ("ranks 0-1, 3; rank 2", "ranks 0, 2-3; rank 1", "ranks 1-3"),
}[SIZE]

def raised(kind, call, *arguments, **named):
    try:
        call(*arguments, **named)
    except kind as error:
        return error
    raise AssertionError(f"{call} did not raise {kind}")

# Meetings
for _ in range(3):
    debug.barrier(60)
    debug.barrier(60, group=half)
assert debug.all_reduce_check(60) >= 0
assert debug.all_reduce_check(60, group=half) >= 0
debug.print_in_order("I am", RANK)
debug.print_in_order("two\\nlines", group=several)
if RANK != LAST:
    error = raised(debug.RanksMissingError, debug.barrier, 1.5, what="the third epoch")
    assert error.ranks == (LAST,)
    said = f"the third epoch: rank {LAST} did not come within 1.5 s; {LAST} of {SIZE} ranks did"
    assert str(error) == said, str(error)
    assert isinstance(error, TimeoutError)
debug.barrier(60)
if RANK in (0, LAST):
    other = halves[1 - RANK // HALF]
    assert "not in this group" in str(raised(ValueError, debug.barrier, 5, group=other))
if RANK == 0:
    # The others do not come: it is said before the collective is begun.
    assert raised(debug.RanksMissingError, debug.all_reduce_check, 0.5, group=several).ranks == (1,)

# Agreement
torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).eval()
assert debug.compare_across_ranks(model) == ""
assert debug.compare_across_ranks(torch.ones(0)) == ""
assert debug.compare_across_ranks([torch.ones(2, dtype=torch.bfloat16), torch.tensor(True)]) == ""
if RANK == HALF:
    with torch.no_grad():
        model[1].weight[1] += 1e-7
        model[2].bias[0] = math.nan
found = debug.compare_across_ranks(model)
assert found == f"'1.weight' is the first of 2 of 9 that differ; the same have: {ODD}", found
in_half = found.replace(ODD, "rank 2; rank 3") if SIZE == 4 and RANK >= 2 else ""
assert debug.compare_across_ranks(model, group=half) == in_half
found = debug.compare_across_ranks({"a": torch.ones(1), **({} if RANK else {"b": torch.ones(1)})})
assert found == f"'b' is the first of 1 of 2 that differ; the same have: rank 0; {REST}: missing", found
random.seed(5)
if "numpy" in sys.modules:
    sys.modules["numpy"].random.seed(5)
debug.assert_same_rng()
if RANK == 1:
    random.random()
error = raised(AssertionError, debug.assert_same_rng)
assert "'random' is the first" in str(error) and ONE in str(error), error

# Layouts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
mesh = init_device_mesh("cpu", (HALF, 2), mesh_dim_names=("dp", "tp"))
text = debug.describe_mesh(mesh)
assert text.startswith(f"mesh of {SIZE} ranks on cpu: dp {HALF}, tp 2\\n"), text
assert f"rank {RANK} is at dp {RANK // 2}, tp {RANK % 2}" in text, text
assert f"  tp: in a group with ranks {RANK // 2 * 2}, {RANK // 2 * 2 + 1}" in text, text
tensor = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0), Replicate()])
text = debug.describe_dtensor(tensor)
placements = f"sharded by dimension 0 over dp ({HALF}), replicated over tp (2)"
assert text.startswith(f"DTensor [8, 6] float32: {placements};"), text
assert text.endswith(f"; this rank has [{8 // HALF}, 6]"), text
assert debug.describe_dtensor(torch.ones(2)) == "plain tensor [2] float32 on cpu"
from torch.distributed.fsdp import fully_shard
layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
fully_shard(layers[0], mesh=init_device_mesh("cpu", (SIZE,)))
text = debug.fsdp_coverage(layers)
assert "sharded: 2 parameters, 72 elements (52.9 %)" in text, text
assert "left out: 1 parameters, 64 elements (47.1 %)\\n  1.weight: 64" in text, text
assert debug.compare_across_ranks(layers[0]) == ""

# Checks of values; no communication
net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
with torch.no_grad():
    net[0].weight[0, 0] = math.inf
for nan in (True, net):
    with debug.set_checks(anomaly=True, sync="warn", nan=nan):
        assert torch.is_anomaly_enabled()
        error = raised(FloatingPointError, net, torch.ones(3, 2))
        assert "'0' (Linear)" in str(error), error
        assert "3 of 6 elements of [3, 2]" in str(error), error
    assert not torch.is_anomaly_enabled()
    net(torch.ones(3, 2))
with debug.set_checks(nan=True):
    whole = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ModuleDict({"block": net})["block"])
    assert "of '1.0' (Linear) is" in str(raised(FloatingPointError, whole, torch.ones(3, 2)))
    assert "of Linear is" in str(raised(FloatingPointError, net[0], torch.ones(3, 2)))

class Drifts(torch.nn.Module):
    calls = 0
    def forward(self, x):
        Drifts.calls += 1
        return x + (Drifts.calls > 1)

drifting = torch.nn.Sequential(torch.nn.Linear(2, 2), Drifts(), torch.nn.ReLU())
text = debug.compare_devices(drifting, [torch.ones(3, 2)], ("cpu", "cpu"))
assert text == "'1' (Drifts) differs first between cpu and cpu: 6 of 6 elements of [3, 2], by 1 at most", text
assert debug.compare_devices(drifting, [torch.ones(3, 2)], ("cpu", "cpu")) == ""
inputs = [torch.ones(2), {"z": torch.ones(2)}]
assert debug.compare_devices(lambda x, y: {"sum": x + y["z"]}, inputs, ("cpu", "cpu")) == ""
for _ in range(20):
    debug.locked_print("x" * 2000 + str(RANK))
debug.barrier(60)
dist.destroy_process_group()
print("well", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_does_what_it_says(tmp_path: Path, ranks: int) -> None:
    """Whatever does not fails its rank."""
    with running(tmp_path, PROGRAM, "--preflight", "off", "--prefix", "none", nproc=ranks) as job:
        assert job.wait(240) == 0, job.err
        assert job.out.count("well") == ranks
        assert "".join(f"rank {rank}: I am {rank}\n" for rank in range(ranks)) in job.out
        second_half = range(ranks // 2, ranks)
        assert "".join(f"rank {rank}: two\nrank {rank}: lines\n" for rank in second_half) in job.out
        lines = [line for line in job.out.splitlines() if line.startswith("xx")]
        assert len(lines) == 20 * ranks
        assert {len(line) for line in lines} == {2001}


def test_a_state_dict_is_compared_whatever_is_in_it() -> None:
    """What has bits is compared by them; the rest is left out. Each of these once ended in an exception."""
    import torch

    class Counts(torch.nn.Linear):
        def get_extra_state(self) -> object:
            return 3

        def set_extra_state(self, state: object) -> None:
            assert state == 3

    state = Counts(2, 2).state_dict()
    assert not isinstance(state["_extra_state"], torch.Tensor)
    turned = torch.tensor([1 + 2j, 3j])
    odd = {"none": None, "meta": torch.ones(2, device="meta"), "sparse": torch.eye(2).to_sparse()}
    views = {"conj": turned.conj(), "neg": turned.conj().imag}
    assert compare_across_ranks({**state, **odd, **views}) == ""
    assert [name for name, _ in _tensors({**state, **odd, **views})] == ["weight", "bias", "conj", "neg"]
    assert _hash(turned.conj()) == _hash(turned.conj().resolve_conj()) != _hash(turned)
    assert _hash(turned.conj().imag) == _hash(torch.tensor([-2.0, -3.0])) != _hash(turned.imag)


class Batch(NamedTuple):
    """What a data loader may return."""

    x: Any
    y: Any


def test_devices_are_compared_where_the_inputs_are_a_named_tuple() -> None:
    import torch

    def sum_of(batch: Batch) -> Batch:
        return Batch(batch.x + batch.y, batch.y)

    assert compare_devices(sum_of, [Batch(torch.ones(2), torch.ones(2))], ("cpu", "cpu")) == ""


@pytest.mark.slow
def test_a_collective_that_hangs_names_who_has_not_come_through(tmp_path: Path) -> None:
    """The ranks are all there, and the backend of one is stuck in another collective of the group."""
    program = """
import saferun, torch, torch.distributed as dist
dist.init_process_group("gloo")
debug, RANK = saferun.debug, dist.get_rank()
if RANK == 1:
    real = dist.all_reduce
    dist.all_reduce = lambda *args, **named: real(torch.ones(1), group=alone, async_op=True)
alone = dist.new_group([1])
try:
    debug.all_reduce_check(2)
except debug.RanksMissingError as error:
    assert error.ranks == (0,), error
    print("named", flush=True)
import os
os._exit(0)
"""
    with running(tmp_path, program, "--preflight", "off", nproc=2) as job:
        assert job.wait(240) == 0, job.err
        assert job.out.count("named") == 2
