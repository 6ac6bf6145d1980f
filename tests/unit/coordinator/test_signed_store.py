"""The coordinator's part with a job secret, on a store in which somebody else writes, too."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from saferun.cluster.join_messages import JoinRequest
from saferun.cluster.secret import JobSecret
from saferun.cluster.signed import Signer
from saferun.coordinator.assignment_wait import await_assignment
from saferun.coordinator.assignments import HostRecord, TaskRecord, encode_host_record
from saferun.coordinator.evidence_chunks import ChunkReader
from saferun.coordinator.failure_messages import publish_failure
from saferun.coordinator.heartbeats import CHANGE, HeartbeatMonitor, Heartbeats
from saferun.coordinator.host_record_collection import HostRecordCollection, MovedError
from saferun.coordinator.job_log import JobLog
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.secrecy import (
    NO_SECRET,
    NONE_HERE,
    NONE_THERE,
    OTHER,
    Secrecy,
    SecretMismatch,
    decode_note,
    encode_note,
    mismatch_message,
)
from saferun.coordinator.store_client import FORGED, StoreClient
from saferun.text.typed_json import fit
from tests.unit.coordinator.memory_store import MemoryStore

DEADLINE_S = 30.0
SECRET = JobSecret(bytes(range(32)))
DECISION = {"kind": "decision", "host": 0, "next": "finish", "exit_code": 0, "wait_s": 0.0, "restarts": 0}
TROUBLE = {"kind": "abort", "host": 1, "task": 0, "label": "node1", "reason": "failure", "text": "rank 2 died"}


def signer(job: str = "job7", **more: Any) -> Signer:
    return Signer(SECRET, job, **more)


def until(is_so: Any, what: str) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < give_up_at, f"never: {what}"
        time.sleep(0.002)


class Line:
    """A line that does not break.

    Once it is closed, the next entry ends the thread that reads a log, which would see the virtual time of other tests.
    """

    def __init__(self, client: StoreClient) -> None:
        self.client = client
        self.watching = client.another()
        self.is_closed = False

    def is_current(self, _client: StoreClient) -> bool:
        return not self.is_closed

    def repair(self, _client: StoreClient) -> None:
        assert self.is_closed, "it broke"


# ---------------------------------------------------------------------------------------------------------- the client


def test_without_a_secret_the_store_holds_what_it_held_before() -> None:
    """Not a byte more."""
    store = MemoryStore()
    client = store.client()
    client.set("a", "1")
    assert client.create("b", "2") == b"2"
    assert client.create("b", "3") == b"2"
    client.put("c", b"", "4", 1)
    assert store.values == {"a": b"1", "b": b"2", "c": b"4"}
    assert client.find("a") == b"1"
    assert client.get("b", 1.0) == b"2"
    assert client.read_all(["a", "c"], newest=True) == [b"1", b"4"]


def test_a_value_without_a_signature_is_as_if_it_were_not_there() -> None:
    """Read by whichever call, and counted."""
    store, ignored = MemoryStore(), list[str]()
    client = store.client(signer(on_ignored=ignored.append))
    store.write("r0/fail", '["it failed", "elsewhere"]')
    assert client.find("r0/fail") is None
    assert not client.exists("r0/fail")
    assert client.read_all(["r0/fail"]) == [None]
    assert client.get("r0/fail", 0.2) is None
    assert client.get("r0/fail", 10.0, forged=FORGED) == FORGED
    assert client.create("r0/fail", "mine") == FORGED
    assert set(ignored) == {"r0/fail"}
    assert len(ignored) >= 6


@pytest.mark.parametrize("is_signed", [False, True])
def test_many_keys_are_found_in_two_requests_where_all_exist(*, is_signed: bool) -> None:
    """One by one where some do not. What is not signed, or too long, is none."""
    store = MemoryStore()
    client = store.client(signer() if is_signed else None)
    for key in "abc":
        client.set(key, key * 3)
    store.write("forged", "x")
    forged = None if is_signed else b"x"
    before = client.answers
    assert client.find_all(["a", "b", "forged"]) == [b"aaa", b"bbb", forged]
    assert client.answers - before == 2
    assert client.find_all(["a", "missing", "c"]) == [b"aaa", None, b"ccc"]
    assert client.find_all([]) == []
    if is_signed:
        client.set("long", "x" * 500)
        assert client.find_all(["a", "long"], longest=100) == [b"aaa", None]


def test_the_true_value_is_waited_for_where_a_forged_one_lies() -> None:
    store = MemoryStore()
    reader, writer = store.client(signer()), store.client(signer())
    store.write("r0/assignment/1", "forged")
    found: list[bytes | None] = []
    thread = threading.Thread(target=lambda: found.append(reader.get("r0/assignment/1", DEADLINE_S)))
    thread.start()
    writer.set("r0/assignment/1", "true")
    thread.join()
    assert found == [b"true"]


def test_a_value_that_only_this_host_writes_is_put_whatever_lies_there() -> None:
    """A heartbeat comes through, though somebody has written over the last one."""
    store = MemoryStore()
    client, leader = store.client(signer()), store.client(signer())
    stored = client.put("a0/heartbeat/1", b"", "1", 1)
    store.write("a0/heartbeat/1", "999")
    stored = client.put("a0/heartbeat/1", stored, "2", 2)
    assert leader.read_all(["a0/heartbeat/1"], newest=True) == [b"2"]
    del store.values["a0/heartbeat/1"]
    client.put("a0/heartbeat/1", stored, "3", 3)
    assert leader.read_all(["a0/heartbeat/1"], newest=True) == [b"3"]


# ------------------------------------------------------------------------------------------------------- the job's log


class Logs:
    """The log of host 1, on a store."""

    def __init__(self, store: MemoryStore) -> None:
        self.told: list[tuple[int, dict[str, Any]]] = []
        self.ignored: list[str] = []
        self.line = Line(store.client(signer(on_ignored=self.ignored.append)))
        self.log = JobLog(
            self.line,  # type: ignore[arg-type]
            "a0/",
            1,
            lambda k, message: self.told.append((k, message)),
        )


def entry(message: dict[str, Any]) -> str:
    return json.dumps({"h": 0, "n": 1, "m": message})


def test_a_decision_that_nobody_of_the_job_has_signed_is_passed_over() -> None:
    """However well it is formed: without the secret it would end the job. The true one is heard."""
    store = MemoryStore()
    recorded = MemoryStore().client(signer("an older job"))
    recorded.set("a0/log/1", entry(DECISION))
    store.write("a0/log/0", entry(DECISION))
    store.write("a0/log/1", recorded.store.values["a0/log/1"])
    store.client(signer()).set("a1/log/2", entry(DECISION))
    store.write("a0/log/2", store.values.pop("a1/log/2"))
    logs = Logs(store)
    logs.log.start()
    logs.log.append(TROUBLE)
    logs.log.wait_written(DEADLINE_S)
    until(lambda: logs.told, "the true message")
    assert [(k, message["kind"]) for k, message in logs.told] == [(3, "abort")]
    assert not logs.log.has("decision")
    leader = store.client(signer())
    assert leader.create("a0/log/4", entry({**DECISION, "exit_code": 1})) != FORGED
    until(lambda: len(logs.told) == 2, "the true decision")
    assert logs.told[1][1]["exit_code"] == 1
    assert {"a0/log/0", "a0/log/1", "a0/log/2"} <= set(logs.ignored)
    logs.line.is_closed = True
    leader.set("a0/log/5", '{"end": true}')


def test_without_a_secret_a_decision_of_anybody_counts() -> None:
    """As docs/security.md says: this is what the secret is for."""
    store = MemoryStore()
    store.write("a0/log/0", entry(DECISION))
    told: list[dict[str, Any]] = []
    line = Line(store.client())
    log = JobLog(line, "a0/", 1, lambda _, message: told.append(message))  # type: ignore[arg-type]
    log.start()
    until(lambda: told, "the decision")
    assert told[0]["kind"] == "decision"
    line.is_closed = True
    store.write("a0/log/1", '{"end": true}')


def test_thousands_of_forged_entries_hide_no_true_one() -> None:
    """Somebody who is always quicker only makes the log longer."""
    store = MemoryStore()
    for k in range(3000):
        store.write(f"a0/log/{k}", "x" * (1 + k % 100))
    logs = Logs(store)
    logs.log.start()
    logs.log.append(TROUBLE)
    until(lambda: logs.told, "the true message")
    assert [(k, message["kind"]) for k, message in logs.told] == [(3000, "abort")]
    logs.line.is_closed = True
    store.client(signer()).set("a0/log/3001", '{"end": true}')


# ------------------------------------------------------------------------------------------------ heartbeats and states


class Leader:
    """The leader's view of host 1."""

    def __init__(self, store: MemoryStore) -> None:
        self.states: list[dict[str, Any]] = []
        client = store.client(signer())
        client.set("a0/heartbeat/1", "0")
        client.set("a0/state/1", "")
        self.monitor = HeartbeatMonitor(
            client,
            "a0/",
            [1, 1],
            30.0,
            on_states=self.states.append,
            on_chunk=lambda *_: None,
            on_timeout=lambda _: None,
            on_late=lambda: None,
            on_return=lambda _: None,
            on_stuck=lambda *_: None,
        )

    def look(self) -> bytes:
        self.monitor._read(1.0)
        return self.monitor.heartbeat_of(1)


