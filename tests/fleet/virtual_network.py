"""A network of virtual hosts: latency, bandwidth, loss, cut routes; TCPStores, and connections that are dialled.

Of torch's TCPStore only what it promises to ``StoreClient`` is here: keys, and who waits for them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self
from weakref import WeakSet

from saferun.coordinator.liveness_probe import ANSWER
from tests.fleet.virtual_time import Place, Simulation

_HEADER_BYTES = 78  # of a TCP segment in its frame
_RETRANSMISSION_S = 0.2
_LOOPBACK_S = 20e-6


class Host(Place):
    """A host on the network."""

    def __init__(self, number: int, *, clock_ahead_s: float = 0.0) -> None:
        super().__init__(clock_ahead_s)
        self.number = number
        self.name = f"node{number}"
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.is_off = False  # the host itself is gone, so that nothing answers
        self.sent = self.received = self.sent_bytes = self.received_bytes = 0
        self.connections = 0
        self.most_connections = 0


class Network:
    """What lies between the hosts.

    Args:
        simulation: the clock.
        latency_s: from one host to another.
        bandwidth_bytes_s: of each host.
        loss: the part of messages that have to be sent again.
        store_s: how long a store works on one operation.
    """

    def __init__(
        self,
        simulation: Simulation,
        *,
        latency_s: float = 50e-6,
        bandwidth_bytes_s: float = 1.25e9,
        loss: float = 0.0,
        store_s: float = 20e-6,
    ) -> None:
        self.simulation = simulation
        self.latency_s = latency_s
        self.bandwidth_bytes_s = bandwidth_bytes_s
        self.loss = loss
        self.store_s = store_s
        self.operations = 0  # of all stores
        self.hosts: dict[str, Host] = {}  # by name and by address
        self.listening: dict[tuple[int, int], Listener] = {}
        self._parts: dict[int, int] = {}  # by host: which part of the network it is in
        self._held: list[tuple[Host, Host, Callable[[], object]]] = []

    def add(self, host: Host) -> None:
        """Another host."""
        self.hosts[host.name] = self.hosts[host.address] = host

    def divide(self, part: set[int]) -> None:
        """Cut all routes between these hosts and the others."""
        self._parts = dict.fromkeys(part, 1)

    def heal(self) -> None:
        """All routes work; what was on its way arrives."""
        self._parts = {}
        held, self._held = self._held, []
        for source, target, call in held:
            self.deliver(source, target, 0, call)

    def connects(self, source: Host, target: Host) -> bool:
        """Whether there is a route."""
        return self._parts.get(source.number, 0) == self._parts.get(target.number, 0)

    def deliver(
        self, source: Host, target: Host, size_bytes: int, call: Callable[[], object], *, after: float = 0.0
    ) -> float:
        """Have something happen on another host when a message has arrived there.

        ``after``: when the message before it on the same connection arrives. Returns when this one does.
        """
        simulation = self.simulation
        if source is target:
            arrives_at = max(simulation.now + _LOOPBACK_S, after)
            simulation.at(arrives_at, call, target)
            return arrives_at
        source.sent += 1
        target.received += 1
        source.sent_bytes += size_bytes + _HEADER_BYTES
        target.received_bytes += size_bytes + _HEADER_BYTES
        if target.is_off:
            return after
        if not self.connects(source, target):
            self._held.append((source, target, call))
            return after
        delay_s = self.latency_s * (1 + simulation.random.random() / 4) + size_bytes / self.bandwidth_bytes_s
        while self.loss and simulation.random.random() < self.loss:
            delay_s += _RETRANSMISSION_S
        arrives_at = max(simulation.now + delay_s, after)
        simulation.at(arrives_at, call, target)
        return arrives_at

    # ------------------------------------------------------------------------------------------------ plain connections

    def dial(
        self,
        here: Host,
        name: str,
        port: int,
        timeout_s: float = 5.0,
        on_resolved: Callable[[], None] = lambda: None,
    ) -> tuple[Any, str, str]:
        """As ``saferun.coordinator.dial.dial``."""
        on_resolved()
        where = f"{name}:{port}"
        target = self.hosts.get(name)
        if target is None:
            return None, "unknown name", f"the name {name} cannot be resolved on this host"
        if target.is_off or not self.connects(here, target):
            self.simulation.park(timeout_s)
            return None, "silent", f"{where} does not answer"
        self.simulation.park(2 * self.latency_s if here is not target else 2 * _LOOPBACK_S)
        listener = self.listening.get((target.number, port))
        if listener is None:
            return None, "refused", f"{where} refuses connections"
        return _Connection(self, listener), "connected", f"{where} accepts connections"


class Listener:
    """A port on which a process of a host listens."""

    answers_probes = False

    def __init__(self, host: Host) -> None:
        self.host = host


class ProbePort(Listener):
    """Where a coordinator answers liveness probes."""

    answers_probes = True


class _Connection:
    """A connected socket."""

    def __init__(self, network: Network, listener: Listener) -> None:
        self._network = network
        self._listener = listener
        self._timeout_s = 0.0

    def settimeout(self, seconds: float) -> None:
        self._timeout_s = seconds

    def recv(self, _size: int) -> bytes:
        simulation, listener = self._network.simulation, self._listener
        if not listener.answers_probes or listener.host.frozen_until > simulation.now:
            simulation.park(self._timeout_s)
            raise TimeoutError
        simulation.park(self._network.latency_s)
        return ANSWER

    def close(self) -> None:
        """Nothing is left of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --------------------------------------------------------------------------------------------------------------- stores


