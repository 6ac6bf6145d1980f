"""Connections between rendezvous: nothing is sent on them for hours, and a firewall may forget them without a word."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.cluster.join_messages import EndNote
from saferun.coordinator import arrivals, control_search, handler_rendezvous
from saferun.coordinator.arrivals import Arrivals, Waiting
from saferun.coordinator.control_search import JOB_KEY
from saferun.coordinator.handler_rendezvous import HandlerRendezvous
from saferun.coordinator.rendezvous_round import JoinFailedError
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

    monkeypatch.setattr(control_search, "_JOB_TIMEOUT_S", 0.05)
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
        self.requests = 0
        self.on_request: Callable[[str], None] = lambda _: None

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
        if name in {"add", "set", "delete", "check", "find"}:
            self._way.requests += 1
            self._way.on_request(name)
            if self.is_forgotten:
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
        assert within(2.0, first.names) == Waiting(["node1", "node2"], is_all=True)
        for one in (first, second):
            within(2.0, one.depart)
        assert within(2.0, second.names) == Waiting([], is_all=True)
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
        assert one.names() == Waiting(["node1"], is_all=True)
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
    assert waited_for[0] == "other hosts"
    within(5.0, rendezvous.leave)
    assert len(way.made) < 10, "each has a thread that waits"


@pytest.mark.parametrize("names", ["", "node1 node3000"])
def test_a_slow_store_is_asked_nothing_more_when_its_answer_is_not_waited_for_any_more(
    monkeypatch: pytest.MonkeyPatch, way: Way, names: str
) -> None:
    """Requests that go on would be in the way of others, and of the job that the store is there for."""
    now = [1000.0]

    def take_a_while(_: str) -> None:
        now[0] += 0.01

    monkeypatch.setattr(arrivals, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    way.store.put("saferun/job/hosts", "4000")
    for number, name in ((5, "node1"), (3000, "node3000")):
        if name in names.split():
            way.store.put(f"saferun/job/here/{number}", name)
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    way.on_request = take_a_while
    assert one.names() == Waiting(["node1"] if names else [], is_all=False)
    assert way.requests <= 500
    way.requests = 0
    one.await_departures(1.0)
    assert way.requests <= 200
    assert not one._unanswered
    assert len(way.made) == 2


def test_more_hosts_than_are_read_are_not_all_hosts(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """The others may be there."""
    monkeypatch.setattr(arrivals, "_MOST_HOSTS", 2)
    hosts = [Arrivals(way.connect(), "job", f"node{number}") for number in range(3)]  # type: ignore[arg-type]
    for host in hosts:
        host.arrive()
    assert hosts[0].names() == Waiting(["node0", "node1"], is_all=False)


def test_what_others_need_to_know_is_sent_though_many_requests_were_not_answered(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """A host that has gone on would stay among those who wait, and nobody would learn who has ended the job."""
    for limit in ("_WRITE_S", "_READ_S"):
        monkeypatch.setattr(arrivals, limit, 0.05)
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    one.arrive()
    way.forget()
    way.lets_in = False
    for _ in range(10):
        assert within(5.0, one.names) == Waiting([], is_all=False)
    for limit in ("_WRITE_S", "_READ_S"):
        monkeypatch.setattr(arrivals, limit, 5.0)
    way.lets_in = True
    note = EndNote("saferunctl kill by ada", at_once=False)
    within(5.0, one.depart)
    assert "saferun/job/here/0" not in way.store.keys
    within(5.0, lambda: one.note_end(note))
    assert within(5.0, one.find_end) == note


def test_a_store_that_never_answers_costs_few_threads(monkeypatch: pytest.MonkeyPatch, way: Way) -> None:
    """Whatever it is asked for."""
    for limit in ("_WRITE_S", "_READ_S"):
        monkeypatch.setattr(arrivals, limit, 0.01)
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    one.arrive()
    way.forget()
    way.lets_in = False
    note = EndNote("saferunctl kill by ada", at_once=False)
    for _ in range(10):
        for do in (one.arrive, one.names, one.depart, lambda: one.note_end(note), one.find_end):
            within(5.0, do)
    assert len(one._unanswered) <= 7


class Pause:
    """Requests of a kind stand still from now on, until they go on; those that come later do not."""

    def __init__(self, way: Way, name: str) -> None:
        self.threads: list[threading.Thread] = []
        self._way, self._name, self._goes_on = way, name, threading.Event()
        way.on_request = self._stop

    def _stop(self, name: str) -> None:
        if name == self._name:
            self.threads.append(threading.current_thread())
            self._goes_on.wait(DEADLINE_S)

    def pass_by(self) -> None:
        """Requests that are made from now on are answered."""
        self._way.on_request = lambda _: None

    def end(self) -> None:
        """Those that stand still go on, and come to their end."""
        self.pass_by()
        self._goes_on.set()
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


@pytest.mark.parametrize("name", ["add", "set"])
@pytest.mark.parametrize("is_here_again", [False, True])
def test_a_host_whose_arrival_is_answered_late_leaves_no_name_behind(
    monkeypatch: pytest.MonkeyPatch, way: Way, name: str, *, is_here_again: bool
) -> None:
    """It would be shown as one that waits for as long as the job lasts."""
    monkeypatch.setattr(arrivals, "_WRITE_S", 0.05)
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    pause = Pause(way, name)
    within(5.0, one.arrive)
    pause.pass_by()
    monkeypatch.setattr(arrivals, "_WRITE_S", 5.0)
    within(5.0, one.depart)
    if is_here_again:
        within(5.0, one.arrive)
    pause.end()
    assert within(5.0, one.names) == Waiting(["node1"] if is_here_again else [], is_all=True)
    within(5.0, one.depart)
    assert not [key for key in way.store.keys if key.startswith("saferun/job/here/")]


def test_a_host_whose_departure_is_answered_late_is_there_when_it_has_come_again(
    monkeypatch: pytest.MonkeyPatch, way: Way
) -> None:
    """Else it would be said to be missing."""
    one = Arrivals(way.connect(), "job", "node1")  # type: ignore[arg-type]
    within(5.0, one.arrive)
    monkeypatch.setattr(arrivals, "_WRITE_S", 0.05)
    pause = Pause(way, "delete")
    within(5.0, one.depart)
    pause.pass_by()
    monkeypatch.setattr(arrivals, "_WRITE_S", 5.0)
    within(5.0, one.arrive)
    pause.end()
    assert within(5.0, one.names) == Waiting(["node1"], is_all=True)


class RendezvousClosedError(Exception):
    """As torch's."""


