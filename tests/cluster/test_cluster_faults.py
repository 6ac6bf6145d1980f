"""The faults of a host are what the tests take them for, and can be undone."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING

from tests.cluster.talking import connect, python, say, talk

if TYPE_CHECKING:
    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster


def test_a_cut_network_is_silent_and_leaves_the_other_alone(cluster: Cluster) -> None:
    """The link stays up, so nothing tells the host; only who asks for an address hears that nobody answers."""
    node1, _, node3, _ = cluster.hosts
    client = talk(node1, node3)
    node3.cut("eth1")
    say(client, "lost")
    node1.in_network("ip", "neigh", "flush", "dev", "eth1")
    assert connect(node1, "node3-data:22", "node3:22") == {"node3-data:22": "EHOSTUNREACH", "node3:22": "ok"}
    assert node3.in_network("cat", "/proc/self/net/dev").count("eth1") == 1
    assert "state UP" in node3.in_network("ip", "link", "show", "eth1")
    assert "answer" not in client.out
    node3.heal("eth1")
    client.wait_for("^answer lost$")


def test_a_pulled_cable_takes_the_carrier_and_a_nic_that_is_down_takes_the_route(cluster: Cluster) -> None:
    """Two more ways to lose a NIC, which the host itself can see."""
    host = cluster.hosts[2]
    host.cut("eth1", "cable")
    assert "NO-CARRIER" in host.in_network("ip", "link", "show", "eth1")
    host.heal("eth1")
    host.cut("eth1", "down")
    assert connect(host, "node1-data:22", "node1:22") == {"node1-data:22": "ENETUNREACH", "node1:22": "ok"}
    host.heal("eth1")
    assert connect(host, "node1-data:22") == {"node1-data:22": "ok"}


def test_a_firewall_drops_rejects_or_prohibits(cluster: Cluster) -> None:
    """Three things that site firewalls do, and three things that connect() says."""
    node1, node2, *_ = cluster.hosts
    node1.firewall(29501, "drop")
    node1.firewall(29502, "reject")
    node1.firewall((29503, 29504), "prohibit")
    node1.firewall(22, "prohibit", peer=node2, nic="eth1")
    ports = [f"node1:{port}" for port in range(29501, 29506)]
    assert list(connect(node2, *ports).values()) == [
        *("silence", "ECONNREFUSED", "EHOSTUNREACH", "EHOSTUNREACH", "ECONNREFUSED")
    ]
    assert connect(node2, "node1:22", "node1-data:22") == {"node1:22": "ok", "node1-data:22": "EHOSTUNREACH"}
    assert connect(cluster.hosts[2], "node1-data:22") == {"node1-data:22": "ok"}
    assert connect(node1, "node1-data:22", "node1:29501") == {"node1-data:22": "ok", "node1:29501": "ECONNREFUSED"}
    node1.unfirewall()
    assert connect(node2, "node1:29501", "node1-data:22") == {"node1:29501": "ECONNREFUSED", "node1-data:22": "ok"}


def test_a_firewall_may_spare_what_is_connected(cluster: Cluster) -> None:
    """Stateful firewalls do; a cut does not."""
    node1, node2, *_ = cluster.hosts
    client = talk(node1, node2)
    node2.firewall(7777, "drop", new_only=True)
    say(client, "spared")
    client.wait_for("^answer spared$")
    assert connect(node1, "node2:7777") == {"node2:7777": "silence"}
    node2.firewall(7777, "drop")
    say(client, "lost")
    assert connect(node1, "node2:7777") == {"node2:7777": "silence"}
    assert "answer lost" not in client.out


def test_two_hosts_may_be_blocked_from_each_other_only(cluster: Cluster) -> None:
    """A fault between two hosts, of which a third knows nothing."""
    node1, node2, node3, _ = cluster.hosts
    node2.block_peer(node3)
    pairs = ((node2, "node3"), (node3, "node2"))
    pings = [host.popen(["ping", "-c", "1", "-W", "1", name + nic]) for host, name in pairs for nic in ("", "-data")]
    assert [ping.finish() for ping in pings] == [1, 1, 1, 1]
    assert connect(node1, "node2-data:22", "node3-data:22") == {"node2-data:22": "ok", "node3-data:22": "ok"}
    node2.unfirewall()
    assert connect(node2, "node3:22", "node3-data:22") == {"node3:22": "ok", "node3-data:22": "ok"}


def test_names_can_be_wrong_or_unknown_on_one_host(cluster: Cluster) -> None:
    """An address of its own for the host's own name is what Debian writes into /etc/hosts."""
    node1, node2, *_ = cluster.hosts
    node2.break_name("node1", None)
    node2.break_name("node2", "127.0.1.1")
    assert connect(node2, "node1:22", "node1-data:22") == {"node1:22": "EAI_NONAME", "node1-data:22": "ok"}
    assert node2.run(["getent", "hosts", "node2"]).stdout.split() == ["127.0.1.1", "node2"]
    assert connect(node1, "node1:22") == {"node1:22": "ok"}
    node2.mend_names()
    assert connect(node2, "node1:22") == {"node1:22": "ok"}


