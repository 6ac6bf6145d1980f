"""``saferunctl stacks`` of jobs of several hosts."""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.jobs import Way, assert_nothing_left, start
from tests.cluster.test_ctl_ends_jobs import ask, has_control_sockets
from tests.process.launching import customized, in_saferun, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

APART = """
def evaluate():
    tell("ready")
    stay()

def exchange():
    tell("ready")
    stay()

evaluate() if RANK == 3 else exchange()
"""


def stacks_on(host: Host, folder: Path, *arguments: str) -> dict[str, Any]:
    """What it shows there."""
    content = json.loads(ask(host, folder, "stacks", "latest", "--json", *arguments))
    assert isinstance(content, dict)
    return content


def functions(content: dict[str, Any]) -> dict[int, set[str]]:
    """The names of the functions that each rank is in."""
    return {
        dump["rank"]: {frame["function"] for thread in dump["threads"] for frame in thread["frames"]}
        for dump in content["stacks"]
        if dump["is_rank"]
    }


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_first_host_shows_the_stacks_of_all(cluster: Cluster, tmp_path: Path, count: int) -> None:
    hosts = cluster.hosts[:count]
    job = start(cluster, Way("by_hand"), tmp_path, APART, hosts=hosts)
    job.hear("ready", 2 * count)
    until(lambda: has_control_sockets(tmp_path, count), "control sockets")
    content = stacks_on(hosts[0], tmp_path)
    assert content["hosts"] == [
        {"host": f"node{1 + i}", "ranks": [2 * i, 2 * i + 1], "answered": True} for i in range(count)
    ]
    found = functions(content)
    assert sorted(found) == list(range(2 * count))
    assert all(("evaluate" if rank == 3 else "exchange") in names for rank, names in found.items())
    assert content["remarks"] == []
    text = ask(hosts[0], tmp_path, "stacks", "latest")
    assert f"run latest, {count} hosts: ranks 0-{2 * count - 1}; " in text
    assert "evaluate" in text
    assert "exchange" in text
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gdb") is None and not os.environ.get("CI"), reason="gdb is not installed")
def test_ranks_that_are_not_python_have_native_stacks_on_all_hosts(cluster: Cluster, tmp_path: Path) -> None:
    """Programs of MPI or of C++ are launched as well."""
    hosts = cluster.hosts[:2]
    program = 'tell("ready")\nos.execvp("sleep", ["sleep", "1000"])\n'
    job = start(cluster, Way("by_hand"), tmp_path, program, hosts=hosts, nproc=1)
    job.hear("ready", 2)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    found = functions(stacks_on(hosts[0], tmp_path, "--native"))
    assert sorted(found) == [0, 1]
    assert all(any("sleep" in name for name in names) for names in found.values()), found
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_another_host_shows_the_stacks_of_all_by_the_first(cluster: Cluster, tmp_path: Path) -> None:
    """If that answers; else its own ranks'."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, APART, "--host-timeout", "300", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    content = stacks_on(hosts[1], tmp_path)
    assert sorted(functions(content)) == [0, 1, 2, 3]
    assert content["remarks"] == []
    frozen = hosts[0].pids("-m saferun ")
    hosts[0].freeze(frozen)
    content = stacks_on(hosts[1], tmp_path)
    assert sorted(functions(content)) == [2, 3]
    assert content["remarks"] == ["the ranks of this host alone: node1 does not answer"]
    hosts[0].thaw(frozen)
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [
        "from saferun.launch.asked_stacks import AskedStacks as owner; owner._take_asked = fail",
        "import saferun.launch.host_stacks as owner; owner.read_ranks = fail",
    ],
    ids=["on a host", "in the examiner"],
)
def test_where_it_is_broken_the_job_goes_on(cluster: Cluster, tmp_path: Path, broken: str) -> None:
    """On all hosts; the ranks of the host where one asks are shown all the same."""
    folder, hosts = tmp_path / "job", cluster.hosts[:2]
    folder.mkdir()
    planted = in_saferun(f"def fail(*_): raise RuntimeError('a mistake')\n    {broken}")
    program = 'tell("ready")\nawait_release("end")\n'
    job = start(cluster, Way("by_hand"), folder, program, hosts=hosts, env=customized(tmp_path, planted))
    job.hear("ready", 4)
    until(lambda: has_control_sockets(folder, 2), "control sockets")
    content = stacks_on(hosts[0], folder)
    assert sorted(functions(content)) == [0, 1]
    assert content["remarks"][0].startswith("the ranks of this host alone: ")
    job.release("end")
    assert job.finish() == [0, 0], job.story("failed")
    assert_nothing_left(cluster)


def test_a_saferun_a_rank_hands_in_its_own(cluster: Cluster, tmp_path: Path) -> None:
    job = start(cluster, Way("srun", 2), tmp_path, APART, hosts=cluster.hosts[:2])
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 4), "control sockets")
    content = stacks_on(cluster.hosts[0], tmp_path)
    assert sorted(functions(content)) == [0, 1, 2, 3]
    assert [host["ranks"] for host in content["hosts"]] == [[0, 1], [2, 3]]
    ask(cluster.hosts[0], tmp_path, "kill", "latest")
    job.finish()
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_host_that_does_not_answer_is_named_and_the_job_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, APART, "--host-timeout", "300", hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    frozen = hosts[1].pids("-m saferun ")
    hosts[1].freeze(frozen)
    content = stacks_on(hosts[0], tmp_path)
    assert sorted(functions(content)) == [0, 1]
    assert content["remarks"] == ["no stacks from node2 (ranks 2-3)"]
    assert [host["answered"] for host in content["hosts"]] == [True, False]
    hosts[1].thaw(frozen)
    assert sorted(functions(stacks_on(hosts[0], tmp_path))) == [0, 1, 2, 3]
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


COMPUTE = """
def compute():
    return sum(i * i for i in range(10000))

