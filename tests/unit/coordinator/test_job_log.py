"""The job's log as a coordinator reads it: what other hosts have written there may be anything. The line is none."""

from __future__ import annotations

import json
import random
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from saferun.coordinator.evidence_chunks import ChunkReader
from saferun.coordinator.heartbeats import read_state
from saferun.coordinator.job_log import ANSWERS, QUESTIONS, JobLog
from saferun.coordinator.store_client import StoreBrokenError
from tests.unit.coordinator.fake_store import DEADLINE_S, Line, Store

if TYPE_CHECKING:
    from collections.abc import Callable

TROUBLE = {"kind": "abort", "host": 1, "task": 0, "label": "node1", "reason": "failure", "text": "rank 2 died"}
DECISION = {"kind": "decision", "host": 0, "next": "finish", "exit_code": 1, "wait_s": 0.0, "restarts": 0}


class Log:
    """A log with its entries."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.log = JobLog(None, "a0/", 1, lambda _, message: self.told.append(message))  # type: ignore[arg-type]

    def take(self, entry: object) -> None:
        content = entry if isinstance(entry, bytes) else json.dumps(entry).encode()
        self.log._take(self.log.count, content)


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (1, DECISION),  # written by somebody who says that the leader has
        (0, {**DECISION, "exit_code": float("inf")}),
        (0, {**DECISION, "wait_s": 10**400}),
        (0, {**DECISION, "restarts": "many"}),
        (1, {**TROUBLE, "signum": float("inf")}),
        (1, {**TROUBLE, "text": 7}),
        (1, {"kind": "hang", "verdict": {}, "n": 1}),
        (1, {"kind": "preflight", "ok": True}),
        (1, {"kind": ["decision"]}),
        (1, {"kind": "malformed"}),
        (10**400, TROUBLE),
        ("1", TROUBLE),
        (None, None),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_entry_that_makes_no_sense_stands_for_no_other_one(writer: object, message: object) -> None:
    """There is one trouble and one decision; what cannot be read is not it, or the true one would never be told."""
    log = Log()
    log.take({"h": writer, "n": 1, "m": message})
    assert [told["kind"] for told in log.told] == ["malformed"]
    assert not log.log.has("decision")
    assert not log.log.has("abort")
    log.take({"h": 1, "n": 1, "m": TROUBLE})
    log.take({"h": 0, "n": 1, "m": DECISION})
    assert [told["kind"] for told in log.told] == ["malformed", "abort", "decision"]
    assert log.log.has("decision")


def test_an_entry_that_cannot_be_passed_on_is_the_only_one_that_is_lost() -> None:
    """The thread that reads the log is needed for the decision."""
    log = Log()
    told: list[dict[str, Any]] = []

    def pass_on(_k: int, message: dict[str, Any]) -> None:
        if message["kind"] == "notice":
            raise OSError("no memory")
        told.append(message)

    log.log = JobLog(None, "a0/", 1, pass_on)  # type: ignore[arg-type]
    log.take({"h": 0, "n": 1, "m": {"kind": "notice"}})
    log.take({"h": 0, "n": 1, "m": DECISION})
    assert [(one["kind"], one.get("text")) for one in told] == [
        ("malformed", "OSError: no memory"),
        ("decision", None),
    ]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 60_000, b"7", b"[]", b"null", b"1e999", b"x" * 100_000])
def test_bytes_that_are_no_entry_are_passed_over(content: bytes) -> None:
    log = Log()
    log.take(content)
    log.take({"h": 1, "n": 1, "m": TROUBLE})
    assert [told["kind"] for told in log.told] == ["malformed", "abort"]


def test_the_first_of_what_is_told_once_counts() -> None:
    """A second trouble could turn a failure into a regrouping, and a second decision an end into a restart."""
    log = Log()
    log.take({"h": 1, "n": 1, "m": TROUBLE})
    log.take({"h": 2, "n": 1, "m": {**TROUBLE, "reason": "membership"}})
    log.take({"h": 0, "n": 1, "m": DECISION})
    log.take({"h": 0, "n": 2, "m": {**DECISION, "next": "restart"}})
    assert [told["kind"] for told in log.told] == ["abort", "malformed", "decision", "malformed"]


def test_a_message_is_marked_with_the_host_that_wrote_it() -> None:
    """Whatever it says of itself."""
    log = Log()
    log.take({"h": 2, "n": 1, "m": TROUBLE})
    assert log.told[0]["host"] == 2


@pytest.mark.parametrize(
    "field",
    [
        *({"tasks": {"1": {"s": "run"}}}, {"tasks": {"²": {}}}, {"tasks": {"0": 7}}, {"tasks": []}),
        *({"tasks": {"0" * 5000: {}}}, {"chunks": {"0": 1}}, {"chunks": [[float("inf"), "end"]]}),
        *({"stuck": {"a": "D"}}, {"stuck": {"5": "D"}}, {"stuck": {"0": 1}}, {"chunks": [[1, "end"]]}),
        *({"locations": {"a": "x"}}, {"locations": {"0": None}}, {"chunks": [[0, "e" * 9999]]}),
    ],
    ids=lambda field: str(field)[:30],
)
def test_a_state_names_only_tasks_that_its_host_has(field: dict[str, Any]) -> None:
    """The leader keeps what it is told of each, and looks up the one that waits for a file system by its number."""
    state = {"tasks": {"0": {"s": "run"}}, "chunks": [], "stuck": {}, "acked": False, "locations": {}}
    assert read_state(json.dumps(state).encode(), 1) is not None
    assert read_state(json.dumps({**state, **field}).encode(), 1) is None


def test_a_host_announces_so_many_parts_and_each_of_them_once() -> None:
    """What is announced waits in the leader's memory until it is read."""
    reader = ChunkReader(None, "a0/", 100, lambda *_: None, lambda: False)  # type: ignore[arg-type]
    for i in range(10_000):
        reader.announce(1, 0, f"hang-{i}")
        reader.announce(1, 0, "end")
    assert reader._waiting.qsize() == 1000


