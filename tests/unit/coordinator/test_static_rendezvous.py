"""How a static job's first host and the others conduct their rendezvous, in a store that stands in for torch's."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.cluster.secret import JobSecret
from saferun.cluster.signed import Signer
from saferun.coordinator import spare_rounds, static_rendezvous
from saferun.coordinator.assignments import HostRecord, TaskRecord, assign, encode_assignment, encode_host_record
from saferun.coordinator.failure_messages import failure_text
from saferun.coordinator.host_record_collection import MOVED
from saferun.coordinator.rendezvous_round import CancelledError, JoinFailedError, RendezvousRound
from saferun.coordinator.spare_rounds import SpareRounds, late_key
from saferun.coordinator.static_rendezvous import StaticRendezvous
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.text.typed_json import fit
from tests.unit.coordinator.memory_store import MemoryStore

REQUEST: dict[str, Any] = {
    "backend": "static",
    "node_rank": 0,
    "least": 3,
    "most": 3,
    "run_id": "job7",
    "timeout_s": 30.0,
    "probe_after_s": 1,
    "name": "node0",
    "tasks": 1,
    "expected": ["node0", "node1"],
}


def joined(**fields: Any) -> RendezvousRound:
    """A rendezvous that all tasks of this host have joined."""
    rdzv = RendezvousRound(fit(JoinRequest, {**REQUEST, **fields}))
    rdzv.add(0, rdzv.request)
    return rdzv


class OnePort:
    """The stores of a first host with one port: a rendezvous begins with an empty one, as torch's are."""

    control_port = ranks_port = 1
    store_class = None

    def __init__(self, come: dict[int, list[int]]) -> None:
        self._come = come  # the seats of the hosts that come, by rendezvous
        self.memory = MemoryStore()
        self.ranks: StoreClient | None = None

    def serve_ranks(self) -> StoreClient:
        self.memory = memory = MemoryStore()
        for number, seats in self._come.items():
            memory.write(f"r{number}/left", "9")
            for seat in seats:
                one = HostRecord(f"node{seat}", (TaskRecord(1, "", 7),), born=str(seat), most=3)
                memory.write(f"r{number}/host/{seat}", encode_host_record(one))
        self.ranks = memory.client()
        return self.ranks


def one_port_stores(monkeypatch: pytest.MonkeyPatch, come: dict[int, list[int]]) -> Any:
    """Those of the first host in a job with spares, which waits for no others for long."""
    monkeypatch.setattr(spare_rounds, "_PATIENCE_S", 0.1)
    stores: Any = OnePort(come)
    monkeypatch.setattr(static_rendezvous, "prefix_class", lambda _: None)
    monkeypatch.setattr(static_rendezvous, "publish_address", lambda *_: None)
    connected = SimpleNamespace(connect=lambda *_, **__: stores.memory.client())
    monkeypatch.setattr(static_rendezvous, "StoreClient", connected)
    return stores


def test_a_host_that_does_not_come_again_is_replaced_where_one_port_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store in which the others are answered is not the one in which they have met."""
    stores = one_port_stores(monkeypatch, {0: [1, 2, 3], 1: [1, 3]})
    rendezvous = StaticRendezvous(stores)
    first = rendezvous.meet(joined(spares=1, one_port=True))
    assert [record.name for record in first.records] == ["node0", "node1", "node2", "node3"]
    second = rendezvous.meet(joined(spares=1, one_port=True, attempt=1))
    assert [record.name for record in second.records] == ["node0", "node1", "node3"]
    assert [(one.host, one.by) for one in second.replacements] == [("node2", "node3")]
    assert sorted(key for key in stores.memory.values if "assignment" in key) == ["r1/assignment/1", "r1/assignment/3"]


def test_a_lost_host_that_is_needed_and_comes_again_takes_part_where_one_port_is_all_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its place counts in the store in which it comes and in the one in which it is answered."""
    stores = one_port_stores(monkeypatch, {0: [1, 2, 3], 1: [2, 3], 2: [2, 3]})
    rendezvous = StaticRendezvous(stores)
    rendezvous.meet(joined(spares=1, one_port=True))
    rendezvous.meet(joined(spares=1, one_port=True, attempt=1, left_out=[1]))
    third = rendezvous.meet(joined(spares=1, one_port=True, attempt=2, left_out=[2]))
    assert [record.name for record in third.records] == ["node0", "node3", "node2"]
    assert (third.assignment.hosts, third.replacements) == (3, ())


