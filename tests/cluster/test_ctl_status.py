"""``saferunctl status`` of jobs of several hosts."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.jobs import STAY, Way, assert_nothing_left, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
from tests.process.launching import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host


def status_on(host: Host, folder: Path) -> dict[str, Any]:
    """What the saferun there answers."""
    live = json.loads(ask(host, folder, "status", "latest", "--json"))["live"]
    assert isinstance(live, dict)
    return live


@pytest.mark.slow
def test_every_host_shows_the_ranks_of_all(cluster: Cluster, tmp_path: Path) -> None:
    """The first host collects what all report, and the others ask it."""
    hosts = cluster.hosts[:4]
    job = start(cluster, Way("by_hand"), tmp_path, STAY, hosts=hosts)
    job.hear("ready", 8)
    until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    for number in (0, 2):
        live = status_on(hosts[number], tmp_path)
        assert (live["leads"], live["leader"], live["is_whole"]) == (number == 0, "node1", True)
        assert live["missing"] == []
        shown = {host["host"]: [row["rank"] for row in host["ranks"]] for host in live["hosts"]}
        assert shown == {f"node{1 + i}": [2 * i, 2 * i + 1] for i in range(4)}
        assert all(row["rss_mib"] > 0 for host in live["hosts"] for row in host["ranks"])
    assert "node4: " in ask(hosts[1], tmp_path, "status", "latest")
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_without_the_first_host_each_shows_its_own_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Its saferun is stopped; the job goes on."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, STAY, "--host-timeout", "300", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    frozen = hosts[0].pids("-m saferun ")
    hosts[0].freeze(frozen)
    live = status_on(hosts[1], tmp_path)
    assert [host["host"] for host in live["hosts"]] == ["node2"]
    assert (live["leads"], live["leader"], live["is_whole"]) == (False, "node1", False)
    hosts[0].thaw(frozen)
    assert status_on(hosts[1], tmp_path)["is_whole"]
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_it_is_shown_again_until_the_job_has_ended(cluster: Cluster, tmp_path: Path) -> None:
    """On both hosts at once; the last time there is the outcome."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, STAY, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    command = [sys.executable, "-m", "saferun.ctl", "status", "latest", "-w", "0.2", "--json"]
    watching = [host.popen(command, cwd=tmp_path) for host in hosts]
    for one in watching:
        job.until(lambda one=one: one.out.count("\n") >= 2, "it is shown twice")  # type: ignore[misc]
    ask(hosts[1], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    for one in watching:
        assert one.finish() == 0
        shown = [json.loads(line) for line in one.out.splitlines()]
        assert [host["host"] for host in shown[0]["live"]["hosts"]] == ["node1", "node2"]
        assert (shown[-1]["state"], shown[-1]["exit_code"]) == ("stopped", 137)
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_and_the_others_are_shown(cluster: Cluster, tmp_path: Path) -> None:
    """Its saferun is stopped: the job goes on, and so does the command."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, STAY, "--host-timeout", "300", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    frozen = hosts[1].pids("-m saferun ")
    hosts[1].freeze(frozen)
    live = status_on(hosts[0], tmp_path)
    assert [host["host"] for host in live["hosts"]] == ["node1"]
    assert live["missing"] == ["node2"]
    hosts[1].thaw(frozen)
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_saferun_a_rank_reports_too(cluster: Cluster, tmp_path: Path) -> None:
    """The tasks of one host are one host."""
    job = start(cluster, Way("srun", 2), tmp_path, STAY, hosts=cluster.hosts[:2])
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    live = status_on(cluster.hosts[0], tmp_path)
    assert {host["host"]: sorted(row["rank"] for row in host["ranks"]) for host in live["hosts"]} == {
        "node1": [0, 1],
        "node2": [2, 3],
    }
    ask(cluster.hosts[0], tmp_path, "kill", "latest")
    job.finish()
    assert_nothing_left(cluster)
