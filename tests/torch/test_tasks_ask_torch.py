"""One saferun per rank, with what only torch knows: each of them asks torch for itself, as each torchrun does."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.launching import REPOSITORY, STAY, Job, until
from tests.torch.several import hosts
from tests.torch.test_several_hosts import mpi_task

# A task whose torch never answers ends by itself, and the test with it.
_IMPATIENT = ("--start-timeout", "120")
# Imported by the process that has torch, before it is asked which CPUs are near a GPU: GPU i is near CPU 10 + i.
_PLUGIN = """
import os
import time
import torch.numa.binding
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

torch.cuda.device_count = lambda: 8
torch.numa.binding._get_logical_cpus_to_bind_to = lambda *, gpu_index, numa_options: {10 + gpu_index}

class Mine(DefaultLogsSpecs):
    def reify(self, envs):
        for environ in envs.values():
            environ["SEEN_BY_PLUGIN"] = environ["RANK"]
            if environ["RANK"] == os.environ.get("REFUSED_RANK"):
                raise ValueError("no logs for this rank")
            if environ["RANK"] == os.environ.get("SILENT_RANK"):
                open(os.environ["LAUNCHING_FOLDER"] + "/asked", "w").close()
                time.sleep(10_000)
        return super().reify(envs)
"""
_LOGS = ("--logs-specs", "mine", "--log-dir", "logs")
_NUMACTL = '#!/bin/sh\nexport BOUND_TO="$1"\nshift\nexec "$@"\n'
_USE_TIMER = """
from rank import *
import json

def set_timer(after_s):
    '''What torch's FileTimerClient writes.'''
    request = {"version": 1, "pid": os.getpid(), "scope_id": "step", "signal": signal.SIGKILL}
    request["expiration_time"] = time.time() + after_s
    fd = os.open(os.environ["TORCHELASTIC_TIMER_FILE"], os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, json.dumps(request).encode() + b"\\n")
    os.close(fd)
"""


def plugged(folder: Path) -> dict[str, str]:
    """An environment with an entry point for --logs-specs, GPUs, and a numactl that shows what it was asked for."""
    (folder / "site" / "mine-1.0.dist-info").mkdir(parents=True)
    (folder / "site" / "saferun_test_plugin.py").write_text(_PLUGIN)
    (folder / "site" / "mine-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n"
    )
    (folder / "site" / "mine-1.0.dist-info" / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nmine = saferun_test_plugin:Mine\n"
    )
    (folder / "bin").mkdir()
    (folder / "bin" / "numactl").write_text(_NUMACTL)
    (folder / "bin" / "numactl").chmod(0o755)
    return {
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{REPOSITORY}",
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
    }


def said_by(job: Job, name: str) -> list[str]:
    """What the rank of a task printed behind a name."""
    return [line.split(f"{name} ", 1)[1] for line in job.out.splitlines() if f"{name} " in line]


@contextlib.contextmanager
def tasks(folder: Path, program: str, *options: str, **environ: str) -> Iterator[list[Job]]:
    """The two tasks of a step on one host, each with one rank."""
    with hosts(
        folder,
        program,
        *_IMPATIENT,
        *options,
        place=False,
        nproc=None,
        environs=lambda i: {**mpi_task(i, 2, 7), **environ},
    ) as jobs:
        yield jobs


def test_each_task_gets_what_torch_knows_of_its_own_rank(tmp_path: Path) -> None:
    """Its CPUs are those near the GPU of its local rank, and its timers, logs and events are its own."""
    program = f"""
{_USE_TIMER}
set_timer(600.0)
print("place", RANK, os.environ["BOUND_TO"], os.environ["SEEN_BY_PLUGIN"], flush=True)
print("timer", os.environ["TORCHELASTIC_TIMER_FILE"], flush=True)
"""
    timed = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "timer")}
    options = ("--numa-binding", "node", *_LOGS, "--event-log-handler", "console")
    with tasks(tmp_path, program, *options, **plugged(tmp_path), **timed) as jobs:
        assert [job.wait(180.0) for job in jobs] == [0, 0]
        for rank, job in enumerate(jobs):
            assert said_by(job, "place") == [f"{rank} --physcpubind={10 + rank} {rank}"]
            events = [line for line in job.err.splitlines() if "torchelastic.worker.status" in line]
            assert [f'"global_rank": {rank}' in line for line in events if '"WORKER"' in line] == [True, True]
            job.assert_nothing_left(timeout_s=20.0)
        assert [said_by(job, "timer") for job in jobs] == [[f"{tmp_path}/timer"], [f"{tmp_path}/timer.1"]]
        assert not list(tmp_path.glob("timer*"))


def test_a_timer_that_expires_in_one_task_costs_the_others_nothing(tmp_path: Path) -> None:
    """Torch's server of timers kills itself with the rank; the coordinator, with the store of all ranks, lives on."""
    program = f"""
{_USE_TIMER}
if ATTEMPT == 0:
    set_timer(0.0 if RANK == 1 else 600.0)
    stay()
set_timer(600.0)
print("attempt", ATTEMPT, flush=True)
"""
    options = ("--max-restarts", "1")
    timed = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "timer")}
    with tasks(tmp_path, program, *options, **timed) as jobs:
        assert [job.wait(240.0) for job in jobs] == [0, 0]
        assert [said_by(job, "attempt") for job in jobs] == [["1"], ["1"]]
        assert "starting again at once (restart 1 of 1)" in jobs[0].err
        assert "the process of task 1 that has torch ended (killed by SIGKILL); torch's timers" in jobs[1].err


def test_what_torch_refuses_one_task_ends_the_step_with_the_reason(tmp_path: Path) -> None:
    """The others have begun to start their ranks, which would wait for its own."""
    with tasks(tmp_path, STAY, *_LOGS, **plugged(tmp_path), REFUSED_RANK="1") as jobs:
        assert [job.wait(180.0) for job in jobs] == [1, 2]
        assert "could not start its ranks: ValueError: no logs for this rank" in jobs[0].err


def test_what_torch_refuses_all_tasks_is_said_once(tmp_path: Path) -> None:
    """They share a console."""
    with tasks(tmp_path, STAY, "--event-log-handler", "no-such-handler") as jobs:
        assert [job.wait(180.0) for job in jobs] == [2, 2]
        said = [job.err.count("there is no event handler 'no-such-handler'") for job in jobs]
        assert said == [1, 0]


# test_supervisor_retries.py and test_attempt_end.py have the parts of this.
@pytest.mark.slow
def test_a_task_that_torch_never_answers_ends_the_step(tmp_path: Path) -> None:
    """In vain it waits as long as it would for hosts; then the others hear of it."""
    options = ("--start-timeout", "1")
    with tasks(tmp_path, STAY, *_LOGS, *options, **plugged(tmp_path), SILENT_RANK="1") as jobs:
        assert [job.wait(180.0) for job in jobs] == [1, 1]
        assert "could not start its ranks: the preparation of the ranks timed out" in jobs[0].err


def test_a_task_that_leaves_while_it_asks_torch_ends_the_step(tmp_path: Path) -> None:
    """A signal ends it at once, as nothing of it runs yet; the ranks of the others wait for its own."""
    with tasks(tmp_path, STAY, *_LOGS, **plugged(tmp_path), SILENT_RANK="1") as jobs:
        jobs[0].hear("ready")
        until((jobs[1].folder / "asked").exists, "torch is asked")
        jobs[1].send(signal.SIGTERM)
        assert jobs[1].wait(60.0) == -signal.SIGTERM
        assert jobs[0].wait(120.0) == 1
        assert "is gone: that of rank 1 (local rank 1)" in jobs[0].err
