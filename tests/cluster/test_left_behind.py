"""What a job leaves on its hosts: nothing but its run directory."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from tests.cluster.jobs import STAY, Way, assert_nothing_left, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster


def left(cluster: Cluster) -> list[str]:
    """What has saferun's name in the directories that are for such files."""
    directories = [(host, directory) for host in cluster.hosts for directory in ("/tmp", "/dev/shm")]
    return [
        f"{host.name} {path.name}" for host, directory in directories for path in host.path(directory).glob("*saferun*")
    ]


def test_one_saferun_a_rank_leaves_no_directory(cluster: Cluster, tmp_path: Path) -> None:
    """The directory of the sockets at which the tasks of a host meet goes with the last of them."""
    before = left(cluster)  # by others, which were killed
    job = start(cluster, Way("srun", 2), tmp_path, "tell('done')\n")
    assert job.finish() == [0], job.story("failed")
    assert_nothing_left(cluster)
    assert [path for path in left(cluster) if path not in before] == []


def test_a_saferun_that_is_gone_is_named_by_its_rank(cluster: Cluster, tmp_path: Path) -> None:
    """Local ranks say little where there are many hosts."""
    job = start(cluster, Way("srun", 2), tmp_path, STAY, hosts=cluster.hosts[:2])
    job.hear("ready", 4)
    node2 = cluster.hosts[1]
    # What it has forked has the same command line, and is younger.
    supervisor = next(pid for pid in node2.pids(r"-m saferun \S*program\.py") if _is_of_task(pid, 1))
    node2.kill(supervisor, signal.SIGKILL)
    job.finish()
    said = "a saferun process of node2 is gone: that of rank 3 (local rank 1)"
    assert job.saferun_said(rf"saferun: {re.escape(said)}"), job.story("which rank")


def _is_of_task(pid: int, local_id: int) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return f"SLURM_LOCALID={local_id}".encode() in file.read().split(b"\0")
