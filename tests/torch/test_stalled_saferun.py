"""A saferun that does not run for a while (Ctrl-Z, a suspended machine) has seen nothing, and draws no conclusion."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import Job, running, state_of, until
from tests.torch.several import hosts

if TYPE_CHECKING:
    from pathlib import Path

# Says every hundredth of a second that it is at work, in memory and without output: nothing waits for saferun.
WORK = """
import os
import time

import rank

rank.tell("ready")
done = 0
while not os.path.exists(f"{rank.FOLDER}/release.end"):
    done += sum(range(1000))
    time.sleep(0.01)
print("done", flush=True)
"""
# Sleeps all the time: only a watch that runs may call that a hang, when it has seen it for as long as it takes.
SLEEP = """
import rank
import time

rank.tell("ready")
while not rank.os.path.exists(f"{rank.FOLDER}/release.end"):
    time.sleep(0.2)
print("done", flush=True)
"""


def await_watch(job: Job) -> None:
    until(lambda: job.has_happened("ModulesImported"), "the watch begins")


def stall(job: Job, for_s: float) -> None:
    """Stop saferun itself, and let it go on later."""
    job.send(signal.SIGSTOP)
    until(lambda: state_of(job.process.pid) == "T", "saferun has stopped")
    time.sleep(for_s)  # what passes meanwhile is what is tested
    job.send(signal.SIGCONT)


@pytest.mark.parametrize("program", [pytest.param(WORK, marks=pytest.mark.slow), SLEEP], ids=["work", "sleep"])
@pytest.mark.parametrize(
    ("hang_timeout_s", "stalled_s"), [(4.0, 7.0), pytest.param(10.0, 35.0, marks=pytest.mark.slow)]
)
def test_a_saferun_that_was_stopped_calls_nothing_a_hang(
    tmp_path: Path, hang_timeout_s: float, stalled_s: float, program: str
) -> None:
    """It was stopped for longer than ranks may be quiet. They end as they would have, and so does the launch."""
    options = ("--hang-timeout", str(hang_timeout_s), "--on-hang", "stop")
    with running(tmp_path, program, *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        await_watch(job)
        stall(job, stalled_s)
        job.release("end")
        assert job.wait() == 0, job.err
        assert job.out.count("done\n") == 2
        assert "hang" not in job.err
        assert not job.has_happened("HangSuspected")
        assert len([line for line in job.err.splitlines() if line.startswith("saferun:")]) <= 1, job.err


@pytest.mark.slow
def test_ranks_that_ended_meanwhile_are_reported_as_they_ended(tmp_path: Path) -> None:
    """A rank that failed while saferun was stopped is the one that failed; the others are stopped because of it."""
    program = """
import rank
rank.tell("ready")
rank.await_release("fail")
if rank.RANK == 1:
    raise ValueError("meanwhile")
rank.stay()
"""
    with running(tmp_path, program, "--hang-timeout", "4", nproc=2, store=False) as job:
        (first, second) = job.hear("ready", 2)
        await_watch(job)
        job.send(signal.SIGSTOP)
        until(lambda: state_of(job.process.pid) == "T", "saferun has stopped")
        job.release("fail")
        pid = first.pid if first.rank == 1 else second.pid
        until(lambda: not state_of(pid), "the rank has ended")
        job.send(signal.SIGCONT)
        assert job.wait() == 1
        assert "rank 1" in job.err
        assert "ValueError: meanwhile" in job.err
        assert "hang" not in job.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host_timeout_s", "stalled_s"), [(3.0, 9.0), pytest.param(30.0, 60.0, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["leader", "other"])
def test_a_host_whose_saferun_was_stopped_is_not_lost(
    tmp_path: Path, which: int, host_timeout_s: float, stalled_s: float
) -> None:
    """Its coordinator beats on, and its ranks work: nothing is wrong with the host."""
    options = ("--host-timeout", str(host_timeout_s), "--hang-timeout", "6", "--on-hang", "stop")
    with hosts(tmp_path, WORK, *options) as jobs:
        for job in jobs:
            job.hear("ready")
            await_watch(job)
        stall(jobs[which], stalled_s)
        assert [job.process.poll() for job in jobs] == [None, None], jobs[0].err + jobs[1].err
        for job in jobs:
            job.release("end")
        assert [job.wait(60.0) for job in jobs] == [0, 0]
        said = jobs[0].err + jobs[1].err
        assert "lost" not in said
        assert "hang" not in said
        assert said.count("warning: ") <= 1, said
