"""The pickle that torch writes of its Flight Recorder, read without anything but plain values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from saferun.captures.plain_pickle import read_pickle
from saferun.captures.recorder_content import read_groups

PROGRAM = """
import os, pickle, sys, time
import torch, torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)

def step():
    dist.all_reduce(torch.ones(3))

step()
dist.barrier()
# Another thread notes that a call is over.
while not all(entry["retired"] for entry in pickle.loads(_dump_fr_trace())["entries"]):
    time.sleep(0.01)
with open(sys.argv[1], "wb") as file:
    file.write(_dump_fr_trace())
os._exit(0)
"""


@pytest.mark.slow
def test_what_torch_writes_is_plain_values(tmp_path: Path) -> None:
    """It names no class: neither for lists nor for dictionaries."""
    script, path = tmp_path / "train.py", tmp_path / "flight_recorder_0"
    script.write_text(PROGRAM)
    subprocess.run([sys.executable, str(script), str(path)], check=True, timeout=300)
    (group,) = read_groups(read_pickle(path.read_bytes()), "fr_trace_json")
    assert (group.group, group.enqueued, group.completed) == ("gloo:0", 2, 2)
    call = group.calls[0]
    assert (call.op, call.sizes, call.output_sizes, call.dtypes) == ("all_reduce", "[[3]]", "[[3]]", "Float -> Float")
    assert ("step", str(script)) in {(frame.function, frame.file) for frame in call.frames}
