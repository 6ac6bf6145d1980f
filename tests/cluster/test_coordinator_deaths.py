"""A coordinator that is killed on a host of a job: by the out-of-memory killer, say, or by somebody's pkill."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster import jobs
from tests.cluster.faulted import HANG_TIMEOUT_S, HOST_TIMEOUT_S, KNOCK_S, STEPS, FaultedJob
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


@pytest.mark.slow
@pytest.mark.parametrize("signed", ["off", "required", "secret file"])
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


@pytest.mark.slow
def test_with_one_saferun_a_rank_all_of_a_host_come_to_its_successor(cluster: Cluster, tmp_path: Path) -> None:
    """Under srun. A rank of the second task fails later, which all are told."""
    hosts = cluster.hosts[:3]
    limits = ("--host-timeout", str(HOST_TIMEOUT_S), "--hang-timeout", "600")
    job = jobs.start(cluster, jobs.Way("srun", 2), tmp_path, f"{STEPS}{FAILS}", *limits, hosts=hosts)
    job.hear("steps", 6)
    (coordinator,) = filter(is_coordinator, hosts[1].pids(r"coordinator/__main__\.py"))
    hosts[1].kill(coordinator)
    job.until(lambda: job.saferun_said(f"saferun: {REPLACED}"), "another one takes its place")
    logs = list(tmp_path.glob("saferun-runs/[0-9]*/node2/events*.jsonl"))
    assert len(logs) == 2
    job.until(lambda: all("CoordinatorReplaced" in log.read_text() for log in logs), "both tasks go on")
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    assert not job.saferun_said("saferun: .* is lost|hint: "), job.story("the host was given up")
    job.release("fail")
    assert set(job.finish()) == {1}
    assert job.saferun_said(r"saferun: rank 3 \(node2, "), job.story("rank 3 is not named")
    jobs.assert_nothing_left(cluster)


STORE_ENDED = (
    r"warning: the coordinator of node1 ended \(killed by SIGKILL\), and with it the job's store; .*the job goes on"
)
WORKS = """
import hashlib

tell("steps")
while not os.path.exists(f"{FOLDER}/release.end"):
    hashlib.sha256(bytes(1 << 20)).digest()
    if RANK == 2 and os.path.exists(f"{FOLDER}/release.fail"):
        raise ValueError("a label is out of range")
    if os.path.exists(f"{FOLDER}/release.stop"):
        stay()
    time.sleep(0.02)
"""


def without_store(make_cluster: MakeCluster, folder: Path) -> FaultedJob:
    """A job of three hosts that trains on without its store, as all of them know."""
    cluster = make_cluster(3)
    # Ranks that stand still soon after the start would be started again.
    job = FaultedJob(cluster, folder, WORKS, "--start-retries", "0")
    job.await_steps()
    job.now()
    cluster.hosts[0].kill(job.coordinator(cluster.hosts[0]))
    for host in cluster.hosts:
        job.wait_said(host, STORE_ENDED)
    return job


def test_where_it_served_the_store_the_ranks_train_on_and_end_well(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Ranks that have met need their store for new groups only; and no host takes the first one for lost."""
    job = without_store(make_cluster, tmp_path)
    # Were a host missed, it would be given up by now.
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    restart = (sys.executable, "-m", "saferun.ctl", "restart", str(tmp_path / "run"))
    refused = job.hosts[1].run(restart, cwd=tmp_path)
    assert (refused.returncode, "the hosts no longer hear of each other" in refused.stderr) == (1, True), refused
    job.job.release("end")
    assert set(job.end().values()) == {0}, job.story("not well")
    for host in job.hosts:
        assert job.said(host).count("saferun: ") == 2, job.story("the warning, and the end")
        assert "; all ranks of this host ended well" in job.said(host), job.story("the end")
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_host_whose_coordinators_are_all_killed_trains_on(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Nothing of it is heard any more; the others see that the ranks make progress, and wait for it at the end."""
    cluster = make_cluster(3)
    node1, node2, _ = cluster.hosts
    job = FaultedJob(cluster, tmp_path / "job", WORKS, "--hang-timeout", 600)
    job.await_steps()

    def await_replaced(times: int) -> None:
        job.job.until(lambda: job.said(node2).count("has taken its place") == times, "another one is there")

    for times in range(1, 4):
        node2.kill(job.coordinator(node2))
        await_replaced(times)
    job.now()
    node2.kill(job.coordinator(node2))
    job.wait_said(node2, r"ended \(killed by SIGKILL\), and none takes its place; the job goes on")
    job.wait_said(node1, r"no heartbeat received from node2 .*the job goes on")
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    job.job.release("end")
    assert set(job.end().values()) == {0}, job.story("not well")
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("end", ["fail", "stop", "SIGTERM"])
def test_what_happens_after_that_ends_each_host_with_its_own_words(
    make_cluster: MakeCluster, tmp_path: Path, end: str
) -> None:
    """What a rank, or a person, has brought about is not put down to the coordinator; a standstill is."""
    job = without_store(make_cluster, tmp_path)
    job.now()
    if end == "SIGTERM":
        for process in job.of.values():
            process.terminate()
    else:
        job.job.release(end)
    _, _, node3 = job.hosts
    if end == "fail":
        assert job.end(node3) == {"node3": 1}
        assert "rank 2 (node3, local rank 0" in job.said(node3), job.story("its own error")
        job.job.release("end")
    codes = job.end()
    assert set(codes.values()) == ({0, 1} if end == "fail" else {1}), job.story("codes")
    for host in job.hosts:
        is_blamed = "the coordinator of node1 ended (killed by SIGKILL)" in job.said(host).partition("all ranks of")[0]
        assert is_blamed == (end == "stop") or host is not node3, job.story(f"{host.name}: who is to blame")
    job.assert_nothing_left()


@pytest.mark.slow
def test_with_one_saferun_a_rank_the_job_trains_on_without_its_store(cluster: Cluster, tmp_path: Path) -> None:
    """The other tasks of the first host know that its first one lives."""
    hosts = cluster.hosts[:2]
    limits = ("--host-timeout", str(HOST_TIMEOUT_S), "--hang-timeout", str(HANG_TIMEOUT_S))
    job = jobs.start(cluster, jobs.Way("srun", 2), tmp_path, WORKS, *limits, hosts=hosts)
    job.hear("steps", 4)
    (coordinator,) = filter(is_coordinator, hosts[0].pids(r"coordinator/__main__\.py"))
    hosts[0].kill(coordinator)
    job.until(lambda: job.saferun_said(f"saferun: {STORE_ENDED}"), "it is said")
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    assert not job.saferun_said("saferun: .* is (lost|gone)|hint: "), job.story("given up")
    job.release("end")
    assert set(job.finish()) == {0}, job.story("not well")
    jobs.assert_nothing_left(cluster)
