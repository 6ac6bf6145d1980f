"""Hosts probe each other over real sockets: on loopback, and between network namespaces with real faults."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.judge import judge
from saferun.preflight.probe import listener as listener_module
from saferun.preflight.probe import prober
from saferun.preflight.probe.listener import Listener
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.probe.protocol import (
    MOST_SMALL,
    RECORD_BYTES,
    SMALL,
    hello,
    kind_of,
    read_hello,
    read_welcome,
    record,
    welcome,
)
from saferun.preflight.probe.routes import source_for
from saferun.preflight.results import HostInfo, Probe, ProbeEndpoint, Target

Answer = TypeVar("Answer")
LOOPBACK = Nic("lo", ("127.0.0.1",), ("127.0.0.1/8",), kind="loopback")
NONCE = bytes(range(16))
DEADLINE_S = 30.0
TOKEN = "0123456789abcdef" * 2


def soon(within_s: float = DEADLINE_S) -> float:
    return time.monotonic() + within_s


def one(endpoint: ProbeEndpoint, nics: Sequence[Nic] = (LOOPBACK,)) -> Probe:
    """The only route of a probe endpoint, probed."""
    (found,) = probe_all(0, [Target(1, "node1", endpoint)], nics, soon())
    return found


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not answer takes a second instead of seven."""
    monkeypatch.setattr(prober, "CONNECT_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "LARGE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(prober, "_PAUSE_S", 0.05)


# ------------------------------------------------------------------------------------------------------------ loopback


def test_a_healthy_way_gives_numbers() -> None:
    with closing(Listener([("lo", "127.0.0.2"), ("lo", "127.0.0.3")])) as listening:
        found = probe_all(3, [Target(7, "node7", listening.endpoint)], [LOOPBACK], soon())
    assert [(p.source, p.target, p.nic, p.address, p.from_nic, p.kind) for p in found] == [
        (3, 7, "lo", "127.0.0.2", "lo", "ok"),
        (3, 7, "lo", "127.0.0.3", "lo", "ok"),
    ]
    for each in found:
        assert 0 < each.latency_s < 1
        assert each.bytes_s > 1e6
        assert each.segments > 0
        assert abs(each.clock_s) < 1
        assert each.words == ""


def test_two_listeners_have_different_secrets() -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as a, closing(Listener([("lo", "127.0.0.2")])) as b:
        assert len(a.endpoint.token) == len(b.endpoint.token) == 32
        assert a.endpoint.token != b.endpoint.token


def test_the_secret_is_never_sent() -> None:
    """Whoever has the address of a host need not be that host."""
    assert TOKEN.encode() not in hello(TOKEN, NONCE)
    assert bytes.fromhex(TOKEN) not in hello(TOKEN, NONCE)
    assert TOKEN.encode() not in welcome(TOKEN, NONCE, 0.0)
    assert len(hello(TOKEN, NONCE)) == len(welcome(TOKEN, NONCE, 0.0)) == len(record(SMALL)) == RECORD_BYTES


def test_each_end_proves_who_it_is() -> None:
    assert read_hello(hello(TOKEN, NONCE), TOKEN) == NONCE
    assert read_hello(hello("f" * 32, NONCE), TOKEN) == b""
    assert read_welcome(welcome(TOKEN, NONCE, 5.0), TOKEN, NONCE) == 5.0
    assert read_welcome(welcome("f" * 32, NONCE, 5.0), TOKEN, NONCE) is None
    assert read_welcome(welcome(TOKEN, bytes(16), 5.0), TOKEN, NONCE) is None
    assert read_welcome(hello(TOKEN, NONCE), TOKEN, NONCE) is None, "what was said is no answer when it comes back"


def said_to(endpoint: ProbeEndpoint, content: bytes) -> bytes:
    """All that a listener says to whoever says this."""
    with socket.create_connection((endpoint.routes[0][1], endpoint.port), timeout=DEADLINE_S) as connection:
        connection.sendall(content)
        heard = b""
        try:
            while chunk := connection.recv(4096):
                heard += chunk
        except ConnectionResetError:
            pass
    return heard


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\n\r\n" + bytes(64),
        bytes(RECORD_BYTES),
        hello("f" * 32, NONCE),
        record(SMALL),
        welcome(TOKEN, NONCE, 0.0),
        b"x",
    ],
)
def test_a_stranger_is_told_nothing(content: bytes) -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        assert said_to(listening.endpoint, content) == b""
        assert one(listening.endpoint).kind == "ok"


