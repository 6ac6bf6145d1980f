"""Whatever keeps hosts from meeting: each of them names what it was, and where, and ends when the time is over.

Jobs that wait for nothing but the end of that time do so side by side.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.faulted import GLOO, FaultedJob, end_all
from tests.cluster.jobs import PORT, TRAIN, Job, by_hand
from tests.process.launching import until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster

START_TIMEOUT_S = 8.0
FIRST_PORT = 29501
NOBODYS_ADDRESS = "10.77.0.99"
LISTENS = "something listens on node1"
NOTHING = "raise SystemExit('the hosts have met')"


class Jobs:
    """Jobs that are under way at once, each on a port of its own."""

    def __init__(self, cluster: Cluster, folder: Path, *, backend: str) -> None:
        self.cluster = cluster
        self.of: dict[str, FaultedJob] = {}
        self._folder = folder
        self._backend = backend

    def port(self) -> int:
        """The port of the job that is started next."""
        return FIRST_PORT + len(self.of)

    def start(self, name: str, *nodes: int, count: int = 0, master: str = "node1", options: Sequence[str] = ()) -> None:
        """Start a job on some hosts; the one with node rank 0 is node1.

        Args:
            name: the fault.
            nodes: numbers of hosts, from 1.
            count: how many hosts it has, where not all of them are started.
            master: the name under which node1 is looked for.
            options: more of saferun's.
        """
        hosts = [self.cluster.hosts[node - 1] for node in nodes]
        ranks = {host: node - 1 for host, node in zip(range(len(hosts)), nodes, strict=True)}
        ranks = {place: min(rank, (count or len(hosts)) - 1) for place, rank in ranks.items()}
        port = self.port()

        def place(number: int) -> tuple[str, ...]:
            if self._backend == "c10d":
                return "--rdzv-endpoint", f"{master}:{port}", "--rdzv-id", name
            return "--node-rank", str(ranks[number]), "--master-addr", master, "--master-port", str(port)

        self.of[name] = FaultedJob(
            self.cluster,
            self._folder / name,
            NOTHING,
            *("--start-timeout", START_TIMEOUT_S, *options),
            hosts=hosts,
            nnodes=str(count or len(hosts)),
            backend=self._backend,
            each=place,
        )

    def check(self, name: str, node: int, pattern: str) -> None:
        """A host says it, in a sentence with advice."""
        job = self.of[name]
        said = job.said(self.cluster.hosts[node - 1])
        assert re.search(rf"^saferun: {pattern}", said, re.MULTILINE), job.story(
            f"{name}: not {pattern!r} on node{node}"
        )
        assert "\nhint: " in said, job.story(f"{name}: no advice on node{node}")

    def said(self, name: str, node: int) -> str:
        """What a host has said."""
        return self.of[name].said(self.cluster.hosts[node - 1])

    def end(self) -> None:
        """All jobs fail on all hosts, and nothing is left of them."""
        for name, codes in end_all(self.of).items():
            assert set(codes.values()) == {1}, self.of[name].story(name)
        for job in self.of.values():
            job.assert_nothing_left()


@pytest.mark.slow
def test_what_keeps_hosts_from_their_master_is_named(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """By host, port and kind; and what is known at once is told long before the time is over."""
    cluster = make_cluster(3)
    node1, node2, node3 = cluster.hosts
    jobs = Jobs(cluster, tmp_path, backend="static")
    for how in ("drop", "reject", "prohibit"):
        node1.firewall(jobs.port(), how)
        jobs.start(how, 1, 2)
    node1.occupy(jobs.port())
    jobs.start("in use", 1, 2)
    for host in (node1, node2):
        host.break_name("first", node1.management)
    node3.break_name("first", NOBODYS_ADDRESS)
    jobs.start("wrong name", 1, 3, count=2, master="first")
    node1.break_name("leader", node1.management)
    jobs.start("unknown name", 1, 3, count=2, master="leader")
    jobs.start("a host is missing", 1, 2, count=3, options=["--hosts", "node1,node2,node3"])
    jobs.start("the master is missing", 2, 3, count=3)
    jobs.end()
    at = "within 8 s: node rank 1$"
    for name in ("drop", "reject", "prohibit", "wrong name", "unknown name"):
        jobs.check(name, 1, f"1 of 2 hosts did not come {at}")
    jobs.check(
        "drop", 2, r"node1 \(10\.77\.0\.1\) answers node2, but its port 29501 does not: a firewall drops .*, for 8 s$"
    )
    jobs.check("drop", 2, r"node1 \(10\.77\.0\.1\) answers node2, but its port 29501 does not: .* \([56] s\)$")
    jobs.check("reject", 2, r"node1:29502 \(10\.77\.0\.1\) refuses connections from node2, for 8 s$")
    jobs.check(
        "prohibit", 2, r"node1:29503 \(10\.77\.0\.1\) cannot be reached from node2 \(no route to host\), for 8 s$"
    )
    jobs.check("in use", 1, r"port 29504 on node1 is in use by pid \d+ \(python")
    # What accepts connections may be a leader that imports torch, and is waited for ten seconds longer.
    jobs.check("in use", 2, rf"{LISTENS}:29504 \(10\.77\.0\.1\) and does not answer as a store, for 1[89] s$")
    jobs.check("wrong name", 3, rf"first:29505 \({NOBODYS_ADDRESS}\) cannot be reached from node3 \(.*\), for 8 s$")
    assert f"hint: node3 takes first for {NOBODYS_ADDRESS} by its /etc/hosts" in jobs.said("wrong name", 3)
    jobs.check("unknown name", 3, "the name leader cannot be resolved on node3, for 8 s$")
    for node in (1, 2):
        jobs.check("a host is missing", node, "1 of 3 hosts did not come within 8 s: node3$")
    for node in (2, 3):
        jobs.check(
            "the master is missing",
            node,
            rf"node1:29508 \(10\.77\.0\.1\) refuses connections from node{node}, for 8 s$",
        )


@pytest.mark.slow
def test_what_keeps_hosts_from_the_endpoint_of_c10d_is_named(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The same where torch's own rendezvous is what they look for."""
    cluster = make_cluster(3)
    node1, _, _ = cluster.hosts
    jobs = Jobs(cluster, tmp_path, backend="c10d")
    node1.firewall(jobs.port(), "drop")
    jobs.start("drop", 1, 2)
    node1.occupy(jobs.port())
    jobs.start("in use", 1, 2)
    node1.break_name("leader", node1.management)
    jobs.start("unknown name", 1, 3, count=2, master="leader")
    jobs.start("a host is missing", 1, 2, count=3)
    jobs.end()
    jobs.check(
        "drop", 2, r"node1 \(10\.77\.0\.1\) answers node2, but its port 29501 does not: a firewall drops .*, for 8 s$"
    )
    for node in (1, 2):
        jobs.check("in use", node, rf"{LISTENS}:29502 \(10\.77\.0\.1\) and does not answer as a store, for 8 s$")
    jobs.check("unknown name", 3, "the name leader cannot be resolved on node3, for 8 s$")
    for name, number, here in (("drop", 1, "node1"), ("unknown name", 3, "node1")):
        where = f"the rendezvous '{name}' at {'leader' if number == 3 else 'node1'}:{FIRST_PORT + number - 1}"
        jobs.check(
            name, 1, f"the hosts of the job did not come to {where} within 8 s; missing: 1 of 2 hosts; here is {here}$"
        )
    for node in (1, 2):
        jobs.check(
            "a host is missing",
            node,
            "the hosts of the job did not come .*; missing: 1 of 3 hosts; here are node[12], node[12]$",
        )


