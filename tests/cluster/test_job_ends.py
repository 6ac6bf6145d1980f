"""What started a job goes away, or ends it: its ranks end with it, and what was known of them is on disk."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import STAY, Way, assert_nothing_left, await_no_ranks, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster

STUBBORN = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tell("ready")
while True:
    signal.pause()
"""


@pytest.mark.parametrize("tasks", slow_but([1, 2], "1"))
def test_scancel_leaves_time_for_evidence_and_report(make_cluster: MakeCluster, tmp_path: Path, tasks: int) -> None:
    """TERM, and KILL after KillWait: by then even ranks that do not listen have been looked at and killed."""
    cluster = make_cluster(3, slurm=True, slurm_options={"KillWait": 30})
    options = ("--shutdown-timeout", "5")
    job = start(cluster, Way("srun", tasks), tmp_path, STUBBORN, *options, nproc=2)
    job.hear("ready", 6)
    (number,) = re.findall(r"from Slurm step (\d+)\.0", job.err)
    cluster.hosts[0].run(["scancel", number], check=True)
    assert job.finish()[0] != 0
    assert_nothing_left(cluster)
    (report,) = job.reports
    (incident,) = report["incidents"]
    assert "saferun: stopped by the scheduler (SIGTERM to all 3 hosts)\n" in job.err, job.story("who stopped it")
    assert "failed after it" not in job.err, job.story("the ranks were stopped")
    assert (report["run"]["outcome"], report["run"]["exit_code"]) == ("stopped", 1)
    assert sorted(rank for group in incident["wait_groups"] for rank in group["ranks"]) == list(range(6))
    # Those of each host, too, and Slurm has killed nobody before they were written.
    assert len(list(tmp_path.glob("saferun-runs/[0-9]*/node[23]/report.json"))) == 2
    events = list(tmp_path.glob("saferun-runs/[0-9]*/node*/events*.jsonl"))
    assert len(events) == 3 * tasks
    assert all('"state": "done"' in path.read_text() for path in events)


@pytest.mark.parametrize("tasks", slow_but([1, 2], "1"))
@pytest.mark.parametrize("launcher", slow_but(["srun", "mpirun", "hydra"], "srun"))
def test_nothing_trains_on_where_the_launcher_was_killed(
    cluster: Cluster, tmp_path: Path, launcher: str, tasks: int
) -> None:
    """Some launchers leave tasks alive on the head host, and what they kill has no time to end its ranks."""
    job = start(cluster, Way(launcher, tasks), tmp_path, STAY)
    job.hear("ready", 8)
    job.processes[0].kill()
    job.processes[0].wait()
    assert_nothing_left(cluster)


SLOW_AT_CTRL_C = """
try:
    tell("ready")
    stay()
except KeyboardInterrupt:
    tell("interrupted")
    await_release("saved")
    tell("saved")
"""


def test_one_ctrl_c_at_the_launcher_is_one_on_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """MPICH's passes it on to every host, which hear of each other's, too; ranks that save their work may do so."""
    job = start(cluster, Way("hydra"), tmp_path, SLOW_AT_CTRL_C)
    job.hear("ready", 8)
    job.processes[0].send_signal(signal.SIGINT)
    job.hear("interrupted", 8)
    job.release("saved")
    job.hear("saved", 8)
    job.finish()  # mpiexec calls it a success
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_ctrl_c_at_mpirun_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    """It sends TERM in its place."""
    job = start(cluster, Way("mpirun"), tmp_path, STAY)
    job.hear("ready", 8)
    job.processes[0].send_signal(signal.SIGINT)
    assert job.finish() == [1]
    assert_nothing_left(cluster)


def test_ranks_end_where_the_ssh_session_of_pdsh_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    """Of one host: with --stop-with-parent on, that is the end of the job on all of them."""
    job = start(cluster, Way("pdsh"), tmp_path, STAY)
    job.hear("ready", 8)
    node1 = cluster.hosts[0]
    (session,) = node1.pids(r"^ssh .* node3 cd ")
    node1.kill(session)
    await_no_ranks(*cluster.hosts)
    assert job.finish()[0] != 0
    assert_nothing_left(cluster)
    assert job.saferun_said("saferun: .*node3.*"), job.story("node3 is not named")


@pytest.mark.slow
def test_ranks_end_where_pdsh_itself_is_gone(cluster: Cluster, tmp_path: Path) -> None:
    """Its ssh sessions are on their own then, until somebody writes to them."""
    job = start(cluster, Way("pdsh"), tmp_path, STAY)
    job.hear("ready", 8)
    job.processes[0].kill()
    job.processes[0].wait()
    for pid in cluster.hosts[0].pids(r"^ssh "):
        cluster.hosts[0].kill(pid)
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_signal_to_one_of_several_saferuns_ends_them_all(cluster: Cluster, tmp_path: Path) -> None:
    """Whoever stops one by hand means the job."""
    job = start(cluster, Way("by_hand"), tmp_path, STAY, nproc=1)
    job.hear("ready", 4)
    job.processes[2].terminate()
    assert job.finish() == [1, 1, 1, 1]
    assert len(job.saferun_said(r"saferun: .*SIGTERM")) >= 4, job.story("not told everywhere")
    assert_nothing_left(cluster)