def test_a_known_visitor_may_not_do_more_than_it_should() -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        heard = said_to(listening.endpoint, hello(listening.endpoint.token, NONCE) + record(SMALL) * (MOST_SMALL + 5))
    assert len(heard) <= (1 + MOST_SMALL) * RECORD_BYTES


def test_whoever_says_nothing_is_parted_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "_HELLO_TIMEOUT_S", 0.1)
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        assert said_to(listening.endpoint, b"") == b""
        assert said_to(listening.endpoint, hello(listening.endpoint.token, NONCE)[:20]) == b""


def test_a_crowd_of_silent_strangers_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """More connections than the listener keeps, all of which say nothing, and whose time is never over."""
    monkeypatch.setattr(listener_module, "_HELLO_TIMEOUT_S", 100_000.0)
    with closing(Listener([("lo", "127.0.0.2")])) as listening, ExitStack() as stack:
        for _ in range(listener_module._MOST_VISITORS + 40):
            stack.enter_context(socket.create_connection(("127.0.0.2", listening.endpoint.port), timeout=DEADLINE_S))
        assert one(listening.endpoint).kind == "ok"
        assert len(listening._visitors) <= listener_module._MOST_VISITORS


def test_a_flood_of_strangers_is_looked_at_in_small_doses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener that is flooded may not take the processor from the job; when it is over, it is there."""
    monkeypatch.setattr(listener_module, "_MOST_STRANGERS_A_SECOND", 20)
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        began_at = time.monotonic()
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(said_to, [listening.endpoint] * 60, [b"x" * 64] * 60)) == {b""}
        assert time.monotonic() - began_at > 1.5, "sixty strangers, twenty a second"
        assert one(listening.endpoint).kind == "ok"


def test_many_hosts_probe_one_at_the_same_time() -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as listening, ThreadPoolExecutor(24) as pool:
        target = Target(1, "node1", listening.endpoint)
        found = list(pool.map(lambda source: probe_all(source, [target], [LOOPBACK], soon())[0], range(2, 26)))
    assert {p.kind for p in found} == {"ok"}


def test_a_closed_listener_has_left_its_port() -> None:
    listening = Listener([("lo", "127.0.0.2")])
    threads = threading.active_count()
    listening.close()
    listening.close()
    assert threading.active_count() == threads - 1
    with socket.socket() as again:
        again.bind(("127.0.0.2", listening.endpoint.port))
    assert one(listening.endpoint).kind == "refused"


def test_all_ways_have_one_port_and_the_same_address_is_bound_once() -> None:
    with closing(Listener([("lo", "127.0.0.2"), ("lo", "127.0.0.3"), ("lo", "127.0.0.2")])) as listening:
        assert listening.endpoint.routes == (("lo", "127.0.0.2"), ("lo", "127.0.0.3"))
        assert one(listening.endpoint._replace(routes=(("lo", "127.0.0.3"),))).kind == "ok"


def test_what_cannot_be_bound_is_not_in_the_door() -> None:
    with closing(Listener([("nowhere9", "fe80::1"), ("lo", "127.0.0.2")])) as listening:
        assert listening.endpoint.routes == (("lo", "127.0.0.2"),)
    with pytest.raises(OSError, match="no interface"):
        Listener([("nowhere9", "fe80::1")])
    with closing(Listener([])) as closed:
        assert closed.endpoint.routes == ()


def test_what_leads_back_to_oneself_is_told_apart() -> None:
    """docker0 has one address on every host: who connects to it connects to itself."""
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        endpoint = listening.endpoint
    docker = Nic("docker0", ("127.0.0.2",), ("127.0.0.2/8",))
    found = one(endpoint, [docker])
    assert found.kind == "self"
    assert "docker0" in found.words
    with closing(Listener([("lo", "127.0.0.2")])) as own:
        assert one(own.endpoint._replace(token=TOKEN), [docker]).kind == "self"
        assert one(own.endpoint, [docker]).kind == "ok", "two hosts of a job may be one machine"


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[ProbeEndpoint]:
    """Something that is no listener of ours, on 127.0.0.2."""
    with socket.create_server(("127.0.0.2", 0)) as listening:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                with connection:
                    connection.settimeout(DEADLINE_S)
                    try:
                        answer(connection)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield ProbeEndpoint(listening.getsockname()[1], TOKEN, (("lo", "127.0.0.2"),))
        listening.shutdown(socket.SHUT_RDWR)
    thread.join(DEADLINE_S)


def _banner(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" + bytes(64))
    connection.recv(4096)


def _mirror(connection: socket.socket) -> None:
    while content := connection.recv(4096):
        connection.sendall(content)


def _hang_up(connection: socket.socket) -> None:
    connection.recv(4096)


@pytest.mark.parametrize("answer", [_banner, _mirror, _hang_up])
def test_whoever_does_not_prove_itself_is_a_stranger(answer: Callable[[socket.socket], None]) -> None:
    with server(answer) as endpoint:
        found = one(endpoint, [])
    assert found.kind == "stranger"
    assert TOKEN not in found.words


@pytest.mark.usefixtures("impatient")
def test_a_port_that_accepts_and_says_nothing_is_told_apart() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        found = one(ProbeEndpoint(listening.getsockname()[1], TOKEN, (("lo", "127.0.0.2"),)))
    assert (found.kind, found.words) == ("silent", "the connection is accepted, but no data is received")


def test_a_connection_that_ends_midway_is_told_apart() -> None:
    def leave(connection: socket.socket) -> None:
        nonce = read_hello(connection.recv(RECORD_BYTES, socket.MSG_WAITALL), TOKEN)
        connection.sendall(welcome(TOKEN, nonce, time.time()))
        connection.recv(RECORD_BYTES, socket.MSG_WAITALL)

    with server(leave) as endpoint:
        assert one(endpoint).kind == "broken"


def test_what_fails_is_tried_once_more_before_it_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as first:
        endpoint = first.endpoint
    opened: list[Listener] = []

    def open_now(_: float) -> None:
        # As a host that was too busy to listen, between the first and the second try.
        late = Listener.__new__(Listener)
        monkeypatch.setattr(os, "urandom", lambda size: bytes.fromhex(endpoint.token)[:size])
        monkeypatch.setattr(listener_module, "_listen", _at(endpoint.port))
        Listener.__init__(late, endpoint.routes)
        opened.append(late)

    stand_in = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=open_now)
    monkeypatch.setattr(prober, "time", stand_in)
    found = one(endpoint)
    assert (found.kind, found.words) == ("ok", "connection refused at first")
    opened[0].close()


def _at(port: int) -> Callable[[Sequence[tuple[str, str]]], tuple[list[socket.socket], list[tuple[str, str]]]]:
    def listen(routes: Sequence[tuple[str, str]]) -> tuple[list[socket.socket], list[tuple[str, str]]]:
        return [listener_module._listen_on(nic, address, port) for nic, address in routes], list(routes)

    return listen


def test_no_time_is_no_answer() -> None:
    """What could not be looked at long enough is left out: it is no fault."""
    with socket.create_server(("127.0.0.2", 0)) as listening:
        endpoint = ProbeEndpoint(listening.getsockname()[1], TOKEN, (("lo", "127.0.0.2"),))
        assert probe_all(0, [Target(1, "a", endpoint), Target(2, "b", endpoint)], [LOOPBACK], soon(0.3)) == []
    assert probe_all(0, [], [LOOPBACK], soon()) == []


@pytest.mark.parametrize(
    ("nic", "address", "expected"),
    [
        ("eth0", "10.0.0.9", ("eth0", "10.0.0.1")),
        ("eth1", "10.1.0.9", ("eth1", "10.1.0.1")),
        ("ib0", "10.1.0.9", ("eth1", "10.1.0.1")),  # its name differs from host to host
        ("eth1", "10.7.0.9", ("eth1", "10.1.0.1")),  # behind a router
        ("ib0", "10.7.0.9", ("", "")),
        ("eth0", "fd00::9", ("eth0", "fd00::1")),
        ("eth2", "10.2.0.9", ("", "")),  # it is down
        ("eth0", "nonsense", ("eth0", "10.0.0.1")),
    ],
)
def test_a_connection_comes_from_the_interface_that_leads_there(
    nic: str, address: str, expected: tuple[str, str]
) -> None:
    nics = [
        Nic("eth0", ("10.0.0.1", "fd00::1"), ("10.0.0.1/24", "fd00::1/64")),
        Nic("eth1", ("10.1.0.1",), ("10.1.0.1/24",)),
        Nic("eth2", ("10.2.0.1",), ("10.2.0.1/24",), is_up=False),
    ]
    assert source_for(nic, address, nics) == expected


# --------------------------------------------------------------------------------------------------- between namespaces

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
        target = Target(1 - source, f"node{1 - source}", self.endpoints[1 - source])
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
    ("how", "kind", "words"),
    [
        ("drop", "timeout", "timeout"),
        ("reject with tcp reset", "refused", "connection refused"),
        ("reject with icmpx type admin-prohibited", "no_route", "no route to host"),
    ],
)
def test_a_firewall_in_one_direction_is_told_with_the_direction(pair: Pair, how: str, kind: str, words: str) -> None:
    pair.hosts[1].rule(f'iifname "eth1" tcp flags & (syn | ack) == syn {how}')
    assert pair.kinds(0) == {"eth0": "ok", "eth1": kind}
    assert pair.kinds(1) == {"eth0": "ok", "eth1": "ok"}
    told = f"node0 does not reach node1 over eth1 ({words}); the other route round works; eth0 works"
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
    assert found["eth0"].bytes_s > 2 * found["eth1"].bytes_s


@in_namespaces
@pytest.mark.usefixtures("impatient")
def test_an_own_interface_that_is_down_is_told_at_once(pair: Pair) -> None:
    pair.hosts[0].do("ip", "link", "set", "eth1", "down")
    found = pair.probe(0)
    assert found["eth0"].kind == "ok"
    assert found["eth1"].kind == "unreachable"
    assert "network is unreachable" in found["eth1"].words


@in_namespaces
def test_an_address_that_nobody_has_does_not_answer(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel says "no route to host" after three seconds, as if a router had: but nobody is there."""
    monkeypatch.setattr(prober, "_TRIES", 1)
    host = pair.hosts[0]
    endpoint = ProbeEndpoint(pair.endpoints[1].port, TOKEN, (("eth1", "10.9.1.77"),))
    (found,) = host.run(probe_all, 0, [Target(1, "node1", endpoint)], host.nics, soon())
    assert (found.kind, found.words) == ("timeout", "no host on the link answers for that address")


@in_namespaces
def test_a_bridge_that_both_have_leads_each_to_itself(pair: Pair) -> None:
    for host in pair.hosts:
        host.do("ip", "link", "add", "docker0", "type", "bridge")
        host.do("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
        host.do("ip", "link", "set", "docker0", "up")
    host = pair.hosts[0]
    endpoint = ProbeEndpoint(pair.endpoints[1].port, pair.endpoints[1].token, (("docker0", "172.17.0.1"),))
    (found,) = host.run(probe_all, 0, [Target(1, "node1", endpoint)], host.nics, soon())
    assert found.kind == "self"
    assert "docker0" in found.words


def test_a_record_has_a_kind_only_where_it_is_one() -> None:
    assert kind_of(record(SMALL)) == SMALL
    assert kind_of(record(SMALL)[:-1]) == b""
    assert kind_of(bytes(RECORD_BYTES)) == b""
