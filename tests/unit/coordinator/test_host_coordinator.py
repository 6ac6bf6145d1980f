"""What a host's tasks ask of its coordinator."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator.assignments import HostRecord, TaskRecord, assign
from saferun.coordinator.attempt import CoordinatorAttempt
from saferun.coordinator.host_coordinator import HostCoordinator
from saferun.coordinator.liveness_probe import SilenceReason
from saferun.coordinator.rendezvous_round import RendezvousResult, RendezvousRound
from saferun.model import RANKS_DONE
from tests.unit.coordinator.memory_store import MemoryStore


@pytest.mark.parametrize("is_head", [False, True])
def test_a_host_leaves_the_meeting_with_its_head_and_with_no_other_task(*, is_head: bool) -> None:
    """One of several saferuns of a host ends while the ranks of the others train."""
    left: list[str] = []
    nothing: Any = SimpleNamespace()
    coordinator = HostCoordinator(nothing, nothing, -1)
    rendezvous: Any = SimpleNamespace(leave=lambda: left.append("left"))
    coordinator._rendezvous = rendezvous
    connection: Any = SimpleNamespace(is_head=is_head, task=0 if is_head else 1)
    coordinator.handle(connection, {"op": "leave"})
    if coordinator._closing is not None:
        coordinator._closing.join()
    assert left == (["left"] if is_head else [])


def test_a_leader_that_can_start_no_thread_ends_the_attempt_with_the_reason() -> None:
    """It would watch over nobody, and its ranks would wait for a decision that cannot come."""
    sent: list[dict[str, Any]] = []
    attempt: Any = object.__new__(CoordinatorAttempt)
    attempt.is_leader, attempt.number, attempt._closed = True, 3, False
    attempt.log = SimpleNamespace(has=lambda _kind: False)
    attempt._tasks = SimpleNamespace(send_all=sent.append)

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    attempt.client, attempt._liveness, attempt._cannot_work = SimpleNamespace(another=refuse), object(), False
    attempt.open()
    text = "the coordinator of this host cannot work: can't start new thread"
    assert sent == [{"op": "store_lost", "attempt": 3, "why": "unknown", "text": text, "again": False}]


ENDS = ("abort", "decision", "request")


class Task:
    """The connection of one of a host's two tasks."""

    is_leaving = False

    def __init__(self, task: int) -> None:
        self.task, self.is_head = task, task == 0
        self.heard: list[tuple[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.heard.append((message["op"], message.get("task", message.get("attempt"))))


class Host:
    """The second host of a job, with two tasks, which meets the first when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spares: int = 0) -> None:
        self.spares = spares
        self.lines = [Task(0), Task(1)]
        self.connected = list(self.lines)
        self.others_come = [threading.Event(), threading.Event()]
        self.sent_away: list[list[int]] = []
        tasks: Any = SimpleNamespace(
            send_away=lambda joins: self.sent_away.append(list(joins)),
            head=self.lines[0],
            connected=lambda: list(self.connected),
            of_task=lambda task: next((one for one in self.connected if one.task == task), None),
            send_all=self._send_all,
        )
        rendezvous: Any = SimpleNamespace(
            meet=self._meet,
            watch_membership=lambda _: None,
            move=None,
            resumption=lambda *_: None,
            leave=lambda: None,
        )
        self.coordinator = HostCoordinator(tasks, SimpleNamespace(), -1)  # type: ignore[arg-type]
        self.coordinator._rendezvous = rendezvous
        self.opened = [threading.Event(), threading.Event()]
        monkeypatch.setattr(CoordinatorAttempt, "open", lambda attempt: self.opened[attempt.number].set())

    def _send_all(self, message: dict[str, Any]) -> None:
        for one in self.connected:
            one.send(message)

    def _meet(self, rdzv: RendezvousRound) -> RendezvousResult:
        own = rdzv.wait_for_tasks()
        assert self.others_come[own.attempt].wait(30.0)
        first = HostRecord("node1", (TaskRecord(1, "", 1),), attempt=own.attempt)
        assignment = assign([first, own], self.spares)[1]
        client = MemoryStore().client()
        return RendezvousResult(assignment, client, "job", f"a{own.attempt}/", [], "node1", 29500)

    def join(self, attempt: int = 0) -> None:
        for one in self.connected:
            record = {"nproc": 1, "role": "", "pid": 0}
            request = {"backend": "static", "least": 2, "most": 2, "run_id": "job", "timeout_s": 60.0, "node_rank": 1}
            request |= {"probe_after_s": 1, "name": "node2", "tasks": 2, "task": one.task, "record": record}
            self.coordinator.handle(one, {"op": "join", "attempt": attempt, **request})  # type: ignore[arg-type]

    def lose(self, task: int, *, is_leaving: bool = False) -> None:
        self.lines[task].is_leaving = is_leaving
        self.disconnect(task)
        self.notice(task)

    def disconnect(self, task: int) -> None:
        self.connected.remove(self.lines[task])

    def notice(self, task: int) -> None:
        self.coordinator.lose_task(self.lines[task])  # type: ignore[arg-type]

    def finish(self, task: int, attempt: int = 0) -> None:
        state = {"op": "state", "attempt": attempt, "state": {"s": RANKS_DONE}}
        self.coordinator.handle(self.lines[task], state)  # type: ignore[arg-type]

    def meet(self, attempt: int = 0) -> None:
        self.others_come[attempt].set()
        assert self.opened[attempt].wait(30.0)


@pytest.mark.parametrize("is_leaving", [False, True])
def test_a_task_that_ends_while_the_hosts_meet_ends_the_attempt_that_they_meet_for(
    monkeypatch: pytest.MonkeyPatch, *, is_leaving: bool
) -> None:
    """Its ranks have a place among the others, which would wait for them in the first collective."""
    host = Host(monkeypatch)
    host.join()
    host.lose(1, is_leaving=is_leaving)
    assert host.lines[0].heard == [], "there is no attempt that could be ended"
    host.meet()
    assert host.lines[0].heard == [("joined", 0), ("task_lost", 1)]


def test_of_later_attempts_the_next_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before is over for all tasks that have joined."""
    host = Host(monkeypatch)
    host.join()
    host.meet()
    assert host.lines[0].heard == [("joined", 0)]
    host.join(attempt=1)
    host.lose(1)
    assert host.lines[0].heard == [("joined", 0)]
    host.meet(attempt=1)
    assert host.lines[0].heard == [("joined", 0), ("joined", 1), ("task_lost", 1)]


def test_a_task_that_ends_while_ranks_run_is_lost_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.join()
    host.meet()
    host.lose(1)
    assert host.lines[0].heard == [("joined", 0), ("task_lost", 1)]


def test_a_task_that_says_goodbye_while_the_ranks_of_others_run_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not start its ranks, say, and announced nothing: the others would wait for them without end."""
    host = Host(monkeypatch)
    host.join()
    host.meet()
    host.lose(1, is_leaving=True)
    assert host.lines[0].heard == [("joined", 0), ("task_lost", 1)]


@pytest.mark.parametrize("end", ["done", "announced", *ENDS, "store lost", "over"])
def test_a_task_that_says_goodbye_is_not_missed_where_its_part_is_over(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Its ranks have ended well, or the attempt ends: how a task ends then is for the leader, or itself, to decide."""
    host = Host(monkeypatch)
    host.join()
    host.meet()
    attempt = host.coordinator._attempt
    assert attempt is not None
    match end:
        case "done":
            host.finish(1)
        case "announced":
            message = {"op": "append", "attempt": 0, "message": {"kind": "abort", "reason": "failure"}}
            host.coordinator.handle(host.lines[1], message)  # type: ignore[arg-type]
        case "store lost":
            attempt._on_channel_lost(SilenceReason("gone", "node1 is gone"), may_come_again=False)
        case "over":
            attempt.close()
        case _:
            attempt._on_entry(0, {"kind": end, "host": 0})
    host.lose(1, is_leaving=True)
    assert "task_lost" not in [op for op, _ in host.lines[0].heard]


@pytest.mark.parametrize("kind", ["preflight", "cause", "hang", "checkpoint", "notice"])
def test_other_entries_of_the_jobs_log_let_no_task_go(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The ranks are still needed after them."""
    host = Host(monkeypatch)
    host.join()
    host.meet()
    attempt = host.coordinator._attempt
    assert attempt is not None
    attempt._on_entry(0, {"kind": kind, "host": 0})
    host.lose(1, is_leaving=True)
    assert host.lines[0].heard[-1] == ("task_lost", 1)


def test_a_task_of_a_spare_that_says_goodbye_costs_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before: no rank waits for it."""
    host = Host(monkeypatch, spares=1)
    host.join()
    host.meet()
    host.lose(1, is_leaving=True)
    assert [op for op, _ in host.lines[0].heard] == ["joined"]


def test_a_task_of_a_spare_that_ends_while_the_hosts_meet_costs_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rank waits for it."""
    host = Host(monkeypatch, spares=1)
    host.join()
    host.lose(1)
    host.meet()
    assert [op for op, _ in host.lines[0].heard] == ["joined", "warn"]


@pytest.mark.parametrize("spares", [0, 1])
def test_the_previous_attempt_does_not_go_on_without_a_task_that_ends_while_the_hosts_meet_again(
    monkeypatch: pytest.MonkeyPatch, spares: int
) -> None:
    """Its ranks may have ended well there, and this host may be a spare again: only the next one shows what follows."""
    host = Host(monkeypatch, spares)
    host.join()
    host.meet()
    host.finish(1)
    host.join(attempt=1)
    host.lose(1)
    assert host.lines[0].heard == [("joined", 0)]
    host.meet(attempt=1)
    assert [op for op, _ in host.lines[0].heard] == ["joined", "joined", "warn" if spares else "task_lost"]


@pytest.mark.parametrize("spares", [0, 1])
def test_a_task_whose_end_is_noticed_twice_is_reported_once(monkeypatch: pytest.MonkeyPatch, spares: int) -> None:
    """Its connection is gone, and what follows from that waits until the attempt has begun, which misses it as well."""
    host = Host(monkeypatch, spares)
    host.join()
    host.disconnect(1)
    host.meet()
    host.notice(1)
    assert [op for op, _ in host.lines[0].heard] == ["joined", "warn" if spares else "task_lost"]


def farewell(host: Host) -> None:
    gone = threading.Event()
    host.coordinator.farewell(gone.set)
    assert gone.wait(30.0)


def test_a_task_that_comes_when_the_launch_ends_is_sent_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two launches in one step: the first task of a host says goodbye later than the others do."""
    monkeypatch.setattr(CoordinatorAttempt, "wait_acked", lambda _: None)
    host = Host(monkeypatch)
    host.join()
    host.meet()
    late = Task(1)
    host.connected = [late]
    host.join()  # while the ranks of the earlier launch run
    farewell(host)
    assert host.sent_away == [[1]]
    later = Task(1)
    host.connected = [later]
    host.join()
    assert later.heard == [("not_here", None)]


def test_a_task_is_not_sent_away_by_a_launch_that_has_yet_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of the same one, which is over: no local rank 0 comes any more."""
    host = Host(monkeypatch)
    host.connected = [host.lines[1]]
    host.join()
    farewell(host)
    assert host.sent_away == []
    again = Host(monkeypatch)
    again.join()
    farewell(again)
    assert again.sent_away == []
    failed = Host(monkeypatch)
    failed.join()
    rdzv = failed.coordinator._rdzv
    assert rdzv is not None
    rdzv.is_over = True  # with an error that each task hears, but those that come later
    farewell(failed)
    assert failed.sent_away == []
