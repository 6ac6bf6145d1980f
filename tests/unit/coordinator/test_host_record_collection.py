"""How hosts hand in their records, in a store that others write to as well."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pytest

from saferun.cluster.join_messages import EndNote, JoinRequest
from saferun.coordinator import assignment_wait, gone_hosts, host_record_collection
from saferun.coordinator.assignment_wait import BegunWithout, MissedError, await_assignment, is_for
from saferun.coordinator.assignments import HostRecord, TaskRecord, decode_assignment, encode_host_record
from saferun.coordinator.failure_messages import failure_text, read_failure
from saferun.coordinator.gone_hosts import is_gone
from saferun.coordinator.host_record_collection import (
    HostRecordCollection,
    forget_round,
    missing_error,
)
from saferun.coordinator.liveness_probe import SilenceReason
from saferun.coordinator.rendezvous_round import CancelledError, JoinFailedError, JoinFailure, RendezvousRound
from saferun.coordinator.withdrawals import withdraw_alone
from saferun.text.typed_json import fit
from tests.unit.coordinator.fake_store import Client, Store
from tests.unit.coordinator.memory_store import MemoryStore

MEETING: dict[str, Any] = {
    "backend": "static",
    "node_rank": 1,
    "least": 2,
    "most": 2,
    "run_id": "job7",
    "timeout_s": 0.2,
    "probe_after_s": 1,
    "name": "node2",
    "tasks": 1,
}
OWN = HostRecord("node2", (TaskRecord(1, "default", 7),), born="own")


class Exchanged(Client):
    """Whatever is written here, somebody else has written another record before."""

    numbers = itertools.count()

    def swap(self, _key: str, _expected: bytes, _value: str) -> tuple[bytes, bytes]:
        found = encode_host_record(OWN._replace(born=str(next(self.numbers)))).encode()
        return found, found


class Accepted(Client):
    """What is written here is what is there."""

    def swap(self, key: str, _expected: bytes, value: str) -> tuple[bytes, bytes]:
        self.set(key, value)
        return value.encode(), value.encode()

    def get(self, key: str, timeout_s: float, **_: object) -> None:
        """It does not come."""


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_host_whose_record_is_always_exchanged_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    """It says what is amiss, or ends with those who wanted to meet."""
    monkeypatch.setattr(assignment_wait, "is_gone", lambda _record, _own: True)
    rdzv = RendezvousRound(fit(JoinRequest, MEETING))
    rdzv.is_over = cancelled
    with pytest.raises(
        CancelledError if cancelled else JoinFailedError, match=None if cancelled else "another process"
    ):
        await_assignment(Exchanged(Store()), "r0/", 1, rdzv, OWN)  # type: ignore[arg-type]


class Replaced(Accepted):
    """Another process's record takes the place of what is written here, or nothing is left of it."""

    record: HostRecord | None = OWN._replace(born="another")

    def get(self, key: str, timeout_s: float, **_: object) -> None:  # noqa: ARG002 - as of the store
        if self.record is not None:
            self.set("r0/host/1", encode_host_record(self.record))
        else:
            self.delete("r0/host/1")
        self.set("r0/done", "")


@pytest.mark.parametrize("name", ["node2", "node3"])
def test_a_host_whose_place_another_process_has_taken_does_not_wait_for_its_answer(name: str) -> None:
    """As when two jobs come to one address at the same moment: it waited as long as it would for hosts."""
    client = Replaced(Store())
    client.record = OWN._replace(name=name, born="another")
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "timeout_s": 60}))
    says = "node2 has come to this address twice" if name == "node2" else "two hosts have the node rank 1: node3 and"
    with pytest.raises(JoinFailedError, match=says):
        await_assignment(client, "r0/", 1, rdzv, OWN)  # type: ignore[arg-type]


class Begun(Accepted):
    """The others have met, and the assignment is not for this host, which cannot read it."""

    def get(self, key: str, timeout_s: float, **_: object) -> None:  # noqa: ARG002 - as of the store
        self.set("r0/done", "")


