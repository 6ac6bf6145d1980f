"""The process of local rank 0, whose coordinator the other processes of the host use, is killed, or ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.cluster import host_ports
from saferun.cluster.job_channel import JobChannel
from saferun.config import HostsConfig, TaskConfig
from saferun.errors import EXIT_USAGE, SaferunError
from saferun.linux import task_sockets
from saferun.linux.children import fork
from saferun.linux.poller import Poller
from saferun.model import JsonObject
from tests.unit.samples import CONFIG

GONE = "saferun of local rank 0 on this host is gone"
JOIN = {"op": "join", "connect_s": 0.0, "timeout_s": 600.0}


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_sockets, "_bases", lambda: [str(tmp_path)])


class Head:
    """A process that listens as that of local rank 0 does; who has inherited its socket may keep it open."""

    def __init__(self, key: str) -> None:
        ready_read, ready_write = os.pipe()
        ours, theirs = socket.socketpair()

        def listen() -> None:
            listener, _ = task_sockets.TaskSockets(key).listen()
            socket.send_fds(theirs, [b"x"], [listener.fileno()])
            os.write(ready_write, b"x")
            signal.pause()

        self.pid = fork(listen)
        assert os.read(ready_read, 1) == b"x"
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
        self.inherited = socket.socket(fileno=fds[0])
        for fd in (ready_read, ready_write):
            os.close(fd)
        ours.close()
        theirs.close()

    def kill(self, *, reaps: bool) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        if reaps:
            os.waitpid(self.pid, 0)


class Task:
    """Another process of the same host."""

    def __init__(self, key: str) -> None:
        self.lost: list[str] = []
        self.heard: list[JsonObject] = []
        self.poller = Poller()
        config = CONFIG._replace(hosts=HostsConfig(task=TaskConfig(1, 2, key), node_rank=0))
        callbacks: Any = SimpleNamespace(on_stderr=lambda _: None)
        self.channel = JobChannel(
            config,
            {},
            self.poller,
            callbacks,
            on_message=self.heard.append,
            on_lost=lambda what, _: self.lost.append(what),
        )
        self.channel.bind()
        self.channel.send(JOIN)


@pytest.fixture
def key() -> str:
    return os.urandom(8).hex()


@pytest.fixture
def head(key: str) -> Iterator[Head]:
    head = Head(key)
    yield head
    head.inherited.close()
    try:
        os.kill(head.pid, signal.SIGKILL)
        os.waitpid(head.pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


@pytest.fixture
def task(key: str) -> Iterator[Task]:
    task = Task(key)
    yield task
    task.channel.close()
    task.poller.close()


@pytest.mark.parametrize("reaps", [True, False])
def test_who_was_killed_is_not_taken_for_there_while_its_socket_is_open(head: Head, task: Task, *, reaps: bool) -> None:
    """Its coordinator is killed a moment after it, and its connections end before its listening socket does."""
    task.channel.open()
    accepted, _ = head.inherited.accept()
    head.kill(reaps=reaps)
    accepted.close()
    task.poller.wait(5)
    assert task.lost == [GONE]
    assert not task.channel.client.is_open


def test_who_lives_is_connected_to_again(head: Head, task: Task) -> None:
    """It starts another coordinator for the next attempt."""
    task.channel.open()
    accepted, _ = head.inherited.accept()
    accepted.close()
    task.poller.wait(5)
    assert task.lost == ["the coordinator of " + socket.gethostname().partition(".")[0] + " is gone"]
    assert task.channel.client.is_open


def test_who_is_connected_to_again_is_not_searched_for(
    head: Head, task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The ranks run: a directory in which it could be, and is not, may be on a file system that does not answer."""
    searched: list[str] = []
    check = task_sockets._check

    def note(directory: str) -> None:
        searched.append(directory)
        check(directory)

    monkeypatch.setattr(task_sockets, "_check", note)
    task.channel.open()
    assert len(searched) == 1
    monkeypatch.setattr(task_sockets, "_bases", lambda: ["/frozen", str(tmp_path)])
    accepted, _ = head.inherited.accept()
    accepted.close()
    task.poller.wait(5)
    assert task.channel.client.is_open
    assert len(searched) == 1


def test_who_has_not_come_yet_is_waited_for(task: Task) -> None:
    task.channel.open()
    assert (task.lost, task.channel.deadline is None) == ([], False)


def test_who_was_killed_is_not_waited_for_in_the_next_attempt(head: Head, task: Task) -> None:
    """Nobody starts it again, and the start timeout is ten minutes."""
    task.channel.open()
    accepted, _ = head.inherited.accept()
    accepted.close()
    task.poller.wait(5)
    again, _ = head.inherited.accept()
    head.kill(reaps=True)
    head.inherited.close()
    again.close()
    task.poller.wait(5)
    task.lost.clear()
    task.channel.send(JOIN)
    task.channel.open()
    assert task.lost == [GONE]
    assert task.channel.deadline is None


