"""saferunctl stop and kill on jobs of several hosts that have no ranks now: between a failure and the next attempt."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import SAFERUN, STAY, Job, Way, assert_nothing_left, await_no_ranks, by_hand, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
from tests.cluster.test_elastic import C10D, QUICK
from tests.cluster.test_retries import SYSTEM_ERROR, fails_at_first

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# Every rank stays until the control sockets are open.
FAILS_WHEN_RELEASED = """
tell("ready")
await_release("fail")
"""


def lose_the_last(job: Job, hosts: Sequence[Host], lost: int = 1) -> None:
    """Kill the last saferuns; the others end their ranks, and wait for them."""
    job.until(lambda: has_control_sockets(job.folder, len(hosts)), "control sockets")
    for process in job.processes[-lost:]:
        process.kill()
    job.until(lambda: len(job.saferun_said("saferun: starting again ")) == len(hosts) - lost, "the others start again")
    await_no_ranks(*hosts)


def assert_said(job: Job, verb: str, asked: Host, count: int) -> None:
    """Hosts say who asked for the end, and where."""
    said = job.saferun_said(f"saferun: saferunctl {verb} by .*?( on {asked.name})?: there is no other attempt")
    assert len(said) == count, job.story("not said by every host")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "verb", "code"), slow_but([(0, "stop", 143), (2, "stop", 143), (1, "kill", 137)], "2")
)
def test_hosts_that_wait_for_one_that_is_lost_end_at_once(
    cluster: Cluster, tmp_path: Path, asked: int, verb: str, code: int
) -> None:
    """Asked on the leader, or on another host: all of them, and not one without the others."""
    hosts = cluster.hosts[:4]
    options = ("--max-restarts", "2", "--host-timeout", "6")
    job = start(cluster, Way("by_hand"), tmp_path, STAY, *options, hosts=hosts, nproc=1)
    job.hear("ready", 4)
    lose_the_last(job, hosts)
    assert f"exit code {code}" in ask(hosts[asked], tmp_path, verb, "latest")
    assert job.finish()[:3] == [code] * 3, job.story("another exit code")
    assert_said(job, verb, hosts[asked], 3)
    assert {said.attempt for said in job.words} == {0}
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "verb", "code"), slow_but([(0, "stop", 143), (3, "kill", 137)], "3"))
def test_hosts_that_wait_before_a_retry_end_at_once(
    cluster: Cluster, tmp_path: Path, asked: int, verb: str, code: int
) -> None:
    """The wait is long; nobody waits for it."""
    hosts = cluster.hosts[:4]
    program = FAILS_WHEN_RELEASED + fails_at_first(tmp_path, who="RANK == 2", times=9, message=SYSTEM_ERROR)
    job = start(cluster, Way("by_hand"), tmp_path, program, "--retry-wait", "300", hosts=hosts, nproc=1)
    job.hear("ready", 4)
    job.until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    job.release("fail")
    job.until(lambda: len(job.saferun_said("saferun: starting again in ")) == 4, "all wait before the retry")
    assert f"exit code {code}" in ask(hosts[asked], tmp_path, verb, "latest")
    assert job.finish() == [code] * 4, job.story("another exit code")
    assert_said(job, verb, hosts[asked], 4)
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_host_whose_leader_does_not_answer_ends_alone(cluster: Cluster, tmp_path: Path) -> None:
    """As with SIGTERM: there is no other way to end it. When the leader answers again, the others end too."""
    hosts = cluster.hosts[:4]
    options = ("--max-restarts", "2", "--host-timeout", "6")
    job = start(cluster, Way("by_hand"), tmp_path, STAY, *options, hosts=hosts, nproc=1)
    job.hear("ready", 4)
    lose_the_last(job, hosts)
    frozen = hosts[0].pids("saferun")
    hosts[0].freeze(frozen)
    ask(hosts[1], tmp_path, "stop", "latest", "--no-wait")
    assert job.processes[1].finish() == 143, job.story("another exit code")
    assert job.processes[2].poll() is None
    hosts[0].thaw(frozen)
    assert [process.finish() for process in job.processes[:3]] == [143] * 3, job.story("another exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_an_elastic_job_that_waits_for_more_hosts_ends_at_once(cluster: Cluster, tmp_path: Path, asked: int) -> None:
    """With too few of them left, the others wait for some to come."""
    hosts = cluster.hosts[:3]
    options = (*QUICK, "--max-restarts", "2", "--host-timeout", "6", "--nproc-per-node", "1")
    job = by_hand(cluster, tmp_path, STAY, *options, hosts=hosts, backend="c10d", nnodes="3:4")
    job.hear("ready", 3)
    lose_the_last(job, hosts)
    assert "exit code 143" in ask(hosts[asked], tmp_path, "stop", "latest")
    assert job.finish()[:2] == [143] * 2, job.story("another exit code")
    assert_said(job, "stop", hosts[asked], 2)
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(("asked", "verb", "code"), [(0, "kill", 137), (1, "stop", 143)])
def test_a_host_that_only_waits_to_join_an_elastic_job_ends_with_the_others(
    cluster: Cluster, tmp_path: Path, asked: int, verb: str, code: int
) -> None:
    """It was in no attempt of the job: it learns of the end by the rendezvous, before its store goes."""
    hosts = cluster.hosts[:4]
    options = (*QUICK, "--max-restarts", "2", "--host-timeout", "6", "--nproc-per-node", "1")
    job = by_hand(cluster, tmp_path, STAY, *options, hosts=hosts, backend="c10d", nnodes="4:5")
    job.hear("ready", 4)
    lose_the_last(job, hosts, lost=2)
    command = (*SAFERUN, "--nnodes", "4:5", *C10D, *options, str(tmp_path / "program.py"))
    newcomer = hosts[3].popen(command, cwd=tmp_path)
    job.processes.append(newcomer)
    # After half a minute each of them says for whom it waits.
    job.until(lambda: re.search(r"here are (?=.*node1)(?=.*node2)(?=.*node4)", newcomer.err), "it waits")
    assert f"stopped, exit code {code}" in ask(hosts[asked], tmp_path, verb, "latest")
    codes = job.finish()
    assert [*codes[:2], codes[4]] == [code] * 3, job.story("another exit code")
    assert_said(job, verb, hosts[asked], 3)
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_host_that_waits_for_room_in_an_elastic_job_ends_with_the_others(cluster: Cluster, tmp_path: Path) -> None:
    """The job has all the hosts that it takes, and its ranks run."""
    hosts = cluster.hosts[:3]
    options = (*QUICK, "--host-timeout", "6", "--nproc-per-node", "1")
    job = by_hand(cluster, tmp_path, STAY, *options, hosts=hosts[:2], backend="c10d", nnodes="1:2")
    job.hear("ready", 2)
    job.until(lambda: has_control_sockets(job.folder, 2), "control sockets")
    command = (*SAFERUN, "--nnodes", "1:2", *C10D, *options, str(tmp_path / "program.py"))
    job.processes.append(hosts[2].popen(command, cwd=tmp_path))
    job.until(lambda: "is here (node3)" in job.processes[2].err, "it waits")
    ask(hosts[1], tmp_path, "stop", "latest")
    assert job.finish() == [143] * 3, job.story("another exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_with_a_saferun_for_each_rank_all_of_them_end(cluster: Cluster, tmp_path: Path) -> None:
    """Any of them is asked, by its host."""
    program = FAILS_WHEN_RELEASED + fails_at_first(tmp_path, who="RANK == 2", times=9, message=SYSTEM_ERROR)
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("srun", 2), tmp_path, program, "--retry-wait", "300", hosts=hosts)
    job.hear("ready", 4)
    job.until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    job.release("fail")
    job.until(lambda: len(job.saferun_said("saferun: starting again in ")) >= 1, "all wait before the retry")
    ask(hosts[1], tmp_path, "stop", "latest")
    assert set(job.finish()) == {143}, job.story("another exit code")
    assert_nothing_left(cluster)