# ------------------------------------------------------------------------------------------------- between the hosts


class Hearing:
    """A log at work, and what it has told."""

    def __init__(self, store: Store, host: int, *, is_resumed: bool = False, line: Line | None = None) -> None:
        self.told: list[dict[str, Any]] = []
        self.changed = threading.Condition()
        self.line = line or Line(store)
        self.log = JobLog(self.line, "a0/", host, self._on_entry, is_resumed=is_resumed)  # type: ignore[arg-type]
        self.line.start = self.log.start
        self.log.start()

    def _on_entry(self, _k: int, message: dict[str, Any]) -> None:
        with self.changed:
            self.told.append(message)
            self.changed.notify_all()

    def until(self, *kinds: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: [m["kind"] for m in self.told] == [*kinds], DEADLINE_S), self.told


def test_what_somebody_else_writes_in_the_leader_s_name_is_ignored_by_the_leader() -> None:
    """It would take a forged decision for its own, and tell no other one."""
    store = Store()
    store.put("a0/log/0", json.dumps({"h": 0, "n": 1, "m": DECISION}))
    hearing = Hearing(store, 0)
    hearing.until("malformed")
    assert hearing.told[0]["text"] == "another process writes in this host's name"
    assert not hearing.log.has("decision")
    hearing.log.append(DECISION)
    hearing.until("malformed", "decision")
    store.put("a0/log/2", store.keys["a0/log/1"].decode())  # once more
    hearing.until("malformed", "decision", "malformed")
    hearing.line.close()


@pytest.mark.parametrize(
    ("kind", "kept"), [*((kind, 8) for kind in sorted(ANSWERS)), *((kind, 32) for kind in sorted(QUESTIONS))]
)
def test_what_users_ask_and_the_answers_do_not_fill_the_store(kind: str, kept: int) -> None:
    """A user may ask every second for weeks. Whoever reads an old entry late passes over it, and reads the newest."""
    store = Store()
    hearing = Hearing(store, 0)
    for number in range(100):
        hearing.log.append({"kind": kind, "n": number, "answer": {"text": "x" * 10_000}, "attempt": 0})
    hearing.log.append({"kind": "notice", "text": "all are there"})
    hearing.until(*[kind] * 100, "notice")
    late = Hearing(store, 1)
    late.until(*[kind] * kept, "notice")
    assert [message["n"] for message in late.told[:kept]] == [*range(100 - kept, 100)]
    assert sum(map(len, store.keys.values())) < kept * 10_100 + 100 * 20
    hearing.line.close()
    late.line.close()


