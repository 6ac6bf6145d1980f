"""One saferun per rank: the tasks of a host that start, fail and end at different times."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.ports import own_port
from tests.process.launching import STAY, Job, customized, in_saferun, running, until

# A file is made when this task looks for its head.
_NOTES_LOOK = (
    "import saferun.cluster.job_channel as channel\n"
    "    look = channel.connect_to_task\n"
    "    channel.connect_to_task = lambda *a: (open('looks', 'w').close(), look(*a))[1]"
)
# A file is made when this task has found a coordinator.
_NOTES_FOUND = (
    "import saferun.cluster.coordinator_client as client\n"
    "    attach = client.CoordinatorClient.attach\n"
    "    client.CoordinatorClient.attach = lambda *a: (attach(*a), open('found', 'w').close())[0]"
)
# This head says goodbye to its coordinator when the test lets it.
_LEAVES_LATE = (
    "import os, time, saferun.cluster.job_channel as channel\n"
    "    close = channel.JobChannel.close\n"
    "    def close_late(self):\n"
    "        open('leaves', 'w').close()\n"
    "        while not os.path.exists('may_leave'): time.sleep(0.01)\n"
    "        close(self)\n"
    "    channel.JobChannel.close = close_late"
)


class Step:
    """A step of Slurm with two tasks on one host."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._id = str(int.from_bytes(os.urandom(3), "big"))
        self.port = own_port()

    def start(self, task: int, program: str, *options: str, name: str = "", source: str = "", **more: Any) -> Job:
        """Start one of its tasks. ``source``: what it does beside; ``more``: goes to ``running``."""
        folder = self._folder / (name or f"task{task}")
        folder.mkdir()
        host = socket.gethostname()
        environ = {"SLURM_JOB_ID": self._id, "SLURM_STEP_ID": "0", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
        environ |= {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
        environ |= {"SLURM_STEP_NODELIST": host, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
        environ |= customized(folder, in_saferun(source)) if source else {}
        own = ("--scheduler", "slurm", "--master-port", str(self.port), "--preflight", "off")
        launch = running(folder / "launch", program, *own, *options, nproc=None, environ=environ, **more)
        return self._stack.enter_context(launch)

    def start_waiting(self, program: str, *options: str) -> Job:
        """Start task 1, and return when it looks for local rank 0."""
        job = self.start(1, program, *options, source=_NOTES_LOOK)
        until((job.folder / "job" / "looks").exists, "it looks for local rank 0 of its host")
        return job


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Step]:
    with contextlib.ExitStack() as stack:
        yield Step(tmp_path, stack)


def codes(jobs: Sequence[Job]) -> list[int]:
    return [job.wait() for job in jobs]


def test_a_port_that_is_in_use_ends_all_tasks_of_the_host_with_the_reason(step: Step) -> None:
    """Only local rank 0 finds it; the others would wait for it until the start timeout."""
    with socket.socket() as other:
        other.bind(("", step.port))
        other.listen()
        second = step.start_waiting(STAY, "--start-retries", "1")
        first = step.start(0, STAY, "--start-retries", "1")
        assert codes([first, second]) == [1, 1]
    for job in (first, second):
        assert f"saferun: port {step.port} on " in job.err
        assert "is in use by pid" in job.err
        assert "hint: stop that process" in job.err


@pytest.mark.parametrize("comes", ["before", "after"])
def test_the_next_launch_of_a_step_does_not_end_with_the_one_before(step: Step, comes: str) -> None:
    """``srun bash -c 'saferun a.py; saferun b.py'``: local rank 0 ends the first launch later than the others do."""
    first = [step.start(0, "", name="first0", source=_LEAVES_LATE), step.start(1, "", name="first1")]
    folder = first[0].folder / "job"
    assert first[1].wait() == 0
    until((folder / "leaves").exists, "local rank 0 ends the first launch")
    second: list[Job] = []
    if comes == "before":
        second.append(step.start(1, "", source=_NOTES_FOUND))
        until((second[0].folder / "job" / "found").exists, "it finds the coordinator of the first launch")
    (folder / "may_leave").touch()
    assert first[0].wait() == 0
    if comes == "after":
        second.append(step.start(1, ""))
    second.insert(0, step.start(0, "", name="second0"))
    assert codes(second) == [0, 0]
    assert [job.err for job in second if "gone" in job.err] == []