# ----------------------------------------------------------------------------- the hosts have met, and the ranks cannot

Break = Callable[["Cluster"], None]


def names_of_their_own(cluster: Cluster) -> None:
    """What Debian's installer writes into /etc/hosts."""
    for host in cluster.hosts:
        host.break_name(host.name, "127.0.1.1")


def no_fault(_: Cluster) -> None:
    """All is well but for what the environment says."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "break_", "class_name", "pattern"),
    slow_but(
        [
            pytest.param(
                *({}, names_of_their_own, "network_interface"),
                r"the ranks exchange the address 127\.0\.1\.1, which is not unique to one host",
                id="the hosts' own names mean 127.0.1.1",
            ),
            pytest.param(
                *({"GLOO_SOCKET_IFNAME": "docker0"}, no_fault, "network_interface"),
                r"the ranks exchange the address 172\.17\.0\.1, which is not unique to one host",
                id="docker0",
            ),
            pytest.param(
                *({"GLOO_SOCKET_IFNAME": "ib0"}, no_fault, "network_interface"),
                r"rank \d \(node\d, .*: this host has no network interface ib0",
                id="ib0",
            ),
            pytest.param(
                *({"GLOO_SOCKET_IFNAME": "eth1"}, lambda cluster: cluster.hosts[1].firewall(None, "drop", nic="eth1")),
                "network_cut",
                r"nothing gets through between node2 and node1, node3: its network is cut \(rank 1\)",
                id="the data ports of node2 dropped",
            ),
            pytest.param(
                *(
                    {"GLOO_SOCKET_IFNAME": "eth1"},
                    lambda c: c.hosts[1].firewall(None, "reject", nic="eth1", new_only=True),
                ),
                "network_between_hosts",
                "node2 refuses the connections of node3",
                id="the data ports of node2 rejected",
            ),
        ],
        "docker0",
        "the data ports of node2 dropped",
    ),
)
def test_what_keeps_gloo_from_connecting_is_named(
    make_cluster: MakeCluster, tmp_path: Path, environ: dict[str, str], break_: Break, class_name: str, pattern: str
) -> None:
    """Which address, interface or pair of hosts it is, on all hosts; a hang in the beginning is a hang."""
    cluster = make_cluster(3)
    break_(cluster)
    # The preflight checks would say it sooner, and start nothing.
    job = FaultedJob(cluster, tmp_path, GLOO, "--on-hang", "stop", "--preflight", "off", env=environ)
    assert set(job.end().values()) == {1}
    for host in cluster.hosts:
        assert re.search(rf"^saferun: (the job hangs: )?{pattern}", job.said(host), re.MULTILINE), job.story(host.name)
        assert "\nhint: " in job.said(host), job.story(f"no advice on {host.name}")
    incident = job.incident()
    assert incident is not None
    assert incident["cause"]["class"] == class_name, job.story(incident["cause"])
    job.assert_nothing_left()


# Of saferun's own messages, where a firewall drops what is sent to it.
CLOSED = 30001
FAIL_ONCE = """
tell("ready")
await_release(f"end{ATTEMPT}")
sys.exit(3 if RANK == 1 and ATTEMPT == 0 else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("preflight", ["on", "off"])
def test_the_port_of_the_ranks_store_is_all_that_has_to_be_open(
    make_cluster: MakeCluster, tmp_path: Path, preflight: str
) -> None:
    """As behind a Kubernetes service or a NAT: the job meets, restarts and ends as one, with an option or none."""
    cluster = make_cluster(3)
    node1 = cluster.hosts[0]
    for ports in ((1, PORT - 1), (PORT + 2, 65535)):
        node1.firewall(ports, "drop", new_only=True)
    # Two refuse at once, which is not to be taken for a saferun that is gone.
    cluster.hosts[1].firewall((1, 65535), "reject", new_only=True)
    options = ("--max-restarts", "1", "--preflight", preflight, "--start-timeout", "60")
    jobs: dict[str, Job] = {}
    for number, (name, more) in enumerate({"auto": (), "same": ("--control-port", "same")}.items()):
        folder = tmp_path / name
        folder.mkdir()
        where = ("--master-port", str(PORT + number))
        jobs[name] = by_hand(cluster, folder, FAIL_ONCE, *options, *more, *where, hosts=cluster.hosts)
    _fail_once(jobs)


@pytest.mark.slow
def test_c10d_needs_no_port_but_those_of_its_stores(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """Where the port of saferun's own messages is closed, they go to that of the ranks' store, with checks and all."""
    cluster = make_cluster(3)
    for host in cluster.hosts:
        host.firewall(CLOSED, "drop", new_only=True)
    options = ("--max-restarts", "1", "--control-port", str(CLOSED), "--start-timeout", "60")
    job = by_hand(cluster, tmp_path, FAIL_ONCE, *options, hosts=cluster.hosts, backend="c10d")
    _fail_once({"c10d": job})


def _fail_once(jobs: dict[str, Job]) -> None:
    for attempt in range(2):
        for job in jobs.values():
            job.hear("ready", 3, attempt=attempt)
            job.release(f"end{attempt}")
    for name, job in jobs.items():
        assert job.finish() == [0, 0, 0], job.story(name)
        assert len(job.saferun_said(r"saferun: rank 1 \(node\d, .*exit code 3")) == 3, job.story(name)


SERVICE = "10.96.0.1"


@pytest.mark.slow
def test_a_master_behind_the_address_of_a_service_is_reached_by_ranks_and_messages(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    """The address has one port, and the hosts reach each other at their own: what Kubernetes does for a job's pods."""
    cluster = make_cluster(3)
    to_first = f"ip daddr {SERVICE} tcp dport {PORT} dnat to {cluster.hosts[0].management}:{PORT}"
    for host in cluster.hosts:
        host.in_network("ip", "route", "add", f"{SERVICE}/32", "dev", "eth0")
        lines = ["table ip service {", "chain out {", "type nat hook output priority -100", to_first, "}", "}", ""]
        host.in_network("nft", "-f", "-", stdin="\n".join(lines))
    program = f"def after_step_2(): pass\n{TRAIN}"
    options = ("--master-addr", SERVICE, "--start-timeout", "60")
    job = by_hand(cluster, tmp_path, program, *options, hosts=cluster.hosts, env={"OMP_NUM_THREADS": "1"})
    job.hear("trained", 3)
    assert job.finish() == [0, 0, 0], job.story("failed")
    assert job.saferun_said("saferun: ") == []


CONNECTS = f"""
import time
from datetime import timedelta
from saferun.coordinator.store_connection import StoreConnection
began_at = time.monotonic()
try:
    StoreConnection("node1", {PORT}, None, False, timedelta(seconds=60), wait_for_workers=False)
except ConnectionError as error:
    print("ended", time.monotonic() - began_at > 5, error)
"""


@pytest.mark.slow
def test_a_leader_whose_machine_goes_before_it_has_answered_is_not_waited_for(make_cluster: MakeCluster) -> None:
    """It listens before it imports torch; nothing is on its way then, and only asking shows that it is gone.

    One that is merely slow is waited for, however long it takes.
    """
    cluster = make_cluster(2)
    leader, other = cluster.hosts
    leader.occupy(PORT)
    waiting = other.popen([sys.executable, "-c", CONNECTS])
    established = f"ss -Htn state established dst {leader.management} dport = :{PORT}"
    until(lambda: str(PORT) in other.run(established.split()).stdout, "it is connected")
    time.sleep(25)  # longer than it takes where nothing answers
    assert waiting.poll() is None
    leader.power_off()
    waiting.wait_for("^ended True .*(timed out|No route)")
