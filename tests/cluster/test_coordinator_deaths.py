"""A coordinator that is killed on a host of a job: by the out-of-memory killer, say, or by somebody's pkill."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster import jobs
from tests.cluster.faulted import HOST_TIMEOUT_S, KNOCK_S, STEPS, FaultedJob
from tests.process.launching import is_coordinator

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

REPLACED = r"warning: the coordinator of node\d ended \(killed by SIGKILL\); another one has taken its place, and"
FAILS = """
    if RANK == 3 and os.path.exists(f"{FOLDER}/release.fail"):
        raise ValueError("a label is out of range")
"""


def kill_coordinator(job: FaultedJob, host: Host) -> None:
    """And wait until there is another one that does its work."""
    job.now()
    host.kill(job.coordinator(host))
    job.wait_said(host, REPLACED)


def options(signed: str, folder: Path) -> tuple[object, ...]:
    """With which the messages between hosts are signed, or not."""
    if signed == "secret file":
        path = folder / "secret"
        path.touch(mode=0o600)
        path.write_bytes(bytes(range(32)))
        return ("--secret-file", path)
    return ("--sign-messages", signed)


@pytest.mark.parametrize("signed", slow_but(["off", "required", "secret file"], "required"))
def test_another_one_takes_the_place_of_one_that_serves_no_store(
    make_cluster: MakeCluster, tmp_path: Path, signed: str
) -> None:
    """The job trains on; what happens after it is heard of on all hosts, and the hosts meet again."""
    cluster = make_cluster(3)
    _, node2, node3 = cluster.hosts
    limits = ("--max-restarts", 1, "--hang-timeout", 600)
    job = FaultedJob(cluster, tmp_path / "job", STEPS, *options(signed, tmp_path), *limits)
    job.await_steps()
    kill_coordinator(job, node2)
    # Were it missed, its host would be given up by now.
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    for host in cluster.hosts:
        more = [line for line in job.said(host).splitlines() if "another one has taken its place" not in line]
        assert more == [], job.story(f"{host.name} has more to say")
    job.now()
    node3.kill(job.rank(node3))
    job.await_steps(attempt=1)
    for host in cluster.hosts:
        assert "rank 2 (node3, local rank 0" in job.said(host), job.story(f"{host.name} does not name rank 2")
    kill_coordinator(job, node2)
    job.now()
    node2.kill(job.rank(node2))
    assert set(job.end().values()) == {1}
    for host in cluster.hosts:
        assert "rank 1 (node2, local rank 0" in job.said(host), job.story(f"{host.name} does not name rank 1")
    job.assert_nothing_left()


def test_with_one_saferun_a_rank_all_of_a_host_come_to_its_successor(cluster: Cluster, tmp_path: Path) -> None:
    """Under srun. A rank of the second task fails later, which all are told."""
    hosts = cluster.hosts[:3]
    limits = ("--host-timeout", str(HOST_TIMEOUT_S), "--hang-timeout", "600")
    job = jobs.start(cluster, jobs.Way("srun", 2), tmp_path, f"{STEPS}{FAILS}", *limits, hosts=hosts)
    job.hear("steps", 6)
    (coordinator,) = filter(is_coordinator, hosts[1].pids(r"coordinator/__main__\.py"))
    hosts[1].kill(coordinator)
    job.until(lambda: job.saferun_said(f"saferun: {REPLACED}"), "another one takes its place")
    logs = list(tmp_path.glob("saferun_runs/[0-9]*/node2/events*.jsonl"))
    assert len(logs) == 2
    job.until(lambda: all("CoordinatorReplaced" in log.read_text() for log in logs), "both tasks go on")
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    assert not job.saferun_said("saferun: .* is lost|hint: "), job.story("the host was given up")
    job.release("fail")
    assert set(job.finish()) == {1}
    assert job.saferun_said(r"saferun: rank 3 \(node2, "), job.story("rank 3 is not named")
    jobs.assert_nothing_left(cluster)