def test_one_kind_of_question_does_not_empty_those_of_another() -> None:
    """Many users may watch the ranks, while one wants to see their stacks."""
    store = Store()
    hearing = Hearing(store, 0)
    hearing.log.append({"kind": "asked", "n": 1, "wanted": {"stacks": True}, "attempt": 0})
    for number in range(100):
        hearing.log.append({"kind": "status", "n": number, "attempt": 0})
    hearing.until("asked", *["status"] * 100)
    late = Hearing(store, 1)
    late.until("asked", *["status"] * 32)
    assert late.told[0]["wanted"] == {"stacks": True}
    hearing.line.close()
    late.line.close()


def test_a_coordinator_that_has_replaced_another_reads_no_old_questions_and_remembers_none_of_its_own() -> None:
    """It reads the log from the beginning, and asks for its users from then on."""
    store = Store()
    before = Hearing(store, 1)
    for number in range(100):
        before.log.append({"kind": "asked_elsewhere", "wanted": number, "attempt": 0})
    before.log.append(TROUBLE)
    before.until(*["asked_elsewhere"] * 100, "abort")
    before.line.close()
    successor = Hearing(store, 1, is_resumed=True)
    successor.until(*["asked_elsewhere"] * 32, "abort")
    for number in range(100):
        successor.log.append({"kind": "asked_elsewhere", "wanted": 100 + number, "attempt": 0})
    successor.until(*["asked_elsewhere"] * 32, "abort", *["asked_elsewhere"] * 100)
    assert len(successor.log._in_log) == 33
    successor.line.close()


def test_what_the_leader_says_and_gets_no_answer_to_is_said_once() -> None:
    """The connection broke when it had reached the store: nobody else has written it."""
    store = Store()
    hearing = Hearing(store, 0)
    asked = hearing.line.client.create

    def lose_answer(key: str, value: str) -> bytes:
        asked(key, value)
        hearing.until("notice")
        raise StoreBrokenError("broken")

    hearing.line.client.create = lose_answer
    hearing.log.append({"kind": "notice", "text": "why"})
    hearing.log.wait_written(DEADLINE_S)
    hearing.log.append(DECISION)
    hearing.until("notice", "decision")
    hearing.line.close()


@pytest.mark.parametrize("host", [0, 1, 2])
def test_a_trouble_counts_on_all_hosts_whoever_has_written_it(host: int) -> None:
    """Were it ignored by the one in whose name it stands, the others would wait for that one."""
    store = Store()
    store.put("a0/log/0", json.dumps({"h": 1, "n": 1, "m": TROUBLE}))
    hearing = Hearing(store, host)
    hearing.until("abort")
    hearing.line.close()


@pytest.mark.parametrize("host", [0, 1])
def test_whoever_writes_that_the_log_has_ended_silences_nobody(host: int) -> None:
    """Only the host that leads ends it; what comes after that is still heard and told."""
    store = Store()
    store.put("a0/log/0", '{"end": true}')
    hearing = Hearing(store, host)
    store.put("a0/log/1", json.dumps({"h": 2, "n": 1, "m": TROUBLE}))
    heard = ["malformed", "abort"] if host == 0 else ["abort"]
    hearing.until(*heard)
    if host == 0:
        hearing.log.append(DECISION)
        hearing.until(*heard, "decision")
    hearing.line.close()


def test_whoever_ends_the_log_waits_for_no_more() -> None:
    """Threads of an attempt that is over go home."""
    store = Store()
    before = threading.active_count()
    hearing = Hearing(store, 0)
    hearing.log.end()
    store.until("a0/log/0", '{"end": true}')
    give_up_at = time.monotonic() + DEADLINE_S
    while threading.active_count() > before:
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_of_a_channel_that_is_closed_no_thread_waits_for_something_to_write() -> None:
    """It kept the connections of each ended attempt open for a minute."""
    store = Store()
    before = set(threading.enumerate())
    hearing = Hearing(store, 1)
    (writer,) = [thread for thread in set(threading.enumerate()) - before if "_write" in thread.name]
    hearing.line.close()
    hearing.log.wake()
    writer.join(DEADLINE_S)
    assert not writer.is_alive()


