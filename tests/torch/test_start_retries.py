"""Starts of real process groups that fail: tried again while not all have got through init_process_group, no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import running

if TYPE_CHECKING:
    from pathlib import Path

# A healthy machine needs a few seconds for each attempt, most of them for importing torch.
WITHIN_S = 120.0

BEGIN = """
from rank import *
import datetime
import torch
import torch.distributed as dist
path = f"{FOLDER}/attempts.{RANK}"
number = len(open(path).read()) if os.path.exists(path) else 0
open(path, "a").write("x")
tell("began")
"""
# Rank 1 fails twice as a system does whose sockets are not ready yet; rank 0 waits for it.
FLAKY = (
    BEGIN
    + """
if RANK == 1 and number < 2:
    raise dist.DistBackendError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:77, unhandled system error "
        "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\\n"
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
    )
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
one = torch.ones(1)
dist.all_reduce(one)
tell(f"sum {int(one)}")
dist.destroy_process_group()
"""
)
# The same words, from a rank that has trained already.
LATE = (
    BEGIN
    + """
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.all_reduce(torch.ones(1))
if RANK == 1:
    raise RuntimeError("NCCL error: unhandled system error, ncclSystemError: System call failed")
dist.all_reduce(torch.ones(1))
"""
)


@pytest.mark.slow
def test_a_start_that_fails_twice_and_then_works_needs_nobody(tmp_path: Path) -> None:
    """Each decision is a line with its reason; no restart is used up."""
    with running(tmp_path, FLAKY, "--retry-wait", "0.1", nproc=2) as job:
        assert job.wait(WITHIN_S) == 0
        assert {said.word for said in job.said() if said.word.startswith("sum")} == {"sum 2"}
        assert len(job.said("began")) == 6
        assert "(retry 1 of 3): " in job.err
        assert "(retry 2 of 3): " in job.err
        assert "retry 3 of 3" not in job.err
        rows = json.loads((job.run_dir / "report.json").read_text())["decisions"]
        assert [(row["next_step"], row["class"]) for row in rows] == [("retry", "nccl_system_error")] * 2


@pytest.mark.slow
def test_what_fails_after_the_start_is_not_tried_again(tmp_path: Path) -> None:
    """It has trained: that belongs to --max-restarts, as under torchrun."""
    with running(tmp_path, LATE, "--retry-wait", "0.1", nproc=2) as job:
        assert job.wait(WITHIN_S) == 1
        assert len(job.said("began")) == 2
        assert "starting again" not in job.err
