"""Hosts probe each other over real sockets: on loopback."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from types import SimpleNamespace

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.probe import listener as listener_module
from saferun.preflight.probe import prober
from saferun.preflight.probe.listener import Listener
from saferun.preflight.probe.prober import probe_all
from saferun.preflight.probe.protocol import (
    MOST_SMALL,
    RECORD_BYTES,
    SMALL,
    hello,
    read_hello,
    read_welcome,
    record,
    welcome,
)
from saferun.preflight.probe.routes import source_for
from saferun.preflight.results import ProbeEndpoint, ProbeTarget
from tests.process.probing import DEADLINE_S, LOOPBACK, TOKEN, impatient, one, soon

__all__ = ["impatient"]


NONCE = bytes(range(16))


def test_a_healthy_way_gives_numbers() -> None:
    with closing(Listener([("lo", "127.0.0.2"), ("lo", "127.0.0.3")])) as listening:
        found = probe_all(3, [ProbeTarget(7, "node7", listening.endpoint)], [LOOPBACK], soon())
    assert [(p.source, p.target, p.nic, p.address, p.from_nic, p.kind) for p in found] == [
        (3, 7, "lo", "127.0.0.2", "lo", "ok"),
        (3, 7, "lo", "127.0.0.3", "lo", "ok"),
    ]
    for each in found:
        assert 0 < each.latency_s < 1
        assert each.bytes_s > 1e6
        assert each.segments > 0
        assert abs(each.clock_s) < 1
        assert each.message == ""


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
    """A listener that is flooded may not take the processor from the job; when it is over, it is there.

    The listener's clock stands still until it rests, and goes on to the end of that rest: sixty strangers, twenty a
    second, are three rests, however slow the machine is.
    """
    clock_s, rests = [1000.0], list[float]()
    rest = Listener._rest

    def rest_and_go_on(listener: Listener, until: float) -> None:
        rest(listener, until)
        rests.append(until)
        clock_s[0] = until

    monkeypatch.setattr(listener_module, "_MOST_STRANGERS_A_SECOND", 20)
    monkeypatch.setattr(listener_module, "_AGAIN_S", 0.01)
    monkeypatch.setattr(listener_module, "time", SimpleNamespace(monotonic=lambda: clock_s[0], time=time.time))
    monkeypatch.setattr(Listener, "_rest", rest_and_go_on)
    with closing(Listener([("lo", "127.0.0.2")])) as listening:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(said_to, [listening.endpoint] * 60, [b"x" * 64] * 60)) == {b""}
        # The last stranger sees the end of its connection before the listener rests.
        assert one(listening.endpoint).kind == "ok"
        assert rests == [1001.0, 1002.0, 1003.0]


def test_many_hosts_probe_one_at_the_same_time() -> None:
    with closing(Listener([("lo", "127.0.0.2")])) as listening, ThreadPoolExecutor(24) as pool:
        target = ProbeTarget(1, "node1", listening.endpoint)
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
    assert "docker0" in found.message
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
    assert TOKEN not in found.message


@pytest.mark.usefixtures("impatient")
def test_a_port_that_accepts_and_says_nothing_is_told_apart() -> None:
    with socket.create_server(("127.0.0.2", 0)) as listening:
        found = one(ProbeEndpoint(listening.getsockname()[1], TOKEN, (("lo", "127.0.0.2"),)))
    assert (found.kind, found.message) == ("silent", "the connection is accepted, but no data is received")


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
    assert (found.kind, found.message) == ("ok", "connection refused at first")
    opened[0].close()


def _at(port: int) -> Callable[[Sequence[tuple[str, str]]], tuple[list[socket.socket], list[tuple[str, str]]]]:
    def listen(routes: Sequence[tuple[str, str]]) -> tuple[list[socket.socket], list[tuple[str, str]]]:
        return [listener_module._listen_on(nic, address, port) for nic, address in routes], list(routes)

    return listen


def test_no_time_is_no_answer() -> None:
    """What could not be looked at long enough is left out: it is no fault."""
    with socket.create_server(("127.0.0.2", 0)) as listening:
        endpoint = ProbeEndpoint(listening.getsockname()[1], TOKEN, (("lo", "127.0.0.2"),))
        assert probe_all(0, [ProbeTarget(1, "a", endpoint), ProbeTarget(2, "b", endpoint)], [LOOPBACK], soon(0.3)) == []
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
