"""saferunctl on a job of two hosts that share the run directory, from a third place that sees no process of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

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


@pytest.mark.slow
def test_two_runs_of_two_hosts_are_compared(cluster: Cluster, tmp_path: Path) -> None:
    for options in ((), ("--max-restarts", "2")):
        job = start(cluster, Way("by_hand"), tmp_path, "print('x')", *options, hosts=cluster.hosts[:2])
        assert set(job.finish()) == {0}, job.story("failed")
    found = (tmp_path / "saferun-runs").glob("[0-9]*")
    # Two runs of the same second are in no order by name.
    runs = sorted(found, key=lambda path: json.loads((path / "run.json").read_text(encoding="utf-8"))["started_at"])
    names = [path.name for path in runs]
    differences = json.loads(answer(begin(tmp_path, "diff", *names, "--json")))["differences"]
    assert differences["settings"]["max_restarts"] == ["0", "2"]
    assert "hosts" not in differences
    assert_nothing_left(cluster)


FAIL_ON_THE_LAST_HOST = """
print("rank", RANK, flush=True)
tell("ready")
await_release("fail")
if RANK == 3:
    raise RuntimeError("this rank was asked to fail")
stay()
"""


@pytest.mark.slow
def test_four_hosts_are_listed_read_compared_reported_and_removed(cluster: Cluster, tmp_path: Path) -> None:
    """A job that succeeds and one that fails on the last host: each verb sees all four hosts from outside of them."""
    good = start(cluster, Way("by_hand"), tmp_path, "print('rank', RANK)", "--prefix", "{host}/{local_rank}> ", nproc=1)
    assert set(good.finish()) == {0}, good.story("failed")
    wanted = [f"node{rank + 1}/0> rank {rank}" for rank in range(4)]
    assert sorted(answer(begin(tmp_path, "logs")).splitlines()) == wanted
    assert answer(begin(tmp_path, "logs", "--rank", "2", "--prefix", "none")) == "rank 2\n"

    bad = start(cluster, Way("by_hand"), tmp_path, FAIL_ON_THE_LAST_HOST, nproc=1)
    bad.hear("ready", 4)
    states = [run["state"] for run in json.loads(answer(begin(tmp_path, "list", "--here", "--json")))["runs"]]
    assert sorted(states) == ["running", "succeeded"]
    bad.release("fail")
    assert set(bad.finish()) == {1}, bad.story("did not fail")
    runs = json.loads(answer(begin(tmp_path, "list", "--here", "--json")))["runs"]
    assert sorted(run["state"] for run in runs) == ["failed", "succeeded"]
    (headline,) = (run["headline"] for run in runs if run["state"] == "failed")
    assert "rank 3 (node4" in headline

    lines = answer(begin(tmp_path, "logs", "--grep", "^rank")).splitlines()
    assert sorted(lines) == [f"[node{rank + 1}:{rank}] rank {rank}" for rank in range(4)]
    report = json.loads(answer(begin(tmp_path, "report", "--json")))
    assert report["incidents"][-1]["first_failure"]["rank"] == 3
    assert "this rank was asked to fail" in answer(begin(tmp_path, "report"))
    answer(begin(tmp_path, "report", "--html", "--output", str(tmp_path / "page.html")))
    page = (tmp_path / "page.html").read_text()
    assert all(f"node{number}" in page for number in (1, 2, 3, 4))

    found = (tmp_path / "saferun-runs").glob("[0-9]*")
    # Two runs of the same second are in no order by name.
    runs = sorted(found, key=lambda path: json.loads((path / "run.json").read_text(encoding="utf-8"))["started_at"])
    names = [path.name for path in runs]
    differences = json.loads(answer(begin(tmp_path, "diff", *names, "--json")))["differences"]
    assert differences["settings"]["prefix"] == ["{host}/{local_rank}> ", "null"]
    assert "hosts" not in differences
    answer(begin(tmp_path, "clean", "--keep", "0"))
    assert json.loads(answer(begin(tmp_path, "list", "--here", "--json"))) == {"runs": []}
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_of_two_hosts_the_leader_has_the_port_for_metrics(cluster: Cluster, tmp_path: Path) -> None:
    """The same options everywhere: where the other one has its port taken, nothing comes of it."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, STAY_UNTIL_RELEASED, "--metrics-port", ":9400", hosts=hosts)
    job.hear("ready", 4)
    asked = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:9400/metrics', timeout=20).read().decode())"

    def numbers() -> str:
        done = hosts[0].run((sys.executable, "-c", asked), check=False)
        return done.stdout

    until(lambda: 'host="node1"} 2' in numbers(), "the leader answers")
    other = hosts[1].run((sys.executable, "-c", asked), check=False)
    assert other.returncode == 1
    assert "Connection refused" in other.stderr
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    assert_nothing_left(cluster)


STAY_UNTIL_RELEASED = """
tell("ready")
await_release("end")
"""
