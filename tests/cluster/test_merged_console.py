"""What each host says on a console that is that of all hosts: it names itself."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import SAFERUN, STAY, Job, Way, assert_nothing_left, by_hand, start, write
from tests.cluster.machines import launchers
from tests.cluster.machines.host import command_line
from tests.cluster.machines.process import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

# The rank itself may end before the reaper ends it; what it has started does not.
WITH_A_CHILD = f"import subprocess\nsubprocess.Popen(['sleep', '1000'])\n{STAY}"


@pytest.mark.slow
def test_what_concerns_one_host_names_it(cluster: Cluster, tmp_path: Path) -> None:
    """No files can be kept, a signal comes, a saferun is killed: each of them is about a host."""
    hosts = cluster.hosts[:2]
    nowhere = ("--run-dir", "/proc/nowhere")
    job = by_hand(cluster, tmp_path, STAY, *nowhere, hosts=hosts)
    job.hear("ready", 2)
    for process, host in zip(job.processes, hosts, strict=True):
        assert f"saferun: {host.name}: no run directory: /proc/nowhere" in process.err, job.story("which host")
    job.processes[1].send_signal(signal.SIGTERM)
    job.finish()
    assert "saferun: SIGTERM on node2: stopping 1 rank, SIGKILL follows" in job.processes[1].err, job.story("which")

    job = by_hand(cluster, tmp_path, WITH_A_CHILD, *nowhere, hosts=hosts)
    job.hear("ready", 2)
    job.processes[0].kill()
    job.finish()
    give_up_at = time.monotonic() + DEADLINE_S
    # The reaper outlives the supervisor for a moment.
    while not re.search("^saferun: the supervisor on node1 was killed; .* ended$", job.processes[0].err, re.MULTILINE):
        assert time.monotonic() < give_up_at, job.story("the reaper does not say where")
        time.sleep(0.01)
    assert_nothing_left(cluster)


def advice_of(job: Job) -> list[str]:
    """The hints: a report has one."""
    return [line for line in job.err.splitlines() if line.startswith("hint: ")]


@pytest.mark.slow
def test_the_loss_of_the_leader_is_reported_once_and_each_other_host_names_itself(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Nobody is left to report for all hosts, and a report of each of 64 hosts is read by no user."""
    job = start(cluster, Way("srun"), tmp_path, STAY, "--host-timeout", "6", nproc=1)
    job.hear("ready", 4)
    node1 = cluster.hosts[0]
    saferuns = [pid for pid in node1.pids("-m saferun") if "srun" not in command_line(pid).split()[0]]
    node1.kill(min(saferuns))
    job.finish()
    assert len(advice_of(job)) == 1, job.story("one report")
    lost = "node1, which had the job's store, is lost"
    assert len(job.saferun_said(f"saferun: {lost}")) == 1, job.story("one report")
    for name in ("node3", "node4"):
        assert len(job.saferun_said(f"saferun: {name}: {lost}")) == 1, job.story("a line of each other host")
    assert not job.saferun_said(f"saferun: node2: {lost}"), job.story("node2 reports")


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 2])
def test_hosts_that_do_not_meet_give_their_advice_once(cluster: Cluster, tmp_path: Path, missing: int) -> None:
    """Where the first host is there, it speaks for all; where it is missing, the second one does."""
    script = write(tmp_path, "pass")
    late = f'[ "$SLURM_NODEID" = {missing} ] && exec sleep 30; exec "$@"'
    command = ("sh", "-c", late, "sh", *SAFERUN, "--start-timeout", "8", str(script))
    job = Job(tmp_path, [launchers.srun(cluster, command, cwd=tmp_path)])
    job.finish()
    assert len(advice_of(job)) == 1, job.story("one report")
    if missing:
        assert len(job.saferun_said("saferun: 1 of 4 hosts did not come within 8 s: node3")) == 1, job.story("once")
        assert not job.saferun_said("saferun: node"), job.story("the others are silent")
