"""A host's line to the control store: where it leads when the way that it had is cut. Nobody is connected to."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest

from saferun.cluster.silence import CUT, ENDED, FROZEN, GONE, REACHED, UNREACHABLE
from saferun.coordinator import control_channel as channel_module
from saferun.coordinator.control_channel import ControlChannel
from saferun.coordinator.liveness_probe import SilenceReason
from saferun.coordinator.store_client import StoreBrokenError, StoreClient

DEADLINE_S = 30.0
TIMEOUT_S = 6.0


class Client:
    """Stands in for a connection."""

    def __init__(self, address: str) -> None:
        self.address = (address, 4711)
        self.answers = 0
        self.store_class = Client
        self.signer = None

    def another(self) -> Client:
        return Client(self.address[0])


class World:
    """A line, what is found at its other end, and what it says of that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *findings: SilenceReason) -> None:
        self.findings = list(findings)
        self.asked: list[list[str]] = []
        self.said: list[tuple[str, Any]] = []
        self.changed = threading.Condition()
        self.broken: set[str] = set()
        monkeypatch.setattr(channel_module, "probe_host", self._knock)
        self.ended: SilenceReason | None = None
        monkeypatch.setattr(channel_module, "how_it_ended", lambda *_: self.ended)
        monkeypatch.setattr(channel_module, "_LEAST_SEARCH_S", 0.01)
        monkeypatch.setattr(channel_module, "_SEARCH_SHARE", 0.0)
        monkeypatch.setattr(StoreClient, "connect", self._connect)
        self.line = ControlChannel(
            Client("node1"),  # type: ignore[arg-type]
            "job",
            "key",
            "node1",
            ["10.0.0.1", "10.1.0.1"],
            TIMEOUT_S,
            start=lambda: self._write("started", self.line.client.address[0]),
            on_lost=lambda finding, again: self._write("lost", (finding.why, again)),
            on_late=lambda: self._write("late", None),
            on_searching=lambda finding: self._write("searching", finding.why),
            on_moved=lambda was, now: self._write("moved", (was, now)),
        )
        self.line.open()

    def _knock(self, _name: str, addresses: list[str], _port: int, **_: Any) -> SilenceReason:
        self.asked.append(addresses)
        return self.findings.pop(0) if len(self.findings) > 1 else self.findings[0]

    def _connect(self, _store_class: object, address: tuple[str, int], **_: object) -> Client:
        if address[0] in self.broken:
            raise StoreBrokenError("no")
        return Client(address[0])

    def _write(self, word: str, value: Any) -> None:
        with self.changed:
            self.said.append((word, value))
            self.changed.notify_all()

    def wait_written(self, *words: str) -> None:
        """Wait until this and nothing else has been said."""
        with self.changed:
            assert self.changed.wait_for(lambda: [word for word, _ in self.said] == list(words), DEADLINE_S), self.said

    def repair(self, **how: bool) -> None:
        self.line.repair(self.line.client, **how)


def test_where_the_store_answers_at_another_address_the_line_leads_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the first host has published are tried, and the one where the hosts met."""
    world = World(monkeypatch, SilenceReason(CUT, "text", "10.1.0.1"))
    world.repair(is_silent=True)
    assert world.said == [("started", "node1"), ("started", "10.1.0.1"), ("moved", ("node1", "10.1.0.1"))]
    assert world.asked == [["node1", "10.0.0.1", "10.1.0.1"]]
    assert world.line.watching.address[0] == "10.1.0.1"


def test_a_connection_that_was_forgotten_is_made_again_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way works."""
    world = World(monkeypatch, SilenceReason(REACHED, "text", "node1"))
    world.repair()
    assert world.said == [("started", "node1"), ("started", "node1")]