def heartbeat_of(store: MemoryStore) -> tuple[Heartbeats, StoreClient]:
    client = store.client(signer())
    return Heartbeats(Line(client), "a0/", 1, 5.0, {}), client  # type: ignore[arg-type]


def test_a_beat_that_is_written_again_is_no_new_beat() -> None:
    """Or a dead host would live for as long as somebody writes down what it last said."""
    store = MemoryStore()
    leader, (heartbeats, client) = Leader(store), heartbeat_of(store)
    recorded = []
    for expected in (b"1", b"2", b"3"):
        heartbeats._add(client, 1)
        recorded.append(store.values["a0/heartbeat/1"])
        assert leader.look() == expected
    for value in (*recorded, b"99", b"", store.values["a0/state/1"]):
        store.write("a0/heartbeat/1", value)
        assert leader.look() == b"3"
    assert leader.monitor.silent_s(1) == len(recorded) + 3
    heartbeats._add(client, 1)
    assert leader.look() == b"4"
    assert leader.monitor.silent_s(1) == 0


def test_a_state_that_is_written_again_or_made_up_is_none() -> None:
    """That a host hangs, or is done, it says itself, and as of now."""
    store = MemoryStore()
    leader, (heartbeats, client) = Leader(store), heartbeat_of(store)

    def say(state: str) -> None:
        heartbeats.set_state(0, {"s": state})
        client.set("a0/state/1", heartbeats._text(), heartbeats._sum + 1)
        heartbeats._add(client, CHANGE + 1)

    say("quiet")
    quiet = store.values["a0/state/1"]
    leader.look()
    say("run")
    leader.look()
    assert leader.states == [{"1/0": {"s": "quiet"}}, {"1/0": {"s": "run"}}]
    plain = b'{"tasks": {"0": {"s": "gone"}}, "chunks": [], "stuck": {}, "acked": false, "locations": {}}'
    for forged in (quiet, plain):
        store.write("a0/state/1", forged)
        heartbeats._add(client, CHANGE + 1)  # the host has something to say, and somebody writes over it
        leader.look()
    assert len(leader.states) == 2
    # It is looked for again at the next heartbeat.
    client.set("a0/state/1", heartbeats._text(), heartbeats._sum + 1)
    heartbeats.set_state(0, {"s": "done"})
    client.set("a0/state/1", heartbeats._text(), heartbeats._sum + 1)
    heartbeats._add(client, 1)
    leader.look()
    assert leader.states[2:] == [{"1/0": {"s": "done"}}]


