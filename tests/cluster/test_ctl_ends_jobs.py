"""saferunctl stop and kill on jobs of several hosts: asked on any of them, all end."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import Way, assert_nothing_left, start
from tests.process.launching import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

STUBBORN = """
signal.signal(signal.SIGTERM, lambda *_: tell("SIGTERM"))
tell("ready")
stay()
while True:
    stay()
"""
SAVES = """
def save(*_):
    tell("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("ready")
stay()
"""
CHECKPOINTS = SAVES.replace("SIGTERM", "SIGUSR1")


def has_control_sockets(folder: Path, hosts: int) -> bool:
    """Whether all saferuns of the newest run can be asked."""
    found = [*folder.glob("saferun-runs/latest/run*.json"), *folder.glob("saferun-runs/latest/*/run*.json")]
    contents: list[dict[str, Any]] = []
    for path in found:
        try:
            contents.append(json.loads(path.read_text()))
        except ValueError:
            return False
    return sum(bool(content.get("control_socket")) for content in contents) >= hosts


def ask(host: Host, folder: Path, *arguments: str) -> str:
    """The command, on a host."""
    done = host.run([sys.executable, "-m", "saferun.ctl", *arguments], cwd=folder)
    assert done.returncode == 0, done
    return str(done.stdout)


@pytest.mark.parametrize("asked", slow_but([0, 1], "1"))
def test_stop_on_any_host_gives_all_ranks_sigterm(cluster: Cluster, tmp_path: Path, asked: int) -> None:
    """Every saferun says by its exit code, and its report, that a user asked."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, SAVES, "--max-restarts", "2", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    assert "exit code 143" in ask(hosts[asked], tmp_path, "stop", "latest")
    assert set(job.finish()) == {143}, job.story("wrong exit code")
    job.hear("saved", 4)
    report = json.loads((tmp_path / "saferun-runs" / "latest" / "report.json").read_text())
    assert report["run"]["outcome"] == "stopped"
    assert report["incidents"][-1]["headline"].startswith("stopped by saferunctl stop by ")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_kill_ends_the_ranks_of_all_hosts_that_a_stop_waits_for(cluster: Cluster, tmp_path: Path) -> None:
    hosts = cluster.hosts[:4]
    job = start(cluster, Way("by_hand"), tmp_path, STUBBORN, "--shutdown-timeout", "600", hosts=hosts)
    job.hear("ready", 8)
    until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    ask(hosts[2], tmp_path, "stop", "latest", "--no-wait")
    job.hear("SIGTERM", 8)
    assert "exit code 137" in ask(hosts[1], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("asked", slow_but([0, 1], "0"))
def test_a_restart_starts_the_ranks_of_all_hosts_again(cluster: Cluster, tmp_path: Path, asked: int) -> None:
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, SAVES, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    for attempt in (1, 2):
        assert f"attempt {attempt}" in ask(hosts[asked], tmp_path, "restart", "latest")
        until(lambda n=attempt: job.out.count(" ready ") >= 4 * (n + 1), "the ranks run again")  # type: ignore[misc]
    assert "exit code 143" in ask(hosts[1 - asked], tmp_path, "stop", "latest")
    assert set(job.finish()) == {143}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_the_ranks_of_all_hosts_save_a_checkpoint_and_end(cluster: Cluster, tmp_path: Path) -> None:
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, CHECKPOINTS, "--max-restarts", "2", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    assert "exit code 0" in ask(hosts[1], tmp_path, "stop", "latest", "--after-checkpoint")
    assert set(job.finish()) == {0}, job.story("wrong exit code")
    job.hear("saved", 4)
    assert_nothing_left(cluster)
