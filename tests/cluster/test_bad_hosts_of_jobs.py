"""Hosts of a job that are bad: found by the checks before an attempt or by what ended it, and left out by Slurm."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING

import pytest

from tests.cluster.faulted import STEPS, FaultedJob
from tests.cluster.machines.launchers import srun

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster

FAILS_ONCE = """
tell("ran")
if ATTEMPT == 0:
    await_release("end")
    if RANK == 2:
        raise ConnectionResetError("Connection reset by peer")
    stay()
tell("done")
"""
BROKEN_GPU = """
tell("ran")
if RANK == 2:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
stay()
"""


@pytest.mark.slow
def test_a_link_that_flapped_in_an_attempt_is_reported_before_the_next(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """The checks before each attempt compare what interfaces have counted; the job goes on all the same."""
    cluster = make_cluster(3)
    job = FaultedJob(cluster, tmp_path / "job", FAILS_ONCE, "--max-restarts", "1", "--hang-timeout", "0")
    job.job.hear("ran", 3)
    node1, _, node3 = cluster.hosts
    for _ in range(2):
        node3.cut("eth1", how="cable")
        node3.heal("eth1")
    job.job.release("end")
    assert set(job.end().values()) == {0}, job.story("failed")
    assert "node3: eth1 has lost its carrier 2 times in the last " in job.of[node1.name].err, job.story("not reported")
    report = json.loads((job.run_dir / "report.json").read_text())
    assert [(row["host"], row["kind"], row["found_by"], row["attempt"]) for row in report["bad_hosts"]] == [
        ("node3", "link", "checks", 1)
    ]
    job.assert_nothing_left()


@pytest.mark.slow
def test_slurm_leaves_out_the_hosts_of_the_list(cluster: Cluster, tmp_path: Path) -> None:
    """Its option takes the file that the leader has written; all other hosts get jobs."""
    hosts, bad = cluster.hosts[:3], tmp_path / "bad-hosts"
    job = FaultedJob(cluster, tmp_path / "job", BROKEN_GPU, "--exclude-file", bad, hosts=hosts)
    assert set(job.end().values()) == {1}, job.story("did not fail")
    assert bad.read_text() == "node3\n", job.story("not in the list")
    done = cluster.hosts[0].popen(("srun", "--nodes=3", f"--exclude={bad}", "hostname"))
    assert done.finish() == 0, done.story("refused")
    assert sorted(done.out.split()) == ["node1", "node2", "node4"]
    refused = srun(cluster, ["hostname"], hosts=[hosts[2]], options=[f"--exclude={bad}"])
    assert refused.finish() != 0, refused.story("node3 was given to a job")


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "kinds"), [("power", ["lost"]), ("cables", ["lost"]), ("saferun", [])])
def test_a_host_is_bad_that_is_lost_and_not_one_whose_saferun_was_killed(
    make_cluster: MakeCluster, tmp_path: Path, fault: str, kinds: list[str]
) -> None:
    """Whoever kills a process does not break the host."""
    cluster, bad = make_cluster(3), tmp_path / "bad-hosts"
    job = FaultedJob(cluster, tmp_path / "job", STEPS, "--exclude-file", bad)
    job.await_steps()
    node3 = cluster.hosts[2]
    if fault == "power":
        node3.power_off()
    elif fault == "cables":
        node3.cut("eth0", how="cable")
        node3.cut("eth1", how="cable")
    else:
        node3.kill(job.saferun(node3), signal.SIGKILL)
    assert job.of["node1"].finish() == 1, job.story("did not fail")
    report = json.loads((job.run_dir / "report.json").read_text())
    found = [(row["host"], row["kind"]) for row in report["bad_hosts"]]
    assert found == [("node3", kind) for kind in kinds], job.story(f"{found}")
    assert (bad.read_text() if bad.exists() else "") == "node3\n" * len(kinds)
