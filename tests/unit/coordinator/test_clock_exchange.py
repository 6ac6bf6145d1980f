"""How far clocks are apart is measured over the store, and known to within half of the delay."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.cluster.secret import JobSecret
from saferun.cluster.signed import Signer
from saferun.coordinator.clock_exchange import ClockExchange, ClockSample, ClockServer, better_of, sample_of
from tests.unit.coordinator.fake_store import DEADLINE_S, Line, Store
from tests.unit.coordinator.memory_store import MemoryStore

_DELAYS = st.floats(0.0, 10.0)


@given(st.floats(-1e9, 1e9), _DELAYS, _DELAYS, _DELAYS)
def test_the_error_is_never_more_than_half_of_the_delay(
    offset_s: float, there_s: float, held_s: float, back_s: float
) -> None:
    """However different the two ways are, and however long the leader holds the question."""
    seen_at = 100.0 + there_s + offset_s
    sample = sample_of(100.0, seen_at, seen_at + held_s, 100.0 + there_s + held_s + back_s)
    if sample is not None:  # rounding may make a delay of nothing less than nothing
        assert abs(sample.leader_s - offset_s) <= sample.error_s + 1e-5
        assert sample.error_s == pytest.approx((there_s + back_s) / 2, abs=1e-5)


@pytest.mark.parametrize(
    "times", [(0.0, 5.0, 4.0, 1.0), (1.0, 5.0, 5.0, 0.0), (0.0, 5.0, 7.0, 1.0), (0.0, 1e300, 1e300, 1.0)]
)
def test_times_that_cannot_be_give_no_sample(times: tuple[float, float, float, float]) -> None:
    """An answer before its question, or one that took longer than the whole exchange."""
    assert sample_of(*times) is None


def test_the_most_exact_sample_counts_until_it_is_old() -> None:
    """Clocks drift apart, and are set."""
    exact = ClockSample(5.0, 0.0001, 100.0)
    assert better_of(None, exact) is exact
    assert better_of(exact, worse := ClockSample(5.001, 0.002, 110.0)) is exact
    assert better_of(worse, exact) is exact
    assert better_of(exact, later := ClockSample(5.001, 0.002, 200.0)) is later
    assert better_of(exact, after_a_step := ClockSample(6.0, 0.002, 110.0)) is after_a_step


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def server(store: Store) -> Iterator[ClockServer]:
    server = ClockServer(Line(store).client, "a0/")
    server.start()
    yield server
    server.close()
    store.put("a0/clock", "")  # nobody has to wait for the server's next look


class _Samples:
    """What a host has found out."""

    def __init__(self) -> None:
        self.samples: list[ClockSample] = []
        self._more = threading.Event()

    def add(self, sample: ClockSample) -> None:
        self.samples.append(sample)
        self._more.set()

    def wait(self) -> ClockSample:
        assert self._more.wait(DEADLINE_S)
        return self.samples[-1]


def _ask(channel: Any, host: int, hosts: int = 2) -> _Samples:
    found = _Samples()
    ClockExchange(channel, "a0/", host, hosts, found.add).start()
    return found


@pytest.mark.usefixtures("server")
def test_hosts_learn_the_leaders_time(store: Store) -> None:
    """All of them, though the leader has one question at a time; and nothing stays in the store."""
    lines = [Line(store) for _ in range(5)]
    for found in [_ask(line, host) for host, line in enumerate(lines, 1)]:
        sample = found.wait()
        assert abs(sample.leader_s - (time.time() - time.monotonic())) <= sample.error_s + 0.01
    for line in lines:
        line.close()
    with store.changed:
        assert store.changed.wait_for(lambda: set(store.keys) <= {"a0/clock"}, DEADLINE_S)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("planted", ["", "no JSON", "[1]", '["x", "y"]', '[1, "zz"]', "9" * 4000, '[-1, "00"]'])
def test_what_is_no_question_is_taken_away(store: Store, planted: str) -> None:
    """Else it would be in the way of all others."""
    store.put("a0/clock", planted)
    line = Line(store)
    _ask(line, 1).wait()
    line.close()


def test_without_an_answer_nothing_is_known_and_nothing_waits(store: Store) -> None:
    """The leader may be too busy, or its thread may have ended: the other messages of the host go on."""
    line = Line(store)
    found = _ask(line, 1)
    with store.changed:
        assert store.changed.wait_for(lambda: len(store.waits) >= 1, DEADLINE_S)
    assert max(store.waits) <= 0.1
    line.close()
    assert found.samples == []


def test_a_forged_answer_is_none() -> None:
    """Who has no secret can neither answer nor ask."""
    memory = MemoryStore()
    signer = Signer(JobSecret(bytes(32)), "job")
    server = ClockServer(memory.client(signer), "a0/")
    memory.write("a0/clock", json.dumps([1, "00"]))
    server.start()
    line = Line(Store())
    line.client = memory.client(signer)
    sample = _ask(line, 1).wait()
    assert abs(sample.leader_s - (time.time() - time.monotonic())) <= sample.error_s + 0.01
    line.close()
    server.close()
    memory.write("a0/clock", "")


def test_a_broken_store_ends_the_questions(store: Store) -> None:
    """The heartbeats use the same connection, and find out why."""
    store.breaks = 1
    line = Line(store)
    found = _ask(line, 1)
    with store.changed:
        assert store.changed.wait_for(lambda: store.breaks == 0, DEADLINE_S)
    line.close()
    assert line.repairs == 0
    assert found.samples == []


def test_answers_that_come_too_late_do_not_pile_up_in_the_store() -> None:
    """Between distant hosts each of them is late, for as long as the job lasts."""
    store = MemoryStore()
    exchange = ClockExchange(cast("Any", SimpleNamespace(client=store.client())), "a0/", 1, 2, lambda _: None)
    server = ClockServer(store.client(), "a0/")
    for _ in range(3):
        exchange._ask(store.client())
        server._answer(time.time(), time.monotonic())
    assert len(store.values) == 1