class StoreServer(Listener):
    """A store's server: one operation after the other, in the order in which they arrive."""

    def __init__(self, network: Network, host: Host, port: int) -> None:
        super().__init__(host)
        self.network = network
        self.port = port
        self.keys: dict[str, bytes] = {}
        self.is_closed = False
        self._waiting: dict[str, list[_Wait]] = {}
        self._free_at = 0.0
        self.clients: WeakSet[VirtualStore] = WeakSet()
        network.listening[host.number, port] = self

    def close(self) -> None:
        """End it: all connections break."""
        if not self.is_closed:
            self.is_closed = True
            if self.network.listening.get((self.host.number, self.port)) is self:
                del self.network.listening[self.host.number, self.port]
            for client in list(self.clients):
                self.network.deliver(self.host, client.here, 0, client.break_off)
            self.clients.clear()

    def take(self, operation: Callable[[], object], answer: Callable[[object], object] | None) -> None:
        """An operation has arrived. ``answer`` gets its result, when the server has come to it."""
        if self.is_closed:
            return
        simulation = self.network.simulation
        began = time.thread_time()
        self.network.operations += 1
        self._free_at = max(self._free_at, simulation.now) + self.network.store_s
        result = operation()
        if answer is not None:
            simulation.at(self._free_at, partial(answer, result), self.host)
        self.host.processor_s -= time.thread_time() - began  # torch's own is another one

    def write(self, key: str, value: bytes) -> None:
        """Set a key, which some may wait for."""
        self.keys[key] = value
        for wait in self._waiting.pop(key, ()):
            self.wait(wait)

    def wait(self, wait: _Wait) -> None:
        """Answer when all keys are there."""
        missing = next((key for key in wait.keys if key not in self.keys), None)
        if missing is not None:
            self._waiting.setdefault(missing, []).append(wait)
        elif not wait.is_over:
            wait.answer()


class _Wait:
    def __init__(self, keys: list[str], answer: Callable[[], object]) -> None:
        self.keys = keys
        self.answer = answer
        self.is_over = False