def test_a_host_that_came_late_and_has_gone_since_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it waits when it is late; each later attempt would begin half a minute later because of it."""
    monkeypatch.setattr(spare_rounds, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(spare_rounds, "_FIRST_PATIENCE_S", 0.0)
    client = MemoryStore().client()
    rounds = SpareRounds(joined(spares=1))

    def meet(number: int, *come: int) -> list[int]:
        """Returns who is waited for."""
        rdzv, prefix = joined(spares=1), f"r{number}/"
        for seat in come:
            record = HostRecord(f"node{seat}", (TaskRecord(1, "", 7),), born=str(seat), most=3)
            client.set(f"{prefix}host/{seat}", encode_host_record(record))
        collection = rounds.collection(rdzv, client, prefix, can_probe=False)
        awaited = collection.taking_part
        rounds.arrange(rdzv, collection, collection.collect(rdzv, rdzv.wait_for_tasks()))
        return awaited

    assert meet(0, 1, 2) == [1, 2, 3]
    assert meet(1, 1, 2) == [1, 2]
    client.set(late_key(3), "")
    assert meet(2, 1, 2, 3) == [1, 2, 3]
    assert meet(3, 1, 2) == [1, 2, 3], "it is a spare"
    assert meet(4, 1, 2) == [1, 2]
    client.set(late_key(3), "")
    assert meet(5, 1, 2) == [1, 2, 3]
    assert meet(6, 1, 2) == [1, 2]


def test_no_attempt_has_fewer_hosts_than_the_job_was_started_with() -> None:
    """Whatever has led to that: the others learn that they get no assignment."""
    rdzv, client = joined(spares=1), MemoryStore().client()
    rounds = SpareRounds(rdzv)
    collection = rounds.collection(rdzv, client, "r0/", can_probe=False)
    own = rdzv.wait_for_tasks()
    client.set("r0/host/1", encode_host_record(HostRecord("node1", (TaskRecord(1, "", 7),), born="1", most=3)))
    client.set("r0/read", "1")
    met: Any = SimpleNamespace(taking_part=[1], withdrawn={}, fail=collection.fail)
    with pytest.raises(JoinFailedError, match="met with 2 of the 3 hosts that the job needs"):
        rounds.arrange(rdzv, met, [own, HostRecord("node1", (), born="1")])
    assert b"met with 2 of the 3 hosts" in (client.get("r0/assignment/1", 1.0) or b"")


class Reached:
    """Finds the control store, which could not be reached for a while."""

    port, script, master_addr, job = 29500, "", "", "job"

    def __init__(self, memory: MemoryStore, signer: Signer | None = None) -> None:
        self._memory = memory
        self._signer = signer

    def find(self, rdzv: RendezvousRound) -> StoreClient:
        rdzv.set_status("node0:29500 refuses connections from node1", is_fault=True)
        return self._memory.client(self._signer)


def following(*keys: str, **fields: Any) -> tuple[RendezvousRound, threading.Thread, list[Exception]]:
    """A host that has found the store of a first host, which has written these keys. Returns what comes of it, too."""
    rdzv = joined(node_rank=1, name="node1", report_every_s=0.1, **fields)
    rendezvous = StaticRendezvous(SimpleNamespace())  # type: ignore[arg-type]
    memory = MemoryStore()
    for key in keys:
        memory.write(key, "0")
    rendezvous._finder = Reached(memory)  # type: ignore[assignment]
    errors: list[Exception] = []

    def follow() -> None:
        try:
            rendezvous.meet(rdzv)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    return rdzv, thread, errors


def test_a_first_host_that_has_been_reached_and_does_not_begin_is_named_as_that() -> None:
    """That it refused connections is over; and there was no attempt before."""
    rdzv, thread, errors = following(timeout_s=0.6)
    thread.join()
    assert [error.what for error in errors if isinstance(error, JoinFailedError)] == [
        "node0 did not begin the rendezvous within 1 s"
    ]
    assert rdzv._notice.text == "waiting for node0 to begin the rendezvous"


def test_a_host_that_waits_for_the_first_to_begin_ends_with_its_tasks() -> None:
    """It does not wait for as long as it would for hosts."""
    rdzv, thread, errors = following()
    rdzv.is_over = True
    thread.join(20.0)
    assert [type(error) for error in errors] == [CancelledError]


def test_where_a_spare_has_taken_over_it_is_the_spare_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host with node rank 0 is gone, and its output says nothing about the wait."""
    records = [HostRecord(f"node{seat}", (TaskRecord(1, "", 7),), (f"10.0.0.{seat}",), 1, most=3) for seat in range(4)]
    rendezvous = StaticRendezvous(SimpleNamespace())  # type: ignore[arg-type]
    rendezvous._last = assign(records, spares=1)[1]
    rendezvous._finder = finder = Reached(MemoryStore())  # type: ignore[assignment]
    memory = MemoryStore()

    def find(*_: object) -> StoreClient:
        finder.master_addr = "10.0.0.3"
        return memory.client()

    def failed(**fields: Any) -> str:
        with pytest.raises(JoinFailedError) as raised:
            rendezvous.meet(joined(node_rank=1, name="node1", report_every_s=0.1, timeout_s=0.6, spares=1, **fields))
        return raised.value.what

    monkeypatch.setattr(static_rendezvous, "find_successor", find)
    assert failed(replaces_leader=True) == "node3 did not begin the rendezvous within 1 s"
    monkeypatch.setattr(finder, "master_addr", "10.0.0.9")
    monkeypatch.setattr(static_rendezvous, "find_successor", lambda *_: memory.client())
    assert failed(replaces_leader=True) == "the leader did not begin the rendezvous within 1 s"
    order = [records[3], records[1], records[2]]
    monkeypatch.setattr(static_rendezvous, "await_assignment", lambda *_: assign(order)[1])
    memory.write("round", "0")
    memory.write("r0/open", "")
    rendezvous.meet(joined(node_rank=1, name="node1", spares=1))
    monkeypatch.setattr(rendezvous, "_renewed", lambda client: client)
    assert failed() == "node3 did not begin another attempt within 1 s"


