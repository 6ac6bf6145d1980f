"""The cluster is what the tests on it take it for, and nothing of it is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.machines import launchers
from tests.cluster.machines.cluster import REPOSITORY, Cluster, end_stale, keepers
from tests.cluster.machines.host import all_pids, is_alive, pid_namespace, start_of, state_of
from tests.cluster.talking import connect, say
from tests.process.launching import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.cluster.conftest import MakeCluster, Standby
    from tests.cluster.machines.process import Process

# -------------------------------------------------------------------------------------------------------- what there is


def test_hosts_reach_each_other_by_name_on_both_networks(cluster: Cluster) -> None:
    """Management and data network are two, as on real clusters; names mean the first."""
    names = [f"{host.name}{suffix}:22" for host in cluster.hosts for suffix in ("", "-data", "-v6")]
    for host in cluster.hosts:
        assert connect(host, *names) == dict.fromkeys(names, "ok")
        assert "172.17.0.1/16" in host.in_network("ip", "-o", "addr", "show", "docker0")


@pytest.mark.slow
def test_hosts_are_told_apart_and_share_what_clusters_share(cluster: Cluster, tmp_path: Path) -> None:
    """What saferun looks at: names, boot ids, pids; and run directories are on a file system of all hosts."""
    look = [
        "sh",
        "-c",
        'hostname; cat /proc/sys/kernel/random/boot_id; cat /etc/machine-id; echo $$ > "$0/$(hostname)"',
    ]
    seen = [host.run([*look, tmp_path], check=True).stdout.split() for host in cluster.hosts]
    assert [name for name, _, _ in seen] == [f"node{number}" for number in (1, 2, 3, 4)]
    assert len({boot for _, boot, _ in seen}) == len({machine for _, _, machine in seen}) == 4
    assert all(int((tmp_path / host.name).read_text()) < 1000 for host in cluster.hosts)
    cluster.hosts[0].run(["touch", "/srv/shared", "/tmp/own", "/run/own", "/dev/shm/own"], check=True)
    assert cluster.hosts[1].run(["ls", "/srv/shared", "/tmp/own", "/run/own", "/dev/shm/own"]).stdout == "/srv/shared\n"
    assert (cluster.shared / "shared").exists()


@pytest.mark.slow
def test_saferun_runs_on_a_host_as_the_tests_import_it(cluster: Cluster) -> None:
    """The tests are about this checkout, and no other."""
    show = "import saferun, sys; print(saferun.__file__, sys.executable)"
    assert cluster.hosts[3].run(["python", "-c", show]).stdout.split() == [
        str(REPOSITORY / "saferun" / "__init__.py"),
        sys.executable,
    ]


@pytest.mark.slow
def test_signals_reach_a_process_in_a_host(cluster: Cluster) -> None:
    """A launcher that is killed must be dead, and not only what carries its name outside."""
    host = cluster.hosts[1]
    script = "trap 'echo heard; exit 3' TERM; echo ready; while :; do sleep 0.01; done"
    process = host.popen(["sh", "-c", script])
    process.wait_for("^ready$")
    assert process.pid in host.pids("echo ready")
    process.terminate()
    assert (process.finish(), process.out) == (3, "ready\nheard\n")
    killed = host.popen(["sleep", "1000"])
    until(lambda: host.pids("^sleep 1000$") == [killed.pid], "the sleep is there")
    host.kill(killed.pid)
    assert killed.finish() == -signal.SIGKILL
    assert host.pids("sleep 1000") == []


@pytest.mark.slow
def test_inner_and_outer_pids_belong_together(cluster: Cluster) -> None:
    """Messages name the pids that a host knows; tests kill by the machine's."""
    host = cluster.hosts[2]
    process = host.popen(["sh", "-c", "echo $$; exec sleep 1000"])
    inner = int(process.wait_for(r"^\d+$")[0])
    assert inner != process.pid
    assert host.outer_pid(inner) == process.pid
    with pytest.raises(ValueError, match="no process of node1"):
        cluster.hosts[0].kill(process.pid)
    process.kill()