# ---------------------------------------------------------------------------------------------------------------- parts


def test_evidence_is_encrypted_in_the_store_and_somebody_else_s_is_none() -> None:
    store, got = MemoryStore(), list[tuple[int, int, str, str]]()
    client = store.client(signer())
    client.set("a0/chunk/1/0/end", "a rank said S3CR3TVALUE")
    assert b"S3CR3T" not in store.values["a0/chunk/1/0/end"]
    # Somebody puts another piece of the same job in its place, and one that is too long.
    store.write("a0/chunk/1/0/hang-1", store.values["a0/chunk/1/0/end"])
    client.set("a0/chunk/1/0/hang-2", "x" * 101)
    reader = ChunkReader(store.client(signer()), "a0/", 100, lambda *part: got.append(part), lambda: False)
    for name in ("end", "hang-2"):
        reader.announce(1, 0, name)
    reader.close()
    reader._run()
    assert got == [(1, 0, "end", "a rank said S3CR3TVALUE")]
    assert store.client(signer()).find("a0/chunk/1/0/hang-1") is None


# -------------------------------------------------------------------------------------------------------------- meeting


def record(name: str, born: str) -> HostRecord:
    return HostRecord(
        name, (TaskRecord(1, "default", 7),), born=born, most=2, host_info="S3CR3TCARD", probe_endpoint="S3CR3TDOOR"
    )