def test_the_wait_for_an_entry_is_no_silence_of_an_hour() -> None:
    """A firewall or NAT between the hosts forgets a connection on which nothing is said, without a word."""
    store = Store()
    hearing = Hearing(store, 1)
    store.put("a0/log/0", json.dumps({"h": 2, "n": 1, "m": TROUBLE}))
    hearing.until("abort")
    assert max(store.waits) <= 120.0
    hearing.line.close()


def test_a_decision_of_too_many_words_is_told_without_them() -> None:
    """What follows matters more than why: nobody may wait for it in vain."""
    store = Store()
    hearing = Hearing(store, 0)
    hearing.log.append({**DECISION, "text": [], "x": "x" * 70_000})
    hearing.log.append({**DECISION, "text": ["\u65e5" * 1000] * 20})
    hearing.until("malformed", "decision")
    assert hearing.told[1]["text"] == []
    assert hearing.told[1]["exit_code"] == 1
    hearing.line.close()


@pytest.mark.parametrize("text", [{}, {"text": 7}, {"text": "some words"}])
def test_a_message_that_is_too_long_without_its_text_is_counted_and_not_lost_in_silence(text: dict[str, Any]) -> None:
    """It is none of other hosts: whoever sends it is told."""
    store = Store()
    hearing = Hearing(store, 0)
    hearing.log.append({"kind": "table", "table": "x" * 70_000, **text})
    hearing.log.append(DECISION)
    hearing.until("malformed", "decision")
    assert hearing.told[0]["text"] == "table of this host is longer than 64 KiB, so it is not sent"
    hearing.line.close()


def test_a_successor_does_not_repeat_what_the_process_before_it_has_written() -> None:
    """Its supervisor does not know what of the last messages has reached the store."""
    store = Store()
    before = Hearing(store, 1)
    told, untold = ({"kind": "request", "text": f"stop {n}", "at_once": False} for n in range(2))
    before.log.append(told)
    before.until("request")
    before.line.close()
    successor = Hearing(store, 1, is_resumed=True)
    successor.log.append(told, is_repeated=True)
    successor.log.append(untold, is_repeated=True)
    successor.log.append(told)
    successor.until("request", "request", "request")
    assert [message["text"] for message in successor.told] == ["stop 0", "stop 1", "stop 0"]
    successor.line.close()


def test_an_append_that_is_answered_after_its_connection_was_given_up_loses_no_other_entry() -> None:
    """The next connection has written it again by then; what follows it in the queue has not been written."""
    store = Store()
    before = set(threading.enumerate())
    hearing = Hearing(store, 1)
    (first_writer,) = (one for one in set(threading.enumerate()) - before if one.name.endswith("(_write)"))
    asked, has_asked, may_answer = hearing.line.client.create, threading.Event(), threading.Event()

    def answer_late(key: str, value: str) -> bytes:
        found: bytes = asked(key, value)
        has_asked.set()
        assert may_answer.wait(DEADLINE_S)
        return found

    hearing.line.client.create = answer_late
    hearing.log.append({"kind": "request", "text": "first", "at_once": False})
    assert has_asked.wait(DEADLINE_S)
    hearing.until("request")
    writes = threading.Semaphore(0)
    hearing.line.client = hearing.line.client.another()
    asked_again = hearing.line.client.create

    def answer_counted(key: str, value: str) -> bytes:
        assert writes.acquire(timeout=DEADLINE_S)
        return asked_again(key, value)  # type: ignore[no-any-return]

    hearing.line.client.create = answer_counted
    hearing.log.start()  # as a channel does that is made again
    hearing.log.wait_written(DEADLINE_S)
    for text in ("second", "third"):
        hearing.log.append({"kind": "request", "text": text, "at_once": False})
    may_answer.set()
    first_writer.join(DEADLINE_S)
    writes.release(2)
    hearing.until("request", "request", "request")
    assert [message["text"] for message in hearing.told] == ["first", "second", "third"]
    hearing.line.close()


