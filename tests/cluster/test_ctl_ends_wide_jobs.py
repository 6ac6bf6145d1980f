"""saferunctl restart, stop and kill on jobs of four hosts, elastic ones, and those with a saferun for each rank."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import Job, Way, assert_nothing_left, by_hand, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
from tests.cluster.test_elastic import QUICK

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# SIGTERM and the signal for a checkpoint have ranks say so and end well.
SAVES = """
def save(signum, _):
    tell("saved", signal.Signals(signum).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
tell("ready")
stay()
"""
ENDS = {
    "stop": (("stop", "latest"), 143, "SIGTERM"),
    "kill": (("kill", "latest"), 137, ""),
    "checkpoint": (("stop", "latest", "--after-checkpoint"), 0, "SIGUSR1"),
}


def begin(cluster: Cluster, folder: Path, kind: str) -> tuple[Job, Sequence[Host], int]:
    """A job of eight ranks on four hosts, or an elastic one of three ranks on three of them, once it can be asked."""
    hosts = cluster.hosts[:3] if kind == "elastic" else cluster.hosts
    if kind == "elastic":
        options = (*QUICK, "--nproc-per-node", "1")
        job = by_hand(cluster, folder, SAVES, *options, hosts=hosts, backend="c10d", nnodes="2:4")
        job.until(lambda: len({said.rank for said in job.words if said.word == "ready"}) == 3, "all hosts have met")
        return job, hosts, 3
    job = start(cluster, Way("srun", 2) if kind == "task-a-rank" else Way(kind), folder, SAVES)
    job.hear("ready", 8)
    return job, hosts, 8


def ready(job: Job) -> int:
    """How often ranks have said that they run."""
    return sum(said.word == "ready" for said in job.words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "end"),
    slow_but(
        [pytest.param(kind, end, id=f"{kind}-{end}") for kind in ("by_hand", "elastic", "task-a-rank") for end in ENDS],
        "elastic-stop",
    ),
)
def test_a_job_is_started_again_and_ended_by_hosts_that_do_not_lead(
    cluster: Cluster, tmp_path: Path, kind: str, end: str
) -> None:
    """As often as a user wants, without a failure; the exit code says in the end who asked for what."""
    job, hosts, ranks = begin(cluster, tmp_path, kind)
    sockets = ranks if kind == "task-a-rank" else len(hosts)
    job.until(lambda: has_control_sockets(tmp_path, sockets), "control sockets")
    before = ready(job)
    assert "its ranks run again: attempt 1" in ask(hosts[-1], tmp_path, "restart", "latest")
    job.until(lambda: ready(job) == before + ranks, "all ranks run again")
    job.until(lambda: sum(said.word == "saved" for said in job.words) == before, "each rank got SIGTERM once")
    arguments, code, signal_name = ENDS[end]
    assert f"exit code {code}" in ask(hosts[1], tmp_path, *arguments)
    assert set(job.finish()) == {code}, job.story("another exit code")
    saved = Counter(said.more for said in job.words if said.word == "saved")
    assert saved == Counter({"SIGTERM": before}) + Counter({signal_name: ranks} if signal_name else {})
    assert_nothing_left(cluster)
