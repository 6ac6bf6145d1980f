"""Why a host is silent, from what its addresses say; and the words of connections and arrivals."""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Collection
from typing import Any

import pytest

from saferun.coordinator.arrivals import waiting_text
from saferun.coordinator.dial import CONNECTED, REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE, dial, kind_of, plain, shown
from saferun.coordinator.evidence_chunks import is_chunk_name
from saferun.coordinator.heartbeats import read_state
from saferun.coordinator.host_coordinator import HostCoordinator
from saferun.coordinator.leader_address import is_loopback, leads_to, master_addr, read_address
from saferun.coordinator.liveness_probe import Observation, ended_reason, judge, probe_host
from tests.ports import own_port

DATA, MANAGEMENT = "10.1.0.3", "10.2.0.3"
MEETING: dict[str, Any] = {
    "backend": "c10d",
    "least": 1,
    "most": 2,
    "run_id": "job7",
    "timeout_s": 1,
    "probe_after_s": 1,
    "name": "node1",
    "tasks": 1,
    "endpoint": "",
    "master": ["10.0.0.9", []],
}


def sight(address: str, kind: str, *, answered: bool = False) -> Observation:
    return Observation(address, kind, f"{address} is {kind}", answered)


@pytest.mark.parametrize(
    ("sights", "why"),
    [
        ([sight(DATA, REFUSED), sight(MANAGEMENT, REFUSED)], "gone"),
        ([sight(DATA, SILENT), sight(MANAGEMENT, REFUSED)], "gone"),
        ([sight(DATA, SILENT), sight(MANAGEMENT, UNREACHABLE)], "unreachable"),
        ([sight(DATA, SILENT), sight(MANAGEMENT, CONNECTED, answered=True)], "cut"),
        ([sight(DATA, REFUSED), sight(MANAGEMENT, CONNECTED, answered=True)], "cut"),
        ([sight(DATA, CONNECTED), sight(MANAGEMENT, CONNECTED)], "frozen"),
        ([sight(DATA, CONNECTED), sight(MANAGEMENT, SILENT)], "frozen"),
        ([sight("node3", UNKNOWN_NAME)], "unknown"),
        ([sight(DATA, CONNECTED, answered=True), sight(MANAGEMENT, SILENT)], "reached"),
    ],
)
def test_a_silent_host_is_judged_by_all_its_addresses(sights: list[Observation], why: str) -> None:
    """A dead host, a dead saferun, a cut network and a frozen process look alike from one address alone."""
    assert judge("node3", sights, DATA).why == why


def test_a_cut_names_the_way_that_works_and_the_one_that_does_not() -> None:
    """That is what somebody has to mend."""
    words = judge("node3", [sight(DATA, SILENT), sight(MANAGEMENT, CONNECTED, answered=True)], DATA).message
    assert MANAGEMENT in words
    assert f"{DATA} is silent" in words


def test_without_an_address_nothing_is_claimed() -> None:
    """Unknown is an honest answer."""
    assert probe_host("node3", [], 4711, address=None).why == "unknown"
    assert probe_host("node3", ["127.0.0.1"], 0, address=None).why == "unknown"


def test_a_refusal_is_enough_where_other_addresses_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is up and saferun is gone; the kernel's verdict on a cut network takes seconds longer."""
    never = threading.Event()
    is_over: list[str] = []

    def look(address: str, port: int, answers: object, on_connected: object) -> Observation:
        del port, answers, on_connected
        if address == DATA:
            never.wait(60.0)
            is_over.append(address)
        return sight(address, REFUSED)

    monkeypatch.setattr("saferun.coordinator.liveness_probe._ask", look)
    monkeypatch.setattr("saferun.coordinator.liveness_probe._CONNECT_TIMEOUT_S", 1000.0)
    assert probe_host("node3", [DATA, MANAGEMENT], 4711, address=None).why == "gone"
    assert not is_over, "it waited for the other address"
    never.set()


def test_an_answer_is_enough_where_only_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host lives, whatever becomes of its other addresses."""
    never = threading.Event()

    def look(address: str, port: int, answers: object, on_connected: object) -> Observation:
        del port, answers, on_connected
        if address == DATA:
            never.wait(60.0)
        return sight(address, CONNECTED, answered=True)

    monkeypatch.setattr("saferun.coordinator.liveness_probe._ask", look)
    monkeypatch.setattr("saferun.coordinator.liveness_probe._CONNECT_TIMEOUT_S", 1000.0)
    found = probe_host("node3", [DATA, MANAGEMENT], 4711, address=None, is_answer_enough=True)
    assert (found.why, found.address) == ("cut", MANAGEMENT)
    never.set()


def test_a_silent_host_has_the_whole_time_to_find_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer at one address does not end the probe: its heartbeats may come over that one a moment later."""
    waited = threading.Event()

    def look(address: str, port: int, answers: object, on_connected: object) -> Observation:
        del port, answers, on_connected
        if address == DATA:
            waited.wait(0.3)
            waited.set()
        return sight(address, SILENT if address == DATA else CONNECTED, answered=address != DATA)

    monkeypatch.setattr("saferun.coordinator.liveness_probe._ask", look)
    assert probe_host("node3", [DATA, MANAGEMENT], 4711, address=None).why == "cut"
    assert waited.is_set()


