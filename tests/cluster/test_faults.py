"""Whatever befalls a job of several hosts: it ends everywhere, soon, and every console names what it was, and where.

The bounds are seconds after the fault. Where torchrun on the same cluster showed anything about it within three
minutes, which it mostly did not, it took longer, or named the wrong rank.
"""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster import jobs
from tests.cluster.faulted import (
    GLOO,
    GLOO_UNTIL_RELEASED,
    HANG_TIMEOUT_S,
    HOST_TIMEOUT_S,
    KNOCK_S,
    STEPS,
    FaultedJob,
)
from tests.cluster.machines.process import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# Rank 2 has an error of its own, when the test says so.
FAILS_LATE = """
def fail_when_asked():
    if RANK != 2 or not os.path.exists(f"{FOLDER}/release.fail"):
        return
    try:
        raise ValueError("a label is out of range")
    finally:
        for peer in peers:
            peer.close()
        tell("cleans-up")
        await_release("end")
"""
ON_DATA_NETWORK = {"GLOO_SOCKET_IFNAME": "eth1"}


def check_named(job: FaultedJob, hosts: list[Host], pattern: str, hints: int = 1) -> None:
    """Each of these hosts says it, in the first line after the fault that is a sentence of its own."""
    for host in hosts:
        assert re.search(pattern, job.said(host)), job.story(f"{host.name} does not say {pattern!r}")
        assert job.said(host).count("hint: ") == hints, job.story(f"{host.name} gives no advice, or too much of it")


def check_cause(job: FaultedJob, class_name: str, ranks: list[int], host: Host | None = None) -> None:
    """What the last incident of the report says, that of the job or a host's own; of a hang it follows the words."""
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        incident = job.incident(host)
        cause = (incident or {}).get("cause") or {}
        if (cause.get("class"), cause.get("ranks")) == (class_name, ranks):
            return
        assert time.monotonic() < give_up_at, job.story(f"not {class_name} of {ranks}, but {cause}")
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------------- processes that die


