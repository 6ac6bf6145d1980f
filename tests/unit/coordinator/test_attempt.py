"""The leader's side of an attempt: what hears the other hosts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import attempt
from saferun.coordinator.assignments import HostRecord, TaskRecord
from saferun.coordinator.attempt import CoordinatorAttempt, heartbeat_interval_s
from saferun.coordinator.job_log import ANSWERS, QUESTIONS
from saferun.coordinator.store_client import StoreBrokenError, StoreClient

ASSIGNMENT: dict[str, Any] = {
    "attempt": 0,
    "leader_name": "node1",
    "leader_addresses": ("10.0.0.1",),
    "members": 2,
    "chunk_limit_bytes": 1,
    "probe_after_s": 24.0,
}


class Client:
    """A connection to a store to which another one cannot be had, so many times."""

    address = ("10.0.0.1", 29500)
    store_class = StoreClient

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals

    def another(self) -> Client:
        """Another connection."""
        if self.refusals:
            self.refusals -= 1
            raise StoreBrokenError("Too many open files")
        return Client(0)


class Part:
    """Stands in for what reads heartbeats, chunks and clocks."""

    started: list[object]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.announce = None

    def start(self) -> None:
        """Counts."""
        self.started.append(self)


class Thread:
    """Runs at once."""

    def __init__(self, target: Any, *, daemon: bool) -> None:
        assert daemon
        self.start = target


@pytest.mark.parametrize("refusals", [0, 1, 2, 5])
def test_a_leader_that_cannot_connect_to_its_own_store_tries_again(
    monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Else it would hear no other host in this attempt, and no host could end."""
    Part.started = []
    for name in ("ChunkReader", "HeartbeatMonitor", "ClockServer"):
        monkeypatch.setattr(attempt, name, type(name, (Part,), {}))
    monkeypatch.setattr(attempt, "threading", SimpleNamespace(Thread=Thread, Lock=threading.Lock))
    assignment = SimpleNamespace(**ASSIGNMENT, host=0)
    client = Client(refusals)
    records = [HostRecord(name, (TaskRecord(1, "default", 7),)) for name in ("node1", "node2")]
    result = SimpleNamespace(
        assignment=assignment, prefix="a0/", client=client, records=records, labels=["node1", "node2"], job="j"
    )
    rdzv = SimpleNamespace(request=SimpleNamespace(probe_after_s=24.0))
    leader = CoordinatorAttempt(result, rdzv, records[0], SimpleNamespace())  # type: ignore[arg-type]
    leader._channel = SimpleNamespace(open=lambda: None, open_again=lambda: None)  # type: ignore[assignment]
    leader._own_supervisor = SimpleNamespace(tick=lambda _: "")  # type: ignore[assignment]
    leader.open()
    for _ in range(refusals):
        assert Part.started == []
        leader.tick(1.0)
    assert [type(part).__name__ for part in Part.started] == ["ChunkReader", "HeartbeatMonitor", "ClockServer"]
    leader.tick(1.0)
    assert len(Part.started) == 3


@pytest.mark.parametrize(
    ("leaders_s", "own_s", "interval_s"),
    [(24.0, 480.0, 4.0), (480.0, 24.0, 4.0), (0.0, 480.0, 80.0), (1e-9, 480.0, 0.05), (1e-9, 0.06, 0.01)],
)
def test_a_host_beats_as_often_as_the_leader_and_itself_need(leaders_s: float, own_s: float, interval_s: float) -> None:
    """The leader may be of another state and not say it. No leader makes a host beat without a pause."""
    assert heartbeat_interval_s(own_s, leaders_s) == pytest.approx(interval_s)


def test_a_coordinator_that_has_replaced_another_keeps_the_newest_question_of_each_kind() -> None:
    """The leader may have asked this host before its tasks are here again, and waits for what they say.

    Users ask for as long as the attempt lasts, so what they ask for may not pile up. Answers come again.
    """
    assignment = SimpleNamespace(**ASSIGNMENT, host=1)
    result = SimpleNamespace(assignment=assignment, prefix="a0/", client=Client(0), records=[], job="j")
    rdzv = SimpleNamespace(request=SimpleNamespace(probe_after_s=24.0))
    sent: list[dict[str, Any]] = []
    own = HostRecord("node2", (TaskRecord(1, "default", 7),) * 2)
    tasks = SimpleNamespace(send_all=sent.append)
    resumed = CoordinatorAttempt(result, rdzv, own, tasks, is_resumed=True)  # type: ignore[arg-type]
    questions: list[dict[str, Any]] = [{"kind": kind} for kind in sorted(QUESTIONS - {"watch"})]
    questions += [{"kind": "watch", "hosts": [0, 1]}]
    others = [{"kind": kind} for kind in sorted(ANSWERS)] + [{"kind": "watch", "hosts": [2, 3]}]
    messages = [{"kind": "request"}, *(questions + others) * 100, {"kind": "cause"}]
    for k, message in enumerate(messages):
        resumed._on_entry(k, message)
    assert [message["k"] for message in sent] == [*range(len(messages))]
    heard: list[dict[str, Any]] = []
    resumed.welcome(SimpleNamespace(send=heard.append), 1)  # type: ignore[arg-type]
    newest = len(messages) - 1 - len(others) - len(questions)
    assert [(message["op"], message.get("k")) for message in heard] == [
        ("resumed", None),
        ("entry", 0),
        *[("entry", newest + number) for number in range(len(questions))],
        ("entry", len(messages) - 1),
    ]
    assert [message["message"] for message in heard[2:-1]] == questions
