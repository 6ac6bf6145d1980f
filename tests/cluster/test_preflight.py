"""Whatever would keep a job from starting is named before it starts: the right host, the right NIC, and what to do.

Faults that cost nothing but time to find out are made side by side, each on a cluster of its own.
"""

from __future__ import annotations

import json
import re
import sys
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.faulted import FaultedJob, end_all
from tests.cluster.jobs import Way, by_hand, start
from tests.cluster.machines import launchers
from tests.cluster.preflighted import (
    EXIT_CHECKED,
    ON_DATA_NETWORK,
    RAN,
    Scene,
    assert_said,
    play,
)
from tests.process.launching import customized, in_saferun

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.jobs import Job
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

DATA_NIC = "eth1"
FIREWALL = "a firewall on node3"


def on_node3(do: Callable[[Host], object]) -> Callable[[Cluster], None]:
    """A fault of the third host."""

    def act(cluster: Cluster) -> None:
        do(cluster.hosts[2])

    return act


def between(do: Callable[[Host, Host], object]) -> Callable[[Cluster], None]:
    """A fault of the third host that concerns the second one."""

    def act(cluster: Cluster) -> None:
        do(cluster.hosts[2], cluster.hosts[1])

    return act


def own_names(cluster: Cluster) -> None:
    """What Debian's installer writes into /etc/hosts."""
    for host in cluster.hosts:
        host.break_name(host.name, "127.0.1.1")


# ------------------------------------------------------------------------------------------------- between the hosts


SILENT = {
    "its network is cut": Scene(
        r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
        "check the cable, the switch port and the VLAN of node3's eth1, and firewalls, or run with --nic eth0",
        on_node3(lambda host: host.cut(DATA_NIC)),
        hosts=4,
    ),
    "its network is cut and no rank needs it": Scene(
        r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
        "check the cable",
        on_node3(lambda host: host.cut(DATA_NIC)),
        fails=False,
        environ={},
    ),
    "everything that comes in is dropped": Scene(
        r"node3: eth1 does not answer \(timeout\) from \d of \d hosts; its eth0 does",
        "firewalls",
        on_node3(lambda host: host.firewall(None, "drop", nic=DATA_NIC)),
    ),
    "connections that come in are dropped": Scene(
        r"node3: eth1 does not answer \(timeout\) from \d of \d hosts, while it reaches others itself; its eth0 does",
        f"{FIREWALL} keeps connections out",
        on_node3(lambda host: host.firewall(None, "drop", nic=DATA_NIC, new_only=True)),
    ),
    "connections from one host are dropped": Scene(
        r"node2 does not reach node3 over eth1 \(timeout\)(; the other way round works)?; eth0 works",
        f"{FIREWALL} (incoming) or node2 (outgoing) is likely",
        between(lambda host, other: host.firewall(None, "drop", peer=other, nic=DATA_NIC, new_only=True)),
        about="node2 does not reach node3",
    ),
    "two hosts are cut from each other": Scene(
        r"node2 and node3 do not reach each other over eth1 \(timeout\); eth0 works",
        "eth1",
        between(lambda host, other: host.deafen(other, DATA_NIC)),
        about="node2 and node3 do not reach each other",
    ),
    "large frames vanish": Scene(
        r"node3: eth1 lets small messages from \d of \d hosts through, and no large ones; its eth0 works",
        "set the same MTU on all hosts and switch ports that eth1 passes, or run with --nic eth0",
        on_node3(lambda host: host.swallow(DATA_NIC)),
    ),
    "a third of all frames is lost": Scene(
        r"node3: eth1 loses packets with \d of \d hosts: [234]\d% was retransmitted",
        "ethtool -S eth1",
        on_node3(lambda host: host.slow(DATA_NIC, loss=0.3)),
        fails=False,
    ),
}


@pytest.mark.parametrize(
    "names",
    [list(SILENT)[:4], list(SILENT)[4:]],
    ids=["hosts", "pairs and packets"],
)
@pytest.mark.slow
def test_where_nothing_answers_host_and_nic_are_named(
    make_cluster: MakeCluster, tmp_path: Path, names: list[str]
) -> None:
    """And which NIC would do instead; where no rank needs the NIC, it is only a warning."""
    play(make_cluster, tmp_path, {name: SILENT[name] for name in names})