def failure_of_rendezvous(
    monkeypatch: pytest.MonkeyPatch, error: Exception, names: Callable[[], Waiting], report_every_s: float
) -> tuple[str, list[str]]:
    """Why a host did not come into a job of four, and what was shown before: two texts if reports are frequent."""
    monkeypatch.setattr(handler_rendezvous, "_RECHECK_S", 0.01)
    stores: Any = SimpleNamespace(store_class=object)
    rendezvous = HandlerRendezvous(stores, -1)
    goes_on = threading.Event()
    shown: list[str] = []

    def next_rendezvous() -> None:
        assert goes_on.wait(DEADLINE_S)
        raise error

    def wait_for(whom: str) -> None:
        shown.append(whom)
        if report_every_s > 1.0 or whom != shown[0]:
            goes_on.set()

    answers: Any = SimpleNamespace(names=names, find_end=lambda: None)
    rendezvous._arrivals = answers
    rendezvous._handler = SimpleNamespace(next_rendezvous=next_rendezvous)
    request = SimpleNamespace(
        backend="c10d", endpoint="", conf={}, expected=[], report_every_s=report_every_s, attempt=0
    )
    rdzv: Any = SimpleNamespace(
        request=request,
        run_id="job",
        name="node1",
        least=4,
        most=4,
        timeout_s=900.0,
        remaining_s=900.0,
        is_over=False,
        check=lambda: None,
        wait_for=wait_for,
    )
    with pytest.raises(JoinFailedError) as raised:
        rendezvous._next_rendezvous(rdzv)
    return raised.value.what, shown


@pytest.mark.parametrize("found", [Waiting(["node1", "node3"], is_all=False), Waiting(["node1", "node3"], is_all=True)])
def test_a_closed_rendezvous_has_been_given_up_only_where_all_who_wait_are_known(
    monkeypatch: pytest.MonkeyPatch, found: Waiting
) -> None:
    """Of a job of thousands of hosts that has ended, a slow store may have named a few."""
    what, shown = failure_of_rendezvous(monkeypatch, RendezvousClosedError(), lambda: found, 15.0)
    if found.is_all:
        assert shown[0] == "2 of 4 hosts; here are node1, node3"
        assert what.endswith("within 900 s; missing: 2 of 4 hosts; here are node1, node3")
    else:
        assert shown[0] == "other hosts; at least 2 of 4 have come (node1, node3)"
        assert "is closed" in what


class RendezvousTimeoutError(Exception):
    """As torch's."""


def test_hosts_that_have_come_since_the_store_answered_last_are_not_said_to_be_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only one had come when the names were read; later the store did not answer any more."""
    readings = iter([Waiting(["node1"], is_all=True)])
    nothing = Waiting([], is_all=False)
    what, shown = failure_of_rendezvous(monkeypatch, RendezvousTimeoutError(), lambda: next(readings, nothing), 0.02)
    assert shown[0] == "3 of 4 hosts; here is node1"
    assert shown[-1] == "other hosts; at least 1 of 4 has come (node1)"
    assert what.endswith("; missing: other hosts; at least 1 of 4 has come (node1)")
