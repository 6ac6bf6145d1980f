"""How hosts hand in their records, in a store that others write to as well."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.coordinator import record_collection
from saferun.coordinator.assignments import HostRecord, TaskRecord, encode_record
from saferun.coordinator.record_collection import RecordCollection, await_assignment
from saferun.coordinator.rendezvous_round import CancelledError, JoinFailedError, RendezvousRound
from saferun.text.typed_json import fit
from tests.unit.coordinator.fake_store import Client, Store

MEETING: dict[str, Any] = {
    "backend": "static",
    "node_rank": 1,
    "least": 2,
    "most": 2,
    "run_id": "job7",
    "timeout_s": 0.2,
    "host_timeout_s": 1,
    "name": "node2",
    "tasks": 1,
}
OWN = HostRecord("node2", (TaskRecord(1, "default", 7),), born="own")


class Exchanged(Client):
    """Whatever is written here, somebody else has written another record before."""

    numbers = itertools.count()

    def swap(self, _key: str, _expected: bytes, _value: str) -> tuple[bytes, bytes]:
        found = encode_record(OWN._replace(born=str(next(self.numbers)))).encode()
        return found, found


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_host_whose_record_is_always_exchanged_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    """It says what is amiss, or ends with those who wanted to meet."""
    monkeypatch.setattr(record_collection, "is_gone", lambda _record, _own: True)
    rdzv = RendezvousRound(fit(JoinRequest, MEETING))
    rdzv.is_over = cancelled
    with pytest.raises(
        CancelledError if cancelled else JoinFailedError, match=None if cancelled else "another process"
    ):
        await_assignment(Exchanged(Store()), "r0/", 1, rdzv, OWN)  # type: ignore[arg-type]


def test_a_record_that_cannot_be_read_ends_the_meeting_with_its_host_s_number() -> None:
    """On all hosts."""
    store = Store()
    store.put("r0/host/1", "[" * 3000)
    store.put("r0/read", "1")
    rdzv = RendezvousRound(fit(JoinRequest, MEETING))
    with pytest.raises(JoinFailedError, match="what the host with node rank 1 says of itself cannot be read"):
        RecordCollection(Client(store), "r0/", 2, can_probe=False).collect(rdzv, OWN)  # type: ignore[arg-type]
    assert b"node rank 1" in store.keys["r0/assignment/1"]


@pytest.mark.parametrize("counter", ["1000000", "abc", "-5"])
def test_a_counter_that_somebody_has_written_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    """Of those who have read that nobody gets a place, and of those who have left a store that is going to end."""
    monkeypatch.setattr(record_collection, "_READ_TIMEOUT_S", 0.05)
    store = Store()
    for key in ("r0/read", "r0/left"):
        store.put(key, counter)
    store.put("r0/host/1", "")
    leading = RecordCollection(Client(store), "r0/", 2, can_probe=False)  # type: ignore[arg-type]
    leading.fail(JoinFailedError("what", "hint"))
    assert b"what" in store.keys["r0/assignment/1"]
    RecordCollection(Client(store), "r0/", 2, can_probe=False).wait_until_left(0.05)  # type: ignore[arg-type]
