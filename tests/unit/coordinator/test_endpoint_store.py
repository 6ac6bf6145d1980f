"""Which store the hosts of torch's c10d rendezvous meet in, where several of them serve one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import endpoint_store
from saferun.coordinator.arrivals import Arrivals
from saferun.coordinator.endpoint_store import find_endpoint_store
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


def rendezvous(host: str, conf: dict[str, str], began_at: float = 0.0) -> Any:
    """A rendezvous at the endpoint; began_at by a clock of the test."""
    return SimpleNamespace(
        request=SimpleNamespace(conf=conf, connect_s=0.0),
        endpoint_address=(host, 29400),
        name="node1",
        run_id="job",
        timeout_s=900.0,
        connect_remaining_s=900.0,
        began_at=began_at,
        check=lambda: None,
        allow=lambda _seconds: None,
        set_status=lambda _text, **_more: None,
    )


@pytest.fixture(name="clock")
def _clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(endpoint_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_host_that_serves_a_store_meets_the_others_where_the_endpoint_leads(clock: list[float]) -> None:
    """All hosts were told to serve one, as by one command for all: under torchrun they meet."""
    Search.found = MemoryStore().client()
    met = find_endpoint_store(rendezvous(ELSEWHERE, {"is_host": "1"}), object, MemoryStore().client(), OWN)
    assert met is Search.found
    assert clock == [0.0]


@pytest.mark.parametrize("host", ["192.0.2.1", "127.0.0.1", "2001:db8::1"])
def test_the_store_of_the_host_whose_address_the_endpoint_is_is_the_right_one(host: str) -> None:
    """Nothing is searched for."""
    own = MemoryStore().client()
    assert find_endpoint_store(rendezvous(host, {"is_host": "1"}), object, own, OWN) is own
    assert Search.looks == 0


def test_a_host_that_found_out_by_itself_that_it_is_the_endpoint_has_the_right_store() -> None:
    """By an interface that is not among those which others can reach, say."""
    own = MemoryStore().client()
    assert find_endpoint_store(rendezvous(ELSEWHERE, {}), object, own, OWN) is own
    assert Search.looks == 0


def test_the_store_to_which_another_host_has_come_is_the_right_one(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endpoint is a service in front of this host, which does not reach itself by it."""
    store = MemoryStore()
    own = store.client()
    monkeypatch.setattr(type(own), "another", lambda client: client)
    Arrivals(store.client(), "job", "node2").arrive()
    assert find_endpoint_store(rendezvous(ELSEWHERE, {"is_host": "true"}), object, own, OWN) is own
    assert (Search.looks, clock) == (1, [0.0])


def test_where_the_endpoint_leads_nowhere_for_a_minute_the_own_store_is_used(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun this fails."""
    own = MemoryStore().client()
    monkeypatch.setattr(type(own), "another", lambda client: client)
    rdzv = rendezvous(ELSEWHERE, {"is_host": "1"})

    def check() -> None:
        clock[0] += 20.0

    rdzv.check = check
    assert find_endpoint_store(rdzv, object, own, OWN) is own
    assert clock == [80.0]


def test_a_host_without_a_store_fails_with_what_the_search_says(clock: list[float]) -> None:
    """In time."""
    rdzv = rendezvous(ELSEWHERE, {})
    rdzv.connect_remaining_s = 0.0
    with pytest.raises(JoinFailedError, match=r"nothing answers at 192\.0\.2\.7, for 900 s"):
        find_endpoint_store(rdzv, object)
    assert clock == [0.0]
