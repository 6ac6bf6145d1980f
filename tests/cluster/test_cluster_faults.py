"""The faults of a host are what the tests take them for, and can be undone."""

from __future__ import annotations

import re
import signal
import sysconfig
from typing import TYPE_CHECKING

import pytest

from tests.cluster.talking import ECHO, connect, python, say, talk

if TYPE_CHECKING:
    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host

# Sends so many bytes to an ECHO, and says how long they took to come back.
SEND = """
import socket, sys, threading, time
left = int(sys.argv[3])
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
start = time.monotonic()
threading.Thread(target=connection.sendall, args=(bytes(left),)).start()
while left:
    left -= len(connection.recv(1 << 16))
print(time.monotonic() - start)
"""
# What torch's files say of themselves.
VERSION = f"""
namespace = {{}}
exec(open({sysconfig.get_path("purelib")!r} + "/torch/version.py").read(), namespace)
print(namespace["__version__"])
"""
# What of a host its ailments change.
STATE = f"""{VERSION}
import os, resource, subprocess
shm = os.statvfs("/dev/shm")
print(resource.getrlimit(resource.RLIMIT_NOFILE), shm.f_blocks, shm.f_bfree, os.path.exists("/etc/ld.so.preload"))
for nic in ("eth0", "eth1"):
    print(subprocess.run(["tc", "qdisc", "show", "dev", nic], capture_output=True, text=True).stdout)
"""


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_direction_may_be_shut(cluster: Cluster) -> None:
    """Between two hosts, on one NIC: to new connections only, as by a firewall that knows states, or to everything."""
    # Nobody listens there, and who hears that has got through.
    node1, node2, node3, _ = cluster.hosts
    node2.firewall(None, "drop", peer=node3, nic="eth1", new_only=True)
    assert connect(node3, "node2-data:7", "node2:7") == {"node2-data:7": "silence", "node2:7": "ECONNREFUSED"}
    assert connect(node2, "node3-data:7") == {"node3-data:7": "ECONNREFUSED"}
    node2.unfirewall()
    node2.deafen(node3, "eth1")
    listener = node3.popen(["tcpdump", "-i", "eth1", "-c", "1", "-n", "icmp", "and", "src", node2.data])
    listener.wait_for("listening on eth1")
    assert node2.run(["ping", "-c", "1", "-W", "1", "node3-data"]).returncode == 1
    assert listener.finish() == 0
    for host, name in ((node2, "node3"), (node3, "node2")):
        assert connect(host, f"{name}-data:7", f"{name}:7") == {
            f"{name}-data:7": "silence",
            f"{name}:7": "ECONNREFUSED",
        }
    assert connect(node1, "node2-data:7", "node3-data:7") == {
        "node2-data:7": "ECONNREFUSED",
        "node3-data:7": "ECONNREFUSED",
    }
    node2.unfirewall()
    assert connect(node3, "node2-data:7") == {"node2-data:7": "ECONNREFUSED"}


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_occupied_port_takes_connections_and_answers_nothing(cluster: Cluster) -> None:
    """The worst of listeners: whoever takes it for the right one waits forever."""
    node1, node2, *_ = cluster.hosts
    occupant = node1.occupy(29500)
    assert connect(node2, "node1:29500") == {"node1:29500": "ok"}
    bind = "import socket; socket.create_server(('', 29500))"
    assert "Address already in use" in node1.run(python(bind)).stderr
    occupant.kill()
    occupant.finish()
    assert node1.run(python(bind)).returncode == 0


@pytest.mark.slow
def test_a_stranger_may_answer_on_a_port(cluster: Cluster) -> None:
    """Better than silence, and not what was looked for either."""
    node1, node2, *_ = cluster.hosts
    stranger = node1.occupy(29500, answer="HTTP/1.1 400 Bad Request\r\n\r\n")
    ask = "import socket; s = socket.create_connection(('node1', 29500)); s.sendall(b'?'); print(s.recv(100))"
    for _ in range(2):
        assert "400 Bad Request" in node2.run(python(ask)).stdout
    stranger.kill()
    stranger.finish()
    assert connect(node2, "node1:29500") == {"node1:29500": "ECONNREFUSED"}


@pytest.mark.slow
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


@pytest.mark.slow
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


def send(here: Host, there: Host, count: int) -> float:
    """How many seconds so many bytes take to another host's data NIC and back again."""
    there.popen(python(ECHO, 7777)).wait_for("^listening$")
    return float(here.run(python(SEND, f"{there.name}-data", 7777, count)).stdout)