@pytest.mark.slow
def test_frozen_processes_stand_still_until_they_are_thawed(cluster: Cluster) -> None:
    """A host that does not answer, and does not die."""
    host = cluster.hosts[0]
    process = host.popen(["cat"], stdin=subprocess.PIPE)
    host.freeze([process.pid])
    until(lambda: state_of(process.pid) == "T", "it stands still")
    say(process, "still there")
    host.thaw([process.pid])
    process.wait_for("^still there$")


# ----------------------------------------------------------------------------------------------------------- launchers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "arguments", "tasks_per_host"),
    [
        ("srun", {}, 1),
        ("srun", {"tasks_per_host": 2}, 2),
        ("mpirun", {}, 1),
        ("mpirun", {"tasks_per_host": 2}, 2),
        ("hydra", {}, 1),
        ("hydra", {"tasks_per_host": 2}, 2),
        ("pdsh", {}, 1),
    ],
)
def test_launchers_start_a_command_on_all_hosts(
    cluster: Cluster, tmp_path: Path, launcher: str, arguments: dict[str, int], tasks_per_host: int
) -> None:
    """With the variables, the working directory and the Python of the test, whatever the launcher passes on itself."""
    show = "import os, socket, saferun; print(f'{socket.gethostname()} {os.environ[\"GIVEN\"]} {os.getcwd()}')"
    start = getattr(launchers, launcher)
    job: Process = start(cluster, ["python", "-c", show], env={"GIVEN": "a b"}, cwd=tmp_path, **arguments)
    assert job.finish() == 0, job.story("failed")
    lines = [line.split(": ", 1)[-1] for line in job.out.splitlines()]
    assert sorted(lines) == sorted(
        f"{host.name} a b {tmp_path}" for host in cluster.hosts for _ in range(tasks_per_host)
    )


@pytest.mark.slow
def test_launchers_start_on_chosen_hosts_only(cluster: Cluster) -> None:
    """Jobs on two hosts of four are the cheaper ones, and hosts that join come later."""
    chosen = cluster.hosts[1:3]
    names = [host.name for host in chosen]
    for start in (launchers.srun, launchers.mpirun, launchers.hydra, launchers.pdsh):
        job = start(cluster, ["hostname"], hosts=chosen)
        assert job.finish() == 0, job.story("failed")
        assert sorted(line.split(": ")[-1] for line in job.out.splitlines()) == names
    jobs = launchers.by_hand(cluster, lambda host: ["echo", str(host.index)], hosts=chosen)
    assert [(job.finish(), job.out) for job in jobs] == [(0, "1\n"), (0, "2\n")]


@pytest.mark.slow
def test_tests_share_a_cluster_until_one_leaves_its_mark_on_it(standby: Standby) -> None:
    """A fault, or a process that lives on, would be in the next test's way."""
    first = standby.healthy()
    assert launchers.srun(first, ["true"]).finish() == 0
    assert standby.healthy() is first
    first.hosts[0].popen(["setsid", "-f", "sleep", "1000"]).finish()
    second = standby.healthy()
    assert second is not first
    second.hosts[0].break_name("node2", None)
    assert standby.healthy() is not second


# ---------------------------------------------------------------------------------------------------- nothing is left


