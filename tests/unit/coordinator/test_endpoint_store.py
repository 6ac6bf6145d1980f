"""Which store the hosts of torch's c10d rendezvous meet in, where several of them serve one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import endpoint_store
from saferun.coordinator.arrivals import Arrivals
from saferun.coordinator.endpoint_store import find_endpoint_store, is_same_store
from saferun.coordinator.rendezvous_round import JoinFailedError
from tests.unit.coordinator.memory_store import MemoryStore

ELSEWHERE = "192.0.2.7"
OWN = ("192.0.2.1", "2001:db8::1")


class Search:
    """A search that finds a store after so many looks."""

    found: Any = None
    looks = 0

    def __init__(self, _class: object, host: str, ports: list[int], _accept: object, *, here: str) -> None:
        assert (host, ports, here) == (ELSEWHERE, [29400], "node1")
        self.is_in_vain, self.is_over = False, False

    def wait(self, _timeout_s: float) -> Any:
        Search.looks += 1
        return Search.found if Search.looks > 3 else None

    def message(self) -> str:
        return "nothing answers at 192.0.2.7"

    def hint(self, _source: str) -> str:
        return "look there"

    def end(self) -> None:
        self.is_over = True


@pytest.fixture(autouse=True)
def _search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_store, "StoreSearch", Search)
    monkeypatch.setattr(Search, "found", None)
    monkeypatch.setattr(Search, "looks", 0)


def rendezvous(
    clock: list[float], host: str, conf: dict[str, str], *, least: int = 1, connect_s: float = 0.0, step_s: float = 0.0
) -> Any:
    """A rendezvous at the endpoint, whose first host joined 100 s ago; each look takes so long."""

    class Round:
        request = SimpleNamespace(conf=conf, connect_s=connect_s)
        endpoint_address = (host, 29400)
        name, run_id = "node1", "job"
        timeout_s = 900.0
        began_at = -100.0

        @property
        def connect_remaining_s(self) -> float:
            return self.began_at + (connect_s or self.timeout_s) - clock[0]

        def check(self) -> None:
            clock[0] += step_s

        def allow(self, _seconds: float) -> None: ...

        def set_status(self, _text: str, **_more: object) -> None: ...

    found: Any = Round()
    found.least = least
    return found


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(endpoint_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.fixture(name="own")
def _own(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection to the store that this host serves."""
    own = MemoryStore().client()
    monkeypatch.setattr(type(own), "another", lambda client: client)
    return own


def test_a_host_that_serves_a_store_meets_the_others_where_the_endpoint_leads(clock: list[float], own: Any) -> None:
    """All hosts were told to serve one, as by one command for all: under torchrun they meet."""
    Search.found = MemoryStore().client()
    assert find_endpoint_store(rendezvous(clock, ELSEWHERE, {"is_host": "1"}), object, own, OWN) is Search.found


@pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1", "2001:db8::1"])
def test_the_store_of_the_host_whose_address_the_endpoint_is_is_the_right_one(
    clock: list[float], own: Any, host: str
) -> None:
    """Nothing is searched for."""
    assert find_endpoint_store(rendezvous(clock, host, {"is_host": "1"}), object, own, OWN) is own
    assert Search.looks == 0


def test_a_host_that_found_out_by_itself_that_it_is_the_endpoint_has_the_right_store(
    clock: list[float], own: Any
) -> None:
    """By an interface that is not among those which others can reach, say."""
    assert find_endpoint_store(rendezvous(clock, ELSEWHERE, {}), object, own, OWN) is own
    assert Search.looks == 0


@pytest.mark.parametrize("least", [1, 2])
def test_the_store_to_which_another_host_has_come_is_the_right_one(clock: list[float], own: Any, least: int) -> None:
    """The endpoint is a service in front of this host, which does not reach itself by it."""
    Arrivals(own, "job", "node2").arrive()
    assert find_endpoint_store(rendezvous(clock, ELSEWHERE, {"is_host": "true"}, least=least), object, own, OWN) is own
    assert Search.looks == 1


@pytest.mark.parametrize(("connect_s", "given_up_s"), [(0.0, 60.0), (300.0, 200.0), (110.0, 20.0)])
def test_a_host_that_is_enough_goes_on_alone_once_torch_would_have_given_the_endpoint_up(
    clock: list[float], own: Any, connect_s: float, given_up_s: float
) -> None:
    """Under torchrun it fails; the search began long after the first task of the host had come."""
    rdzv = rendezvous(clock, ELSEWHERE, {"is_host": "1"}, connect_s=connect_s, step_s=20.0)
    assert find_endpoint_store(rdzv, object, own, OWN) is own
    assert clock == [given_up_s]


@pytest.mark.parametrize(("connect_s", "late_s"), [(0.0, 800.0), (300.0, 200.0)])
def test_a_host_that_needs_others_waits_for_the_endpoint_as_long_as_one_that_serves_nothing(
    clock: list[float], own: Any, connect_s: float, late_s: float
) -> None:
    """The host of the endpoint may come late."""
    for served in (own, None):
        clock[0] = 0.0
        rdzv = rendezvous(clock, ELSEWHERE, {"is_host": "1"}, least=2, connect_s=connect_s, step_s=20.0)
        with pytest.raises(JoinFailedError, match=rf"nothing answers at 192\.0\.2\.7, for {connect_s or 900:.0f} s"):
            find_endpoint_store(rdzv, object, served, OWN)
        assert clock == [late_s]


def test_whether_the_hosts_meet_in_the_store_that_this_host_serves(own: Any) -> None:
    """A host that does is not left out, whatever happens there; by way of a service it is another connection."""
    assert is_same_store(own, own, "job")
    assert not is_same_store(own, None, "job")
    server = MemoryStore()
    assert is_same_store(server.client(), server.client(), "job")
    elsewhere = MemoryStore()
    assert is_same_store(elsewhere.client(), elsewhere.client(), "job")
    assert not is_same_store(elsewhere.client(), server.client(), "job")