def rdzv_of(name: str, timeout_s: float = DEADLINE_S) -> RendezvousRound:
    first = {"backend": "static", "node_rank": 0, "least": 2, "most": 2, "run_id": "job7", "timeout_s": timeout_s}
    return RendezvousRound(fit(JoinRequest, {**first, "probe_after_s": 30.0, "name": name, "tasks": 1}))


def gather_in_background(collection: HostRecordCollection) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def collect() -> None:
        try:
            results.append(collection.collect(rdzv_of("node1"), record("node1", "b1")))
        except JoinFailedError as error:
            results.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    return thread, results


def test_a_record_that_somebody_else_handed_in_is_deleted_and_the_true_one_taken() -> None:
    """Also where it was recorded in another job with the same secret."""
    store, older = MemoryStore(), MemoryStore()
    older.client(signer("an older job")).set("r0/host/1", encode_host_record(record("node2", "b0")))
    for forged in (encode_host_record(record("evil", "b9")).encode(), older.values["r0/host/1"], b"x"):
        store.write("r0/host/1", forged)
        leader = HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False)
        thread, results = gather_in_background(leader)
        until(lambda: "r0/host/1" not in store.values, "the forged record is deleted")
        assert store.client(signer()).create("r0/host/1", encode_host_record(record("node2", "b2"))) != FORGED
        thread.join()
        assert [one.name for one in results[0]] == ["node1", "node2"]


def test_a_host_takes_a_place_that_is_meant_for_it_alone() -> None:
    """One that somebody has recorded earlier, in a job of the same secret and number even, is not."""
    store = MemoryStore()
    leader = HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False)
    leader.publish_assignments([record("node1", "b1"), record("evil", "b9")])
    recorded = store.values["r0/assignment/1"]
    store.values.clear()
    store.write("r0/assignment/1", recorded)
    taken: list[Any] = []
    own = record("node2", "b2")
    thread = threading.Thread(
        target=lambda: taken.append(await_assignment(store.client(signer()), "r0/", 1, rdzv_of("node2"), own))
    )
    thread.start()
    gatherer, results = gather_in_background(leader)
    gatherer.join()
    leader.publish_assignments(results[0])
    thread.join()
    assert taken[0].label == "node2"
    assert all(b"S3CR3T" not in value for value in store.values.values())


def test_an_assignment_that_is_for_another_process_is_waited_over_for_no_longer_than_for_hosts() -> None:
    """The others have met with that process: it has come to the same place, as when two jobs share an address."""
    store = MemoryStore()
    leader = HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False)
    leader.publish_assignments([record("node1", "b1"), record("node2", "b9")])
    rdzv = rdzv_of("node2", timeout_s=0.2)
    with pytest.raises(JoinFailedError, match="has begun without node2: another process may have its place"):
        await_assignment(store.client(signer()), "r0/", 1, rdzv, record("node2", "b2"))


def test_why_a_meeting_fails_is_told_over_what_somebody_has_written() -> None:
    store = MemoryStore()
    store.write("r0/fail", '["it failed", "elsewhere"]')
    publish_failure(store.client(signer()), "r0/", JoinFailedError("node3 did not come", "look at it", kind="usage"))
    thread, results = gather_in_background(HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False))
    thread.join()
    assert (results[0].what, results[0].hint, results[0].is_usage) == ("node3 did not come", "look at it", True)


