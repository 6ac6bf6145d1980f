"""What the replacement of a killed coordinator goes on from, as its supervisor keeps it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import static_rendezvous
from saferun.coordinator.assignments import HostRecord, TaskRecord, assign
from saferun.coordinator.control_search import JOB_KEY
from saferun.coordinator.resumption import Resumption, SharedSecret, decode_resumption, encode_resumption
from saferun.coordinator.static_rendezvous import StaticRendezvous
from saferun.coordinator.store_client import StoreClient
from tests.unit.coordinator.memory_store import MemoryStore
from tests.unit.coordinator.test_static_rendezvous import joined

TASKS = (TaskRecord(1, "trainer", 7),)
RECORDS = [HostRecord(f"node{seat}", TASKS, (f"10.0.0.{seat}",), 40000, most=3) for seat in range(4)]
ASSIGNMENT = assign(RECORDS, spares=1, order=range(4))[1]
RESUMPTION = Resumption(
    ASSIGNMENT,
    "job",
    ("10.0.0.3", 40000),
    is_shared=False,
    master_port=29500,
    moves=0,
    round=2,
    script="train.py",
    shared=SharedSecret("11" * 32, "file"),
    record=HostRecord(ASSIGNMENT.label, TASKS, RECORDS[1].addresses),
    successor_addr="10.0.0.3",
)


def test_what_is_kept_is_read_as_it_was_written() -> None:
    """Spares and the address of the one that leads included."""
    assert decode_resumption(encode_resumption(RESUMPTION)) == RESUMPTION


def test_what_a_coordinator_of_another_state_has_written_is_read_without_the_newer_fields() -> None:
    """One that is killed may be replaced by another version: saferun was updated while the job runs."""
    parts = json.loads(encode_resumption(RESUMPTION))
    rest = json.loads(parts["rest"])
    del rest["successor_addr"]
    older = json.dumps({**parts, "rest": json.dumps(rest)})
    assert decode_resumption(older) == RESUMPTION._replace(successor_addr="")
    newer = json.dumps({**parts, "rest": json.dumps({**rest, "successor_addr": "10.0.0.3", "newer": 1})})
    assert decode_resumption(newer) == RESUMPTION


@pytest.mark.parametrize("successor_addr", ["10.0.0.3", ""])
def test_a_replacement_keeps_where_the_ranks_find_their_store_and_who_may_lead(
    monkeypatch: pytest.MonkeyPatch, successor_addr: str
) -> None:
    """If a spare leads; and what the next replacement goes on from is the same."""
    memory = MemoryStore()
    memory.write(JOB_KEY, "job")
    monkeypatch.setattr(StoreClient, "connect", lambda *_, **__: memory.client())
    rendezvous = StaticRendezvous(SimpleNamespace(store_class=None))  # type: ignore[arg-type]
    found = RESUMPTION._replace(successor_addr=successor_addr, control=("memory", 1), shared=SharedSecret())
    result = rendezvous.resume(joined(node_rank=1, name="node1", spares=1, master=["10.0.0.0", [29500]]), found)
    assert result.master_addr == (successor_addr or "10.0.0.0")
    assert rendezvous.resumption(result, found.record) == found
    searched: list[Any] = []

    def find(
        _rdzv: object, _stores: object, _finder: object, successors: object, before: object, *_: object
    ) -> StoreClient:
        searched.append((successors, before))
        client = memory.client()
        client.set("round", "0")
        client.set("r0/open", "")
        return client

    monkeypatch.setattr(static_rendezvous, "find_successor", find)
    monkeypatch.setattr(static_rendezvous, "await_assignment", lambda *_: ASSIGNMENT)
    rendezvous.meet(joined(node_rank=1, name="node1", spares=1, replaces_leader=True))
    assert searched == [(ASSIGNMENT.successors, None)]
