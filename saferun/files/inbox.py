"""Whole files that other processes hand to the writer: what captures have seen of the ranks.

The writer alone touches the run directory. Whoever wants a file there puts its content into memory, as a file without
a name, and sends the writer its descriptor: it is not copied through the supervisor, it outlives the process that sent
it, and it waits for as long as the file system of the run directory does not answer. How much waits is bounded: each
file takes tokens from a pipe, which the writer puts back once the file is written.
"""

from __future__ import annotations

import json
import os

from saferun.errors import suppress
from saferun.linux.bare_socket import (
    AF_UNIX,
    MSG_DONTWAIT,
    MSG_PEEK,
    SO_SNDBUF,
    SOCK_SEQPACKET,
    SOL_SOCKET,
    receive_fds,
    socketpair,
)
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.files.sinks import HandedFile, Report

TOKEN_BYTES = 64 << 10
"""What one token stands for; a file takes at least one."""
TOKENS = 1024
_MESSAGE_BYTES = 32 << 10
# As much as an ordinary user gets: each file takes about a kilobyte of it.
_QUEUE_BYTES = 208 << 10


class Outbox(Value):
    """The end for those who hand files in (``hand_in``), inherited by fork; where there is no writer, all are -1."""

    fd: int
    tokens_read: int
    tokens_write: int

    @property
    def fds(self) -> tuple[int, ...]:
        """What a process must keep open to hand files in; empty where there is no writer."""
        return tuple(self) if self.fd >= 0 else ()


class Inbox:
    """The writer's end, made before the writer is forked, and kept by the supervisor for a writer that follows.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self) -> None:
        self._socket, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with suppress(OSError):
            theirs.setsockopt(SOL_SOCKET, SO_SNDBUF, _QUEUE_BYTES)
        tokens_read, self._tokens_write = os.pipe()
        os.set_blocking(tokens_read, False)
        os.set_blocking(self._tokens_write, False)
        os.write(self._tokens_write, bytes(TOKENS))
        self.outbox = Outbox(theirs.detach(), tokens_read, self._tokens_write)

    @property
    def fds(self) -> tuple[int, ...]:
        """What the writer keeps open; the first one is readable when there is a file."""
        return (self._socket.fileno(), self._tokens_write) if self.outbox.fd >= 0 else ()

    def take(self, report: Report) -> HandedFile | None:
        """The next file, which stays in the queue until ``taken``: a writer that dies over it leaves it to the next.

        Args:
            report: called where it cannot be written.

        Returns:
            The file; None: there is none now.
        """
        try:
            message, fds = receive_fds(self._socket, _MESSAGE_BYTES, 1, MSG_PEEK | MSG_DONTWAIT)
        except OSError:
            return None
        if not message:
            return None
        from saferun.files.sinks import HandedFile  # in the writer alone

        path, size_bytes = json.loads(message)
        count = tokens_for(size_bytes)
        return HandedFile(path, fds[0] if fds else -1, report, lambda: put_back(self._tokens_write, count))

    def taken(self) -> None:
        """The file of the last ``take`` is written, or in this process's hands."""
        with suppress(OSError):
            _, fds = receive_fds(self._socket, _MESSAGE_BYTES, 1, MSG_DONTWAIT)
            for fd in fds:
                os.close(fd)

    def waiting_bytes(self) -> int:
        """About how much waits to be written, at most. For the end: from then on the tokens do not count any more."""
        with suppress(OSError):
            return (TOKENS - len(os.read(self.outbox.tokens_read, TOKENS))) * TOKEN_BYTES
        return 0

    def close(self) -> None:
        """There is no writer any more: who hands something in learns that, and what waits is dropped."""
        if self.outbox.fd < 0:
            return
        fds, self.outbox = self.outbox, Outbox(-1, -1, -1)
        self._socket.close()
        for fd in fds:
            os.close(fd)


def put_back(tokens_write: int, count: int) -> None:
    """Put tokens back."""
    if count:
        with suppress(OSError):
            os.write(tokens_write, bytes(count))


def tokens_for(size_bytes: int) -> int:
    """How many tokens a file takes."""
    return max(1, -(-size_bytes // TOKEN_BYTES))