tell("ready")
while True:
    compute()
"""


@pytest.mark.slow
def test_ranks_of_several_hosts_are_recorded(cluster: Cluster, tmp_path: Path) -> None:
    """Asked on any of them."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, COMPUTE, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    wanted = ("record", "latest", "--seconds", "1", "--rank", "1-2,9", "--json")
    content = json.loads(ask(hosts[0], tmp_path, *wanted, "--output", "both"))
    assert [(one["rank"], one["host"], one["samples"] > 0) for one in content["ranks"]] == [
        (1, "node1", True),
        (2, "node2", True),
    ]
    assert content["remarks"] == ["rank 9: there is no such rank in this job"]
    profiles = json.loads((tmp_path / "both.speedscope.json").read_text())["profiles"]
    assert [profile["name"] for profile in profiles] == ["rank 1 (node1)", "rank 2 (node2)"]
    content = json.loads(ask(hosts[1], tmp_path, *wanted, "--output", "again"))
    assert [(one["rank"], one["host"]) for one in content["ranks"]] == [(1, "node1"), (2, "node2")]
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_recording_that_is_interrupted_ends_on_all_hosts(cluster: Cluster, tmp_path: Path, asked: int) -> None:
    """At once, and the next one who asks has not to wait for it."""
    hosts = cluster.hosts[:2]
    job = start(cluster, Way("by_hand"), tmp_path, COMPUTE, hosts=hosts)
    job.hear("ready", 4)
    until(lambda: has_control_sockets(tmp_path, 2), "control sockets")
    command = [sys.executable, "-m", "saferun.ctl", "record", "latest", "--seconds", "600"]
    recording = hosts[asked].popen(command, cwd=tmp_path)
    until(lambda: all(len(host.pids("record --pid")) == 2 for host in hosts), "all ranks are recorded")
    recording.kill()
    recording.wait()
    until(lambda: not any(host.pids("record --pid") for host in hosts), "no rank is recorded")
    assert sorted(functions(stacks_on(hosts[asked], tmp_path))) == [0, 1, 2, 3]
    ask(hosts[0], tmp_path, "kill", "latest")
    assert set(job.finish()) == {137}, job.story("wrong exit code")
    assert_nothing_left(cluster)
