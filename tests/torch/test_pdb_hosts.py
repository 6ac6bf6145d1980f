"""``--pdb`` in a job of several hosts: one rank of the whole job is debugged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.test_ctl_ends_jobs import has_control_sockets
from tests.process.launching import until
from tests.process.test_ctl_attach import attached
from tests.torch.several import hosts

if TYPE_CHECKING:
    from pathlib import Path

WITH_TORCH = """
from rank import *
import torch.distributed as dist
dist.init_process_group("gloo")
"""
WITHOUT = """
from rank import *
"""
FAIL = """
tell("ready")
value = 900 + RANK
await_release("fail")
raise KeyError("labels")
"""


@pytest.mark.slow
@pytest.mark.parametrize("begin", [WITH_TORCH, WITHOUT], ids=["torch", "no torch"])
def test_the_first_rank_of_the_job_is_debugged_and_those_of_other_hosts_wait(tmp_path: Path, begin: str) -> None:
    """Were each host to have a debugger, the end of one would end the job in which the other one is still used."""
    with hosts(tmp_path, begin + FAIL, "--pdb", "--cause-wait", "0", "--preflight", "off") as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[1].release("fail")
        until(lambda: "rank 1 waits for input" in jobs[1].err, "rank 1 is in the debugger")
        jobs[0].release("fail")
        until(lambda: "rank 0 has failed, too, and waits: rank 1 is in the debugger" in jobs[0].out, "rank 0 waits")
        until(lambda: has_control_sockets(jobs[1].folder / "job", 1), "the control socket")
        with attached(jobs[1], "latest", "--rank", "1") as shell:
            until(lambda: "(Pdb) " in shell.text, "attached")
            shell.type(b"p value + 1\r")
            until(lambda: "\n902\r\n" in shell.text, "the debugger answers")
            shell.type(b"\x04")
            until(lambda: "rank 1 has ended" in shell.text, "it has ended")
        assert [job.wait() for job in jobs] == [1, 1]
        assert "waits for input" not in jobs[0].err
        assert "KeyError: 'labels'" in jobs[0].err