def head_channel(key: str, poller: Poller) -> JobChannel:
    """That of the first task of a host; no coordinator is started."""
    config = CONFIG._replace(hosts=HostsConfig(2, 2, 1, task=TaskConfig(0, 2, key)))
    callbacks: Any = SimpleNamespace(on_stderr=lambda _: None)
    return JobChannel(config, {}, poller, callbacks, on_message=lambda _: None, on_lost=lambda *_: None)


@pytest.mark.parametrize("comes", ["before", "after"])
def test_who_has_no_ports_says_so_to_the_others(
    key: str, task: Task, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for its coordinator until the start timeout."""

    def refuse(*_: object, **__: object) -> None:
        raise SaferunError("port 29500 is in use", "stop that process", EXIT_USAGE)

    monkeypatch.setattr(host_ports.HostPorts, "_bind_ports", refuse)
    poller = Poller()
    head = head_channel(key, poller)
    with pytest.raises(SaferunError):
        head.bind()
    task.channel.send(JOIN)
    if comes == "before":
        task.channel.open()
        head.close()
    else:
        with ThreadPoolExecutor(1) as executor:
            ends = executor.submit(head.close)
            while not task.channel.client.is_open:
                task.channel.tick(0.0)
            ends.result()
    poller.close()
    task.poller.wait(5)
    failed = {"op": "join_failed", "what": "port 29500 is in use", "hint": "stop that process"}
    assert task.heard == [{**failed, "usage": True, "published": True}]


def test_who_is_waited_for_is_named_after_a_while(task: Task) -> None:
    """And then ever less often."""
    task.channel.send(JOIN)
    task.channel.open()
    begun = time.monotonic()
    for after_s in (29, 31, 32, 59, 63, 64, 130):
        task.channel.tick(begun + after_s)
    text = "waiting for local rank 0 of this host"
    assert [(message["text"], message["waited_s"]) for message in task.heard] == [(text, 31), (text, 63), (text, 130)]


def test_who_is_there_and_says_nothing_is_named_as_well(head: Head, task: Task) -> None:
    """Its coordinator may take long to start; if it is there, it says itself what the hosts wait for."""
    task.channel.send(JOIN)
    task.channel.open()
    accepted, _ = head.inherited.accept()
    begun = time.monotonic()
    for after_s in (31, 36):
        task.channel.tick(begun + after_s)
    assert [message["waited_s"] for message in task.heard] == [36]
    accepted.send(b'{"op": "waiting", "text": "waiting for node1"}\n')
    task.poller.wait(5)
    task.channel.tick(begun + 1000)
    assert [message["op"] for message in task.heard] == ["head_awaited", "waiting"]
    accepted.close()


@pytest.mark.parametrize("is_abstract", [False, True])
def test_who_says_goodbye_is_not_taken_for_the_head_of_the_next_launch(
    key: str, task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_abstract: bool
) -> None:
    """Of two launches in one step: its coordinator waits for other hosts for up to ten seconds, and then drops all."""
    monkeypatch.setattr(task_sockets, "_bases", lambda: [] if is_abstract else [str(tmp_path)])
    poller = Poller()
    head = head_channel(key, poller)
    head.bind()
    inherited = os.dup(head._ports.fds["tasks"])
    came: list[bool] = []

    def goodbye(_seconds: float) -> None:
        task.channel.open()
        came.append(task.channel.client.is_open)

    monkeypatch.setattr(head.client, "close", goodbye)
    head.close()
    os.close(inherited)
    poller.close()
    assert (came, task.lost) == ([False], [])
    assert task.channel.deadline is not None, "it does not look for the next one"


@pytest.mark.parametrize("has_met", [True, False])
def test_who_ends_an_earlier_launch_sends_those_to_the_next_one_that_have_just_come(
    key: str, task: Task, monkeypatch: pytest.MonkeyPatch, *, has_met: bool
) -> None:
    """Its coordinator accepts them no more. Where it has met nobody, it ends the launch that they belong to."""
    poller = Poller()
    head = head_channel(key, poller)
    head.bind()
    if has_met:
        head.send(JOIN)
        head.client.unanswered = None
        head._hear({"op": "joined"})
    task.channel.open()
    monkeypatch.setattr(head.client, "close", lambda _seconds: None)
    head.close()
    poller.close()
    task.poller.wait(5)
    assert task.lost == ([] if has_met else [GONE])
    if has_met:
        again = Head(key)
        while not task.channel.client.is_open:
            task.channel.tick(0.0)
        accepted, _ = again.inherited.accept()
        assert b'"op": "join"' in accepted.recv(1 << 16)
        accepted.close()
        again.kill(reaps=True)
        again.inherited.close()
