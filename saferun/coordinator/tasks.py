"""The connections to this host's saferun processes, and liveness probes: JSON lines, read by one thread, sent by any.

The head (task 0) has a socket pair; the others of the host come over a Unix socket, and must be of the same user.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

from saferun.coordinator.liveness_probe import ANSWER
from saferun.text.framing import MessageBuffer

Message = dict[str, Any]

NOT_HERE: Message = {"op": "not_here"}
"""What a task reads that has come to the coordinator of an earlier launch, which ends."""

_LONGEST_LINE_BYTES = 16 << 20
_MOST_UNSENT_BYTES = 96 << 20
_MOST_CONNECTIONS = 4096
_CHUNK_BYTES = 1 << 18
_TICK_S = 0.5
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
# Source: unix(7), SO_PEERCRED: pid, uid, gid.
_CREDENTIALS = struct.Struct("=iII")


class TaskConnection:
    """One saferun process of this host. ``task`` is known from its first join; the head is task 0 from the start."""

    def __init__(self, connection: socket.socket, *, is_head: bool, wake: Callable[[], None]) -> None:
        connection.setblocking(False)
        self.task: int | None = 0 if is_head else None
        self.is_head = is_head
        self.is_leaving = False
        self.is_closed = False
        self._socket = connection
        self._wake = wake
        self._buffer = MessageBuffer(_LONGEST_LINE_BYTES)
        self._unsent = bytearray()
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """What becomes readable when the process says something or ends."""
        return self._socket.fileno()

    @property
    def unsent_bytes(self) -> int:
        """What waits for the process to read."""
        return len(self._unsent)

    def send(self, message: Message) -> None:
        """Send a message, from any thread. Never blocks: what the process does not read now waits for it."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            if self.is_closed or len(self._unsent) + len(line) > _MOST_UNSENT_BYTES:
                return
            idle = not self._unsent
            self._unsent += line
            if idle:
                self._send_unsent()
            if not self._unsent:
                return
        self._wake()

    def flush(self) -> None:
        """Send more of what waits; the process reads again."""
        with self._lock:
            self._send_unsent()

    def _send_unsent(self) -> None:
        try:
            while self._unsent:
                with memoryview(self._unsent) as view:
                    sent = self._socket.send(view[:_CHUNK_BYTES], socket.MSG_NOSIGNAL)
                del self._unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            # Its end is noticed where it is read.
            self._unsent.clear()

    def receive(self) -> list[Message] | None:
        """The messages that have come; None when the process has closed its end, or sends without end."""
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._buffer.feed(chunk) if chunk else None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self.is_closed = True
            self._socket.close()


class Tasks:
    """All connections, and the loop of the main thread that reads them.

    Args:
        head: the connected socket to the head.
        listener: where the other tasks of this host connect, if anywhere.
        probed: the listening socket that other hosts probe, if there is one.
    """

    def __init__(
        self, head: socket.socket, listener: socket.socket | None = None, probed: socket.socket | None = None
    ) -> None:
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self.head = TaskConnection(head, is_head=True, wake=self.wake)
        self._listener = listener
        self._probed = probed
        self._answers_probes = probed is not None
        self._accept_at = 0.0  # no connection is accepted before: there were no descriptors, or no memory
        self._probes_changed = threading.Event()
        self._connections = {self.head.fd: self.head}
        for sock in (listener, probed):
            if sock is not None:
                sock.setblocking(False)

    def wake(self) -> None:
        """Have the loop notice what has changed."""
        with suppress(OSError):
            os.write(self._wake_write, b"w")

    def connected(self) -> list[TaskConnection]:
        """All connections of now."""
        return list(self._connections.values())

    def of_task(self, task: int) -> TaskConnection | None:
        """The connection of a task, if it is there."""
        return next((c for c in self.connected() if c.task == task), None)

    def send_all(self, message: Message) -> None:
        """Send a message to all tasks that have joined."""
        for connection in self.connected():
            if connection.task is not None:
                connection.send(message)

    def send_away(self, joins: Collection[int]) -> None:
        """The launch ends: send those to the next one of the step that have not joined, or whose joins are these."""
        for connection in self.connected():
            if not connection.is_head and (connection.task is None or connection.task in joins):
                connection.send(NOT_HERE)

    def answer_probes(self, answers: bool) -> None:  # noqa: FBT001
        """Begin or stop answering liveness probes; when this returns, the loop does not accept any more of them.

        Not to be called by the loop's own thread.
        """
        if self._probed is None or self._answers_probes == answers:
            return
        self._probes_changed.clear()
        self._answers_probes = answers
        self.wake()
        self._probes_changed.wait(10.0)

    def run(
        self,
        on_message: Callable[[TaskConnection, Message], None],
        on_closed: Callable[[TaskConnection], None],
        on_tick: Callable[[float], None],
    ) -> None:
        """Read messages until the head closes its end.

        Args:
            on_message: gets each message.
            on_closed: takes each task, the head apart, that has gone.
            on_tick: called about twice a second with the seconds since the last call.
        """
        ticked_at = time.monotonic()
        while True:
            for fd, events in self._polled():
                if fd == self._wake_read:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                elif fd in self._connections:
                    if not self._serve(self._connections[fd], events, on_message, on_closed):
                        return
                elif self._listener is not None and fd == self._listener.fileno():
                    self._accept_task(self._listener, events)
                else:
                    self._answer_probe()
            now = time.monotonic()
            if now - ticked_at >= _TICK_S:
                on_tick(now - ticked_at)
                ticked_at = now

    def _polled(self) -> list[tuple[int, int]]:
        """What there is to be read, waited for no longer than a tick."""
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for connection in self.connected():
            poll.register(connection.fd, select.POLLIN | (select.POLLOUT if connection.unsent_bytes else 0))
        if time.monotonic() >= self._accept_at:
            if self._listener is not None and len(self._connections) < _MOST_CONNECTIONS:
                poll.register(self._listener.fileno(), select.POLLIN)
            if self._probed is not None and self._answers_probes:
                poll.register(self._probed.fileno(), select.POLLIN)
        self._probes_changed.set()
        return poll.poll(_TICK_S * 1000)

    def _serve(
        self,
        connection: TaskConnection,
        events: int,
        on_message: Callable[[TaskConnection, Message], None],
        on_closed: Callable[[TaskConnection], None],
    ) -> bool:
        """Read and write what can be; False when the head has gone."""
        if events & select.POLLOUT:
            connection.flush()
        if not events & ~select.POLLOUT:
            return True
        messages = connection.receive()
        if messages is None:
            del self._connections[connection.fd]
            connection.close()
            if connection.is_head:
                return False
            on_closed(connection)
            return True
        for message in messages:
            on_message(connection, message)
        return True

    def _accept(self, listener: socket.socket) -> socket.socket | None:
        """A connection that has come; None: whoever came has gone, or there is nothing left to accept it with."""
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in _EXHAUSTED:
                # It stays where it is, and would wake the loop at once, again and again.
                self._accept_at = time.monotonic() + _TICK_S
            return None

    def _accept_task(self, listener: socket.socket, events: int = select.POLLIN) -> None:
        if events & select.POLLHUP:
            self._listener = None  # the head takes no more tasks; it would wake the loop again and again
            return
        connection = self._accept(listener)
        if connection is None:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
            connection.close()
            return
        task = TaskConnection(connection, is_head=False, wake=self.wake)
        self._connections[task.fd] = task

    def _answer_probe(self) -> None:
        if self._probed is None or not self._answers_probes:
            return
        connection = self._accept(self._probed)
        if connection is not None:
            with connection, suppress(OSError):
                connection.send(ANSWER, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
