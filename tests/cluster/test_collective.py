"""``saferunctl doctor --collective``: what makes a real all_reduce fail is found, by host and interface."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.process import Process

TRIAL_S = "8"


def start(cluster: Cluster, *options: str, hanging: tuple[int, Path] | None = None) -> list[Process]:
    """The verb on all hosts; the first one prints what is found.

    Args:
        cluster: the hosts.
        options: saferun's.
        hanging: a host, and a folder with what makes its ranks hang.
    """
    count = len(cluster.hosts)
    command = [sys.executable, "-m", "saferun.ctl", "doctor", "--json", "--collective", "--trial-timeout", TRIAL_S]
    command += ["--nnodes", str(count), "--master-addr", "node1", "--master-port", "29500", *options]
    changes = {hanging[0]: {"PYTHONPATH": str(hanging[1])}} if hanging is not None else {}
    return [
        host.popen([*command, "--node-rank", str(rank)], env=changes.get(rank))
        for rank, host in enumerate(cluster.hosts)
    ]


def end(processes: list[Process]) -> list[dict[str, Any]]:
    """What the trials found. All hosts end with 1 where something failed, and with 0 otherwise."""
    codes = [process.finish() for process in processes]
    story = processes[0].story("what the first host says")
    found: list[dict[str, Any]] = json.loads(processes[0].out)["results"]
    failed = any(result["verdict"] == "fail" for result in found)
    assert codes == [int(failed)] * len(processes), story
    return [result for result in found if result["check"] == "collective"]


@pytest.mark.slow
def test_on_a_healthy_cluster_all_works_at_once(make_cluster: MakeCluster) -> None:
    """One trial, and that is it."""
    cluster = make_cluster(3)
    (found,) = end(start(cluster, "--nic", "eth1"))
    assert found["verdict"] == "ok"
    assert "all 3 hosts" in found["message"]


@pytest.mark.slow
def test_a_network_interface_that_is_cut_is_found(make_cluster: MakeCluster) -> None:
    """Its host works alone and fails with all others; those work together."""
    cluster = make_cluster(3)
    cluster.hosts[1].cut("eth1")
    found = end(start(cluster, "--nic", "eth1"))
    assert [(result["verdict"], result["host"]) for result in found] == [("fail", "node2")], found
    assert "eth1" in found[0]["message"] + found[0]["hint"]


# Stands for a GPU that does not come back, or a driver that waits forever.
HANGS = """
import sys
if any("trial_server" in word for word in sys.orig_argv):
    import time
    import torch.distributed
    torch.distributed.all_reduce = lambda *arguments, **more: time.sleep(3600)
"""


@pytest.mark.slow
def test_a_host_whose_rank_hangs_is_found(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """It fails alone, over loopback too, and the others work without it."""
    cluster = make_cluster(3)
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    found = end(start(cluster, hanging=(2, tmp_path)))
    assert [(result["verdict"], result["host"]) for result in found] == [("fail", "node3")], found
    assert "all_reduce" in found[0]["message"]