TOLD_AT_ONCE = {
    "its NIC is down": Scene(
        r"node3: GLOO_SOCKET_IFNAME names eth1, which is down on this host.*",
        "this host has eth0",
        on_node3(lambda host: host.cut(DATA_NIC, "down")),
    ),
    "connections are refused": Scene(
        r"node3: eth1 refuses connections from \d of \d hosts, while it reaches others itself; its eth0 works",
        f"{FIREWALL} rejects connections",
        on_node3(lambda host: host.firewall(None, "reject", nic=DATA_NIC, new_only=True)),
    ),
    "its NIC is throttled": Scene(
        r"node3: eth1 is slow with \d of \d hosts: .*(MB/s|ms), elsewhere .*",
        "ethtool eth1",
        on_node3(lambda host: host.throttle(DATA_NIC, 5_000_000)),
        fails=False,
        about=".*node3",
        hosts=4,
    ),
    "a bridge that all have": Scene(
        # Whichever of the two was faster at that moment is suggested.
        r"docker0 has the same address on several hosts \(172\.17\.0\.1\); eth[01] works",
        "run with --nic eth",
        environ={"GLOO_SOCKET_IFNAME": "docker0"},
        about=".*docker0",
    ),
    "a name that is no NIC": Scene(
        r"node1.*: GLOO_SOCKET_IFNAME names eht1, which this host does not have.*",
        "did you mean eth1? this host has eth0 and eth1",
        environ={"GLOO_SOCKET_IFNAME": "eht1"},
        about=".*GLOO_SOCKET_IFNAME names eht1",
    ),
    "its own name means loopback": Scene(
        r"node3: its own name node3 resolves to 127\.0\.1\.1, so that gloo would listen on loopback.*",
        "give the host's name its address in /etc/hosts, or run with --nic eth0",
        on_node3(lambda host: host.break_name("node3", "127.0.1.1")),
        environ={},
    ),
    "their own names mean loopback": Scene(
        r"node\d.*: its own name \S+ resolves to 127\.0\.1\.1, so that gloo would listen on loopback.*",
        "give the host's name its address in /etc/hosts, or run with --nic eth0",
        own_names,
        environ={},
        about="node.*gloo would listen on loopback",
    ),
    "too few files": Scene(
        r"node3: a process may open 48 files, at most, and saferun takes up to \d+ for 1 rank",
        "raise the hard limit",
        on_node3(lambda host: host.limit_files(48)),
        fails=False,
        environ={},
        own="saferun: the limit on open files leaves no room for the output of all ranks: .*",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(TOLD_AT_ONCE)[:4], list(TOLD_AT_ONCE)[4:]], ids=["links", "names and limits"])
def test_what_can_be_known_at_once_is_told_with_its_host(
    make_cluster: MakeCluster, tmp_path: Path, names: list[str]
) -> None:
    """On all consoles where it ends the job, with the same words."""
    play(make_cluster, tmp_path, {name: TOLD_AT_ONCE[name] for name in names})


