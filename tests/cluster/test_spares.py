"""Jobs with spare hosts: a spare takes the place of a host that is itself at fault, and waits until then."""

from __future__ import annotations

import json
import re
import signal
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.breadth import slow_but
from tests.cluster import jobs
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
from tests.process.launching import customized, in_saferun, is_coordinator

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

HOST_TIMEOUT_S = 4
HEALTHY = "check = bool"
# Each rank says where it is, and works on until the test lets it end.
PLACES = """
place = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
tell("place", json.dumps([socket.gethostname(), *place]))
while not os.path.exists(f"{FOLDER}/release.end"):
    check()
    time.sleep(0.01)
"""
# The same, but for what a rank of the second host meets first; torch prints this of a GPU that is broken.
SICK_GPU = """
if RANK == 2 and socket.gethostname() == "node2":
    await_release("sick")
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
FIRST_IS_SICK = """
def check():
    if RANK == 0 and socket.gethostname() == "node1" and os.path.exists(f"{FOLDER}/release.sick"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
"""
# All ranks but those of the second host wait for these, as in a collective.
OTHERS_WAIT = """
import signal

def check():
    if ATTEMPT == 0 and socket.gethostname() != "node2":
        signal.pause()
"""
# What the checks of the second host find of it, before any rank is started.
UNFIT = """import socket
    if socket.gethostname() == "node2":
        from saferun.preflight.checks import gpus
        from saferun.preflight.checks.answers import warning
        lost = "GPU 3 fell off the bus", "reboot", (("unusable", "GPU 3"),)
        gpus.check_gpus = lambda _: warning(*lost, class_name="gpu_hardware_error")"""
# A rank fails by the script's own fault, wherever it runs.
WRONG = """
if RANK == 2 and ATTEMPT == 0:
    raise ValueError("a label is out of range")
"""
WAITS = "saferun: node4: this spare host waits to take the place of one that fails"


def start(
    cluster: Cluster, folder: Path, way: str, *options: object, program: str = f"{HEALTHY}\n{PLACES}", **more: Any
) -> jobs.Job:
    """Three hosts that train, with two ranks each, and one spare."""
    chosen = ("--spares", 1, "--host-timeout", HOST_TIMEOUT_S, "--start-window", 0.1, *options)
    texts = tuple(map(str, chosen))
    if way == "by_hand":
        return jobs.start(cluster, jobs.Way(way), folder, program, *texts, nnodes="3", **more)
    return jobs.start(cluster, jobs.Way(way, more.pop("tasks", 1)), folder, program, "--nnodes", "3", *texts, **more)


def places(job: jobs.Job, attempt: int = 0) -> dict[int, list[str]]:
    """Where each rank is, once all six are there."""
    return {word.rank: json.loads(word.more) for word in job.hear("place", 6, attempt=attempt)}


def saferun_of(host: Host) -> int:
    """The pid of its supervisor: the oldest, as what it has forked has the same command line."""
    return host.pids(r"-m saferun ")[0]


def decisions(job: jobs.Job) -> list[dict[str, Any]]:
    """Those of the leader's report."""
    return [row for report in job.reports for row in report["decisions"]]


def assert_replaced(job: jobs.Job, before: dict[int, list[str]], attempt: int = 1) -> None:
    """The fourth host has the place of the second one, with its ranks; the others have theirs."""
    after = places(job, attempt=attempt)
    assert [after[rank][0] for rank in range(6)] == ["node1", "node1", "node4", "node4", "node3", "node3"]
    assert [after[rank][1:] for rank in range(6)] == [before[rank][1:] for rank in range(6)]
    line = r"saferun: starting again: node2 is left out \(.*\); node4, a spare, takes its place; no spare is left"
    job.until(lambda: job.saferun_said(line), "it is said")


def assert_reported(job: jobs.Job) -> None:
    """The decision is in the leader's report."""
    (row,) = [row for row in decisions(job) if row["next_step"] != "finish"]
    assert (row["next_step"], row["host"], row["spare"]) == ("replace", "node2", "node4")


@pytest.mark.slow
def test_a_spare_ends_no_job_whose_ranks_train_on_without_their_store(cluster: Cluster, tmp_path: Path) -> None:
    """The coordinator of the first host is killed: the others need it no more, and the spare waits for them in vain."""
    job = start(cluster, tmp_path, "by_hand")
    places(job)
    job.until(lambda: job.saferun_said(WAITS), "the spare waits")
    first = cluster.hosts[0]
    (coordinator,) = filter(is_coordinator, first.pids(r"coordinator/__main__\.py"))
    first.kill(coordinator)
    lost = r"the coordinator of node1 ended \(killed by SIGKILL\)"
    job.until(lambda: len(job.saferun_said(rf"saferun: warning: {lost}, .*the job goes on")) == 3, "the others go on")
    waits = rf"saferun: {lost}; this spare host waits for the next rendezvous"
    job.until(lambda: job.saferun_said(waits), "the spare waits")
    job.release("end")
    assert job.finish() == [0, 0, 0, 0], job.story("the spare ended with an error")
    jobs.assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["srun", "by_hand"])