def test_a_host_without_an_assignment_where_the_others_have_met_is_told_so_at_the_end_of_its_time() -> None:
    """Its own wait for them is over then; no other host has a failure to hear of."""
    client = Begun(Store())
    with pytest.raises(JoinFailedError, match="has begun without node2: another process may have its place") as raised:
        await_assignment(client, "r0/", 1, RendezvousRound(fit(JoinRequest, MEETING)), OWN)  # type: ignore[arg-type]
    assert "another job" in raised.value.hint
    assert not client.check("r0/fail")
    begun = BegunWithout("the job at node1:29500 (script a.py) has begun without node2", "pass a free --master-port")
    with pytest.raises(JoinFailedError, match=r"\(script a\.py\) has begun without node2: another process") as raised:
        await_assignment(client, "r0/", 1, RendezvousRound(fit(JoinRequest, MEETING)), OWN, begun)  # type: ignore[arg-type]
    assert raised.value.hint == "pass a free --master-port"


def test_a_host_whose_record_is_gone_when_the_others_have_met_is_late() -> None:
    """The others meet without it, and a record in a rendezvous that is over is read by none of them."""
    client = Replaced(Store())
    client.record = None
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "timeout_s": 60}))
    with pytest.raises(MissedError):
        await_assignment(client, "r0/", 1, rdzv, OWN)  # type: ignore[arg-type]


def test_a_record_that_cannot_be_read_ends_the_meeting_with_its_host_s_number() -> None:
    """On all hosts."""
    store = Store()
    store.put("r0/host/1", "[" * 3000)
    store.put("r0/read", "1")
    rdzv = RendezvousRound(fit(JoinRequest, MEETING))
    with pytest.raises(JoinFailedError, match="the record of the host with node rank 1 cannot be read"):
        HostRecordCollection(Client(store), "r0/", 2, can_probe=False).collect(rdzv, OWN)  # type: ignore[arg-type]
    assert b"node rank 1" in store.keys["r0/assignment/1"]


@pytest.mark.parametrize("counter", ["1000000", "abc", "-5"])
def test_a_counter_that_somebody_has_written_holds_nobody_up(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    """Of those who have read that nobody gets a place, and of those who have left a store that is going to end."""
    monkeypatch.setattr(host_record_collection, "_READ_TIMEOUT_S", 0.05)
    store = Store()
    for key in ("r0/read", "r0/left"):
        store.put(key, counter)
    store.put("r0/host/1", "")
    leading = HostRecordCollection(Client(store), "r0/", 2, can_probe=False)  # type: ignore[arg-type]
    leading.fail(JoinFailedError("what", "hint"))
    assert b"what" in store.keys["r0/assignment/1"]
    HostRecordCollection(Client(store), "r0/", 2, can_probe=False).wait_until_left(0.05)  # type: ignore[arg-type]


def started(*seats: int, needed: int, patience_s: float = 0.0) -> tuple[Store, HostRecordCollection]:
    """A rendezvous to which the hosts of these seats have come, of three others that were started."""
    store = Store()
    for seat in seats:
        store.put(f"r0/host/{seat}", encode_host_record(OWN._replace(name=f"node{seat}")))
    store.put("r0/read", "9")
    collection = HostRecordCollection(
        Client(store),  # type: ignore[arg-type]
        "r0/",
        4,
        can_probe=False,
        seats=[1, 2, 3],
        needed=needed,
        patience_s=patience_s,
    )
    return store, collection


def collected(collection: HostRecordCollection, timeout_s: float = 0.2) -> list[str]:
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "most": 3, "least": 3, "spares": 1, "timeout_s": timeout_s}))
    return [record.name for record in collection.collect(rdzv, OWN._replace(name="node0"))]


def test_a_job_begins_without_a_host_where_there_are_enough() -> None:
    """One that is missing is waited for, and then not any more."""
    _, collection = started(1, 3, needed=3)
    assert collected(collection) == ["node0", "node1", "node3"]
    assert collection.taking_part == [1, 3]


def test_too_few_hosts_do_not_begin() -> None:
    """Whoever is missing is named as in a job without spares."""
    _, collection = started(2, needed=3)
    with pytest.raises(JoinFailedError, match="2 of 4 hosts did not come"):
        collected(collection)