def test_what_users_ask_for_takes_no_room_of_what_ends_the_attempt() -> None:
    """They may ask every second, for hours, while the leader stands still; and then a rank fails."""
    store = Store()
    line = Line(store)
    answers = threading.Event()
    asked = line.client.create

    def answer_late(key: str, value: str) -> bytes:
        assert answers.wait(DEADLINE_S)
        return asked(key, value)  # type: ignore[no-any-return]

    line.client.create = answer_late
    hearing = Hearing(store, 1, line=line)
    for _ in range(5000):
        hearing.log.append({"kind": "table_wanted"})
    hearing.log.append(TROUBLE)
    hearing.log.append({"kind": "request", "text": "saferunctl stop", "at_once": False})
    answers.set()
    hearing.until(*["table_wanted"] * 1000, "abort", "request")
    hearing.line.close()


def test_a_wait_whose_connection_is_gone_without_a_word_is_given_up() -> None:
    """Heartbeats have a connection of their own, and it works: this host would read nothing of the log any more."""
    store = Store()
    line = Line(store)
    is_waiting, never = threading.Event(), threading.Event()

    def get_nothing(*_: object, **__: object) -> None:
        is_waiting.set()
        never.wait(DEADLINE_S)

    line.watching.get = get_nothing
    hearing = Hearing(store, 1, line=line)
    assert is_waiting.wait(DEADLINE_S)
    store.put("a0/log/0", json.dumps({"h": 2, "n": 1, "m": TROUBLE}))
    for _ in range(64):
        hearing.log.tick(100.0, 10.0)  # this process was stopped itself: that is no time in which it could be answered
    assert line.repairs == 0
    hearing.log.tick(100.0, 10.0)
    hearing.until("abort")
    never.set()
    hearing.line.close()


class _UnsteadyLine(Line):
    """Its connections break before or after a store has done what it was asked for, as chance will have it."""

    def __init__(self, store: Store, chance: random.Random) -> None:
        super().__init__(store)
        self._chance = chance
        self._lock = threading.Lock()
        self._unsettle()

    def _unsettle(self) -> None:
        self.client.create = self._unsteady(self.client.create)
        self.watching.get = self._unsteady(self.watching.get)

    def _unsteady(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*arguments: Any, **more: Any) -> Any:
            kind = self._chance.random()
            if kind < 0.1:
                raise StoreBrokenError("broken before")
            found = call(*arguments, **more)
            if kind < 0.2:
                raise StoreBrokenError("broken after")
            if kind < 0.3:
                # Another part of the coordinator finds that the channel is broken, while this one is still answered.
                self.repair(self.client)
            return found

        return ask

    def repair(self, broken: object, **_: bool) -> None:
        with self._lock:
            if self.is_current(broken):
                self.client, self.watching = self.client.another(), self.watching.another()
                self._unsettle()
                self.start()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_breaks_every_host_reads_every_entry_once_and_in_the_same_order(seed: int) -> None:
    """An entry that is lost is a job that waits forever: the abort, or the decision."""
    store, chance = Store(), random.Random(seed)  # noqa: S311 - no secret
    logs, told = [], [list[str]() for _ in range(4)]
    changed = threading.Condition()

    def hear(host: int, message: dict[str, Any]) -> None:
        with changed:
            told[host].append(message["text"])
            changed.notify_all()

    for host in range(4):
        line = _UnsteadyLine(store, chance)
        log = JobLog(line, "a0/", host, lambda _, message, host=host: hear(host, message))  # type: ignore[arg-type, misc]
        line.start = log.start
        log.start()
        logs.append((line, log))
    written = [f"{host} {n}" for n in range(25) for host in range(4)]
    for text in written:
        logs[int(text[0])][1].append({"kind": "request", "text": text, "at_once": False})
    with changed:
        assert changed.wait_for(lambda: all(len(heard) == len(written) for heard in told), DEADLINE_S), told
    for line, _ in logs:
        line.close()
    assert sorted(told[0]) == sorted(written)
    assert all(heard == told[0] for heard in told)
    for host in range(4):
        assert [text for text in told[0] if text.startswith(f"{host} ")] == [f"{host} {n}" for n in range(25)]
