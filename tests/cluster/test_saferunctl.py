"""saferunctl on a job of two hosts that share the run directory, from a third place that sees no process of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from tests.cluster.jobs import Way, assert_nothing_left, start
from tests.process.launching import DEADLINE_S, REPOSITORY, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

IN_TURN = """
for number in range(8):
    if RANK == number % WORLD:
        print("line", number, flush=True)
        tell(f"said{number}")
    await_release(f"after{number}")
tell("ready")
await_release("end")
print("last", RANK)
"""


def begin(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The command, in the directory that the hosts share."""
    return subprocess.Popen(
        [sys.executable, "-m", "saferun.ctl", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    """What it prints, which has to be without errors."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    return out


def only_run(folder: Path) -> dict[str, Any]:
    """The only run that is listed."""
    (run,) = json.loads(answer(begin(folder, "list", "--here", "--json")))["runs"]
    assert isinstance(run, dict)
    return run


def lines_in(text: str) -> list[str]:
    """The lines of the ranks, without what they say to the test."""
    return [line for line in text.splitlines() if re.search(r"\] (line|last) ", line)]


def test_a_job_of_two_hosts_is_listed_read_followed_and_kept_while_it_lives(cluster: Cluster, tmp_path: Path) -> None:
    """Its output is in the order of time over both hosts; it is not removed before it has ended."""
    job = start(cluster, Way("by_hand"), tmp_path, IN_TURN, hosts=cluster.hosts[:2])
    wanted = []
    for number in range(8):
        job.hear(f"said{number}", 1)
        rank = number % 4
        wanted.append(f"[node{1 + rank // 2}:{rank}] line {number}")
        until(lambda: lines_in(answer(begin(tmp_path, "logs"))) == wanted, f"the files have line {number}")
        job.release(f"after{number}")
    job.hear("ready", 4)
    follower = begin(tmp_path, "logs", "-f")
    assert only_run(tmp_path)["state"] == "running"
    assert lines_in(answer(begin(tmp_path, "logs", "--host", "node2"))) == [line for line in wanted if "node2" in line]
    answer(begin(tmp_path, "clean", "--keep", "0"))
    assert only_run(tmp_path)["state"] == "running"
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    followed = lines_in(answer(follower))
    assert followed[:8] == wanted
    assert sorted(line.split("] ")[1] for line in followed[8:]) == [f"last {rank}" for rank in range(4)]
    assert only_run(tmp_path)["state"] == "succeeded"
    assert_nothing_left(cluster)
    answer(begin(tmp_path, "clean", "--keep", "0"))
    assert json.loads(answer(begin(tmp_path, "list", "--here", "--json"))) == {"runs": []}


def test_two_runs_of_two_hosts_are_compared(cluster: Cluster, tmp_path: Path) -> None:
    for options in ((), ("--max-restarts", "2")):
        job = start(cluster, Way("by_hand"), tmp_path, "print('x')", *options, hosts=cluster.hosts[:2])
        assert set(job.finish()) == {0}, job.story("failed")
    names = sorted(path.name for path in (tmp_path / "saferun_runs").glob("[0-9]*"))
    differences = json.loads(answer(begin(tmp_path, "diff", *names, "--json")))["differences"]
    assert differences["settings"]["max_restarts"] == ["0", "2"]
    assert "hosts" not in differences
    assert_nothing_left(cluster)