def test_an_answer_that_comes_after_a_refusal_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of its networks has a firewall that refuses."""
    refused = threading.Event()

    def look(address: str, port: int, answers: object, on_connected: object) -> Observation:
        del port, answers, on_connected
        if address == DATA:
            refused.set()
            return sight(DATA, REFUSED)
        assert refused.wait(10.0)
        return sight(address, CONNECTED, answered=True)

    monkeypatch.setattr("saferun.coordinator.liveness_probe._ask", look)
    assert probe_host("node3", [DATA, MANAGEMENT], 4711, address=DATA).why == "cut"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OSError(errno.ECONNREFUSED, ""), REFUSED),
        (OSError(errno.ETIMEDOUT, ""), SILENT),
        (TimeoutError(), SILENT),
        (OSError(errno.EHOSTUNREACH, ""), UNREACHABLE),
        (OSError(errno.ENETUNREACH, ""), UNREACHABLE),
        (socket.gaierror(socket.EAI_NONAME, ""), UNKNOWN_NAME),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
    ],
)
def test_errors_of_connect_are_kinds(error: OSError, kind: str) -> None:
    """Source: connect(2), ip(7)."""
    assert kind_of(error) == kind


@pytest.mark.parametrize("is_last", [True, False])
def test_an_address_for_which_the_kernel_has_no_sockets_is_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, *, is_last: bool
) -> None:
    """A name with addresses of both families, on a host without IPv6: the other address decides."""
    port = own_port()
    infos = [
        (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("127.0.0.1", port)),
        (socket.AF_INET6, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", ("::1", port, 0, 0)),
    ]
    make = socket.socket

    def without_ipv6(family: int = -1, *more: Any, **named: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return make(family, *more, **named)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos if is_last else infos[::-1])
    connection, kind, message = dial("node1", port)
    assert (connection, kind) == (None, REFUSED)
    assert message == f"node1:{port} (127.0.0.1) refuses connections"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos[1:])
    connection, _, message = dial("node1", port)
    assert connection is None
    assert "node1" in message


def test_the_words_name_the_address_behind_a_name() -> None:
    """A name that leads to the wrong address, 127.0.1.1 for one, is a common fault."""
    _, kind, words = dial("localhost", own_port())
    assert kind == REFUSED
    assert words.endswith("refuses connections")
    assert "127.0.0.1" in words or "::1" in words


def test_ipv6_addresses_are_shown_in_brackets() -> None:
    """A colon more would be ambiguous."""
    assert shown("fd00::1", 29500) == "[fd00::1]:29500"
    assert shown("node1", 29500) == "node1:29500"
    assert plain("[fd00::1]") == "fd00::1"


def test_a_name_that_leads_every_host_to_itself_is_not_handed_to_ranks() -> None:
    """Debian's /etc/hosts has the own name at 127.0.1.1."""
    assert is_loopback("127.0.1.1")
    assert master_addr("localhost", ("127.0.0.1", "10.0.0.9")) == "10.0.0.9"
    assert master_addr("no-such-host.invalid", ("10.0.0.9",)) == "10.0.0.9"
    assert master_addr("localhost", ("127.0.0.1",)) == "localhost"
    assert master_addr("192.0.2.1", ("10.0.0.9",)) == "192.0.2.1"


def test_an_address_that_a_handler_names_may_lead_to_another_host() -> None:
    """Where its own store is, which the ranks do not use."""
    assert leads_to("localhost", ())
    assert leads_to("192.0.2.1", ("10.0.0.9", "192.0.2.1"))
    assert not leads_to("192.0.2.1", ("10.0.0.9",))
    assert not leads_to("no-such-host.invalid", ("10.0.0.9",))


def test_who_is_missing_is_named_where_names_are_known() -> None:
    """Else who is there."""
    assert waiting_text(["node1"], 2, 2, ["node1", "node2"]) == "1 of 2 hosts: node2"
    assert waiting_text(["node1"], 2, 4, []) == "1 of 2 to 4 hosts; here is node1"
    assert waiting_text(["node1", "node2"], 2, 4, []) == "more hosts: 2 of 4 are here (node1, node2)"
    assert waiting_text([], 2, 2, []) == "2 of 2 hosts"