def test_a_host_that_cannot_start_is_replaced_and_its_reason_kept() -> None:
    """It is not waited for."""
    store, collection = started(1, 2, needed=3, patience_s=1e6)
    withdraw_alone(Client(store), "r0/", 3, JoinFailedError("no /data on node3", "mount it"))  # type: ignore[arg-type]
    assert collected(collection) == ["node0", "node1", "node2"]
    assert {seat: error.what for seat, error in collection.withdrawn.items()} == {3: "no /data on node3"}


def test_where_too_many_cannot_start_all_end_with_the_reason() -> None:
    store, collection = started(1, needed=3, patience_s=1e6)
    for seat in (2, 3):
        withdraw_alone(Client(store), "r0/", seat, JoinFailedError("no /data", "mount it"))  # type: ignore[arg-type]
    with pytest.raises(JoinFailedError, match="no /data"):
        collected(collection)


def leave(store: Store, seat: int, end: EndNote | None = None) -> None:
    """A host of a job with a spare gets a signal while the hosts meet. ``end``: or a user ends the job there."""
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "spares": 1}))
    rdzv.end = end

    class Leaves(Accepted):
        def get(self, key: str, timeout_s: float, **_: object) -> None:  # noqa: ARG002 - as of the store
            assert rdzv.on_leave is not None
            rdzv.on_leave()
            rdzv.is_over = True

    with pytest.raises(CancelledError):
        await_assignment(Leaves(store), "r0/", seat, rdzv, OWN._replace(name=f"node{seat}"))  # type: ignore[arg-type]


def test_a_host_that_leaves_while_others_are_awaited_is_replaced() -> None:
    """It is none of those that the job has, so that more of the others are waited for."""
    store, collection = started(1, needed=3)
    leave(store, 3)
    arrival = threading.Timer(1.5, store.put, ("r0/host/2", encode_host_record(OWN._replace(name="node2"))))
    arrival.start()
    assert collected(collection, timeout_s=30.0) == ["node0", "node1", "node2"]
    assert {seat: error.what for seat, error in collection.withdrawn.items()} == {
        3: "node3 left while the hosts of the job met"
    }
    arrival.join()


def test_a_host_that_leaves_when_all_have_come_gets_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is still there; it is not probed in vain."""
    probed: list[str] = []
    monkeypatch.setattr(gone_hosts, "is_gone", lambda record, _own: probed.append(record.name))
    store, collection = started(1, 2, needed=3)
    leave(store, 3)
    collection._can_probe, collection._seen_at = True, dict.fromkeys([2, 3], -host_record_collection._STALE_RECORD_S)
    assert collected(collection) == ["node0", "node1", "node2"]
    assert collection.taking_part == [1, 2]
    assert probed == ["node2"]


def test_where_too_many_leave_or_a_user_ends_the_job_all_end() -> None:
    store, collection = started(1, needed=3, patience_s=1e6)
    for seat in (2, 3):
        leave(store, seat)
    with pytest.raises(JoinFailedError, match="node3 left while the hosts of the job met"):
        collected(collection)
    store, collection = started(1, needed=3, patience_s=1e6)
    leave(store, 3, EndNote("saferunctl stop"))
    with pytest.raises(JoinFailedError, match="node3 left") as raised:
        collected(collection, timeout_s=30.0)
    assert raised.value.end == EndNote("saferunctl stop")


def test_a_host_that_leaves_while_others_are_probed_gets_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes up to 10 s to probe them. One that has been left out as late is waited for again where it is needed."""
    store, collection = started(1, 3, needed=3)
    threads: list[threading.Thread] = []

    def probe(record: HostRecord, _own: HostRecord) -> bool:
        if record.name == "node3":
            leave(store, 3)
            threads.append(threading.Thread(target=come))
            threads[0].start()
        return False

    def come() -> None:
        store.until("r0/missing", "1 of 4 hosts: node rank 2")
        store.put("r0/host/2", encode_host_record(OWN._replace(name="node2")))

    monkeypatch.setattr(gone_hosts, "is_gone", probe)
    monkeypatch.setattr(host_record_collection, "_STALE_RECORD_S", -1.0)
    collection._can_probe = True
    assert collected(collection, timeout_s=30.0) == ["node0", "node1", "node2"]
    assert list(collection.withdrawn) == [3]
    threads[0].join()


