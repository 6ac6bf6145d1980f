"""Hosts probe each other between network namespaces, with real faults."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.judge import judge
from saferun.preflight.probe import prober
from saferun.preflight.probe.listener import Listener
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.probe.protocol import RECORD_BYTES, SMALL, kind_of, record
from saferun.preflight.results import HostInfo, Probe, ProbeEndpoint, ProbeTarget
from tests.process.probing import TOKEN, impatient, soon

__all__ = ["impatient"]


Answer = TypeVar("Answer")


in_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nft") is None,
    reason="making networks takes root, iproute2 and nftables",
)


_NEWNET = 0x40000000


class Host:
    """A network namespace: that of a thread, with which it ends. 10.9.0.N is its eth0, 10.9.1.N its eth1."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._thread = ThreadPoolExecutor(1)
        self.thread_id = self.run(self._leave)
        self.nics = (
            *(Nic(f"eth{i}", (f"10.9.{i}.{number + 1}",), (f"10.9.{i}.{number + 1}/24",)) for i in range(2)),
            Nic("docker0", ("172.17.0.1",), ("172.17.0.1/16",), kind="bridge"),
        )

    @staticmethod
    def _leave() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        return threading.get_native_id()

    def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        return self._thread.submit(function, *arguments).result(60)

    def do(self, *command: str, said: str = "") -> None:
        self.run(lambda: subprocess.run(command, input=said, text=True, check=True, timeout=30, capture_output=True))

    def rule(self, *rules: str) -> None:
        """Rules of its firewall for what comes in: each replaces those before."""
        chain = "add chain inet t incoming { type filter hook input priority 0; policy accept; }"
        lines = ["flush ruleset", "add table inet t", chain, *(f"add rule inet t incoming {rule}" for rule in rules)]
        self.do("nft", "-f", "-", said="\n".join([*lines, ""]))

    def listen(self) -> Listener:
        return self.run(Listener, [(nic.name, nic.addresses[0]) for nic in self.nics[:2]])

    def close(self) -> None:
        self._thread.shutdown()


class Pair:
    """Two hosts on two networks."""

    def __init__(self, hosts: Sequence[Host], endpoints: Sequence[ProbeEndpoint]) -> None:
        self.hosts = hosts
        self.endpoints = endpoints

    def probe(self, source: int) -> dict[str, Probe]:
        """What one finds of the other, by interface."""
        target = ProbeTarget(1 - source, f"node{1 - source}", self.endpoints[1 - source])
        host = self.hosts[source]
        return {p.nic: p for p in host.run(probe_all, source, [target], host.nics, soon())}

    def kinds(self, source: int) -> dict[str, str]:
        return {nic: p.kind for nic, p in self.probe(source).items()}

    def verdict(self) -> list[str]:
        """What the user reads, after a second measurement."""
        infos = {
            host.number: HostInfo(
                f"node{host.number}", nics=host.nics, gloo=("eth1",), probed=("eth0", "eth1"), backend="gloo"
            )
            for host in self.hosts
        }
        probes = [p for _ in range(2) for source in range(2) for p in self.probe(source).values()]
        found = judge(infos, probes, missing={}, nics=(), remeasured=True, duration_s=0.0)
        return [f"{r.verdict} {r.message}" for r in found.results if r.verdict in {"warn", "fail"}]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        hosts = [Host(0), Host(1)]
        for host in hosts:
            stack.callback(host.close)
        for i in range(2):
            peer = ("peer", "name", f"eth{i}", "netns", str(hosts[1].thread_id))
            hosts[0].do("ip", "link", "add", f"eth{i}", "type", "veth", *peer)
        for host in hosts:
            host.do("ip", "link", "set", "lo", "up")
            for nic in host.nics[:2]:
                host.do("ip", "addr", "add", nic.networks[0], "dev", nic.name)
                host.do("ip", "link", "set", nic.name, "up")
                # Frames are as long as on a wire.
                host.do("ethtool", "-K", nic.name, "tx", "off", "tso", "off", "gso", "off", "gro", "off")
        listeners = [host.listen() for host in hosts]
        for listening in listeners:
            stack.callback(listening.close)
        yield Pair(hosts, [listening.endpoint for listening in listeners])


@in_namespaces
def test_healthy_networks_are_told_nothing(pair: Pair) -> None:
    for source in range(2):
        found = pair.probe(source)
        assert {nic: (p.kind, p.from_nic) for nic, p in found.items()} == {
            "eth0": ("ok", "eth0"),
            "eth1": ("ok", "eth1"),
        }
    assert pair.verdict() == []


