"""Connections between rendezvous: nothing is sent on them for hours, and a firewall may forget them without a word."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.cluster.join_messages import EndNote
from saferun.coordinator import arrivals, handler_rendezvous, static_rendezvous
from saferun.coordinator.arrivals import Arrivals
from saferun.coordinator.control_search import JOB_KEY
from saferun.coordinator.handler_rendezvous import HandlerRendezvous
from saferun.coordinator.static_rendezvous import StaticRendezvous
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from tests.unit.coordinator.fake_store import DEADLINE_S, Client, Store
from tests.unit.coordinator.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize("found", ["this job's", "another job's", "no job's", "broken", "refused"])
def test_a_connection_that_was_idle_is_kept_only_where_no_other_can_be_made_to_the_store_of_this_job(
    monkeypatch: pytest.MonkeyPatch, found: str
) -> None:
    """A leader that takes no more connections may still answer on those that there are.

    One that was started again serves its store at the same port. That it has no round that this host could wait for
    shows only by the old connection, which is closed.
    """
    stores: Any = None
    rendezvous = StaticRendezvous(stores)
    stored = {"this job's": rendezvous._finder.job, "another job's": "0123456789abcdef"}
    store = MemoryStore()
    if found in stored:
        store.write(JOB_KEY, stored[found])
    made = StoreClient(None if found == "broken" else store, ("node1", 29501))

    def another(_: StoreClient) -> StoreClient:
        if found == "refused":
            raise StoreBrokenError("node1:29501 does not answer")
        return made

    monkeypatch.setattr(static_rendezvous, "NO_CONTROL_S", 0.05)
    monkeypatch.setattr(StoreClient, "another", another)
    idle = StoreClient(object(), ("node1", 29501))
    renewed = rendezvous._renewed(idle)
    is_made = found == "this job's"
    assert renewed is (made if is_made else idle)
    assert (idle.store is None) is is_made
    assert is_made or found == "refused" or made.store is None, "the store keeps a connection that nobody uses"


class Way:
    """A firewall before a store, which forgets connections: on those, no answer comes."""

    def __init__(self) -> None:
        self.store = Store()
        self.made: list[Connection] = []
        self.lets_in = True  # connections that are made from now on
        self.is_over = threading.Event()

    def connect(self) -> Connection:
        self.made.append(Connection(self))
        return self.made[-1]

    def forget(self) -> None:
        """All connections that there are."""
        for connection in self.made:
            connection.is_forgotten = True


class Connection(Client):
    """One connection."""

    def __init__(self, way: Way) -> None:
        super().__init__(way.store)
        self.is_forgotten = not way.lets_in
        self._way = way

    def another(self) -> Connection:
        return self._way.connect()

    def __getattribute__(self, name: str) -> Any:
        if name in {"add", "set", "delete", "check", "find"} and self.is_forgotten:
            self._way.is_over.wait(DEADLINE_S)
        return super().__getattribute__(name)


@pytest.fixture(name="way")
def _way() -> Iterator[Way]:
    way = Way()
    yield way
    way.is_over.set()


def within(seconds: float, do: Callable[[], Any]) -> Any:
    """What a call returns, which may take so long."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(do()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it waits for an answer"
    return found[0]


def test_the_names_of_those_who_wait_are_read_by_a_connection_that_was_not_idle(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """They are asked for as the hosts meet again, hours after the last time."""
    now = [1000.0]
    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    first, second = (Arrivals(way.connect(), "job", name) for name in ("node1", "node2"))  # type: ignore[arg-type]
    for _ in range(3):
        for one in (first, second):
            within(2.0, one.arrive)
        assert within(2.0, first.names) == ["node1", "node2"]
        for one in (first, second):
            within(2.0, one.depart)
        assert within(2.0, second.names) == []
        way.forget()
        now[0] += 3600.0
    note = EndNote("saferunctl kill by ada", at_once=False)
    within(2.0, lambda: first.note_end(note))
    assert within(2.0, second.find_end) == note


def test_a_connection_is_used_again_while_it_is_in_use(way: Way) -> None:
    """Every connection is one more for the store."""
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    one.arrive()
    for _ in range(10):
        assert one.names() == ["node1"]
    one.depart()
    assert len(way.made) == 2


def test_hosts_meet_without_names_where_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Torch's own connection may be there when no other one is let in; names are for messages."""
    for limit in ("_WRITE_S", "_READ_S"):
        monkeypatch.setattr(arrivals, limit, 0.05, raising=False)
    monkeypatch.setattr(handler_rendezvous, "_RECHECK_S", 0.01)
    stores: Any = SimpleNamespace(store_class=object)
    rendezvous = HandlerRendezvous(stores, -1)
    way.lets_in = False
    rendezvous._arrivals = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    goes_on = threading.Event()
    waited_for: list[str] = []

    def next_rendezvous() -> tuple[object, int, int]:
        assert goes_on.wait(DEADLINE_S)
        return object(), 0, 2

    def wait_for(whom: str) -> None:
        waited_for.append(whom)
        goes_on.set()

    rendezvous._handler = SimpleNamespace(next_rendezvous=next_rendezvous)
    monkeypatch.setattr(rendezvous, "_lead", lambda *_, **__: "met")
    request = SimpleNamespace(backend="mine", conf={}, expected=[], report_every_s=15.0)
    rdzv: Any = SimpleNamespace(
        request=request,
        least=2,
        most=2,
        timeout_s=900.0,
        remaining_s=900.0,
        is_over=False,
        check=lambda: None,
        wait_for=wait_for,
        on_all_here=lambda: None,
        allow=lambda _: None,
    )
    own: Any = None
    for _ in range(10):
        assert within(5.0, lambda: rendezvous._meet(rdzv, own, goes_on=False)) == "met"
    assert waited_for[0] == "2 of 2 hosts"
    within(5.0, rendezvous.leave)
    assert len(way.made) < 10, "each has a thread that waits"