def follow(store: Store, seat: int, heard: list[tuple[str, str]], after: threading.Event | None = None) -> None:
    """A host comes, again or for the first time. ``after``: it does not ask for its assignment before that."""
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "spares": 1, "timeout_s": 60}))
    own = OWN._replace(name=f"node{seat}", born="again")

    class Follows(Accepted):
        def get(self, key: str, timeout_s: float, **_: object) -> bytes | None:  # type: ignore[override]
            assert after is None or after.wait(60.0)
            return Client.get(self, key, timeout_s)

    with pytest.raises(JoinFailedError) as raised:
        await_assignment(Follows(store), "r0/", seat, rdzv, own)  # type: ignore[arg-type]
    heard.append((own.name, raised.value.what))


@pytest.mark.parametrize("can_start", [True, False])
def test_a_host_that_has_left_or_could_not_start_and_comes_again_takes_part(*, can_start: bool) -> None:
    """Its job may have no other one, and would wait for one until the start timeout."""
    store, collection = started(1, 2, needed=3)
    if can_start:
        leave(store, 3)
    else:
        withdraw_alone(Client(store), "r0/", 3, JoinFailedError("no /data on node3", "mount it"))  # type: ignore[arg-type]
    leave(store, 2)
    store.put("r0/host/3", encode_host_record(OWN._replace(name="node3", born="again")))
    assert collected(collection) == ["node0", "node1", "node3"]
    assert collection.taking_part == [1, 3]
    assert list(collection.withdrawn) == [2]


def test_a_host_that_comes_again_is_counted_in_while_others_are_awaited() -> None:
    """As soon as its record is there, which is not that of the process that has left."""
    store, collection = started(1, needed=3)
    leave(store, 3)

    def come_again() -> None:
        store.until("r0/missing", "1 of 4 hosts: node rank 2")
        assert list(collection.withdrawn) == [3]
        store.put("r0/host/3", encode_host_record(OWN._replace(name="node3", born="again")))

    arrival = threading.Thread(target=come_again)
    arrival.start()
    assert collected(collection, timeout_s=30.0) == ["node0", "node1", "node3"]
    assert collection.withdrawn == {}
    arrival.join()


@pytest.mark.parametrize("comes_again", [False, True])
def test_a_host_that_comes_again_when_the_hosts_do_not_meet_learns_why(*, comes_again: bool) -> None:
    """It would look for the first host until its start timeout. One that does not come again is not waited for."""
    store, collection = started(1, 2, needed=4)
    store.take_away("r0/read")
    heard: list[tuple[str, str]] = []
    is_back = threading.Event()
    leave(store, 3)

    def come_again() -> None:
        with store.changed:
            assert store.changed.wait_for(lambda: "r0/fail" in store.keys, 60.0)
        follow(store, 3, heard, is_back)

    def note() -> None:
        with store.changed:
            assert store.changed.wait_for(lambda: b"again" in store.keys["r0/host/3"], 60.0)
        is_back.set()

    # The leader is still busy with the others when it comes again.
    targets: list[Any] = [lambda: follow(store, 1, heard, is_back), lambda: follow(store, 2, heard, is_back)]
    if comes_again:
        targets += [come_again, note]
    else:
        is_back.set()
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    why = "node3 left while the hosts of the job met"
    with pytest.raises(JoinFailedError, match=why):
        collected(collection)
    for thread in threads:
        thread.join(20.0)
    come = (1, 2, 3) if comes_again else (1, 2)
    assert sorted(heard) == [(f"node{seat}", why) for seat in come]
    assert store.keys["r0/read"] == str(len(come)).encode()


def test_each_assignment_says_for_which_process_it_is() -> None:
    """Signed or not: by that a host knows its own one again that has lost the connection before it came."""
    store = Store()
    records = [OWN._replace(name=f"node{seat}", born=f"born{seat}") for seat in range(3)]
    HostRecordCollection(Client(store), "r0/", 3).publish_assignments(records)  # type: ignore[arg-type]
    for seat in (1, 2):
        answer = store.keys[f"r0/assignment/{seat}"]
        assert [is_for(answer, record) for record in records] == [record is records[seat] for record in records]
        assert decode_assignment(answer) is not None


