"""Restarts, and jobs whose hosts come and go, on real hosts; and that ranks are told what torchrun tells them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import (
    PORT,
    SAFERUN,
    TORCHRUN,
    TRAIN,
    Job,
    Way,
    assert_nothing_left,
    by_hand,
    ranks_on,
    start,
    write,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# Else 30 s pass before a job of fewer hosts than it may have gets going, and 15 s before a host is missed that is off.
# torch misses it after three intervals: less than a machine may stand still that runs all of these hosts.
QUICK = ("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=3")
C10D = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"node1:{PORT}", "--rdzv-id", "j")

# Ranks that say how large the world is, and stay until they are to end well or badly.
MEMBER = """
tell("world", f"{WORLD} {os.environ['GROUP_RANK']} {os.environ['GROUP_WORLD_SIZE']} {socket.gethostname()}")
while not os.path.exists(f"{FOLDER}/release.end"):
    if os.path.exists(f"{FOLDER}/release.die.{RANK}"):
        os.remove(f"{FOLDER}/release.die.{RANK}")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.01)
"""


# ------------------------------------------------------------------------------------------------------------- restarts


KILLED_ONCE = f"""
def after_step_2():
    if ATTEMPT == 0 and RANK == WORLD - 1:
        os.kill(os.getpid(), signal.SIGKILL)


{TRAIN}"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "count"),
    [("static", 2), pytest.param("static", 4, marks=pytest.mark.slow), pytest.param("c10d", 4, marks=pytest.mark.slow)],
)
def test_a_training_restarts_on_all_hosts_after_a_rank_was_killed(
    cluster: Cluster, tmp_path: Path, backend: str, count: int
) -> None:
    """Gloo meets in keys of the store, and those of the attempt before lead nowhere."""
    options = ("--max-restarts", "1")
    env = {"OMP_NUM_THREADS": "1"}
    job = by_hand(cluster, tmp_path, KILLED_ONCE, *options, hosts=cluster.hosts[:count], backend=backend, env=env)
    assert job.finish() == [0] * count, job.story("failed")
    assert [(said.rank, said.attempt) for said in job.words if said.word == "trained"] == [(i, 1) for i in range(count)]
    named = rf"saferun: rank {count - 1} \(node{count}, .*SIGKILL"
    assert len(job.saferun_said(named)) == count, job.story("not named by every host")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_job_under_slurm_restarts_until_its_restarts_are_used_up(cluster: Cluster, tmp_path: Path) -> None:
    """A rank of another host each time: the count is the job's."""
    job = start(cluster, Way("srun", 2), tmp_path, MEMBER, "--max-restarts", "2")
    for attempt, rank in enumerate((7, 0, 5)):
        job.hear("world", 8, attempt=attempt)
        job.release(f"die.{rank}")
    assert job.finish() == [1], job.story("another exit code")
    assert {said.attempt for said in job.words} == {0, 1, 2}
    (report,) = job.reports
    assert [incident["cause"]["ranks"] for incident in report["incidents"]] == [[7], [0], [5]]
    assert_nothing_left(cluster)


# ----------------------------------------------------------------------------------------------------- coming and going


def join(job: Job, host: Host, *options: str) -> None:
    """One more saferun for an elastic job."""
    command = (*SAFERUN, "--nnodes", "2:4", *C10D, *QUICK, *options, write(job.folder, MEMBER))
    job.processes.append(host.popen(command, cwd=job.folder))


def elastic(cluster: Cluster, folder: Path, hosts: Sequence[Host], *options: str) -> Job:
    """An elastic job whose first host has two ranks."""
    write(folder, MEMBER)
    job = Job(folder, [])
    for host in hosts:
        join(job, host, "--nproc-per-node", "2" if host is cluster.hosts[0] else "1", *options)
    return job


def world(job: Job, size: int, hosts: int, *, before: int) -> list[tuple[int, str]]:
    """Wait until a world of this size has come together after so many words, and return ranks and hosts."""

    def complete() -> list[tuple[int, str]]:
        said = [said for said in job.words if said.word == "world"]
        found = [(w.rank, w.more.split()) for w in said if w.more.split()[0] == str(size)]
        return [(rank, more[3]) for rank, more in found] if len(said) - before >= size == len(found) else []

    placed: list[tuple[int, str]] = job.until(complete, f"a world of {size} ranks on {hosts} hosts")
    assert [rank for rank, _ in placed] == list(range(size))
    assert len({host for _, host in placed}) == hosts
    return placed