def test_a_count_that_is_no_number_ends_no_meeting() -> None:
    """Whoever writes one costs the hosts the moment in which they would have left."""
    store = MemoryStore()
    leader = HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False)
    leader.move()
    store.write("r0/left", "x")
    leader.wait_until_left(DEADLINE_S)
    with pytest.raises(MovedError):
        await_assignment(store.client(signer()), "r0/", 1, rdzv_of("node2"), record("node2", "b2"))


def test_a_host_with_another_secret_ends_the_waiting_for_it() -> None:
    """With words that say what to do, and not at the end of ten minutes."""
    store = MemoryStore()
    mismatch = SecretMismatch(1, "node1 has a job secret, and node2 has none")
    collection = HostRecordCollection(store.client(signer()), "r0/", 2, can_probe=False, mismatch=lambda: mismatch)
    thread, results = gather_in_background(collection)
    thread.join()
    assert results[0].what == mismatch.what
    assert results[0].is_usage
    assert "--secret-file" in results[0].hint


# -------------------------------------------------------------------------------------------------------------- secrecy


@pytest.mark.parametrize(
    ("first", "here", "kind"),
    [
        (None, None, ""),
        (SECRET, SECRET, ""),
        (SECRET, None, NONE_HERE),
        (None, SECRET, NONE_THERE),
        (JobSecret(b"another secret!!"), SECRET, OTHER),
    ],
)
def test_a_host_sees_whether_the_first_one_has_the_same_secret(
    first: JobSecret | None, here: JobSecret | None, kind: str
) -> None:
    store = MemoryStore()
    store.client().set("saferun/control", Secrecy(first).greet("saferun/control", '{"port": 7}'))
    stored = store.client().find_stored("saferun/control", 1.0)
    assert stored is not None
    assert Secrecy(here).mismatch("saferun/control", stored) == kind
    if kind:
        words = mismatch_message(kind, "node1", "node2")
        assert "node1" in words
        assert "node2" in words


def test_without_a_secret_the_first_host_says_what_it_said_before() -> None:
    assert NO_SECRET.greet("saferun/control", '{"port": 7}') == '{"port": 7}'
    assert NO_SECRET.signer("id", "job") is None


def test_a_note_of_another_secret_is_words_and_nothing_more() -> None:
    """Anybody can leave one: it is bounded, clean, and about this job."""
    note = encode_note(OTHER, 1, "node2\x1b[2J" + "x" * 999, "job").encode()
    found = decode_note(note, "node1", "job")
    assert found is not None
    assert found.host == 1
    assert found.what.isprintable()
    assert len(found.what) < 400
    for wrong in (None, b"", b"[" * 9999, b"7", b'["other", -1, "n", "job"]', b'["x", 1, "n", "job"]', b"[1, 2, 3, 4]"):
        assert decode_note(wrong, "node1", "job") is None
    assert decode_note(note, "node1", "another job") is None


def test_the_keys_of_two_jobs_are_different_whatever_they_are_called() -> None:
    """A name of a job may hold what separates it from the number."""
    secrecy = Secrecy(SECRET)
    signers = [secrecy.signer(*names) for names in (("a", "bc"), ("ab", "c"), ('a", "b', "c"), ("", "abc"))]
    stored = [one.protect("k", b"7") for one in signers if one is not None]
    assert len(set(stored)) == 4


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_store_that_wakes_nobody_on_compare_set_is_made_to(*, is_signed: bool) -> None:
    """As torch's plain server: what a host appended to the job's log was read by the others two minutes later.

    Which server the leader has does not follow from the torch of this host.
    """
    store = MemoryStore()
    store.wakes_waiting = False
    reader, writer = (store.client(signer() if is_signed else None) for _ in range(2))
    read: list[bytes | None] = []
    thread = threading.Thread(target=lambda: read.append(reader.get("a0/log/0", DEADLINE_S)))
    thread.start()
    time.sleep(0.2)
    assert writer.create("a0/log/0", "an entry") == b"an entry"
    thread.join(DEADLINE_S)
    assert read == [b"an entry"]
    # What another host has written before stays.
    assert writer.create("a0/log/0", "another entry") == b"an entry"
    assert reader.find("a0/log/0") == b"an entry"