@pytest.mark.parametrize("keys", [("round", "r0/open"), ("round", "r0/open", "r0/done", "r1/open")])
def test_a_first_host_that_has_begun_is_not_waited_for_to_begin(
    monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
) -> None:
    """Nor is its next attempt. Who is missing is known a moment later."""
    statuses: list[str] = []

    def await_none(_client: object, _prefix: str, _host: int, rdzv: RendezvousRound, *_: object) -> None:
        statuses.append(rdzv._notice.text)
        raise CancelledError

    monkeypatch.setattr(static_rendezvous, "await_assignment", await_none)
    _, thread, errors = following(*keys)
    thread.join(20.0)
    assert [type(error) for error in errors] == [CancelledError]
    assert statuses == ["waiting for the leader's answer"]


OWN_BORN = joined().wait_for_tasks().born
ANSWER = encode_assignment(assign([HostRecord(f"node{seat}", (TaskRecord(1, "", 7),)) for seat in range(3)])[1])


def addressed(born: str) -> str:
    """The answer to the process of that record."""
    return json.dumps({**json.loads(ANSWER), "to": born})


def handed_in(
    monkeypatch: pytest.MonkeyPatch,
    answer: str | None,
    *,
    secret: JobSecret | None = None,
    forged: str = "",
    **fields: Any,
) -> list[str]:
    """In which rendezvous a host takes part whose connection breaks while the leader answers so.

    ``forged``: what another process writes there instead.
    """
    monkeypatch.setattr(static_rendezvous, "_ANSWER_S", 0.1)
    monkeypatch.setattr(static_rendezvous, "_READ_S", 0.1)
    memory, prefixes = MemoryStore(), list[str]()
    signer = None if secret is None else Signer(secret, "job")
    leader = memory.client(signer)
    for key in ("round", "r0/open", "r1/open"):
        leader.set(key, "0")
    rdzv = joined(node_rank=1, name="node1", report_every_s=0.1, **fields)
    rendezvous = StaticRendezvous(SimpleNamespace())  # type: ignore[arg-type]
    rendezvous._finder = Reached(memory, signer)  # type: ignore[assignment]

    def await_none(_client: object, prefix: str, *_: object) -> None:
        prefixes.append(prefix)
        if len(prefixes) > 1:
            raise CancelledError
        leader.set("r0/done", "")
        if answer is not None:
            leader.set("r0/assignment/1", answer)
        if forged:
            memory.write("r0/assignment/1", forged)
        if rdzv.spares:
            leader.set("r0/handed_out", "")
        raise StoreBrokenError

    monkeypatch.setattr(static_rendezvous, "await_assignment", await_none)
    with pytest.raises(CancelledError):
        rendezvous.meet(rdzv)
    return prefixes


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("secret", [None, JobSecret(bytes(32))], ids=["unsigned", "signed"])
def test_a_host_that_was_answered_while_its_connection_was_broken_has_not_come_late(
    monkeypatch: pytest.MonkeyPatch, secret: JobSecret | None, spares: int
) -> None:
    """The others wait for its ranks."""
    assert handed_in(monkeypatch, addressed(OWN_BORN), secret=secret, spares=spares) == ["r0/", "r0/"]


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize(
    "answer",
    [None, addressed("another"), ANSWER, failure_text(JoinFailedError("node1 was left out", "")), MOVED],
    ids=["none", "of another process", "of an older leader", "left out", "moved"],
)
def test_a_host_that_was_not_answered_has_come_late(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, spares: int
) -> None:
    """Another process of its node rank may have its place."""
    assert handed_in(monkeypatch, answer, spares=spares) == ["r0/", "r1/"]


def test_an_answer_that_is_not_signed_as_it_has_to_be_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can reach the store can write it."""
    secret = JobSecret(bytes(32))
    assert handed_in(monkeypatch, None, secret=secret, forged=addressed(OWN_BORN)) == ["r0/", "r1/"]


def test_a_host_of_a_later_meeting_takes_no_answer_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt of that is over."""
    memory, prefixes = MemoryStore(), list[str]()
    for key in ("round", "r0/open", "r0/done"):
        memory.write(key, "0")
    memory.write("r0/assignment/1", addressed(OWN_BORN))
    memory.write("r1/open", "")
    rendezvous = StaticRendezvous(SimpleNamespace())  # type: ignore[arg-type]
    rendezvous._finder = Reached(memory)  # type: ignore[assignment]

    def await_none(_client: object, prefix: str, *_: object) -> None:
        prefixes.append(prefix)
        raise CancelledError

    monkeypatch.setattr(static_rendezvous, "await_assignment", await_none)
    with pytest.raises(CancelledError):
        rendezvous.meet(joined(node_rank=1, name="node1", report_every_s=0.1))
    assert prefixes == ["r1/"]
