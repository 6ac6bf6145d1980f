"""The loop that reads the connections of a host."""

from __future__ import annotations

import errno
import os
import socket
import struct
from types import SimpleNamespace

import pytest

from saferun.coordinator import tasks
from saferun.coordinator.liveness_probe import ANSWER
from saferun.coordinator.tasks import Tasks


class Exhausted(socket.socket):
    """A listening socket for whose connections there are no descriptors, while ``is_exhausted``."""

    is_exhausted = True

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class OtherTask(socket.socket):
    """A listening socket; whoever connects has this user id, as the kernel says."""

    user = 3_000_000_000

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        user = self.user

        class Connection(socket.socket):
            def getsockopt(self, *_: int) -> bytes:  # type: ignore[override]
                return struct.pack("=III", 4711, user, user)

        return Connection(fileno=connection.detach()), address


def test_a_task_of_a_user_with_a_large_id_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's number has no sign: the tasks of a host waited for each other for ever."""
    monkeypatch.setattr(os, "getuid", lambda: OtherTask.user)
    supervisor, head = socket.socketpair()
    with supervisor, head, OtherTask(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen()
        loop = Tasks(head, listener)
        with socket.socket(socket.AF_UNIX) as task:
            task.connect(listener.getsockname())
            loop._accept_task(listener)
            connected = loop.connected()
        for connection in connected:
            connection.close()
        assert len(connected) == 2


def test_a_connection_without_a_descriptor_does_not_wake_the_loop_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Descriptors run out where there are many hosts; the loop tries again half a second later."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(tasks, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(tasks, "_TICK_S", 0.02)
    supervisor, head = socket.socketpair()
    with supervisor, head, Exhausted(socket.AF_INET) as probed:
        probed.bind(("127.0.0.1", 0))
        probed.listen()
        loop = Tasks(head, probed=probed)
        with socket.create_connection(probed.getsockname(), timeout=10.0) as prober:
            assert [fd for fd, _ in loop._polled()] == [probed.fileno()]
            loop._answer_probe()
            assert loop._polled() == []  # it waited for a tick
            clock.now += 1.0
            probed.is_exhausted = False
            assert [fd for fd, _ in loop._polled()] == [probed.fileno()]
            loop._answer_probe()
            assert prober.recv(100) == ANSWER


def test_a_listening_socket_that_takes_no_more_tasks_does_not_wake_the_loop_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head has shut it down, and the loop goes on until the other hosts have all they wait for."""
    monkeypatch.setattr(tasks, "_TICK_S", 0.02)
    supervisor, head = socket.socketpair()
    with supervisor, head, socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen()
        loop = Tasks(head, listener)
        listener.shutdown(socket.SHUT_RDWR)
        ((fd, events),) = loop._polled()
        assert fd == listener.fileno()
        loop._accept_task(listener, events)
        assert loop._polled() == []


def test_tasks_of_the_next_launch_are_sent_away_and_no_others() -> None:
    """Those of this launch, which have met, have a place in it to the end."""
    supervisor, head = socket.socketpair()
    with supervisor, head, socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen()
        loop = Tasks(head, listener)
        others = []
        for task in (1, 2, None):
            other = socket.socket(socket.AF_UNIX)
            other.settimeout(10.0)
            other.connect(listener.getsockname())
            loop._accept_task(listener)
            loop.connected()[-1].task = task
            others.append(other)
        loop.send_away([2])
        for connection in loop.connected():
            connection.close()
        assert [other.recv(100) for other in others] == [b"", b'{"op": "not_here"}\n', b'{"op": "not_here"}\n']
        for other in others:
            other.close()
