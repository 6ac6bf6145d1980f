"""The supervisor's end of the line to a coordinator: JSON lines over a socket."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from saferun.host.children import JOB_SIGNALS, Child, spawn
from saferun.model import JsonObject

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "coordinator", "__main__.py")
_LONGEST_MESSAGE_BYTES = 16 << 20
_LAST_WORDS_BYTES = 8 << 10


class JsonLines:
    """JSON objects, one a line, over a connected socket. Nothing is waited for but a peer that does not read."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received: list[bytes] = []
        self._received_bytes = 0

    @property
    def fd(self) -> int:
        """What becomes readable when the other side says something or ends."""
        return self._socket.fileno()

    def send(self, message: JsonObject) -> None:
        """Send a message; a peer that is gone is noticed when it is read from, not here."""
        data = json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            # A message fits the socket's buffer many times over; one that is not read is bounded by the timeout.
            self._socket.settimeout(5.0)
            self._socket.sendall(data)
        with suppress(OSError):
            self._socket.setblocking(False)

    def receive(self) -> list[JsonObject] | None:
        """The messages that have come; None when the other side has closed its end."""
        try:
            chunk = self._socket.recv(1 << 18)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk or self._received_bytes > _LONGEST_MESSAGE_BYTES:
            return None
        self._received.append(chunk)
        self._received_bytes += len(chunk)
        if b"\n" not in chunk:
            return []
        *lines, rest = b"".join(self._received).split(b"\n")
        self._received, self._received_bytes = [rest], len(rest)
        messages = []
        for line in lines:
            with suppress(ValueError, RecursionError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def connect_to_task(path: str) -> JsonLines | None:
    """The line to a coordinator that another process of this user owns; None: there is nobody yet.

    Args:
        path: its Unix socket.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(5.0)
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return JsonLines(connection)


class CoordinatorLink:
    """A running coordinator.

    Args:
        listen_fd: the store's listening socket, inherited; -1: it serves no store.
        environ: its environment.
        whole_torch: import all of torch, not only the store (needed for numa binding, events and logs specs).
        more_fds: further listening sockets, inherited, each with its name.

    Raises:
        SpawnError: it cannot be started.
    """

    def __init__(
        self,
        listen_fd: int,
        environ: Mapping[str, str],
        *,
        whole_torch: bool,
        more_fds: Mapping[str, int] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        error_read, error_write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # By file, and with -P: nothing in the current directory can stand in for a module. By file also works where
        # saferun is importable from the current directory only.
        argv = [sys.executable, "-P", _PROGRAM, str(theirs.fileno()), str(listen_fd), str(int(whole_torch))]
        keep = [theirs.fileno()] + ([listen_fd] if listen_fd >= 0 else [])
        if more_fds:
            argv.append(json.dumps(dict(more_fds)))
            keep.extend(more_fds.values())
        try:
            self.child: Child = spawn(
                argv, environ, stdin=null, stdout=null, stderr=error_write, keep=keep, ignored=JOB_SIGNALS
            )
        except BaseException:
            ours.close()
            os.close(error_read)
            raise
        finally:
            theirs.close()
            os.close(error_write)
            os.close(null)
        os.set_blocking(error_read, False)
        self.whole_torch = whole_torch
        self.serving: int | None = None  # the attempt whose store is served
        self.stderr_fd = error_read
        self.last_words = b""
        self.lines = JsonLines(ours)

    @property
    def fd(self) -> int:
        """What becomes readable when the coordinator says something or ends."""
        return self.lines.fd

    def send(self, message: JsonObject) -> None:
        """Send a message; a coordinator that is gone is noticed by its exit, not here."""
        self.lines.send(message)

    def receive(self) -> list[JsonObject] | None:
        """The messages that have come; None when the coordinator has closed its end."""
        return self.lines.receive()

    def read_stderr(self) -> bytes | None:
        """What it wrote to stderr since; None at the end."""
        try:
            chunk = os.read(self.stderr_fd, 1 << 16)
        except BlockingIOError:
            return b""
        except OSError:
            return None
        if not chunk:
            return None
        self.last_words = (self.last_words + chunk)[-_LAST_WORDS_BYTES:]
        return chunk

    def last_line(self) -> str:
        """The last line it wrote to stderr: with Python, the exception."""
        lines = [line for line in self.last_words.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Close the descriptors; the process is someone else's to end."""
        self.lines.close()
        os.close(self.stderr_fd)
        if self.child.pidfd >= 0:
            os.close(self.child.pidfd)