def test_a_store_that_does_not_answer_is_looked_after_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, and only another way is taken then; what else is found is left for the end of the time."""
    world = World(monkeypatch, SilenceReason(GONE, "text"), SilenceReason(CUT, "text", "10.1.0.1"))
    for _ in range(3):
        world.line.tick(1.0)
    world.wait_written("started", "late")
    while world.line._repairing:
        pass
    world.line.client.answers += 1
    for _ in range(3):
        world.line.tick(1.0)
    world.wait_written("started", "late", "late", "started", "moved")


@pytest.mark.parametrize(("why", "is_silent", "again"), [(GONE, True, False), (FROZEN, False, True)])
def test_what_is_certain_is_the_end_of_the_line(
    monkeypatch: pytest.MonkeyPatch, why: str, is_silent: bool, again: bool
) -> None:
    """Its saferun is gone; or the store is, and somebody holds its port."""
    world = World(monkeypatch, SilenceReason(why, "text"))
    world.repair(is_silent=is_silent)
    assert world.said[1:] == [("lost", (why, again))]
    assert world.line.is_closed


def test_a_store_that_says_nothing_is_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its coordinator may have been stopped, and its ranks train on."""
    world = World(monkeypatch, SilenceReason(FROZEN, "text"), SilenceReason(REACHED, "text", "node1"))
    world.repair(is_silent=True)
    assert world.said[1:] == [("searching", FROZEN), ("started", "node1"), ("moved", ("node1", "node1"))]


def test_where_nothing_answers_it_is_searched_for_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found meanwhile is reported when it changes, and is no end."""
    far = SilenceReason(UNREACHABLE, "text")
    world = World(monkeypatch, far, far, SilenceReason(GONE, "text"), far, SilenceReason(REACHED, "text", "node1"))
    world.repair(is_silent=True)
    assert world.said[1:] == [
        ("searching", UNREACHABLE),
        ("searching", GONE),
        ("searching", UNREACHABLE),
        ("started", "node1"),
        ("moved", ("node1", "node1")),
    ]
    assert not world.line.is_closed


def test_a_search_ends_with_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody wants the line any more."""
    world = World(monkeypatch, SilenceReason(UNREACHABLE, "text"))
    thread = threading.Thread(target=world.repair, daemon=True)
    thread.start()
    world.wait_written("started", "searching")
    world.line.close()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_a_way_that_answers_and_cannot_be_used_is_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is searched for further."""
    world = World(monkeypatch, SilenceReason(CUT, "text", "10.1.0.1"), SilenceReason(CUT, "text", "10.0.0.1"))
    world.broken = {"10.1.0.1"}
    world.repair(is_silent=True)
    assert [word for word, _ in world.said] == ["started", "searching", "started", "moved"]
    assert world.line.client.address[0] == "10.0.0.1"


def test_a_connection_that_breaks_while_somebody_only_looks_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever used it has ended: without another one this host would hear of nothing any more."""
    world = World(monkeypatch, SilenceReason(REACHED, "text", "node1"))
    looked: list[str] = []

    def ask(_broken: object) -> SilenceReason:
        if not looked:
            looked.append("early")
            world.line.repair(world.line.watching)  # as the thread does that waits in it
        return SilenceReason(REACHED, "text", "node1")

    monkeypatch.setattr(world.line, "_ask_leader", ask)
    world.repair(is_silent=True, is_early=True)
    assert world.said == [("started", "node1"), ("started", "node1")]


def test_a_connection_that_breaks_as_soon_as_it_is_made_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at once, and each time."""
    monkeypatch.setattr(channel_module, "_LEAST_PAUSE_S", 0.01)
    world = World(monkeypatch, SilenceReason(REACHED, "text", "node1"))
    say, times = world._write, 3

    def break_again(word: str, value: Any) -> None:
        say(word, value)
        if len(world.said) <= times:
            world.line.repair(world.line.client)  # which the one that makes it does not wait for

    monkeypatch.setattr(world, "_write", break_again)
    world.repair()
    assert world.said == [("started", "node1")] * (times + 1)


def test_where_no_thread_can_be_started_the_store_is_looked_after_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The coordinator lives on: a limit of threads that is reached for a moment ends no job."""
    world = World(monkeypatch, SilenceReason(CUT, "text", "10.1.0.1"))
    start = threading.Thread.start
    full = [True, True]

    def starts(thread: threading.Thread) -> None:
        if full and full.pop():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starts)
    for _ in range(5):
        world.line.tick(1.0)
    world.wait_written("started", "late", "late", "late", "started", "moved")