def test_no_host_is_said_to_be_missing_where_not_all_names_are_known() -> None:
    """A store that is slow, or does not answer, says nothing of those who wait."""
    expected = [f"node{number}" for number in range(1, 5)]
    assert waiting_text([], 4, 4, expected, is_all=False) == "other hosts"
    few = waiting_text(["node1"], 2, 4, expected, is_all=False)
    assert few == "other hosts; at least 1 of 2 to 4 has come (node1)"
    many = waiting_text(["node1", "node2", "node3"], 4, 4, [], is_all=False)
    assert many == "other hosts; at least 3 of 4 have come (node1, node2, node3)"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[",
        b"7",
        b"{}",
        b'{"tasks": 1, "chunks": [], "stuck": {}, "acked": 1, "locations": {}}',
        b'{"tasks": {"x": {}}, "chunks": [], "stuck": {}, "acked": true, "locations": {}}',
        b"[" * 9**5,
    ],
)
def test_a_malformed_state_is_none(text: bytes) -> None:
    """Another host wrote it."""
    assert read_state(text) is None


def test_a_state_is_read_as_it_was_written() -> None:
    """The rest of it is bounded."""
    content = b'{"tasks": {"0": {"s": "run"}}, "chunks": [[0, "end"]], "stuck": {"0": "T"}, "acked": false,'
    state = read_state(content + b' "locations": {}}')
    assert state is not None
    assert (state.tasks, state.chunks, state.stuck, state.acked) == (
        {"0": {"s": "run"}},
        ((0, "end"),),
        {"0": "T"},
        False,
    )


def test_a_malformed_leader_is_none() -> None:
    """A port is a port."""
    good = b'{"job": "x", "control_port": 1, "ranks_port": 2, "master_addr": "a", "addresses": ["b", "10.0.0.1"],'
    good += b' "run_id": "r", "hosts": 2, "one_port": false, "moves": 0, "script": "", "spares": 0}'
    address = read_address(good)
    assert address is not None
    assert address.addresses == ("10.0.0.1",)  # no name service is asked for what another host sends
    for bad in (
        good.replace(b": 1", b": 65536"),
        good.replace(b'"job"', b'"bob"'),
        good.replace(b'["b", "10.0.0.1"]', b"7"),
        b"x",
    ):
        assert read_address(bad) is None


@pytest.mark.parametrize(
    ("name", "is_one"), [("hang-12", True), ("end", True), ("", False), ("../end", False), (7, False)]
)
def test_parts_have_plain_names(name: object, is_one: bool) -> None:
    """They become keys of the store."""
    assert is_chunk_name(name) is is_one


def test_where_no_thread_can_be_started_an_address_is_tried_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that cannot be asked after would be missed forever."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert probe_host("node3", ["127.0.0.1"], own_port(), address=None).why == "gone"


class Told:
    """Stands in for the connection to a task, and for all of them."""

    def __init__(self) -> None:
        self.task: int | None = 0
        self.said: list[dict[str, Any]] = []
        self.head = self
        self.is_head = True

    def of_task(self, _: int) -> Told:
        return self

    def send(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def send_away(self, joins: Collection[int]) -> None:
        """Nobody else has come."""


def test_a_coordinator_lives_on_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would end a job in which nothing is amiss; only what cannot wait fails, with the reason."""

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    told: Any = Told()
    host = HostCoordinator(told, None, -1, "2.13")  # type: ignore[arg-type]
    assert host.handle(told, {"op": "close"})
    host.handle(told, {"op": "join", "task": 0, **MEETING})
    (failed,) = told.said
    assert failed["op"] == "join_failed"
    assert "can't start new thread" in failed["what"]
    ended: list[bool] = []
    host.farewell(lambda: ended.append(True))
    assert ended == [True]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"saferun: the coordinator ended: 9\n", "the coordinator of node1 ended (killed by SIGKILL)"),
        (b"saferun: the coordinator ended: 0\n", "the coordinator of node1 ended"),
        (b"saferun: the coordinator ended: 999\n", None),
        (b"saferun: the coordinator ended: -9\n", None),
        (b"saferun: the coordinator ended: ", None),
        (b"saferun\n", None),
        (b"HTTP/1.1 400 Bad Request\r\n", None),
        (b"\xff\x00", None),
        (b"", None),
    ],
)
def test_how_a_coordinator_ended_is_taken_from_an_answer_of_its_host_only(answer: bytes, message: str | None) -> None:
    """Whatever else holds the port may say anything."""
    reason = ended_reason("node1", answer)
    assert (reason.message if reason is not None else None) == message
