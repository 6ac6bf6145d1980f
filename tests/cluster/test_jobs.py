"""One job over four hosts: however it is started, it finds its place, trains, fails as one, and leaves nothing."""

from __future__ import annotations

import json
import re
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import (
    DIE_WHEN_RELEASED,
    SAFERUN,
    TELL_PLACE,
    TRAIN,
    WAYS,
    Job,
    Way,
    assert_nothing_left,
    start,
    write,
)
from tests.cluster.machines import launchers
from tests.process.launching import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

most_different = pytest.mark.parametrize(
    "way", slow_but(WAYS, "srun", "hydra-a-task-a-rank"), ids=[way.name for way in WAYS]
)
# Long enough for a host that starts later than the others because the machine has other things to do.
START_TIMEOUT_S = 6
SOURCES = {
    "srun": "Slurm step N",
    "mpirun": "Open MPI job N",
    "hydra": "mpiexec on nodeN",
}


# ------------------------------------------------------------------------------------------------------- a healthy job


@most_different
def test_every_rank_has_its_place_without_flags_but_those_of_the_launcher(
    cluster: Cluster, tmp_path: Path, way: Way
) -> None:
    """Two ranks on each host, side by side, in the order of the hosts; and one line says where that comes from."""
    job = start(cluster, way, tmp_path, TELL_PLACE)
    assert set(job.finish()) == {0}, job.story("failed")
    assert [json.loads(said.more) for said in job.words] == [
        [f"node{1 + rank // 2}", rank, 8, rank % 2, 2, rank // 2, 4, rank, 8] for rank in range(8)
    ]
    assert "\x1b" not in job.out  # mpirun's tasks have terminals that nobody looks at
    # Where options say it all, nothing was detected.
    met = "saferun: 4 hosts (node1, node2, node3, node4), 8 ranks, 2 on each, from "
    off = " (--scheduler none ignores the scheduler, as torchrun does)"
    expected = [met + SOURCES[way.launcher] + off] if way.launcher in SOURCES else []
    assert [re.sub(r"\d+(\.0)?(?= \(--)", "N", line) for line in job.saferun_said("saferun: ")] == expected
    assert_nothing_left(cluster)


# ------------------------------------------------------------------------------------------- what the user wrote wins


TELL_JOB = 'tell(sys.argv[1], f\'{os.environ["LOCAL_RANK"]} {os.environ["GROUP_WORLD_SIZE"]} {WORLD}\')'
# One step of two processes on one host, in which each says of several launches what they are.
INDEPENDENT = (
    "--nnodes 1 --nproc-per-node 1",
    "--standalone --nproc-per-node 1",
    "--nnodes 1 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:0",
    "--master-port $((29510 + SLURM_PROCID))",
)


@pytest.mark.slow
def test_independent_launches_in_one_step_stay_independent(cluster: Cluster, tmp_path: Path) -> None:
    """A sweep: N processes are N jobs; two agents with places of their own are one job, of the ranks that they say."""
    script = write(tmp_path, TELL_JOB)
    saferun = " ".join((*SAFERUN, "--run-dir", "none"))
    lines = [f"{saferun} {options} {script} sweep{i}" for i, options in enumerate(INDEPENDENT)]
    place = "--nnodes 2 --node-rank $SLURM_PROCID --master-addr node1 --master-port 29509 --nproc-per-node 2"
    lines += [f"{saferun} {place} {script} agents", f"{saferun} {script} bare"]
    command = ["sh", "-ec", "\n".join(lines)]
    job = Job(tmp_path, [launchers.srun(cluster, command, tasks_per_host=2, hosts=cluster.hosts[:1], cwd=tmp_path)])
    assert job.finish() == [0], job.story("failed")
    told = {word: [(w.rank, w.more) for w in job.words if w.word == word] for word in {w.word for w in job.words}}
    sweeps = {f"sweep{i}": [(0, "0 1 1"), (0, "0 1 1")] for i in range(len(INDEPENDENT))}
    agents = [(rank, f"{rank % 2} 2 4") for rank in range(4)]
    assert told == {**sweeps, "agents": agents, "bare": [(0, "0 1 2"), (1, "1 1 2")]}, job.story("another place")
    # Only who was not told its place says where it comes from.
    (line,) = job.saferun_said("saferun: ")
    assert re.fullmatch(r"saferun: 1 host \(node1\), 2 ranks, from Slurm step \S+ \(--scheduler none .*\)", line)
    assert_nothing_left(cluster)


def test_who_forgets_srun_is_told(cluster: Cluster, tmp_path: Path) -> None:
    """Two hosts were allocated, and the job runs on one of them: in a batch script, or in salloc."""
    command = ("salloc", "--nodes=2", *SAFERUN, "--run-dir", "none", write(tmp_path, TELL_PLACE))
    job = Job(tmp_path, [cluster.hosts[0].popen(command, cwd=tmp_path)])
    assert job.finish() == [0], job.story("failed")
    assert [word.rank for word in job.words] == [0]
    assert job.saferun_said("saferun: ") == [
        "saferun: this job has 2 nodes; saferun runs on node1 only: start it with srun"
    ]
    assert_nothing_left(cluster)


# By hand it does in test_elastic.py; and where a rank has a task of its own, torch cannot tell by what it was started.
TRAINING_WAYS = [way for way in WAYS if way.name in {"srun", "srun-a-task-a-rank", "mpirun", "hydra", "pdsh"}]


@pytest.mark.parametrize("way", slow_but(TRAINING_WAYS, "srun"), ids=[way.name for way in TRAINING_WAYS])
def test_the_same_training_runs_under_every_launcher(cluster: Cluster, tmp_path: Path, way: Way) -> None:
    """With gloo, which has to find its way from host to host."""
    hosts = cluster.hosts if way.tasks == 1 else cluster.hosts[:2]
    program = f"def after_step_2(): pass\n{TRAIN}"
    job = start(cluster, way, tmp_path, program, hosts=hosts, nproc=way.tasks, env={"OMP_NUM_THREADS": "1"})
    job.hear("trained", 4)
    assert set(job.finish()) == {0}, job.story("failed")
    assert [(said.rank, said.more) for said in job.words if said.word == "trained"] == [(i, "4") for i in range(4)]
    assert_nothing_left(cluster)


# ------------------------------------------------------------------------------------------------------- failing as one


@pytest.mark.parametrize("way", slow_but(WAYS, "srun"), ids=[way.name for way in WAYS])
def test_a_rank_that_dies_ends_the_job_everywhere_and_is_named_on_every_console(
    cluster: Cluster, tmp_path: Path, way: Way
) -> None:
    """Whoever reads the log of any host learns which rank of which host it was; from a log of all, once."""
    job = start(cluster, way, tmp_path, DIE_WHEN_RELEASED)
    job.hear("ready", 8)
    job.release("die.5")
    began_at = time.monotonic()
    assert set(job.finish()) == {1}, job.story("another exit code")
    print(f"{way.name}: the launcher ended after {time.monotonic() - began_at:.2f} s")
    named = job.saferun_said(r"saferun: rank 5 \(node3, local rank 1, pid \d+\) failed first .*SIGKILL")
    assert len(set(named)) == 1, job.story("named differently")
    assert len(named) == (4 if way.launcher in {"pdsh", "by_hand"} else 1), job.story("not named once a console")
    (report,) = job.reports
    (incident,) = report["incidents"]
    assert incident["cause"]["ranks"] == [5]
    assert [host["name"] for host in incident["hosts"]] == ["node1", "node2", "node3", "node4"]
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_failure_on_the_first_host_is_told_by_all(cluster: Cluster, tmp_path: Path) -> None:
    """The host that decides may be the one whose rank has died, and the exit code of a rank is not the job's."""
    program = "tell('ready')\nawait_release(f'die.{RANK}')\nsys.exit(3)\n"
    job = start(cluster, Way("by_hand"), tmp_path, program, nproc=1)
    job.hear("ready", 4)
    job.release("die.0")
    assert job.finish() == [1, 1, 1, 1]
    assert len(job.saferun_said(r"saferun: rank 0 \(node1, .*exit code 3")) == 4, job.story("not named by every host")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_ranks_that_all_fail_at_once_are_one_failure(cluster: Cluster, tmp_path: Path) -> None:
    """The first one counts on all hosts, and one of them reports it for all on the console of srun."""
    program = "tell('ready')\nawait_release('die')\nsys.exit(3)\n"
    job = start(cluster, Way("srun"), tmp_path, program)
    job.hear("ready", 8)
    job.release("die")
    assert job.finish() == [1]
    told = job.saferun_said(r"saferun: .*exit code 3")
    assert len(told) == 1, job.story("not told once")
    (report,) = job.reports
    assert len(report["incidents"]) == 1


# ------------------------------------------------------------------------------------------------------- who is missing


@pytest.mark.slow
def test_hosts_may_be_started_in_any_order(cluster: Cluster, tmp_path: Path) -> None:
    """The first one last, as it happens where a scheduler starts them."""
    jobs = []
    script = write(tmp_path, TELL_PLACE)
    for host in reversed(cluster.hosts):
        command = (*SAFERUN, "--nnodes", "4", "--node-rank", str(host.index), "--master-addr", "node1", script)
        process = host.popen(command, cwd=tmp_path)
        jobs.append(process)
        # It has begun to meet the others; but the first one, whom they wait for, is the last.
        until(partial(host.pids, r"coordinator/__main__\.py"), f"{host.name} meets the others")
    job = Job(tmp_path, jobs)
    assert job.finish() == [0] * 4, job.story("failed")
    assert [said.rank for said in job.words] == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_task_that_slurm_has_started_and_that_does_not_come_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """By the name of its host; on a console that the hosts share, by one of those that wait for it."""
    saferun = " ".join((*SAFERUN, "--start-timeout", str(START_TIMEOUT_S), write(tmp_path, TELL_PLACE)))
    command = ["sh", "-c", f"test $(hostname) = node3 || exec {saferun}"]
    job = Job(tmp_path, [launchers.srun(cluster, command, cwd=tmp_path)])
    assert job.finish() == [1]
    told = job.saferun_said(f"saferun: .*did not come within {START_TIMEOUT_S} s.*node3")
    assert len(told) == 1, job.story("not named, or more than once")
    assert "node2" not in "".join(job.saferun_said("saferun: .*did not come"))
    assert job.words == []
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_hosts_of_a_list_that_do_not_come_are_named(cluster: Cluster, tmp_path: Path) -> None:
    """Pdsh was given another list than saferun."""
    some = [cluster.hosts[0], cluster.hosts[2]]
    command = (*SAFERUN, "--hosts", "node[1-4]", "--start-timeout", str(START_TIMEOUT_S), write(tmp_path, TELL_PLACE))
    job = Job(tmp_path, [launchers.pdsh(cluster, command, hosts=some, cwd=tmp_path)])
    assert job.finish() == [1]
    told = job.saferun_said(f"saferun: .*did not come within {START_TIMEOUT_S} s")
    assert len(told) == 2, job.story("not told by both")
    assert all("2 of 4 hosts" in line and "node2" in line and "node4" in line for line in told), told


@pytest.mark.slow
def test_a_first_host_that_does_not_come_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Nobody else could be asked who is there."""
    options = ("--start-timeout", str(START_TIMEOUT_S))
    script = write(tmp_path, TELL_PLACE)
    place = ("--nnodes", "4", "--master-addr", "node1")
    job = Job(
        tmp_path,
        [
            host.popen((*SAFERUN, *place, "--node-rank", str(host.index), *options, script), cwd=tmp_path)
            for host in cluster.hosts[1:]
        ],
    )
    assert job.finish() == [1, 1, 1]
    for when in (r"\(5 s\)", f"for {START_TIMEOUT_S} s"):
        said = job.saferun_said(rf"saferun: node1:29500 \(\S+\) refuses connections from node[234],? {when}$")
        assert len(said) == 3, job.story("not named")


# ---------------------------------------------------------------------------------------------------------------- hangs


HANG = """
import threading


def work():
    listener = socket.create_server(("", 7777))
    peers = [listener.accept()[0] for _ in range(WORLD - 1)]
    load()


def load():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_rank_5():
    while True:
        try:
            connection = socket.create_connection(("node3", 7777))
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    connection.recv(1)


tell("ready")
work() if RANK == 5 else wait_for_rank_5()
"""


def test_a_hang_over_four_hosts_is_one_picture(cluster: Cluster, tmp_path: Path) -> None:
    """Rank and host of the odd one out are named, and whoever hangs is in it, wherever it is."""
    options = ("--hang-timeout", "4", "--on-hang", "stop")
    job = start(cluster, Way("srun"), tmp_path, HANG, *options)
    job.hear("ready", 8)
    assert job.finish() == [1], job.story("another exit code")
    (report,) = job.reports
    incident = report["incidents"][0]
    assert incident["kind"] == "hang"
    assert incident["cause"]["ranks"] == [5], job.story("another rank is blamed")
    assert job.saferun_said(r"saferun: .*rank 5 \(node3"), job.story("not named")
    assert sorted(rank for group in incident["wait_groups"] for rank in group["ranks"]) == list(range(8))
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_hang_over_four_hosts_that_may_end_by_itself_is_suspected_first(cluster: Cluster, tmp_path: Path) -> None:
    """Rank 5 waits for something outside the job, and its host is not the one that judges."""
    program = HANG.replace("    lock.acquire()\n    lock.acquire()\n", "    time.sleep(1000)\n")
    options = ("--hang-timeout", "4", "--external-wait-timeout", "14", "--on-hang", "stop")
    job = start(cluster, Way("srun"), tmp_path, program, *options)
    job.hear("ready", 8)
    assert job.finish() == [1], job.story("another exit code")
    (report,) = job.reports
    hangs = [incident for incident in report["incidents"] if incident["kind"] == "hang"]
    assert [hang["cause"]["ranks"] for hang in hangs] == [[5]] * len(hangs), job.story("another rank is blamed")
    certain = [hang["verdict"]["certain"] for hang in hangs]
    assert certain == [False] * (len(hangs) - 1) + [True], job.story("acted upon too early or too late")
    assert len(hangs) > 1
    assert hangs[-1]["verdict"]["stalled_s"] >= 14
    assert job.saferun_said(r"saferun: the job may hang: .*rank 5 \(node3"), job.story("not suspected")
    assert_nothing_left(cluster)


LEFT_OUT = """
import torch
import torch.distributed as dist


def evaluate():
    while True:
        time.sleep(1000)


dist.init_process_group("gloo")
ones = torch.ones(10)
dist.all_reduce(ones)
tell("ready")
evaluate() if RANK == 2 else dist.all_reduce(ones)
"""


@pytest.mark.slow
def test_a_rank_that_leaves_the_others_alone_in_a_collective_is_named_with_its_host(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Gloo's threads are busy on all hosts all the while."""
    options = ("--hang-timeout", "4", "--external-wait-timeout", "0", "--on-hang", "stop")
    job = start(cluster, Way("srun"), tmp_path, LEFT_OUT, *options, nproc=1, env={"OMP_NUM_THREADS": "1"})
    job.hear("ready", 4)
    assert job.finish() == [1], job.story("another exit code")
    (report,) = job.reports
    incident = report["incidents"][0]
    assert incident["kind"] == "hang"
    assert incident["cause"]["ranks"] == [2], job.story("another rank is blamed")
    assert job.saferun_said(r"saferun: .*rank 2 \(node3"), job.story("not named")
    assert sorted(rank for group in incident["wait_groups"] for rank in group["ranks"]) == [0, 1, 2, 3]


TO_A_PORT = """
def port_of(name):
    while not os.path.exists(f"{FOLDER}/port.{name}"):
        time.sleep(0.01)
    return int(open(f"{FOLDER}/port.{name}").read())


def listen():
    listener = socket.create_server(("", 0))
    with open(f"{FOLDER}/port.new.{RANK}", "w") as file:
        file.write(str(listener.getsockname()[1]))
    os.rename(file.name, f"{FOLDER}/port.{RANK}")
    return listener


listener = listen()
if RANK == 0:
    connection = socket.create_connection(("node2", port_of(1)))
else:
    connection = socket.create_connection(("node1", port_of(ASKED)))
tell("ready")
try:
    connection.recv(1)
except ConnectionResetError:
    pass
"""
SERVICE = """
import os, socket, sys, time
listener = socket.create_server(("", 0))
with open("port.new", "w") as file:
    file.write(str(listener.getsockname()[1]))
os.rename("port.new", "port.service")
connection, _ = listener.accept()
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.parametrize("asked", slow_but(["service", "0"], "service"))
def test_who_has_a_port_of_another_host_decides_whether_a_hang_is_certain(
    cluster: Cluster, tmp_path: Path, asked: str
) -> None:
    """The kernel has chosen both; whose they are, only that host knows."""
    options = ("--hang-timeout", "4", "--on-hang", "stop")
    program = f"ASKED = {asked!r}\n{TO_A_PORT}"
    service = cluster.hosts[0].popen([sys.executable, "-c", SERVICE], cwd=tmp_path)
    job = start(cluster, Way("by_hand"), tmp_path, program, *options, hosts=cluster.hosts[:2], nproc=1)
    job.hear("ready", 2)
    if asked == "service":
        job.until(lambda: job.saferun_said("saferun: the job may hang: "), "it is suspected")
        service.end()
        assert set(job.finish()) == {0}, job.story("it was stopped")
    else:
        assert set(job.finish()) == {1}, job.story("it was not stopped")
        service.end()
    (report,) = job.reports
    certain = [one["verdict"]["certain"] for one in report["incidents"] if one["kind"] == "hang"]
    assert certain == [asked == "0"] * len(certain), job.story("the verdict is another")
    assert_nothing_left(cluster)