def test_where_no_thread_can_be_started_for_those_who_use_the_line_it_is_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it is opened and when it breaks: a host without heartbeats and without the log would be a mute one."""
    refusals = [True, True, False, True, True]
    write = World._write

    def refuse(world: World, word: str, value: Any) -> None:
        write(world, word, value)
        if word == "started" and refusals and refusals.pop(0):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(World, "_write", refuse)
    monkeypatch.setattr(channel_module, "_LEAST_PAUSE_S", 0.0)
    world = World(monkeypatch, SilenceReason(REACHED, "text", "node1"))
    world.wait_written("started", "started")
    wait_until_idle(world)
    world.line.tick(0.1)
    world.wait_written(*3 * ["started"])
    wait_until_idle(world)
    world.line.tick(0.1)
    world.repair()
    world.wait_written(*4 * ["started"])
    for count in (5, 6):
        wait_until_idle(world)
        world.line.open_again()
        world.wait_written(*count * ["started"])
    wait_until_idle(world)
    world.line.open_again()
    world.wait_written(*6 * ["started"])


def wait_until_idle(world: World) -> None:
    """Wait until nobody repairs the line."""
    while world.line._repairing:
        pass


def test_where_not_even_a_thread_for_that_can_be_started_a_tick_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is opened by a thread whose end nobody sees."""
    start, is_full = threading.Thread.start, True
    write = World._write

    def refuse(thread: threading.Thread) -> None:
        if is_full:
            raise RuntimeError("can't start new thread")
        start(thread)

    def fail(world: World, word: str, value: Any) -> None:
        if is_full:
            raise RuntimeError("can't start new thread")
        write(world, word, value)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(World, "_write", fail)
    world = World(monkeypatch, SilenceReason(REACHED, "text", "node1"))
    world.line.tick(0.1)
    assert world.said == []
    is_full = False
    world.line.tick(0.1)
    world.wait_written("started")


def test_a_host_that_says_how_its_coordinator_ended_is_not_asked_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has to be guessed, nor waited for; and the process that says so may start another one."""
    world = World(monkeypatch, SilenceReason(GONE, "gone"))
    world.ended = SilenceReason(ENDED, "the coordinator of node1 ended (killed by SIGKILL)")
    world.repair()
    world.wait_written("started", "lost")
    assert world.said[-1] == ("lost", (ENDED, True))
    assert world.asked == []


def test_a_store_that_is_only_silent_is_not_asked_how_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be waited for twice."""
    world = World(monkeypatch, SilenceReason(GONE, "gone"))
    world.ended = SilenceReason(ENDED, "ended")
    world.repair(is_silent=True)
    world.wait_written("started", "lost")
    assert world.said[-1] == ("lost", (GONE, False))


def test_a_store_that_stands_still_for_hours_has_few_questions_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread and a connection until it runs again, and the job trains on meanwhile."""
    world = World(monkeypatch, SilenceReason(FROZEN, "text"))
    goes_on, asked = threading.Event(), []
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    class Frozen(Client):
        def get(self, _key: str, _timeout_s: float, **_: Any) -> bytes:
            asked.append(self.address[0])
            assert goes_on.wait(DEADLINE_S)
            return b"job"

    monkeypatch.setattr(StoreClient, "connect", lambda _class, address, **_: Frozen(address[0]))
    monkeypatch.setattr(channel_module, "probe_host", lambda *_, answers, **__: answers)
    ask: Any = world.line._ask_leader(world.line.client)
    for _ in range(20):
        threading.Thread(target=lambda: answers.put(ask("node1")), daemon=True).start()
    assert not any(answers.get(timeout=DEADLINE_S) for _ in range(16))
    goes_on.set()
    assert all(answers.get(timeout=DEADLINE_S) for _ in range(4))
    assert asked == ["node1"] * 4
    assert ask("node1")
