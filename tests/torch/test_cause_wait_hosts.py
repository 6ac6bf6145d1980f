"""After a victim's failure all hosts wait for the cause, and none of them longer than until it is shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import Job, until
from tests.torch.several import hosts

if TYPE_CHECKING:
    from pathlib import Path

QUIET = ("--env-profile", "minimal", "--shutdown-timeout", "2")
# Were it not for the news of the cause, host 0 would wait longer than any test.
LONG = ("--cause-wait", "3600")
# The last rank cleans up after an error of its own; rank 0 has lost it. The others do something else than wait.
PROGRAM = """
from rank import *
if RANK == 0:
    tell("ready")
    await_release("fail")
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29612")
def clean_up():
    tell("cleans up")
    await_release("end")
if RANK == int(os.environ["WORLD_SIZE"]) - 1:
    try:
        raise ValueError("a label is out of range")
    finally:
        clean_up()
tell("ready")
stay()
"""
# The same by gloo itself.
GLOO = """
from rank import *
import torch, torch.distributed as dist
def clean_up():
    dist.destroy_process_group()
    tell("cleans up")
    await_release("end")
dist.init_process_group("gloo")
dist.barrier()
tell("ready")
await_release("fail")
if RANK == 1:
    try:
        raise ValueError("a label is out of range")
    finally:
        clean_up()
dist.all_reduce(torch.ones(1))
"""


def await_judgement(job: Job) -> None:
    """A host can judge failures; what fails before ends the attempt on all hosts at once."""
    until(lambda: job.has_happened("ModulesImported"), "failures can be judged")


def await_wait(job: Job) -> None:
    until(lambda: "waiting up to 3600 s for the error of" in job.err, "it waits for the cause")


def failure(job: Job) -> dict[str, Any]:
    """The incident of the job's report."""
    (incident,) = json.loads((job.run_dir / "report.json").read_text())["incidents"]
    found: dict[str, Any] = incident
    return found


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but([1, 2], "1"))
def test_the_host_that_shows_the_cause_ends_the_wait_of_all(tmp_path: Path, count: int) -> None:
    """Whether it has other ranks or not."""
    ranks = ("2", str(count))
    with hosts(tmp_path, PROGRAM, *QUIET, *LONG, nproc=None, each=lambda i: ("--nproc-per-node", ranks[i])) as jobs:
        jobs[0].hear("ready", 2)
        if count > 1:
            jobs[1].hear("ready")
        jobs[1].hear("cleans up")
        for job in jobs:
            await_judgement(job)
        jobs[0].release("fail")
        for job in jobs:
            await_wait(job)
        jobs[1].release("end")
        assert [job.wait() for job in jobs] == [1, 1]
        assert failure(jobs[0])["cause"]["ranks"] == [1 + count], jobs[0].err
        assert failure(jobs[0])["lost_peers"][0]["ranks"] == [0]


@pytest.mark.slow
def test_gloo_on_two_hosts(tmp_path: Path) -> None:
    with hosts(tmp_path, GLOO, *QUIET, *LONG) as jobs:
        for job in jobs:
            job.hear("ready")
            await_judgement(job)
        for job in jobs:
            job.release("fail")
        jobs[1].hear("cleans up")
        until(lambda: "waiting up to 3600 s for the error of rank 1" in jobs[1].err, "rank 1 is given a moment")
        jobs[1].release("end")
        assert [job.wait() for job in jobs] == [1, 1]
        assert failure(jobs[0])["cause"]["ranks"] == [1], jobs[0].err
        assert "failed because of it: rank 0 on " in jobs[0].err