def test_a_spare_takes_the_place_of_a_host_whose_saferun_is_killed(cluster: Cluster, tmp_path: Path, way: str) -> None:
    """Its ranks get the same numbers; the others keep theirs, no restart is used up, and the job ends well."""
    job = start(cluster, tmp_path, way)
    before = places(job)
    assert [before[rank][0] for rank in range(6)] == ["node1", "node1", "node2", "node2", "node3", "node3"]
    job.until(lambda: job.saferun_said(WAITS), "the spare waits")
    cluster.hosts[1].kill(saferun_of(cluster.hosts[1]))
    assert_replaced(job, before)
    job.release("end")
    codes = job.finish()
    assert codes == ([128 + signal.SIGKILL] if way == "srun" else [0, -signal.SIGKILL, 0, 0])
    assert_reported(job)
    jobs.assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("spares", "unfit"), [(1, "node2"), (0, "node2"), (1, "node1")])
def test_a_host_that_is_unfit_before_the_start_is_replaced_and_without_a_spare_it_trains(
    cluster: Cluster, tmp_path: Path, spares: int, unfit: str
) -> None:
    """Its ranks are never started; it ends with exit code 0, as all others do. A line says what was found."""
    hosts = cluster.hosts[: 3 + spares]
    options = ("--spares", str(spares)) if spares else ()
    (folder := tmp_path / "job").mkdir()
    env = customized(tmp_path, in_saferun(UNFIT.replace("node2", unfit)))
    options = ("--nproc-per-node", "2", *options)
    job = jobs.by_hand(cluster, folder, f"{HEALTHY}\n{PLACES}", *options, hosts=hosts, nnodes="3", env=env)
    found = places(job, attempt=0)
    expected = ["node4" if spares and name == unfit else name for name in ("node1", "node2", "node3")]
    assert [found[rank][0] for rank in range(6)] == [name for name in expected for _ in range(2)]
    found_line = f"saferun: {'' if spares else 'warning: '}{unfit}: GPU 3 fell off the bus"
    job.until(lambda: job.saferun_said(found_line), "it is said")
    left_out = rf"saferun: starting again: {unfit} is left out \(GPU 3 fell off the bus\); node4, a spare, takes .*"
    if spares:
        job.until(lambda: job.saferun_said(left_out), "it is said")
    job.release("end")
    assert job.finish() == [0] * len(hosts), job.story("the job did not end well")
    assert len(job.words) == 6, job.story("other ranks ran")
    if spares:
        (row,) = [row for row in decisions(job) if row["next_step"] != "finish"]
        assert (row["next_step"], row["host"], row["spare"]) == ("replace", unfit, "node4")
    jobs.assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_host_that_is_switched_off(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Nothing is heard of it any more, and its place is not kept for it."""
    cluster = make_cluster(4)
    job = start(cluster, tmp_path, "by_hand")
    before = places(job)
    cluster.hosts[1].power_off()
    assert_replaced(job, before)
    job.release("end")
    codes = job.finish()
    assert (codes[0], codes[2], codes[3]) == (0, 0, 0), job.story("the job did not end well")
    assert_reported(job)


@pytest.mark.slow
def test_a_host_that_stands_still_until_a_spare_has_its_place_does_not_end_the_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A virtual machine that is moved goes on, and its saferun is too late. It says so, and ends with exit code 0."""
    job = start(cluster, tmp_path, "by_hand", program=OTHERS_WAIT + PLACES)
    before = places(job)
    job.until(lambda: job.saferun_said(WAITS), "the spare waits")
    saferun = psutil.Process(saferun_of(cluster.hosts[1]))
    frozen = [process.pid for process in (saferun, *saferun.children(recursive=True))]
    cluster.hosts[1].freeze(frozen)
    assert_replaced(job, before)
    cluster.hosts[1].thaw(frozen)
    assert job.processes[1].finish(60.0) == 0, job.story("the host that is left out ended the step")
    assert job.saferun_said("saferun: node2 was left out of this job")
    job.release("end")
    assert job.finish() == [0, 0, 0, 0], job.story("the job did not end well")
    assert_reported(job)
    jobs.assert_nothing_left(cluster)


@pytest.mark.parametrize("tasks", slow_but([1, 2], "1"))
def test_a_host_with_a_broken_gpu_leaves_and_does_not_end_the_step(
    cluster: Cluster, tmp_path: Path, tasks: int
) -> None:
    """Its saferun ends with exit code 0: under --kill-on-bad-exit any other would end the job, which goes on."""
    job = start(
        cluster,
        tmp_path,
        "srun",
        tasks=tasks,
        program=f"{HEALTHY}\n{SICK_GPU}{PLACES}",
        options=("--kill-on-bad-exit=1",),
    )
    job.hear("place", 5)
    job.release("sick")
    after = places(job, attempt=1)
    assert [after[rank][0] for rank in range(6)] == ["node1", "node1", "node4", "node4", "node3", "node3"]
    job.release("end")
    assert job.finish() == [0], job.story("the step was ended")
    assert_reported(job)
    jobs.assert_nothing_left(cluster)


@pytest.mark.parametrize("way", slow_but(["killed", "switched off", "broken"], "killed"))
def test_a_spare_takes_the_place_of_the_first_host(make_cluster: MakeCluster, tmp_path: Path, way: str) -> None:
    """With its ranks, and the stores: all find the spare, which leads from now on, and all ranks have its address."""
    cluster = make_cluster(4)
    job = start(cluster, tmp_path, "by_hand", program=FIRST_IS_SICK + PLACES)
    before = places(job)
    job.until(lambda: job.saferun_said(WAITS), "the spare waits")
    if way == "broken":
        job.release("sick")
    elif way == "killed":
        cluster.hosts[0].kill(saferun_of(cluster.hosts[0]))
    else:
        cluster.hosts[0].power_off()
    after = places(job, attempt=1)
    assert [after[rank][0] for rank in range(6)] == ["node4", "node4", "node2", "node2", "node3", "node3"]
    assert [after[rank][1:4] for rank in range(6)] == [before[rank][1:4] for rank in range(6)]
    (master,) = {after[rank][4] for rank in range(6)}
    assert master in cluster.hosts[3].addresses
    assert len({after[rank][5] for rank in range(6)}) == 1
    job.release("end")
    assert job.finish()[1:] == [0, 0, 0], job.story("the job did not end well")
    assert job.saferun_said(r"saferun: (node\d: )?starting again: node1 is left out \(.*\); node4, a spare, takes")


@pytest.mark.slow
@pytest.mark.parametrize("replaced", [1, 3])
def test_a_coordinator_that_was_replaced_finds_the_spare_that_leads_or_leads(
    make_cluster: MakeCluster, tmp_path: Path, replaced: int
) -> None:
    """The next coordinator of a host knows which spares there are, and that of the spare has its sockets."""
    cluster = make_cluster(4)
    job = start(cluster, tmp_path, "by_hand")
    before = places(job)
    job.until(lambda: job.saferun_said(WAITS), "the spare waits")
    host = cluster.hosts[replaced]
    (coordinator,) = filter(is_coordinator, host.pids(r"coordinator/__main__\.py"))
    host.kill(coordinator)
    resumed = rf"saferun: warning: the coordinator of node{replaced + 1} ended \(.*\); another one has taken its place"
    job.until(lambda: job.saferun_said(resumed), "another one is there")
    cluster.hosts[0].power_off()
    after = places(job, attempt=1)
    assert [after[rank][0] for rank in range(6)] == ["node4", "node4", "node2", "node2", "node3", "node3"]
    assert [after[rank][1:4] for rank in range(6)] == [before[rank][1:4] for rank in range(6)]
    assert {after[rank][4] for rank in range(6)} <= {*cluster.hosts[3].addresses}
    assert len({after[rank][4] for rank in range(6)}) == 1
    job.release("end")
    assert job.finish()[1:] == [0, 0, 0], job.story("the job did not end well")


@pytest.mark.slow
def test_an_exception_of_a_rank_uses_no_spare(cluster: Cluster, tmp_path: Path) -> None:
    """It is the script's fault: --max-restarts decides, and the same hosts train again."""
    job = start(cluster, tmp_path, "srun", "--max-restarts", 1, program=f"{HEALTHY}\n{WRONG}{PLACES}")
    after = places(job, attempt=1)
    assert [after[rank][0] for rank in range(6)] == ["node1", "node1", "node2", "node2", "node3", "node3"]
    job.release("end")
    assert job.finish() == [0]
    assert [row["next_step"] for row in decisions(job)] == ["restart"]


@pytest.mark.slow
def test_without_a_spare_left_the_job_ends(cluster: Cluster, tmp_path: Path) -> None:
    """As it would without spares. The spare that is gone costs one line, and the job goes on until then."""
    job = start(cluster, tmp_path, "by_hand")
    places(job)
    cluster.hosts[3].kill(saferun_of(cluster.hosts[3]))
    job.until(lambda: job.saferun_said("saferun: node4, a spare host, is gone .*; the job goes on, no spare"), "a line")
    cluster.hosts[1].kill(saferun_of(cluster.hosts[1]))
    assert job.finish() == [1, -signal.SIGKILL, 1, -signal.SIGKILL]
    assert not job.saferun_said("saferun: starting again")


@pytest.mark.slow
def test_saferunctl_on_the_spare_ends_the_job_on_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, "by_hand")
    places(job)
    job.until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    assert "exit code 143" in ask(cluster.hosts[3], tmp_path, "stop", "latest")
    assert set(job.finish()) == {143}, job.story("wrong exit code")
    jobs.assert_nothing_left(cluster)


@pytest.mark.slow
def test_scancel_ends_the_spare_too(cluster: Cluster, tmp_path: Path) -> None:
    """It gets the signal itself."""
    job = start(cluster, tmp_path, "srun")
    places(job)
    (number,) = job.until(lambda: re.findall(r"from Slurm step (\d+)\.0", job.err), "its number")
    cluster.hosts[0].run(["scancel", number], check=True)
    assert job.finish()[0] != 0
    jobs.assert_nothing_left(cluster)