def test_a_host_that_comes_when_all_have_their_assignments_hears_that_it_is_late() -> None:
    """It would wait for one that never comes."""
    store, collection = started(1, 2, needed=3)
    records = [OWN, OWN, OWN]
    collected(collection)
    collection.publish_assignments(records)
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "spares": 1, "timeout_s": 60}))
    with pytest.raises(MissedError):
        await_assignment(Accepted(store), "r0/", 3, rdzv, OWN)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "why", "gone"),
    [
        ({}, "reached", True),  # the coordinator before this one, of the same supervisor: this one answers there
        ({"tasks": (TaskRecord(1, "default", 8),)}, "reached", False),
        ({"addresses": ("10.0.0.3",)}, "reached", False),
        ({"port": 4712}, "reached", False),
        ({"port": 4712}, "gone", True),
        ({"addresses": ("10.0.0.3",)}, "unreachable", True),  # a pod that was made again has another address
        ({"name": "node3", "addresses": ("10.0.0.3",)}, "unreachable", False),
    ],
)
def test_the_record_of_a_process_that_has_ended_may_be_replaced(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], why: str, *, gone: bool
) -> None:
    """That of another host with the same number may not: one of them is wrong."""
    monkeypatch.setattr(gone_hosts, "probe_host", lambda *_, **__: SilenceReason(why, "as it was found"))
    own = OWN._replace(port=4711, addresses=("10.0.0.2",))
    assert is_gone(own._replace(born="another", **changes), own) is gone


def test_a_job_of_more_ranks_than_a_leader_can_keep_does_not_begin() -> None:
    """Whatever the records say."""
    store = Store()
    many = OWN._replace(tasks=(TaskRecord(4096, "default", 1),) * 16)
    for host in range(1, 17):
        store.put(f"r0/host/{host}", encode_host_record(many._replace(name=f"node{host}")))
    store.put("r0/read", "99")
    rdzv = RendezvousRound(fit(JoinRequest, MEETING))
    with pytest.raises(JoinFailedError, match="the hosts have 1048577 ranks together, and a job may have 1048576"):
        HostRecordCollection(Client(store), "r0/", 17, can_probe=False).collect(rdzv, OWN)  # type: ignore[arg-type]


@pytest.mark.parametrize("elastic", [False, True])
def test_only_hosts_of_a_job_of_fixed_size_have_to_agree_on_it(*, elastic: bool) -> None:
    """A running elastic job may get a host that was started for more of them, as under torchrun."""
    store = Store()
    store.put("r0/host/1", encode_host_record(OWN._replace(name="node3", most=4)))
    store.put("r0/read", "99")
    collection = HostRecordCollection(Client(store), "r0/", 2, can_probe=False)  # type: ignore[arg-type]
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "elastic": elastic}))
    if elastic:
        assert [record.most for record in collection.collect(rdzv, OWN._replace(most=3))] == [3, 4]
        return
    with pytest.raises(JoinFailedError, match="node2 was started for 3 hosts, node3 for 4 hosts"):
        collection.collect(rdzv, OWN._replace(most=3))


def early(hosts: int) -> tuple[Store, HostRecordCollection]:
    """A rendezvous whose hosts have all come long before the last one."""
    store = Store()
    for host in range(1, hosts):
        store.put(f"r0/host/{host}", encode_host_record(OWN._replace(name=f"node{host}")))
    collection = HostRecordCollection(Client(store), "r0/", hosts)  # type: ignore[arg-type]
    collection._seen_at = dict.fromkeys(range(1, hosts), 0.0)
    return store, collection


def test_of_thousands_of_early_hosts_some_are_probed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread for each of them, and one for each of its addresses, are more than a process may have."""
    lock, now, most = threading.Lock(), [0], [0]

    def probe(record: HostRecord, _own: HostRecord) -> bool:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.01)
        with lock:
            now[0] -= 1
        if record.name == "node7":
            raise OSError("out of descriptors")
        return record.name in {"node3", "node39"}

    monkeypatch.setattr(gone_hosts, "is_gone", probe)
    monkeypatch.setattr(gone_hosts, "_MOST_PROBED", 4)
    store, collection = early(40)
    assert sorted(collection._gone(OWN)) == [3, 39]
    assert most[0] <= 4
    assert "r0/host/3" not in store.keys
    assert "r0/host/7" in store.keys, "what cannot be probed is not gone"


def test_early_hosts_that_cannot_be_probed_in_time_are_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are they where no thread can be started."""
    monkeypatch.setattr(gone_hosts, "_PROBE_S", 0.05)
    released = threading.Event()
    monkeypatch.setattr(gone_hosts, "is_gone", lambda *_: released.wait(30.0))
    _, collection = early(3)
    assert collection._gone(OWN) == []
    released.set()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert collection._gone(OWN) == []