@pytest.mark.slow
def test_hosts_join_and_leave_an_elastic_job(cluster: Cluster, tmp_path: Path) -> None:
    """Everybody starts anew with the world of then; no restart is used up, and a failure is a failure all the same."""
    node1, node2, node3, _ = cluster.hosts
    job = elastic(cluster, tmp_path, [node1, node2], "--max-restarts", "1")
    world(job, 3, 2, before=0)
    join(job, node3, "--nproc-per-node", "1", "--max-restarts", "1")
    world(job, 4, 3, before=3)
    assert {said.attempt for said in job.words} == {0}
    # It leaves: the others go on without it.
    job.processes[2].terminate()
    assert job.processes[2].finish() != 0
    job.until(lambda: sum(said.more.startswith("3 ") for said in job.words) == 6, "a world of three once more")
    assert not ranks_on(node3)
    assert {said.attempt for said in job.words} == {0}
    job.release("die.2")
    job.hear("world", 3, attempt=1)
    job.release("end")
    assert [process.finish() for process in job.processes[:2]] == [0, 0], job.story("failed")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_hosts_that_all_serve_a_store_meet_in_that_of_the_endpoint(cluster: Cluster, tmp_path: Path) -> None:
    """One command for all hosts, with ``is_host=1``: under torchrun they meet. Each was alone with its own store."""
    job = elastic(cluster, tmp_path, cluster.hosts[:3], "--rdzv-conf", "last_call_timeout=1,is_host=1")
    world(job, 4, 3, before=0)
    job.release("end")
    assert job.finish() == [0, 0, 0], job.story("failed")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_host_that_was_switched_off(cluster: Cluster, tmp_path: Path) -> None:
    """That is a failure: a restart is used up, and the lost host is named."""
    options = ("--max-restarts", "1", "--host-timeout", "4")
    job = elastic(cluster, tmp_path, cluster.hosts[:3], *options)
    world(job, 4, 3, before=0)
    cluster.hosts[2].power_off()
    job.until(lambda: len([said for said in job.words if said.attempt == 1]) == 3, "a world of three after the loss")
    assert {said.more.split()[0] for said in job.words if said.attempt == 1} == {"3"}
    job.release("end")
    assert [process.finish() for process in job.processes[:2]] == [0, 0], job.story("failed")
    assert job.saferun_said("saferun: .*node3"), job.story("not named")


@pytest.mark.slow
def test_an_elastic_job_ends_where_too_few_hosts_are_left(cluster: Cluster, tmp_path: Path) -> None:
    """With the least number of hosts, a host that is stopped means the job."""
    job = elastic(cluster, tmp_path, cluster.hosts[:2])
    world(job, 3, 2, before=0)
    job.processes[1].terminate()
    assert job.finish() == [1, 1]
    assert_nothing_left(cluster)


# --------------------------------------------------------------------------------------------------- as under torchrun


TELL_ENVIRONMENT = """
names = ("RANK", "LOCAL", "WORLD", "GROUP", "ROLE", "MASTER", "TORCH", "OMP", "NCCL")
own = {name: value for name, value in os.environ.items() if name.startswith(names)}
with open(f"{FOLDER}/{sys.argv[1]}.{socket.gethostname()}.{RANK}.json", "w") as file:
    json.dump(own, file)
"""
# Different ones on every launch: a free port; a path that holds a random name.
CHANCE = ("TORCHELASTIC_ERROR_FILE",)


def environments(folder: Path, launcher: str, backend: str) -> dict[str, dict[str, str]]:
    """What each rank had, by host and rank."""
    found = {}
    for path in sorted(folder.glob(f"{launcher}.*.json")):
        own = json.loads(path.read_text())
        for name in CHANCE:
            own[name] = "given" if own.get(name) else "not given"
        if backend != "static":
            own["MASTER_PORT"] = str(own["MASTER_PORT"].isdecimal() and own["MASTER_PORT"] != str(PORT))
        found[path.name.partition(".")[2]] = own
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "nnodes"), slow_but([("static", "2"), ("c10d", "1:2")], "c10d"))
def test_ranks_are_told_the_same_as_under_torchrun(cluster: Cluster, tmp_path: Path, backend: str, nnodes: str) -> None:
    """Two hosts with different numbers of ranks and different roles."""
    each = (("--nproc-per-node", "1", "--role", "a"), ("--nproc-per-node", "3", "--role", "b"))
    seen = {}
    for launcher, command in (("torchrun", TORCHRUN), ("saferun", SAFERUN)):
        job = by_hand(
            cluster,
            tmp_path,
            TELL_ENVIRONMENT.replace("sys.argv[1]", repr(launcher)),
            *("--max-restarts", "2"),
            nnodes=nnodes,
            hosts=cluster.hosts[:2],
            each=lambda number: each[number],
            backend=backend,
            launcher=command,
            env={"SAFERUN_ENV_PROFILE": "none"},
        )
        assert job.finish() == [0, 0], job.story("failed")
        seen[launcher] = environments(tmp_path, launcher, backend)
    assert len(seen["torchrun"]) == 4
    assert seen["saferun"] == seen["torchrun"]
