"""What is kept for a coordinator of another process that is not there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from socket import SOCK_STREAM
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster.coordinator_client import CoordinatorClient
from saferun.linux.bare_socket import AF_UNIX, socketpair
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from tests.unit.samples import CONFIG


class Task:
    """Another task of a host than the one that has the coordinator."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.heard: list[JsonObject] = []
        self.replacement: JsonObject | None = None
        self.is_there = False
        self.looked = 0
        self.poller = Poller()
        callbacks: Any = SimpleNamespace()
        self.client = CoordinatorClient(
            CONFIG,
            {},
            self.poller,
            callbacks,
            on_message=lambda _message: None,
            on_lost=lambda what, _hint: self.lost.append(what),
            replacement=lambda _what: self.replacement,
            connect_again=self.connect_again,
            search_again=self.search_again,
        )
        self.other: JsonLines | None = None
        self.connect()

    def connect(self) -> None:
        mine, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        self.other = JsonLines(theirs, self.poller)
        self.client.attach(JsonLines(mine, self.poller))

    def connect_again(self) -> bool:
        if self.is_there:
            self.connect()
        return self.is_there

    def search_again(self) -> None:
        self.looked += 1

    def tell(self, message: JsonObject) -> None:
        assert self.other is not None
        self.other.send(message)
        self.poller.wait(1)

    def lose(self) -> None:
        assert self.other is not None
        self.other.close()
        self.poller.wait(1)

    def arrived(self) -> list[str]:
        assert self.other is not None
        return [message["op"] for message in self.other.receive() or ()]


def test_what_a_coordinator_has_sent_at_last_is_read_to_the_end() -> None:
    """A long message comes in several pieces, and why the job ends may stand after it."""
    mine, theirs = socketpair(AF_UNIX, SOCK_STREAM)
    lines = JsonLines(mine, read_bytes=64)
    heard: list[str] = []
    lost: list[str] = []
    link: Any = SimpleNamespace(
        child=SimpleNamespace(pid=1 << 22),
        fd=lines.fd,
        stderr_fd=os.open("/dev/null", os.O_RDONLY),
        torch_parts="store",
        receive=lines.receive,
        read_stderr=lambda: None,
        last_line=str,
        close=lines.close,
    )
    poller: Any = SimpleNamespace(watch=lambda *_: None, unwatch=lambda _: None)
    callbacks: Any = SimpleNamespace()
    client = CoordinatorClient(
        CONFIG,
        {},
        poller,
        callbacks,
        on_message=lambda message: heard.append(message["op"]),
        on_lost=lambda what, _hint: lost.append(what),
        open_link=lambda *_, **__: link,
    )
    client.start({})
    for message in ({"op": "long", "text": "x" * 1000}, {"op": "job_ended"}):
        theirs.send(json.dumps(message).encode() + b"\n")
    theirs.close()
    assert client.on_exit(1 << 22, ExitStatus(1, None))
    os.close(link.stderr_fd)
    assert heard == ["long", "job_ended"]
    assert len(lost) == 1


@pytest.fixture
def task() -> Iterator[Task]:
    task = Task()
    yield task
    task.client.close(0)
    if task.other is not None:
        task.other.close()
    task.poller.close()


def test_for_one_that_is_gone_nothing_of_the_attempt_is_kept(task: Task) -> None:
    """The ranks may go on for days without it, and each of their states was kept in memory."""
    task.lose()
    assert task.lost == ["saferun of local rank 0 on this host is gone"]
    for number in range(1000):
        task.client.send({"op": "state", "attempt": 0, "state": {"s": "running", "n": number}})
    task.connect()
    assert task.arrived() == []


def test_what_the_next_attempt_sends_before_it_is_connected_arrives(task: Task) -> None:
    """The user may end an attempt for which the hosts are only about to meet."""
    task.lose()
    task.client.send({"op": "state", "attempt": 0, "state": {}})
    task.client.send({"op": "join", "attempt": 1}, answers=("joined", "join_failed"))
    task.client.send({"op": "append", "attempt": 1, "message": {"kind": "abort"}})
    task.connect()
    task.client.send({"op": "state", "attempt": 1, "state": {}})
    assert task.arrived() == ["join", "append", "state"]


def test_a_successor_gets_what_follows(task: Task) -> None:
    task.is_there, task.replacement = True, {"op": "rejoin", "task": 1}
    task.lose()
    task.client.send({"op": "state", "attempt": 0, "state": {}})
    assert (task.arrived(), task.lost) == (["rejoin", "state"], [])


JOIN: JsonObject = {"op": "join", "attempt": 0}
ANSWERS = ("joined", "join_failed")


def test_a_task_that_has_come_to_the_end_of_an_earlier_launch_joins_the_next_one(task: Task) -> None:
    """Of two launches in one step: the first task of the host ends the first one later than the others do."""
    task.client.send(JOIN, answers=ANSWERS)
    assert task.arrived() == ["join"]
    task.tell({"op": "waiting"})
    task.tell({"op": "not_here"})
    assert (task.looked, task.client.is_open, task.lost) == (1, False, [])
    assert task.other is not None
    task.other.close()
    task.connect()
    assert task.arrived() == ["join"]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_task_that_was_answered_belongs_to_the_launch_that_ends(task: Task, answer: str) -> None:
    """Nobody starts its local rank 0 again: it is not looked for."""
    task.client.send(JOIN, answers=ANSWERS)
    task.tell({"op": answer})
    task.client.send(JOIN | {"attempt": 1}, answers=ANSWERS)
    task.tell({"op": "not_here"})
    assert (task.looked, task.client.is_open) == (0, True)
    task.lose()
    assert task.lost == ["saferun of local rank 0 on this host is gone"]


def test_a_task_whose_head_is_killed_before_it_answers_does_not_look_for_another_one(task: Task) -> None:
    """A coordinator that is killed says nothing."""
    task.client.send(JOIN, answers=ANSWERS)
    task.lose()
    assert (task.looked, task.lost) == (0, ["saferun of local rank 0 on this host is gone"])