@pytest.mark.parametrize("is_usage", [False, True])
@pytest.mark.parametrize("end", [None, EndNote("saferunctl stop")])
def test_all_hosts_learn_what_kind_of_failure_it_is(end: EndNote | None, *, is_usage: bool) -> None:
    """Each prints its own hint: how to do without a scheduler's hosts where some are missing."""
    needless = JoinFailedError("what", "hint", kind="needless", end=end)
    of_usage = JoinFailedError("what", "hint", kind="usage" if is_usage else "", end=end)
    for error in (of_usage, needless, missing_error("hosts: node2", 3.0), missing_error("hosts: node2", 3.0, 180.0)):
        read = read_failure(failure_text(error).encode())
        assert read is not None
        assert (read.what, read.hint, read.kind, read.end) == (error.what, error.hint, error.kind, error.end)
    older = read_failure(b'["3 of 4 hosts did not come within 600 s", "see there"]')
    assert older is not None
    assert not older.kind


def test_of_an_earlier_rendezvous_only_what_tells_late_hosts_stays() -> None:
    store = MemoryStore()
    of_hosts = ("r1/host/1", "r1/host/2", "r1/assignment/1", "r1/withdrawn/2", "r1/leaver/2")
    for key in ("r1/open", "r1/done", *of_hosts, "r2/host/1"):
        store.write(key, "x")
    forget_round(store.client(), "r1/", 3)
    assert set(store.values) == {"r1/open", "r1/done", "r2/host/1"}


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_job_that_has_run_meets_again_where_a_newcomer_cannot_take_part(*, goes_on: bool) -> None:
    """Another newcomer, which can, does not end either; where no job has run yet, it begins for nobody."""
    store = Store()
    store.put("r0/host/2", encode_host_record(OWN._replace(name="node3")))
    store.put("r0/read", "9")
    error = JoinFailedError("node2 has no secret", "pass one", kind="usage")
    store.put("r0/fail", failure_text(error))
    collection = HostRecordCollection(Client(store), "r0/", 3, can_probe=False, goes_on=goes_on)  # type: ignore[arg-type]
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "timeout_s": 60}))
    with pytest.raises(JoinFailedError, match="node2 has no secret"):
        collection.collect(rdzv, OWN._replace(name="node1"))
    for seat in (1, 2):
        read = read_failure(store.keys.get(f"r0/assignment/{seat}"))
        assert (read is not None and read.is_again) is goes_on


@pytest.mark.parametrize("kind", ["gone", ""])
def test_a_host_that_comes_when_the_others_are_about_to_meet_again_hears_why(kind: JoinFailure) -> None:
    """It would wait for three minutes, and they for it: the leader's store stays, and the leader does not."""
    store = Store()
    store.put("r0/host/2", encode_host_record(OWN._replace(name="node3")))
    store.put("r0/read", "9")
    store.put("r0/fail", failure_text(JoinFailedError("node3 left while the hosts of the job met", "", kind=kind)))
    collection = HostRecordCollection(Client(store), "r0/", 3, can_probe=False)  # type: ignore[arg-type]
    rdzv = RendezvousRound(fit(JoinRequest, {**MEETING, "timeout_s": 60}))
    with pytest.raises(JoinFailedError, match="node3 left"):
        collection.collect(rdzv, OWN._replace(name="node1"))
    late = read_failure(store.keys.get("r0/assignment/1"))
    assert (late is not None and late.kind == "gone") is (kind == "gone")


def test_a_different_number_of_hosts_is_wrong_input() -> None:
    """Exit code 2, as for other options that contradict each other: no rank has run."""
    one = OWN._replace(most=2)
    with pytest.raises(JoinFailedError, match=r"2 hosts.*3 hosts") as refused:
        host_record_collection._check_agreement([one, one._replace(name="node3", most=3)], is_elastic=False)
    assert refused.value.is_usage
