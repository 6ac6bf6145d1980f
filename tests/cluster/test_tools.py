"""What is put around and into ranks (``--wrap``, ``--trace-calls``) in jobs over several hosts."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import Way, assert_nothing_left, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

END_WHEN_RELEASED = """
signal.signal(signal.SIGTERM, lambda *_: (tell("asked"), sys.exit(0)))
tell("ready")
await_release("end")
sys.exit(3 if RANK == int(sys.argv[1] if sys.argv[1:] else -1) else 0)
"""
HANGS = """
def load(number): return number
def step(number): return load(number)
def evaluate(): time.sleep(1000)
for number in range(50):
    step(number)
if RANK == 3:
    evaluate()
time.sleep(1000)
"""
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="no strace here")


def traced(folder: Path) -> set[str]:
    """The directories of the ranks that strace has written into."""
    return {path.parent.name for path in folder.glob("saferun-runs/*/*/attempt_0/rank_*/strace.txt")}


@needs_strace
@pytest.mark.parametrize("way", [Way("srun"), Way("srun", 2)], ids=["a-task-a-host", "a-task-a-rank"])
def test_ranks_of_a_host_run_under_a_tool_under_slurm(cluster: Cluster, tmp_path: Path, way: Way) -> None:
    """The others do not, and the end of each is its script's."""
    options = ("--wrap", "host:node2:strace", "--wrap", "0:nice -n 1")
    job = start(cluster, way, tmp_path, END_WHEN_RELEASED, *options, hosts=cluster.hosts[:2])
    job.hear("ready", 4)
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    assert traced(tmp_path) == {"rank_2", "rank_3"}
    assert_nothing_left(cluster)


@needs_strace
def test_scancel_reaches_the_scripts_under_their_tools(cluster: Cluster, tmp_path: Path) -> None:
    """And nothing is left of the tools."""
    job = start(cluster, Way("srun"), tmp_path, END_WHEN_RELEASED, "--wrap", "*:strace", hosts=cluster.hosts[:2])
    job.hear("ready", 4)
    job.until(lambda: traced(tmp_path) == {f"rank_{rank}" for rank in range(4)}, "all are traced")
    (number,) = re.findall(r"from Slurm step (\d+)\.0", job.err)
    cluster.hosts[0].run(["scancel", number], check=True)
    job.hear("asked", 4)
    job.finish()
    assert_nothing_left(cluster)


@pytest.mark.parametrize(
    ("lacks", "codes", "what", "hint"),
    slow_but([(1, [2, 2], "node1", ""), (2, [1, 2], "node2 could not start its ranks", "on node2: ")], "2"),
)
def test_a_tool_that_one_host_lacks_ends_the_job_on_all_hosts(
    cluster: Cluster, tmp_path: Path, lacks: int, codes: list[int], what: str, hint: str
) -> None:
    """All hosts say which one lacks it and what to do there, and none of its ranks is started."""
    directory = tmp_path / "bin"
    directory.mkdir()
    (directory / "tool").write_text('#!/bin/sh\nexec "$@"\n')
    (directory / "tool").chmod(0o755)
    job = start(
        cluster,
        Way("by_hand"),
        tmp_path,
        END_WHEN_RELEASED,
        *("--wrap", "*:tool"),
        hosts=cluster.hosts[:2],
        each=lambda number: ("--env", f"PATH={directory if number != lacks - 1 else '/nowhere'}:/usr/bin:/bin"),
    )
    assert job.finish() == codes, job.story("another exit code")
    why = f"saferun: {what}: --wrap: tool is not installed here, or not on the PATH of the ranks"
    advice = f"hint: {hint}install it, or write where it is: --wrap 'RANKS:/path/to/tool ...'"
    for process in job.processes:
        assert f"{why}\n{advice}\n" in process.err, job.story("the host, why and what to do")
    assert "is lost" not in job.err, job.story("nobody has killed it")
    assert_nothing_left(cluster)


def test_the_last_calls_of_a_hang_are_those_of_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks' calls are aligned, wherever they run."""
    options = ("--hang-timeout", "3", "--on-hang", "stop", "--external-wait-timeout", "0", "--trace-calls", "program")
    job = start(cluster, Way("srun"), tmp_path, HANGS, *options, hosts=cluster.hosts[:2])
    assert set(job.finish()) == {1}, job.story("another exit code")
    (report,) = job.reports
    (incident, *_) = report["incidents"]
    assert sorted(rank["rank"] for rank in incident["last_calls"]) == [0, 1, 2, 3]
    (finding,) = [line for line in incident["findings"] if "behind" in line or "differ" in line]
    assert finding.startswith("ranks 0-2 are behind the others: last returned from step (program.py:"), finding
    assert finding.partition("; rank 3 then called evaluate (program.py:")[1], finding
    assert_nothing_left(cluster)