@pytest.mark.slow
def test_large_frames_may_vanish(make_cluster: MakeCluster) -> None:
    """Whatever is small comes through, so that all seems well: connections, pings, the first messages."""
    node1, node2 = make_cluster(2).hosts
    node2.swallow("eth1", 1000)
    assert connect(node1, "node2-data:22") == {"node2-data:22": "ok"}
    for host, name in ((node1, "node2-data"), (node2, "node1-data")):
        pings = [host.popen(["ping", "-c", "1", "-W", "1", "-s", size, name]) for size in ("900", "1100")]
        assert [ping.finish() for ping in pings] == [0, 1]
    client = talk(node1, node2)
    say(client, "small")
    client.wait_for("^answer small$")
    say(client, "l" * 5000)
    say(client, "small")
    assert node1.run(["ping", "-c", "5", "-i", "0.1", "node2-data"]).returncode == 0
    assert client.out.count("answer") == 1
    node2.unslow()
    assert node1.run(["ping", "-c", "1", "-W", "1", "-s", "1400", "node2-data"]).returncode == 0


@pytest.mark.slow
def test_a_throttled_nic_is_slow_in_both_directions(cluster: Cluster) -> None:
    """One that has fallen back to a lower rate, say. Small messages do not notice."""
    node1, node2, *_ = cluster.hosts
    node2.throttle("eth1", 2_000_000)
    throttled_s = min(send(node1, node2, 1_000_000), send(node2, node1, 1_000_000))
    # What a burst may be, and the queue, is through at once.
    assert throttled_s > 0.3
    node2.unthrottle()
    assert min(send(node1, node2, 1_000_000) for _ in range(3)) < throttled_s
    assert "tbf" not in node2.in_network("tc", "qdisc", "show", "dev", "eth1")


@pytest.mark.slow
def test_shared_memory_may_be_full(cluster: Cluster) -> None:
    """Of one host: the others have their own."""
    node1, node2, *_ = cluster.hosts
    write = "open('/dev/shm/mine', 'wb').write(bytes(2_000_000))"
    node2.fill_shared_memory()
    assert "No space left on device" in node2.run(python(write)).stderr
    assert node1.run(python(write)).returncode == 0
    node2.free_shared_memory()
    assert node2.run(python(write)).returncode == 0


@pytest.mark.slow
def test_files_may_be_limited(cluster: Cluster) -> None:
    """By the hard limit too, so that nobody can help themselves."""
    node1, node2, *_ = cluster.hosts
    say = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    usual = node1.run(python(say)).stdout
    node2.limit_files(100)
    assert node2.run(python(say)).stdout == "100 100\n"
    node2.cure()
    assert node2.run(python(say)).stdout == usual


@pytest.mark.slow
def test_a_clock_may_be_wrong(cluster: Cluster) -> None:
    """The wall clock; what measures how long something takes is all hosts' own."""
    node1, node2, *_ = cluster.hosts
    say = "import time; print(time.time(), time.monotonic())"

    def read(host: Host) -> list[float]:
        return [float(word) for word in host.run(python(say), check=True).stdout.split()]

    node2.shift_clock(-300)
    (before, start), (now, late), (after, end) = read(node1), read(node2), read(node1)
    assert before < now + 300 < after
    assert start < late < end
    node2.cure()
    assert read(node1)[0] < read(node2)[0]


@pytest.mark.slow
def test_torch_may_be_said_to_be_another(cluster: Cluster) -> None:
    """On one host; the files of all others are as they are."""
    node1, node2, *_ = cluster.hosts
    say = python(VERSION)
    usual = node1.run(say, check=True).stdout
    node2.fake_torch("2.4.1")
    assert node2.run(say).stdout == "2.4.1\n" != usual
    assert node1.run(say).stdout == usual
    node2.cure()
    assert node2.run(say).stdout == usual


@pytest.mark.slow
def test_heal_undoes_every_fault(make_cluster: MakeCluster) -> None:
    """What one fault has hidden must not stay when that fault is gone."""
    cluster = make_cluster(3)
    node1, node2, node3 = cluster.hosts
    untouched = node1.run(python(STATE), check=True).stdout
    node1.slow("eth0", delay_ms=1)
    node1.cut("eth0")
    node1.break_name("node3", None)
    node2.cut("eth1", "down")
    node2.firewall(None, "drop")
    node2.block_peer(node3)
    node2.throttle("eth0", 1_000_000)
    node2.fill_shared_memory()
    node2.limit_files(100)
    node2.shift_clock(100)
    node2.fake_torch("2.4.1")
    node3.limit_files(100)
    node3.throttle("eth1", 1_000_000)
    node3.power_off()
    cluster.heal()
    names = [f"{host.name}{suffix}:22" for host in cluster.hosts for suffix in ("", "-data", "-v6")]
    for host in cluster.hosts:
        assert connect(host, *names) == dict.fromkeys(names, "ok")
        assert host.run(python(STATE)).stdout == untouched
