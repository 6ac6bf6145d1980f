"""Whole files that other processes hand to the writer: what captures have seen of the ranks.

The writer alone touches the run directory. Whoever wants a file there puts its content into memory, as a file without
a name, and sends the writer its descriptor: it is not copied through the supervisor, it outlives the process that sent
it, and it waits for as long as the file system of the run directory does not answer. How much waits is bounded: each
file takes tokens from a pipe, which the writer puts back once the file is written.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator

from saferun.errors import suppress
from saferun.files.sinks import Report, WholeFile
from saferun.model import Value

TOKEN_BYTES = 64 << 10
"""What one token stands for; a file takes at least one."""
TOKENS = 1024
_MESSAGE_BYTES = 32 << 10
_PIECE_BYTES = 1 << 20
# As much as an ordinary user gets: each file takes about a kilobyte of it.
_QUEUE_BYTES = 208 << 10
FD = struct.Struct("@i")


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
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with suppress(OSError):
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)
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
            message, fds = self._receive(socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return None
        if not message:
            return None
        path, size_bytes = json.loads(message)
        count = tokens_for(size_bytes)
        return HandedFile(path, fds[0] if fds else -1, report, lambda: put_back(self._tokens_write, count))

    def taken(self) -> None:
        """The file of the last ``take`` is written, or in this process's hands."""
        with suppress(OSError):
            _, fds = self._receive(socket.MSG_DONTWAIT)
            for fd in fds:
                os.close(fd)

    def _receive(self, flags: int) -> tuple[bytes, list[int]]:
        # Not socket.recv_fds: it ignores its flags (Python 3.11).
        message, control, _, _ = self._socket.recvmsg(_MESSAGE_BYTES, socket.CMSG_LEN(FD.size), flags)
        return message, [
            FD.unpack(content[: FD.size])[0]
            for level, kind, content in control
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(content) >= FD.size
        ]

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


class HandedFile(WholeFile):
    """A file that another process has handed in: there as a whole, or not at all, and for its owner alone.

    Args:
        path: where it is to be.
        fd: its content, in memory; -1: it could not be received.
        report: called when it cannot be written, and when it can after all.
        on_written: called once it is there.
    """

    mode = 0o600  # what a process has open and what it is called with is its owner's business alone

    def __init__(self, path: str, fd: int, report: Report, on_written: Callable[[], object]) -> None:
        super().__init__(path, report=report)
        self._fd = fd
        self._on_written = on_written

    def close(self) -> None:
        """Write it."""
        super().close()
        self._release()

    def retry(self, now: float, *, at_once: bool = False) -> None:
        """Try again, where that is due."""
        super().retry(now, at_once=at_once)
        self._release()

    def forget(self) -> None:
        """It is not to be written any more: a newer one takes its place."""
        super().forget()
        self._release()

    def _release(self) -> None:
        if self.retry_at is None and self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._on_written()

    def _blocks(self) -> Iterator[bytes]:
        at = 0
        # Not at the descriptor's own position: it may be the second time.
        while block := os.pread(self._fd, _PIECE_BYTES, at):
            at += len(block)
            yield block


def put_back(tokens_write: int, count: int) -> None:
    """Put tokens back."""
    if count:
        with suppress(OSError):
            os.write(tokens_write, bytes(count))


def tokens_for(size_bytes: int) -> int:
    """How many tokens a file takes."""
    return max(1, -(-size_bytes // TOKEN_BYTES))
