"""JSON Lines over a connected socket: bounded in both directions, and non-blocking in the loop."""

from __future__ import annotations

import json
import os
import select
import time
from collections import deque
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket, receive_fds, send_fds
from saferun.linux.poller import Poller
from saferun.model import JsonObject
from saferun.text.framing import MessageBuffer

LONGEST_MESSAGE_BYTES = 16 << 20
QUEUE_BYTES = 32 << 20
_READ_BYTES = 1 << 18
# How long to wait for a peer that does not read, without a loop that could send the rest later.
_PATIENCE_S = 5.0


class JsonLines:
    """One end of a connection to another process.

    Args:
        connection: a connected stream socket, which this object then owns.
        poller: the loop's. With it sending never blocks: what does not fit into the socket's buffer is sent when the
            peer reads. Without it sending waits for a peer that does not read, for at most five seconds.
        queue_bytes: the most that is queued for a slow peer; messages beyond it are dropped, and ``send`` returns
            False.
        most_fds: how many descriptors are received at a time (Unix sockets only).
        longest_bytes: of a message that is received.
        read_bytes: how much is received at a time.

    Attributes:
        fds: the descriptors that have been received, in order; the one who takes one owns it.
    """

    def __init__(
        self,
        connection: Socket,
        poller: Poller | None = None,
        *,
        queue_bytes: int = QUEUE_BYTES,
        most_fds: int = 0,
        longest_bytes: int = LONGEST_MESSAGE_BYTES,
        read_bytes: int = _READ_BYTES,
    ) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._poller = poller
        self._queue_bytes = queue_bytes
        self._buffer = MessageBuffer(longest_bytes)
        self._read_bytes = read_bytes
        self.fds: deque[int] = deque()
        self._most_fds = most_fds
        self._queue: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self._queued_bytes = 0
        # epoll has one registration per descriptor, and that of reading exists.
        self._write_fd = -1

    @property
    def fd(self) -> int:
        """A descriptor that becomes readable when the peer sends something or closes its end."""
        return self._socket.fileno()

    @property
    def queued_bytes(self) -> int:
        """How many bytes wait for the peer to read."""
        return self._queued_bytes

    def send(self, message: JsonObject, fds: Sequence[int] = ()) -> bool:
        """Send a message. That the peer has gone is found by ``receive``, not here.

        Args:
            message: the message.
            fds: descriptors that the peer gets copies of (Unix sockets only); they must stay open until they are sent,
                see ``queued_bytes``.

        Returns:
            Whether the message was sent or queued.
        """
        data = json.dumps(message).encode() + b"\n"
        if self._poller is None:
            return self._send_patiently(data)
        if self._queued_bytes + len(data) > self._queue_bytes:
            return False
        self._queue.append((memoryview(data), tuple(fds)))
        self._queued_bytes += len(data)
        self._flush()
        return True

    def receive(self) -> list[JsonObject] | None:
        """The messages that have arrived; None when the peer has closed its end, or does not send lines."""
        try:
            if self._most_fds:
                chunk, fds = receive_fds(self._socket, self._read_bytes, self._most_fds)
                self.fds += fds
            else:
                chunk = self._socket.recv(self._read_bytes)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return self._buffer.feed(chunk) if chunk else None

    def drain(self, timeout_s: float) -> None:
        """Send what is queued, and wait for the peer to read: at the end of a launch, when no loop runs any more."""
        give_up_at = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket.fileno(), select.POLLOUT)
        while self._queue and (left_s := give_up_at - time.monotonic()) > 0:
            poll.poll(left_s * 1000)
            self._flush()

    def close(self) -> None:
        """Close the socket. What is still queued is dropped."""
        self._stop_writing()
        self._queue.clear()
        self._queued_bytes = 0
        self._socket.close()

    def _send_patiently(self, data: bytes) -> bool:
        sent = False
        with suppress(OSError):
            self._socket.settimeout(_PATIENCE_S)
            self._socket.sendall(data)
            sent = True
        with suppress(OSError):
            self._socket.setblocking(False)
        return sent

    def _flush(self) -> None:
        try:
            while self._queue:
                data, fds = self._queue[0]
                sent = send_fds(self._socket, data, fds) if fds else self._socket.send(data)
                self._queued_bytes -= sent
                if sent < len(data):
                    self._queue[0] = data[sent:], ()
                else:
                    self._queue.popleft()
        except BlockingIOError:
            if self._write_fd < 0 and self._poller is not None:
                with suppress(OSError):
                    self._write_fd = os.dup(self._socket.fileno())
                    self._poller.watch(self._write_fd, self._flush, select.EPOLLOUT)
            return
        except OSError:  # the peer has gone
            self._queue.clear()
            self._queued_bytes = 0
        self._stop_writing()

    def _stop_writing(self) -> None:
        if self._write_fd >= 0 and self._poller is not None:
            self._poller.unwatch(self._write_fd)
            os.close(self._write_fd)
            self._write_fd = -1
