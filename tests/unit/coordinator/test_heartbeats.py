"""Heartbeats and their monitor, in a store that others write to as well."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from saferun.coordinator import heartbeats as heartbeats_module
from saferun.coordinator import stuck_processes
from saferun.coordinator.evidence_chunks import ChunkReader, chunk_key
from saferun.coordinator.heartbeats import CHANGE, HeartbeatMonitor, Heartbeats
from saferun.coordinator.store_client import StoreBrokenError
from tests.unit.coordinator.fake_store import DEADLINE_S, Client, Line, Store

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 0.2
# Whoever waits so long does not come back before the test is over.
FOR_EVER_S = 100_000.0
DONE = {"tasks": {"0": {"s": "done"}}, "chunks": [], "stuck": {}, "acked": False, "locations": {}}


class Leader:
    """What the monitor of a host that leads says."""

    def __init__(self, store: Store, hosts: int = 2, timeout_s: float = TIMEOUT_S) -> None:
        self.changed = threading.Condition()
        self.states: dict[str, Any] = {}
        self.silent: list[int] = []
        for host in range(1, hosts):
            store.put(f"a0/heartbeat/{host}", "0")
            store.put(f"a0/state/{host}", "")
        self.monitor = HeartbeatMonitor(
            Client(store),  # type: ignore[arg-type]
            "a0/",
            [1] * hosts,
            timeout_s,
            on_states=lambda changed: self._note(lambda: self.states.update(changed)),
            on_chunk=lambda *_: None,
            on_timeout=lambda host: self._note(lambda: self.silent.append(host)),
            on_late=lambda: None,
            on_return=lambda _: None,
            on_stuck=lambda *_: None,
        )

    def _note(self, note: Any) -> None:
        with self.changed:
            note()
            self.changed.notify_all()

    def until(self, is_so: Any, every_s: float = DEADLINE_S) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        with self.changed:
            while not is_so():
                assert time.monotonic() < give_up_at, (self.states, self.silent)
                self.changed.wait(every_s)


@contextmanager
def leading(store: Store, hosts: int = 2, timeout_s: float = TIMEOUT_S) -> Iterator[Leader]:
    """A monitor at work."""
    leader = Leader(store, hosts, timeout_s)
    leader.monitor.start()
    try:
        yield leader
    finally:
        leader.monitor.close()


@contextmanager
def beating(store: Store, host: int = 1) -> Iterator[tuple[Heartbeats, Line]]:
    """The heartbeats of a host, while they go on."""
    line = Line(store)
    heartbeats = Heartbeats(line, "a0/", host, 0.01, {})  # type: ignore[arg-type]
    line.start = heartbeats.start
    heartbeats.start()
    try:
        yield heartbeats, line
    finally:
        line.close()


def test_the_leader_learns_states_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next look, which never comes here: the end of a job waits for them."""
    monkeypatch.setattr(heartbeats_module, "_READ_EVERY_S", FOR_EVER_S)
    store = Store()
    with leading(store, timeout_s=6 * FOR_EVER_S) as leader, beating(store) as (heartbeats, _):
        for state in ({"s": "quiet"}, {"s": "run"}, {"s": "done"}):
            heartbeats.set_state(0, state)
            leader.until(lambda state=state: leader.states.get("1/0") == state)


def test_of_a_state_that_is_too_long_the_leader_learns_how_the_ranks_do() -> None:
    """A host whose end got lost with what is only for people would count as at work."""
    store = Store()
    long: dict[str, Any] = {"waits": {"n": 1, "rows": "x" * 3000}, "beside": {"n": 1, "lines": "x" * 3000}}
    with leading(store) as leader, beating(store) as (heartbeats, _):
        heartbeats.set_state(0, {"s": "done", **long, "route": "by eth0"})
        leader.until(lambda: "1/0" in leader.states)
        assert leader.states["1/0"] == {"s": "done", "beside": long["beside"], "route": "by eth0"}
        heartbeats.set_state(0, {"s": "run", "x": "x" * 5000})
        heartbeats.set_state(0, {"s": "left_over", **long, "route": "x" * 3000})
        leader.until(lambda: leader.states["1/0"]["s"] != "done")
        assert leader.states["1/0"] == {"s": "left_over", "route": "x" * 3000}


def test_a_lost_host_is_not_waited_for() -> None:
    """It will not take in anything."""
    leader = Leader(Store())
    leader.monitor.lose(1)
    leader.monitor.wait_acked(FOR_EVER_S)