@pytest.mark.slow
def test_a_killed_rank_is_named_everywhere_at_once(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """By its host and the signal; the ranks that lost their connections to it are its victims."""
    cluster = make_cluster(4)
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    node3 = cluster.hosts[2]
    pid = job.rank(node3)
    job.now()
    node3.kill(pid)
    assert set(job.end().values()) == {1}
    check_named(job, cluster.hosts, r"rank 2 \(node3, local rank 0, pid \d+\) failed first.*SIGKILL")
    check_cause(job, "killed_from_outside", [2])
    job.assert_nothing_left()


@pytest.mark.slow
def test_an_error_that_is_shown_after_the_victims_have_failed_is_the_cause(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """The rank closes its connections, and prints its error only when it has cleaned up; no host waits longer."""
    cluster = make_cluster(3)
    job = FaultedJob(cluster, tmp_path, f"{FAILS_LATE}{STEPS}    fail_when_asked()\n", "--cause-wait", 3600)
    job.await_steps()
    logs = [job.run_dir / host.name / "events.jsonl" for host in cluster.hosts]
    # What fails before that ends the attempt on all hosts at once.
    job.job.until(lambda: all("ModulesImported" in log.read_text() for log in logs), "failures can be judged")
    job.now()
    job.job.release("fail")
    job.job.hear("cleans-up", 1)
    job.wait_said(cluster.hosts[2], r"waiting up to 3600 s for the error of rank 2")
    job.job.release("end")
    assert set(job.end().values()) == {1}
    check_named(job, cluster.hosts, r"rank 2 \(node3, local rank 0, pid \d+\) failed.*ValueError: a label", hints=0)
    check_cause(job, "python_exception", [2])
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_restart_after_a_killed_rank_works(make_cluster: MakeCluster, tmp_path: Path, backend: str) -> None:
    """Nothing of the attempt before is found by the next, neither keys of the store nor gloo's addresses."""
    cluster = make_cluster(3)
    node2, node3 = cluster.hosts[1:]
    job = FaultedJob(cluster, tmp_path, GLOO, "--max-restarts", 1, env=ON_DATA_NETWORK, backend=backend)
    job.await_steps()
    job.now()
    node3.kill(job.rank(node3))
    job.await_steps(attempt=1)
    check_named(job, cluster.hosts, r"rank 2 \(node3, .*SIGKILL[^$]*starting again \(restart 1 of 1\)")
    job.now()
    node2.kill(job.rank(node2))
    assert set(job.end().values()) == {1}
    check_named(job, cluster.hosts, r"rank 1 \(node2, local rank 0, pid \d+\) failed first.*SIGKILL")
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_killed_saferun_is_named_by_the_others(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Its rank dies with it, and the ranks that lose their connection to that one are not taken for the cause."""
    cluster = make_cluster(4)
    node3 = cluster.hosts[2]
    others = [host for host in cluster.hosts if host is not node3]
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    job.now()
    node3.kill(job.saferun(node3))
    assert job.end() == {"node1": 1, "node2": 1, "node3": -signal.SIGKILL, "node4": 1}
    check_named(job, others, r"node3 is lost \(rank 2\): its saferun was killed \(the host is up\)")
    check_cause(job, "host_lost", [2])
    assert job.lost_hosts() == {"node3": "gone"}
    job.assert_nothing_left()


@pytest.mark.slow
def test_where_the_saferun_of_the_first_host_is_killed_each_other_host_says_so(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """They cannot meet any more; each keeps what it has seen."""
    cluster = make_cluster(4)
    node1, *others = cluster.hosts
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    job.now()
    node1.kill(job.saferun(node1))
    assert job.end() == {"node1": -signal.SIGKILL, "node2": 1, "node3": 1, "node4": 1}
    check_named(job, others, r"node1, which had the job's store, is lost: its saferun was killed \(the host is up\)")
    for host in others:
        check_cause(job, "store_host_lost", [], host)
    job.assert_nothing_left()


@pytest.mark.parametrize("killed", slow_but(["rank", "saferun"], "saferun"))
def test_under_slurm_the_launcher_ends_too(cluster: Cluster, tmp_path: Path, killed: str) -> None:
    """Without srun's -K: that a task has failed is no reason for Slurm to end the others."""
    node3 = cluster.hosts[2]
    job = jobs.start(cluster, jobs.Way("srun"), tmp_path, STEPS, "--host-timeout", str(HOST_TIMEOUT_S), nproc=1)
    job.hear("steps", 4)
    # The oldest is the supervisor; what watches over it has the same command line.
    node3.kill(jobs.ranks_on(node3)[0] if killed == "rank" else node3.pids(r"-m saferun ")[0])
    (code,) = job.finish()
    # srun's own is the highest of its tasks'.
    assert code == (1 if killed == "rank" else 128 + signal.SIGKILL)
    named = r"saferun: rank 2 \(node3, .*SIGKILL" if killed == "rank" else r"saferun: node3 is lost \(rank 2\)"
    assert len(job.saferun_said(named)) == 1, job.story("on srun's console one host speaks for all")
    jobs.assert_nothing_left(cluster)


# ------------------------------------------------------------------------------------------ processes that stand still


@pytest.mark.slow
@pytest.mark.parametrize("frozen", slow_but([0, 2], "2"))
def test_a_frozen_saferun_is_told_from_a_dead_one(make_cluster: MakeCluster, tmp_path: Path, frozen: int) -> None:
    """With its coordinator. The others end without it; and it ends too, with its rank, as soon as it may go on."""
    cluster = make_cluster(3)
    host = cluster.hosts[frozen]
    others = [other for other in cluster.hosts if other is not host]
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    pids = [job.saferun(host), job.coordinator(host)]
    job.now()
    host.freeze(pids)
    assert set(job.end(*others).values()) == {1}
    who = "node1, which had the job's store, is lost" if frozen == 0 else r"node3 is lost \(rank 2\)"
    check_named(job, others, f"{who}: its saferun accepts connections but does not respond: it is stopped")
    if frozen == 0:
        for other in others:
            check_cause(job, "store_host_lost", [], other)
    else:
        check_cause(job, "host_lost", [2])
        assert job.lost_hosts() == {"node3": "frozen"}
    job.now()
    host.thaw(pids)
    assert job.end(host) == {host.name: 1}
    assert "hint: " in job.said(host)
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [0, 2])
def test_a_frozen_saferun_ends_no_job_whose_ranks_train_on(
    make_cluster: MakeCluster, tmp_path: Path, frozen: int
) -> None:
    """As under torchrun, whose ranks would not notice: one line says it, and the job ends well."""
    cluster = make_cluster(3)
    host = cluster.hosts[frozen]
    others = [other for other in cluster.hosts if other is not host]
    job = FaultedJob(cluster, tmp_path, GLOO_UNTIL_RELEASED, "--host-timeout", 10, env=ON_DATA_NETWORK)
    job.await_steps()
    pids = [job.saferun(host), job.coordinator(host)]
    job.now()
    host.freeze(pids)
    says = others if frozen == 0 else [cluster.hosts[0]]
    for other in says:
        job.wait_said(other, rf"warning: .*{host.name} .*the ranks make progress, so the job goes on")
    # Were it given up, that would be by now.
    time.sleep(10 + KNOCK_S)
    host.thaw(pids)
    for other in says:
        job.wait_said(other, f"{host.name} answers again after")
    assert "is lost" not in "".join(job.said(each) for each in cluster.hosts)
    job.now()
    job.job.release("end")
    assert set(job.end().values()) == {0}, job.story("not all ended well")
    job.assert_nothing_left()


# The first rank is done at once; the others are seen to work.
UNEVEN = """
import hashlib

tell("ready")
while RANK > 0 and not os.path.exists(f"{FOLDER}/release.end"):
    hashlib.sha256(bytes(1 << 22)).digest()
    time.sleep(0.02)
"""


@pytest.mark.slow
def test_a_first_host_whose_ranks_have_ended_asks_the_others(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """One host cannot be heard; another one's ranks show that the job goes on."""
    cluster = make_cluster(3)
    node1, _, node3 = cluster.hosts
    job = FaultedJob(cluster, tmp_path, UNEVEN, "--host-timeout", 10)
    job.job.hear("ready", 3)
    job.now()
    for nic in ("eth0", "eth1"):
        node3.cut(nic, how="cable")
    job.wait_said(node1, r"warning: no heartbeat received from node3 \(.*the ranks make progress, so the job")
    for nic in ("eth0", "eth1"):
        node3.heal(nic)
    job.wait_said(node1, "node3 answers again after")
    job.now()
    job.job.release("end")
    assert set(job.end().values()) == {0}, job.story("not all ended well")
    job.assert_nothing_left()


# -------------------------------------------------------------------------------------------- hosts and their networks


def test_a_host_that_is_switched_off_is_named(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Nobody closes its connections: it is missed by its silence."""
    cluster = make_cluster(4)
    node3 = cluster.hosts[2]
    others = [host for host in cluster.hosts if host is not node3]
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    job.now()
    node3.power_off()
    assert set(job.end(*others).values()) == {1}
    check_named(job, others, r"node3 is lost \(rank 2\): none of its addresses answers: it has no power")
    check_cause(job, "host_lost", [2])
    assert job.lost_hosts() == {"node3": "unreachable"}
    job.assert_nothing_left()


@pytest.mark.slow
def test_where_the_first_host_is_switched_off_the_others_say_so(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The store was there, and the report would have been: each keeps what it has seen on its own disk."""
    cluster = make_cluster(4)
    node1, *others = cluster.hosts
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    job.now()
    node1.power_off()
    assert set(job.end(*others).values()) == {1}
    check_named(job, others, "node1, which had the job's store, is lost: none of its addresses answers")
    for number, host in enumerate(others, 1):
        check_cause(job, "store_host_lost", [], host)
        incident = job.incident(host)
        assert incident is not None
        assert [rank for group in incident["wait_groups"] for rank in group["ranks"]] == [number]
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.parametrize("cut", [0, 2])
def test_a_lost_control_path_is_no_lost_host(make_cluster: MakeCluster, tmp_path: Path, cut: int) -> None:
    """The ranks train on over the other network; saferun's messages go there too, and one line names the interface."""
    cluster = make_cluster(3)
    host = cluster.hosts[cut]
    job = FaultedJob(cluster, tmp_path, GLOO_UNTIL_RELEASED, env=ON_DATA_NETWORK)
    job.await_steps()
    job.now()
    host.cut("eth0", how="cable")
    node1 = cluster.hosts[0]
    job.wait_said(node1, f"saferun: warning: {host.name}: eth0 has no carrier; .*the job goes on")
    # Were anybody given up, that would be by now.
    time.sleep(HOST_TIMEOUT_S + KNOCK_S)
    if cut:
        host.heal("eth0")
    job.job.release("end")
    assert set(job.end().values()) == {0}
    said = [line for each in cluster.hosts for line in job.said(each).splitlines()]
    assert len([line for line in said if "saferun: " in line]) == 1, job.story("more than one line")
    job.assert_nothing_left()


@pytest.mark.slow
@pytest.mark.limit_s(600)
@pytest.mark.parametrize("heals", [False, True])
def test_without_any_control_path_a_job_goes_on_while_its_ranks_do(
    make_cluster: MakeCluster, tmp_path: Path, heals: bool
) -> None:
    """Connections of ranks that exist live on, and nobody else gets through: torchrun would not have noticed either."""
    cluster = make_cluster(3)
    node1, node2, node3 = cluster.hosts
    # Whether ranks get on is seen within a part of this time, on processors that have other things to do.
    job = FaultedJob(cluster, tmp_path, GLOO_UNTIL_RELEASED, "--host-timeout", 10, env=ON_DATA_NETWORK)
    job.await_steps()
    job.now()
    node3.firewall(nic="eth1", new_only=True)
    for other in (node1, node2):
        other.firewall(nic="eth1", new_only=True, peer=node3)
    node3.cut("eth0", how="cable")
    job.wait_said(node3, r"warning: node3: eth0 has no carrier; node1 cannot be reached; .*the job goes on")
    job.wait_said(node1, r"warning: no heartbeat received from node3 \(.*the ranks make progress, so the job")
    if heals:
        for each in cluster.hosts:
            each.unfirewall()
        job.wait_said(node1, "node3 answers again after")
    job.job.release("end")
    # Unheard hosts are waited for, as at torchrun's exit barrier, ten times as long as a host may be silent.
    assert set(job.end().values()) == {0}
    if not heals:
        assert "no answer from node3 for" in job.said(node1)
    assert "is lost" not in "".join(job.said(each) for each in cluster.hosts)
    job.assert_nothing_left()


@pytest.mark.slow
def test_a_cut_that_stops_the_ranks_is_told_as_what_it_is(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """They use the network that is cut: the job stands still, and whose network it is all hosts can tell together."""
    cluster = make_cluster(3)
    node1, _, node3 = cluster.hosts
    job = FaultedJob(cluster, tmp_path, STEPS)
    job.await_steps()
    job.now()
    node3.cut("eth0")
    job.wait_said(node1, r"warning: node3: node1 does not answer any more; messages to node1 go over eth1 ")
    job.wait_said(node1, r"the job hangs: [^$]*job left running")
    job.of["node1"].terminate()
    assert set(job.end().values()) == {1}
    job.assert_nothing_left()


@pytest.mark.slow
def test_what_stands_between_ranks_is_named_while_the_job_goes_on(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Slow is not hung; what hangs is told with its cause, costs nothing, and is known to be over when it is."""
    cluster = make_cluster(4)
    node1, node2, node3, _ = cluster.hosts
    job = FaultedJob(cluster, tmp_path, GLOO, env=ON_DATA_NETWORK)
    job.await_steps()

    job.now()
    for nic in ("eth0", "eth1"):
        node3.slow(nic, delay_ms=50, loss=0.03)
    time.sleep(HANG_TIMEOUT_S + HOST_TIMEOUT_S)
    assert job.said(node1) == ""
    node3.unslow()

    job.now()
    node3.freeze([job.rank(node3)])
    job.wait_said(node1, r"job left running")
    assert re.search(r"the job may hang: rank 2 \(node3\) .* is stopped \(state T\)", job.said(node1)), job.said(node1)
    check_cause(job, "hang_stopped", [2])
    node3.thaw([job.rank(node3)])
    job.wait_said(node1, "job resumed")

    job.now()
    node3.cut("eth1")
    job.wait_said(node1, r"job left running")
    assert "nothing gets through between node3 and node2, node4: its network is cut (rank 2)" in job.said(node1)
    check_cause(job, "network_cut", [2])
    node3.heal("eth1")
    job.wait_said(node1, "job resumed")

    job.now()
    node2.block_peer(node3)
    job.wait_said(node1, r"job left running")
    assert "the ranks of node2 and node3 do not reach each other" in job.said(node1)
    check_cause(job, "network_between_hosts", [])
    node2.unfirewall()
    job.wait_said(node1, "job resumed")
    job.now()
    job.of["node1"].terminate()
    assert set(job.end().values()) == {1}
    job.assert_nothing_left()