@in_namespaces
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("drop", "timeout", "timeout"),
        ("reject with tcp reset", "refused", "connection refused"),
        ("reject with icmpx type admin-prohibited", "no_route", "no route to host"),
    ],
)
def test_a_firewall_in_one_direction_is_told_with_the_direction(pair: Pair, how: str, kind: str, message: str) -> None:
    pair.hosts[1].rule(f'iifname "eth1" tcp flags & (syn | ack) == syn {how}')
    assert pair.kinds(0) == {"eth0": "ok", "eth1": kind}
    assert pair.kinds(1) == {"eth0": "ok", "eth1": "ok"}
    told = f"node0 does not reach node1 over eth1 ({message}); the other way round works; eth0 works"
    assert pair.verdict() == [f"fail {told}"]


@in_namespaces
@pytest.mark.usefixtures("impatient")
def test_an_mtu_black_hole_lets_small_messages_through_and_no_large_ones(pair: Pair) -> None:
    """A switch port with a smaller MTU than the hosts, and no message about it."""
    for host in pair.hosts:
        host.do("ip", "link", "set", "eth1", "mtu", "9000")
    for host in pair.hosts:
        host.rule('iifname "eth1" meta length > 1600 drop')
    assert pair.kinds(0) == {"eth0": "ok", "eth1": "black_hole"}
    assert pair.verdict() == [
        "fail node0 and node1 get small messages through to each other over eth1, and no large ones; eth0 works"
    ]


@in_namespaces
@pytest.mark.slow
def test_lost_packets_are_seen_in_what_was_sent_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nearly a third of all packets: it takes seconds, and now and then a connection does not come through at all."""
    monkeypatch.setattr(prober, "LARGE_TIMEOUT_S", 1.0)
    for host in pair.hosts:
        host.rule('iifname "eth1" numgen random mod 100 < 28 drop')
    (line,) = pair.verdict()
    assert line.startswith("warn eth1 loses packets ")


@in_namespaces
def test_a_network_of_80_mbit_is_measured_as_one(pair: Pair) -> None:
    pair.hosts[0].do(
        "tc", "qdisc", "add", "dev", "eth1", "root", "tbf", "rate", "80mbit", "burst", "16kb", "latency", "100ms"
    )
    found = pair.probe(0)
    assert found["eth1"].kind == "ok"
    assert 2e6 < found["eth1"].bytes_s < 20e6
    slow_bytes_s = found["eth1"].bytes_s
    # A prober that waits for a processor measures that, too.
    assert any(pair.probe(0)["eth0"].bytes_s > 2 * slow_bytes_s for _ in range(5))


@in_namespaces
@pytest.mark.usefixtures("impatient")
def test_an_own_interface_that_is_down_is_told_at_once(pair: Pair) -> None:
    pair.hosts[0].do("ip", "link", "set", "eth1", "down")
    found = pair.probe(0)
    assert found["eth0"].kind == "ok"
    assert found["eth1"].kind == "unreachable"
    assert "network is unreachable" in found["eth1"].message


@in_namespaces
def test_an_address_that_nobody_has_does_not_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says "no route to host" after three seconds, as if a router had: but nobody is there."""
    monkeypatch.setattr(prober, "_TRIES", 1)
    host = pair.hosts[0]
    endpoint = ProbeEndpoint(pair.endpoints[1].port, TOKEN, (("eth1", "10.9.1.77"),))
    (found,) = host.run(probe_all, 0, [ProbeTarget(1, "node1", endpoint)], host.nics, soon())
    assert (found.kind, found.message) == ("timeout", "no host on the link answers for that address")


@in_namespaces
def test_a_bridge_that_both_have_leads_each_to_itself(pair: Pair) -> None:
    for host in pair.hosts:
        host.do("ip", "link", "add", "docker0", "type", "bridge")
        host.do("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.do("ip", "link", "set", "docker0", "up")
    host = pair.hosts[0]
    endpoint = ProbeEndpoint(pair.endpoints[1].port, pair.endpoints[1].token, (("docker0", "172.17.0.1"),))
    (found,) = host.run(probe_all, 0, [ProbeTarget(1, "node1", endpoint)], host.nics, soon())
    assert found.kind == "self"
    assert "docker0" in found.message


def test_a_record_has_a_kind_only_where_it_is_one() -> None:
    assert kind_of(record(SMALL)) == SMALL
    assert kind_of(record(SMALL)[:-1]) == b""
    assert kind_of(bytes(RECORD_BYTES)) == b""