def test_a_key_that_somebody_deletes_makes_the_leader_blind_to_no_host() -> None:
    """All hosts are read in one go: one that is dead writes its own no more."""
    store = Store()
    with leading(store, 3) as leader, beating(store, 2) as (heartbeats, _):
        store.take_away("a0/heartbeat/1")
        heartbeats.set_state(0, {"s": "done"})
        leader.until(lambda: 1 in leader.silent and leader.states.get("2/0") == {"s": "done"})


def test_a_change_that_could_not_be_read_is_read_later() -> None:
    """Else the host that leads would wait forever for a host whose ranks are done."""
    store = Store()
    with leading(store) as leader:
        store.take_away("a0/state/1")
        store.put("a0/heartbeat/1", str(CHANGE + 1))
        leader.until(lambda: leader.silent)
        store.put("a0/state/1", json.dumps(DONE))
        store.put("a0/heartbeat/1", str(CHANGE + 2))
        leader.until(lambda: leader.states == {"1/0": {"s": "done"}})


def test_a_beat_that_somebody_has_overwritten_goes_on() -> None:
    """Torch's store closes the connection of whoever adds to what is no number."""
    store = Store()
    with beating(store) as (_, line):
        with store.changed:
            assert store.changed.wait_for(lambda: int(store.keys.get("a0/heartbeat/1", b"0")) > CHANGE, DEADLINE_S)
            before = int(store.keys["a0/heartbeat/1"])
        store.put("a0/heartbeat/1", "abc")
        with store.changed:
            assert store.changed.wait_for(
                lambda: store.keys["a0/heartbeat/1"].isdigit() and int(store.keys["a0/heartbeat/1"]) > before,
                DEADLINE_S,
            )
        assert line.repairs == 1


def test_a_state_that_somebody_has_overwritten_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job would wait forever for a host that seems to run."""
    monkeypatch.setattr(heartbeats_module, "_REWRITE_EVERY_S", 0.05)
    store = Store()
    with leading(store) as leader, beating(store) as (heartbeats, _):
        heartbeats.set_state(0, {"s": "done"})
        leader.until(lambda: leader.states.get("1/0") == {"s": "done"})

        def is_overwritten() -> bool:
            # Again and again: it may be written before the leader has read it.
            store.put("a0/state/1", json.dumps({**DONE, "tasks": {"0": {"s": "run"}}}))
            store.put("a0/heartbeat/1", "7")
            return leader.states.get("1/0") == {"s": "run"}

        leader.until(is_overwritten, every_s=0.001)
        leader.until(lambda: leader.states.get("1/0") == {"s": "done"})


def test_a_host_is_asked_after_later_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monitor lives on."""
    store = Store()
    leader = Leader(store)
    full = [True, True]

    def ask(host: int) -> None:
        if full:
            full.pop()
            raise RuntimeError("can't start new thread")
        leader._note(lambda: leader.silent.append(host))

    monkeypatch.setattr(leader.monitor, "_on_timeout", ask)
    leader.monitor.start()
    leader.until(lambda: leader.silent == [1])
    leader.monitor.close()


# ---------------------------------------------------------------------------------------------------------------- parts


@contextmanager
def reading(store: Store) -> Iterator[tuple[ChunkReader, list[tuple[Any, ...]], threading.Condition]]:
    """The leader's reading of parts."""
    read: list[tuple[Any, ...]] = []
    changed = threading.Condition()

    def deliver(*part: Any) -> None:
        with changed:
            read.append(part)
            changed.notify_all()

    reader = ChunkReader(Client(store), "a0/", 100, deliver, lambda: False)  # type: ignore[arg-type]
    reader.start()
    try:
        yield reader, read, changed
    finally:
        reader.close()


def test_a_part_that_is_not_there_holds_up_no_other() -> None:
    """Whoever announces a thousand of them would have the evidence of all other hosts come too late."""
    store = Store()
    store.put(chunk_key("a0/", 2, 0, "end"), "seen")
    with reading(store) as (reader, read, changed):
        for i in range(1000):
            reader.announce(1, 0, f"hang-{i}")
        reader.announce(2, 0, "end")
        with changed:
            assert changed.wait_for(lambda: read, DEADLINE_S)
    assert read == [(2, 0, "end", "seen")]
    assert store.waits == []


@pytest.mark.parametrize("breaks", [0, 1])
def test_parts_of_many_hosts_are_read_at_a_time_and_each_once(breaks: int) -> None:
    """Also those that wait while a connection breaks, and none that is longer than it may be."""
    store = Store()
    for host in range(1, 200):
        store.put(chunk_key("a0/", host, 0, "end"), "x" * 101 if host == 7 else f"of {host}")
    with reading(store) as (reader, read, changed):
        store.breaks = breaks
        for host in range(1, 200):
            reader.announce(host, 0, "end")
        with changed:
            assert changed.wait_for(lambda: len(read) == 198, DEADLINE_S)
    assert read == [(host, 0, "end", f"of {host}") for host in range(1, 200) if host != 7]
    assert store.keys == {}