class VirtualStore:
    """torch's TCPStore, as ``StoreClient`` uses it: made for each host (``store_class``)."""

    network: ClassVar[Network]
    here: ClassVar[Host]

    def __init__(self, name: str, port: int, *_: Any, **__: Any) -> None:
        target = self.network.hosts[name]
        server = self.network.listening.get((target.number, port))
        if not isinstance(server, StoreServer) or not self.network.connects(self.here, target):
            raise RuntimeError("Connection refused")
        self._begin(server)
        self._call(16, lambda: b"", 16)  # whoever accepts the connection has to show that it is a store

    def _begin(self, server: StoreServer) -> None:
        self._server = server
        self._is_broken = False
        self._arrives_at = 0.0  # what was sent last: one connection keeps the order
        self._open_calls: set[tuple[Any, int]] = set()
        self._last_at = 0.0
        server.clients.add(self)
        server.host.connections += 1
        server.host.most_connections = max(server.host.most_connections, server.host.connections)

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.host.connections -= 1

    @classmethod
    def of(cls, server: StoreServer) -> VirtualStore:
        """The server's own object."""
        store = cls.__new__(cls)
        store._begin(server)
        return store

    def break_off(self) -> None:
        """The connection has been closed by the other end."""
        self._is_broken = True
        for ticket in self._open_calls:
            self.network.simulation.wake(*ticket, _BROKEN)
        self._open_calls.clear()

    def _send(
        self, size_bytes: int, operation: Callable[[], object], answer: Callable[[object], object] | None
    ) -> None:
        if self._is_broken or self._server.is_closed:
            self._is_broken = True
            raise RuntimeError("Connection reset by peer")
        take = partial(self._server.take, operation, answer)
        self._arrives_at = self.network.deliver(self.here, self._server.host, size_bytes, take, after=self._arrives_at)

    def _call(self, size_bytes: int, operation: Callable[[], object], back_bytes: int | None = None) -> Any:
        simulation = self.network.simulation
        ticket = simulation.ticket()

        def on_done(result: object) -> None:
            size = back_bytes if back_bytes is not None else 8
            if isinstance(result, bytes):
                size += len(result)
            elif isinstance(result, list):
                size += sum(8 + len(item) for item in result)
            self.network.deliver(self._server.host, self.here, size, partial(simulation.wake, *ticket, _Answer(result)))

        self._send(size_bytes, operation, on_done)
        self._open_calls.add(ticket)
        try:
            found = simulation.park(None)
        finally:
            self._open_calls.discard(ticket)
        return self._result(found)

    def _result(self, found: object) -> Any:
        if found is _BROKEN:
            raise RuntimeError("Connection reset by peer")
        assert isinstance(found, _Answer)
        if isinstance(found.value, Exception):
            raise found.value
        return found.value

    def set(self, key: str, value: str | bytes) -> None:
        stored = _bytes(value)
        self._send(len(key) + len(stored) + 17, partial(self._server.write, key, stored), None)

    def add(self, key: str, amount: int) -> int:
        def do() -> int:
            total = int(self._server.keys.get(key, b"0")) + amount
            self._server.write(key, str(total).encode())
            return total

        return int(self._call(len(key) + 25, do))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        wanted, stored = _bytes(expected), _bytes(value)

        def do() -> bytes:
            found = self._server.keys.get(key)
            if found is None and wanted:
                return wanted
            if found is None or found == wanted:
                self._server.write(key, stored)
            return self._server.keys[key]

        found: bytes = self._call(len(key) + len(wanted) + len(stored) + 25, do)
        return found

    def check(self, keys: list[str]) -> bool:
        return bool(self._call(sum(map(len, keys)) + 9, lambda: all(key in self._server.keys for key in keys)))

    def delete_key(self, key: str) -> bool:
        return bool(self._call(len(key) + 9, lambda: self._server.keys.pop(key, None) is not None))

    def get(self, key: str) -> bytes:
        self.wait([key], timedelta(seconds=300))
        found: bytes = self._call(len(key) + 9, lambda: self._server.keys.get(key, b""))
        return found

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys, timedelta(seconds=300))
        size_bytes = sum(map(len, keys)) + 8 * len(keys)
        found: list[bytes] = self._call(size_bytes, lambda: [self._server.keys.get(key, b"") for key in keys])
        return found

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        simulation = self.network.simulation
        ticket = simulation.ticket()
        server = self._server

        def on_there() -> None:
            self.network.deliver(server.host, self.here, 1, partial(simulation.wake, *ticket, _Answer(None)))

        wait = _Wait(keys, on_there)
        self._send(sum(map(len, keys)) + 8 * len(keys) + 9, partial(server.wait, wait), None)
        self._open_calls.add(ticket)
        try:
            found = simulation.park(timeout.total_seconds())
        finally:
            self._open_calls.discard(ticket)
            wait.is_over = True
        if found is None:
            raise RuntimeError("wait timeout")
        self._result(found)


class _Answer:
    def __init__(self, value: object) -> None:
        self.value = value


_BROKEN = object()


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text


class ServedStores:
    """As ``saferun.coordinator.served_stores.ServedStores``, on virtual ports."""

    def __init__(self, network: Network, host: Host, ranks_port: int, control_port: int) -> None:
        self.store_class: Any = type("HostsStore", (VirtualStore,), {"network": network, "here": host})
        self.ranks_port = ranks_port
        self.control_port = control_port
        self._network = network
        self._host = host
        self._servers: dict[str, StoreServer] = {}
        self._clients: dict[str, Any] = {}
        self.answer_probes(True)

    def answer_probes(self, answers: bool) -> None:
        where = self._host.number, self.control_port
        if answers:
            self._network.listening[where] = ProbePort(self._host)
        else:
            self._network.listening.pop(where, None)

    def _serve(self, name: str, port: int) -> Any:
        from saferun.coordinator.store_client import StoreClient

        self._drop(name)
        server = self._servers[name] = StoreServer(self._network, self._host, port)
        self._clients[name] = StoreClient(self.store_class.of(server), (self._host.address, port))
        return self._clients[name]

    def _drop(self, name: str) -> None:
        server = self._servers.pop(name, None)
        if server is not None:
            server.close()
        self._clients.pop(name, None)

    @property
    def ranks(self) -> Any:
        return self._clients.get("ranks")

    def serve_ranks(self) -> Any:
        return self._serve("ranks", self.ranks_port)

    def drop_ranks(self) -> None:
        self._drop("ranks")

    def serve_control(self) -> Any:
        self.answer_probes(False)
        return self._serve("control", self.control_port)

    def drop_control(self) -> None:
        self._drop("control")
        self.answer_probes(True)

    def close(self) -> None:
        """The process has ended."""
        for name in list(self._servers):
            self._drop(name)
        with suppress(KeyError):
            del self._network.listening[self._host.number, self.control_port]
