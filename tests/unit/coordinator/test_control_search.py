"""The search for the control store at several addresses: which of them counts. No connection is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from saferun.coordinator import dial, store_search
from saferun.coordinator.control_search import ControlSearch
from saferun.coordinator.leader_address import LeaderAddress
from saferun.coordinator.store_client import StoreClient

LEADER = LeaderAddress("job", 4711, 29500, "node0", ("10.0.0.1",), "run", 2, one_port=False, moves=0)
# Only what fails lasts so long.
DEADLINE_S = 60.0


class Client:
    """Stands in for a connection to the control store."""

    def __init__(self, address: str) -> None:
        self.address = (address, 4711)

    def get(self, *_: object, **__: object) -> bytes:
        return b"job"


class Connection:
    """Stands in for a connection that shows that something listens."""

    def close(self) -> None:
        """Nothing is open."""


class Network:
    """What is behind each address: it answers when its event is set; ``refuses``: it fails at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, threading.Event] = {}
        self.refuses: set[str] = set()
        self.threads = 0
        self.most_threads = 99
        monkeypatch.setattr(store_search, "dial", self._dial)
        monkeypatch.setattr(StoreClient, "connect", lambda _kind, way, **_: Client(way[0]))
        monkeypatch.setattr(threading.Thread, "start", self._limited(threading.Thread.start))

    def _limited(self, start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
        def begin(thread: threading.Thread) -> None:
            if self.threads >= self.most_threads:
                raise RuntimeError("can't start new thread")
            self.threads += 1
            start(thread)

        return begin

    def _dial(self, host: str, _port: int, *, on_resolved: Callable[[], None], **_: str) -> tuple[Any, str, str]:
        on_resolved()
        if host in self.refuses:
            return None, dial.REFUSED, f"{host} refuses connections"
        self.answers.setdefault(host, threading.Event()).wait(DEADLINE_S)
        return Connection(), dial.CONNECTED, ""

    def answer(self, host: str) -> None:
        self.answers.setdefault(host, threading.Event()).set()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    found = Network(monkeypatch)
    yield found
    for event in found.answers.values():
        event.set()


def search_at(*addresses: str, patience_s: float) -> ControlSearch:
    return ControlSearch(object, LEADER, addresses, None, patience_s=patience_s)


def test_another_address_does_not_count_while_the_first_may_still_answer(network: Network) -> None:
    """A lost packet costs a second, and the ranks use the address at which the store is found."""
    search = search_at("node0", "10.0.0.1", patience_s=DEADLINE_S)
    network.answer("10.0.0.1")
    assert search._searches[1].wait(DEADLINE_S) is not None
    assert search.wait(0.01) is None
    network.answer("node0")
    client = search.wait(DEADLINE_S)
    assert client is not None
    assert client.address[0] == "node0"
    search.end()


def test_another_address_counts_once_the_first_has_failed(network: Network) -> None:
    """However long it would have been waited for."""
    network.refuses.add("node0")
    search = search_at("node0", "10.0.0.1", patience_s=10 * DEADLINE_S)
    network.answer("10.0.0.1")
    client = search.wait(DEADLINE_S)
    assert client is not None
    assert client.address[0] == "10.0.0.1"
    search.end()


def test_another_address_counts_once_the_first_has_had_its_time(network: Network) -> None:
    """Packets to it may vanish."""
    search = search_at("node0", "10.0.0.1", patience_s=0.01)
    network.answer("10.0.0.1")
    client = search.wait(DEADLINE_S)
    assert client is not None
    assert client.address[0] == "10.0.0.1"
    search.end()


def test_without_threads_for_all_addresses_the_others_are_searched(network: Network) -> None:
    """A limit on processes ends no job that could meet."""
    network.most_threads = 1
    search = search_at("node0", "10.0.0.1", "10.0.0.2", patience_s=DEADLINE_S)
    network.answer("node0")
    client = search.wait(DEADLINE_S)
    assert client is not None
    assert client.address[0] == "node0"
    search.end()
    with pytest.raises(RuntimeError, match="thread"):
        search_at("node0", patience_s=DEADLINE_S)