def traces(namespaces: Sequence[str] = ()) -> tuple[list[str], str, list[int]]:
    """What of a cluster the machine itself could still show: mounts, NICs, processes in the hosts' namespaces."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    nics = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    living = [pid for pid in all_pids() if pid_namespace(pid) in namespaces and is_alive(pid)]
    return mounts, nics, living


@pytest.mark.slow
@pytest.mark.parametrize("slurm", [False, True])
def test_nothing_is_left_of_a_cluster_that_was_closed(make_cluster: MakeCluster, slurm: bool) -> None:
    """Mounts, NICs and processes go with the namespaces."""
    before = traces()
    cluster = make_cluster(2, slurm=slurm)
    cluster.hosts[1].popen(["setsid", "-f", "sleep", "1000"]).finish()
    until(
        lambda: [line.split(": ")[1] for line in cluster.strays()] == ["sleep 1000"], "a process that nobody waits for"
    )
    namespaces = [pid_namespace(host.pid) for host in cluster.hosts]
    assert traces(namespaces)[2]
    cluster.close()
    assert traces(namespaces) == before
    assert cluster.keeper_pid not in keepers()


@pytest.mark.slow
def test_nothing_is_left_when_the_keeper_is_killed(make_cluster: MakeCluster) -> None:
    """However the tests end, the kernel takes the cluster away."""
    before = traces()
    cluster = make_cluster(2, slurm=True)
    namespaces = [pid_namespace(host.pid) for host in cluster.hosts]
    os.kill(cluster.keeper_pid, signal.SIGKILL)
    until(lambda: traces(namespaces) == before, "everything is gone")


@pytest.mark.slow
def test_a_cluster_ends_with_the_tests_that_made_it(tmp_path: Path) -> None:
    """A test run that was killed tidies nothing up itself."""
    source = f"""
import sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from tests.cluster.machines.cluster import Cluster
cluster = Cluster.start(1)
print(cluster.keeper_pid, cluster.hosts[0].pid, flush=True)
time.sleep(1000)
"""
    owner = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert all(is_alive(pid) for pid in pids)
    owner.kill()
    owner.communicate()
    until(lambda: not any(is_alive(pid) for pid in pids), "keeper and host are gone")


@pytest.mark.slow
def test_a_keeper_whose_owner_is_dead_is_ended_by_the_next_tests(make_cluster: MakeCluster) -> None:
    """An owner is known by pid and start time: another process may have its pid by now."""
    living = make_cluster(1)
    with Cluster.start(1, owned=False) as orphan:
        end_stale()
        assert orphan.keeper_pid in keepers()
    assert not is_alive(orphan.keeper_pid)
    with Cluster.start(1, owner=(os.getpid(), start_of(os.getpid()) - 1)) as stale:
        host = stale.hosts[0].pid
        end_stale()
        assert stale.keeper_pid not in keepers()
        assert not is_alive(host)
    assert living.keeper_pid in keepers()


@pytest.mark.slow
def test_sixty_four_hosts_reach_each_other(make_cluster: MakeCluster) -> None:
    """The kernel's table of neighbours is one for the whole machine, and too small as it is."""
    limit = Path("/proc/sys/net/ipv4/neigh/default/gc_thresh3")
    cluster = make_cluster(64)
    assert int(limit.read_text()) > 2 * 64 * 63
    names = [f"{host.name}{suffix}:22" for host in cluster.hosts for suffix in ("", "-data")]
    assert connect(cluster.hosts[63], *names) == dict.fromkeys(names, "ok")
    cluster.close()
    others = [spec for spec in keepers().values() if spec["hosts"] > 16]
    assert others or int(limit.read_text()) < 100_000


# ---------------------------------------------------------------------------------------------- machines without one


@pytest.mark.slow
def test_a_machine_that_can_have_no_cluster_says_so_in_one_line_and_ci_fails(tmp_path: Path) -> None:
    """Tests that are silently left out are taken for tests that passed."""
    # In a user namespace that maps nobody, root is nobody.
    command = ("unshare", "--user", sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider")
    for setting, code in (("", 5), ("true", 2)):
        environ = {**os.environ, "CI": setting, "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
        done = subprocess.run(
            [*command, "tests/cluster"], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        everything = done.stdout + done.stderr
        assert done.returncode == code, everything
        said = [line for line in everything.splitlines() if line.startswith("left out:")]
        assert len(said) == 1, everything
        assert said[0].startswith("left out: tests/cluster, because it needs root"), everything