def test_an_occupied_port_takes_connections_and_answers_nothing(cluster: Cluster) -> None:
    """The worst of listeners: whoever takes it for the right one waits for ever."""
    node1, node2, *_ = cluster.hosts
    occupant = node1.occupy(29500)
    assert connect(node2, "node1:29500") == {"node1:29500": "ok"}
    bind = "import socket; socket.create_server(('', 29500))"
    assert "Address already in use" in node1.run(python(bind)).stderr
    occupant.kill()
    occupant.finish()
    assert node1.run(python(bind)).returncode == 0


def test_a_host_that_is_switched_off_says_nothing(make_cluster: MakeCluster) -> None:
    """Its peers get no FIN and no reset; a host whose processes all die sends both."""
    cluster = make_cluster(3)
    node1, node2, node3 = cluster.hosts
    silent, closed = talk(node1, node2), talk(node1, node3)
    process = node2.popen(["sleep", "1000"])
    node2.power_off()
    node3.die()
    assert process.finish() == -signal.SIGKILL
    say(silent, "anybody?")
    say(closed, "anybody?")
    closed.wait_for("^answer (end|ConnectionResetError|BrokenPipeError)$")
    assert not node2.is_on
    assert connect(node1, "node2:22") == {"node2:22": "EHOSTUNREACH"}
    assert "answer" not in silent.out
    cluster.power_on(node2, node3)
    assert connect(node1, "node2:22", "node3-data:22") == {"node2:22": "ok", "node3-data:22": "ok"}
    assert node2.run(["hostname"]).stdout == "node2\n"


def test_a_slow_nic_delays_and_loses_frames_and_changes_none(make_cluster: MakeCluster) -> None:
    """Without checksums and with segments that no cable carries, TCP would get nothing through at all."""
    node1, node2 = make_cluster(2).hosts
    node2.slow("eth1", delay_ms=20, loss=0.1)
    ping = node1.run(["ping", "-c", "40", "-i", "0.02", "-W", "1", "node2-data"]).stdout
    lost = re.search(r"(\d+)% packet loss", ping)
    fastest = re.search(r"rtt min/avg/max/mdev = ([\d.]+)", ping)
    assert lost is not None, ping
    assert 0 < int(lost[1]) < 100, ping
    assert fastest is not None, ping
    assert float(fastest[1]) >= 40, ping
    node2.slow("eth1", delay_ms=1)
    send = ("sh", "-c", "head -c 2000000 /dev/urandom > /srv/sent; ssh node2-data 'cat > /srv/got' < /srv/sent")
    node1.run(send, check=True)
    node1.run(["cmp", "/srv/sent", "/srv/got"], check=True)
    node2.cut("eth1")
    assert node1.run(["ping", "-c", "1", "-W", "1", "node2-data"]).returncode == 1
    node2.unslow()
    assert connect(node1, "node2-data:22") == {"node2-data:22": "ok"}


def test_heal_undoes_every_fault(make_cluster: MakeCluster) -> None:
    """What one fault has hidden must not stay when that fault is gone."""
    cluster = make_cluster(3)
    node1, node2, node3 = cluster.hosts
    node1.slow("eth0", delay_ms=1)
    node1.cut("eth0")
    node1.break_name("node3", None)
    node2.cut("eth1", "down")
    node2.firewall(None, "drop")
    node2.block_peer(node3)
    node3.power_off()
    cluster.heal()
    names = [f"{host.name}{suffix}:22" for host in cluster.hosts for suffix in ("", "-data", "-v6")]
    for host in cluster.hosts:
        assert connect(host, *names) == dict.fromkeys(names, "ok")