@pytest.mark.slow
def test_a_stranger_on_the_port_is_told_from_the_master(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Where the master should be, or where one host looks for it: somebody else answers, in a language of their own."""
    answer = "HTTP/1.1 400 Bad Request\r\n\r\n"
    options = ("--start-timeout", "8", "--start-retries", "0")
    clusters = {"there": make_cluster(2), "elsewhere": make_cluster(3)}
    clusters["there"].hosts[0].occupy(29500, answer=answer)
    _, node2, node3 = clusters["elsewhere"].hosts
    node2.occupy(29500, answer=answer)
    node3.break_name("node1", node2.management)
    jobs = {name: FaultedJob(cluster, tmp_path / name, RAN, *options) for name, cluster in clusters.items()}
    for name, codes in end_all(jobs).items():
        assert set(codes.values()) <= {1, EXIT_CHECKED}, jobs[name].story(name)
    advice = "whether saferun runs on node1"
    assert_said(jobs["there"], "node1", r"saferun: port 29500 on node1 is in use by pid \d+ \(python.*", "stop that")
    listens = r"saferun: something listens on node1:29500.* and does not answer as a store.*"
    assert_said(jobs["there"], "node2", listens, advice)
    listens = (
        rf"saferun: something listens on node1:29500 \({re.escape(node2.management)}\) and does not answer as a .*"
    )
    assert_said(jobs["elsewhere"], "node3", listens, advice)
    for job in jobs.values():
        assert not job.job.words


# ------------------------------------------------------------------------------------------------- hosts that differ


def test_what_differs_or_is_short_on_a_host_is_a_warning(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The job may well do without: it goes on, and the first host's console says what is odd where."""
    cluster = make_cluster(4)
    node1, node2, node3, node4 = cluster.hosts
    node2.fake_torch("2.4.1")
    node3.fill_shared_memory()
    node3.shift_clock(-300)
    node4.limit_files(200)
    job = FaultedJob(cluster, tmp_path / "job", RAN)
    assert set(job.end().values()) == {0}, job.story("failed")
    assert len(job.job.words) == 4
    for says, hint in (
        (r"node2: torch 2\.4\.1, where the others have torch \S+", "install the same everywhere"),
        (r"node3: /dev/shm is full: \S+ MiB of 32 MiB free", "delete what dead jobs left"),
        (r"node3: its clock is 5 minutes behind the others'", "let all hosts keep time"),
        (r"node4: a process may open 200 files, and .* may need more", "raise the hard limit"),
    ):
        assert_said(job, "node1", f"saferun: warning: {says}", hint)
    assert job.said(node1).count("saferun: ") == 4, job.story("more than these")
    for host in (node2, node3, node4):
        assert not job.said(host).strip(), job.story(f"{host.name} has something to say")


# --------------------------------------------------------------------------------------------------- healthy clusters


@pytest.mark.parametrize("way", slow_but(["srun", "by hand", "c10d"], "srun"))
def test_a_healthy_cluster_gives_no_word(cluster: Cluster, tmp_path: Path, way: str) -> None:
    """Whoever reads warnings that mean nothing reads none soon; what was found is in a file."""
    hosts = cluster.hosts[:2] if way == "c10d" else cluster.hosts
    if way == "srun":
        job = start(cluster, Way("srun", 2), tmp_path, RAN, "--run-dir", str(tmp_path / "run"))
    else:
        backend = "c10d" if way == "c10d" else "static"
        job = by_hand(cluster, tmp_path, RAN, "--run-dir", str(tmp_path / "run"), hosts=hosts, backend=backend)
    assert set(job.finish()) == {0}, job.story("failed")
    said = [line for line in job.saferun_said("saferun: ") if "from Slurm" not in line]
    assert not said, job.story("something was said")
    found = json.loads((tmp_path / "run" / "preflight.json").read_text())
    assert found["verdict"] == "ok"
    rows = {row["host"]: {one["nic"]: one["state"] for one in row["interfaces"]} for row in found["matrix"]}
    assert rows == {host.name: {"eth0": "ok", "eth1": "ok"} for host in hosts}


# ------------------------------------------------------------------------------------------------------ what is asked


@pytest.mark.slow
def test_preflight_may_warn_only_or_be_all_there_is_or_be_left_out(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The user has the last word. With ``only``, a table on the first host's stdout is all there is."""
    cluster = make_cluster(3)
    others = cluster.hosts[1:]
    cluster.hosts[2].cut(DATA_NIC, "down")
    jobs = {}
    for number, mode in enumerate(("warn", "off", "only")):
        options = ("--preflight", mode, "--master-port", 29500 + number)
        jobs[mode] = FaultedJob(cluster, tmp_path / mode, RAN, *options, env=ON_DATA_NETWORK)
    codes = {mode: set(found.values()) for mode, found in end_all(jobs).items()}
    assert codes == {"warn": {0}, "off": {0}, "only": {EXIT_CHECKED}}, "\n".join(j.story(m) for m, j in jobs.items())
    assert [len(job.job.words) for job in jobs.values()] == [3, 3, 0]
    assert_said(jobs["warn"], "node1", "saferun: warning: node3: .*eth1, which is down on this host", "eth0")
    assert not jobs["off"].job.err.strip(), jobs["off"].story("something is said")
    table = jobs["only"].of["node1"].out
    assert re.search(r"^fail  interfaces +node3 +GLOO_SOCKET_IFNAME names eth1, which is down", table, re.MULTILINE)
    assert re.search(r"^node2  ", table, re.MULTILINE), table
    for host in others:
        assert not jobs["only"].of[host.name].out.strip(), jobs["only"].story("more than one table")
        assert not jobs["only"].said(host).strip(), jobs["only"].story("more than a table")


# Ranks that say over which addresses they are connected to each other, apart from the store.
WHERE = """
import torch
import torch.distributed as dist


def address(field):
    host, _, port = field.rpartition(":")
    return ".".join(str(byte) for byte in bytes.fromhex(host[-8:])[::-1]), int(port, 16)


dist.init_process_group("gloo")
dist.all_reduce(torch.ones(100_000))
own = set()
for fd in os.listdir("/proc/self/fd"):
    try:
        own.add(os.readlink(f"/proc/self/fd/{fd}"))
    except FileNotFoundError:
        pass
found = set()
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").readlines()[1:]:
        fields = line.split()
        here, there = address(fields[1]), address(fields[2])
        ports = {here[1], there[1]}
        if fields[3] == "01" and f"socket:[{fields[9]}]" in own and int(os.environ["MASTER_PORT"]) not in ports:
            found.add(f"{here[0]} {there[0]}")
tell("where", json.dumps([os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("NCCL_SOCKET_IFNAME"), sorted(found)]))
dist.barrier()
"""


@pytest.mark.slow
def test_the_nic_that_is_asked_for_is_the_one_that_gloo_uses(cluster: Cluster, tmp_path: Path) -> None:
    """The variables are set on all hosts, and the ranks' connections are those of the data network."""
    hosts = cluster.hosts[:2]
    job = by_hand(cluster, tmp_path, WHERE, "--nic", "eth1", hosts=hosts, env={"OMP_NUM_THREADS": "1"})
    assert job.finish() == [0, 0], job.story("failed")
    ways = [[f"{a.data} {b.data}"] for a, b in (hosts, hosts[::-1])]
    assert _told(job) == [["eth1", "=eth1", way] for way in ways], job.story("not over eth1")


def _told(job: Job) -> list[list[object]]:
    return [json.loads(said.more) for said in job.words if said.word == "where"]


TELL_NIC = "tell('where', json.dumps([os.environ.get('GLOO_SOCKET_IFNAME')]))"


def test_a_nic_that_reaches_everybody_is_chosen(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Whatever gloo would have used by itself: that is what ``--nic auto`` is for."""
    cluster = make_cluster(3)
    cluster.hosts[2].firewall(None, "reject", nic="eth0", new_only=True)
    job = by_hand(cluster, tmp_path, TELL_NIC, "--nic", "auto", hosts=cluster.hosts)
    assert job.finish() == [0, 0, 0], job.story("failed")
    assert _told(job) == [["eth1"]] * 3, job.story("not eth1")
    assert len(job.saferun_said(r"saferun: --nic auto: eth1: GLOO_SOCKET_IFNAME=eth1 ")) == 1, job.story(
        "not told once"
    )


@pytest.mark.parametrize(
    "fault",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["healthy", "a NIC is down"],
)
def test_doctor_under_slurm_prints_one_table(cluster: Cluster, tmp_path: Path, fault: bool) -> None:
    """The first host's, with a row a host; the others have told it everything."""
    if fault:
        cluster.hosts[2].cut(DATA_NIC, "down")
    command = (sys.executable, "-m", "saferun.ctl", "doctor")
    done = launchers.srun(cluster, command, cwd=tmp_path, env=ON_DATA_NETWORK)
    assert done.finish() == 0, done.story("another exit code")  # no script that is known to need it: a warning
    assert len(re.findall(r"^host +eth", done.out, re.MULTILINE)) == 1, done.story("not one table")
    for host in cluster.hosts:
        assert re.search(rf"^{host.name}  ", done.out, re.MULTILINE), done.story(f"no row of {host.name}")
    counts = r"\d warnings?, " if fault else r"\d+ ok$"
    assert re.search(rf"^4 hosts, \d+ checks in .* s: {counts}", done.out, re.MULTILINE), done.story("another sum")
    assert ("names eth1, which is down on this host" in done.out) == fault, done.story("another finding")


@pytest.mark.slow
@pytest.mark.parametrize("place", slow_but(["node1", "node2", "node"], "node"))
def test_checks_that_are_broken_keep_no_job_from_its_start(
    make_cluster: MakeCluster, tmp_path: Path, place: str
) -> None:
    """Those of the leader, of another host, or of all of them."""
    for member in ("_check", "_probe", "_opened"):
        planted = in_saferun(
            "import socket; from saferun.launch.preflight_part import PreflightPart\n"
            "    def fail(*_): raise RuntimeError('a mistake')\n"
            f"    if socket.gethostname().startswith({place!r}): PreflightPart.{member} = fail"
        )
        folder = tmp_path / member
        folder.mkdir()
        cluster = make_cluster(3)
        job = by_hand(cluster, folder, RAN, hosts=cluster.hosts, env={**ON_DATA_NETWORK, **customized(folder, planted)})
        assert job.finish() == [0, 0, 0], job.story(f"{member} failed")
        assert "cannot check this host: RuntimeError: a mistake" in job.err, job.story("not broken")