def test_a_part_is_kept_where_the_connection_breaks_before_it_is_deleted() -> None:
    """It is read, and of no use in the store: where the answer to the deletion is lost, nothing else is."""
    store = Store()
    store.put(chunk_key("a0/", 1, 0, "end"), "seen")

    class Breaking(Client):
        def delete(self, key: str) -> bool:
            super().delete(key)
            self.is_broken = True
            raise StoreBrokenError("reset by peer")

    read: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
    reader = ChunkReader(Breaking(store), "a0/", 100, lambda *part: read.put(part), lambda: False)  # type: ignore[arg-type]
    reader.start()
    reader.announce(1, 0, "end")
    assert read.get(timeout=DEADLINE_S) == (1, 0, "end", "seen")
    reader.close()
    assert store.keys == {}


def test_what_users_ask_for_leaves_room_for_the_evidence_of_a_failure() -> None:
    """A thousand rounds of stacks are one name in a host's state, and one that the leader remembers."""
    store = Store()
    with leading(store) as leader, beating(store) as (heartbeats, _):
        heartbeats.add_chunk(0, "hang-1")
        for number in range(1500):
            heartbeats.add_chunk(0, f"asked-{number}")
        heartbeats.set_state(0, {"s": "done"})
        leader.until(lambda: leader.states.get("1/0") == {"s": "done"})
        names = [name for _, name in json.loads(store.keys["a0/state/1"])["chunks"]]
        assert names == ["hang-1", "asked-1499"]
    store.put(chunk_key("a0/", 1, 0, "end"), "seen")
    with reading(store) as (reader, read, changed):
        for number in range(1500):
            reader.announce(1, 0, f"asked-{number}")
        reader.announce(1, 0, "end")
        with changed:
            assert changed.wait_for(lambda: read, DEADLINE_S)
    assert read == [(1, 0, "end", "seen")]


def test_the_evidence_of_a_failure_is_read_after_thousands_of_other_chunks() -> None:
    """A job may report hangs for weeks before it fails. What has been read is forgotten, oldest first."""
    store = Store()
    names = [*(f"hang-{i}" for i in range(2500)), "end"]
    with reading(store) as (reader, read, changed):
        for count, name in enumerate(names, 1):
            store.put(chunk_key("a0/", 1, 0, name), "seen")
            reader.announce(1, 0, name)
            with changed:
                assert changed.wait_for(lambda count=count: len(read) == count, DEADLINE_S), (name, len(read))  # type: ignore[misc]
            reader.announce(1, 0, name)
        assert reader._waiting.qsize() == 0
        assert len(reader._names[1, 0]) <= 1000
    assert [part[2] for part in read] == names
    assert not [key for key in store.keys if "chunk" in key]


def test_a_connection_that_breaks_is_not_the_end_of_reading() -> None:
    """What lies in the store is read by another one."""
    store = Store()
    store.breaks = 1
    for name in ("hang-1", "end"):
        store.put(chunk_key("a0/", 1, 0, name), name)
    with reading(store) as (reader, read, changed):
        for name in ("hang-1", "end"):
            reader.announce(1, 0, name)
        with changed:
            assert changed.wait_for(lambda: len(read) == 2, DEADLINE_S), read
    assert [part[2] for part in read] == ["hang-1", "end"]


def test_a_supervisor_that_sleeps_shortly_again_and_again_does_not_wait_for_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow disk and a busy machine show state D in one sample after the other; only one long sleep is reported."""
    samples = iter([("D", 5), ("D", 5), ("D", 6), ("D", 7), ("D", 7), ("S", 8), ("D", 8), ("D", 8), ("T", 9)])
    found = []
    seen_in_d: dict[int, int] = {}
    for state, runs in samples:
        monkeypatch.setattr(stuck_processes, "_state_of", lambda _pid, state=state: state)
        monkeypatch.setattr(stuck_processes, "_runs_of", lambda _pid, runs=runs: runs)
        found.append(stuck_processes.stuck_processes({0: 1}, seen_in_d).get("0", ""))
    assert found == ["", "D", "", "", "D", "", "", "D", "T"]


def test_how_often_a_process_ran_is_read() -> None:
    """Else every sleep would be one long one."""
    assert stuck_processes._runs_of(os.getpid()) > 0
    assert stuck_processes._runs_of(-1) == 0
