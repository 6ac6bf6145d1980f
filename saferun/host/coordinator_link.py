"""The supervisor's end of the line to the coordinator process: JSON lines over a socket pair."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress

from saferun.host.children import Child, spawn
from saferun.model import JsonObject

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "coordinator", "__main__.py")
_LONGEST_MESSAGE_BYTES = 16 << 20
_LAST_WORDS_BYTES = 8 << 10


class CoordinatorLink:
    """A running coordinator.

    Args:
        listen_fd: the store's listening socket, inherited; -1: it serves no store.
        environ: its environment.
        whole_torch: import all of torch, not only the store (needed for numa binding, events and logs specs).

    Raises:
        SpawnError: it cannot be started.
    """

    def __init__(self, listen_fd: int, environ: Mapping[str, str], *, whole_torch: bool) -> None:
        ours, theirs = socket.socketpair()
        error_read, error_write = os.pipe()
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # By file, and with -P: nothing in the current directory can stand in for a module. By file also works where
        # saferun is importable from the current directory only.
        argv = [sys.executable, "-P", _PROGRAM, str(theirs.fileno()), str(listen_fd), str(int(whole_torch))]
        keep = [theirs.fileno()] + ([listen_fd] if listen_fd >= 0 else [])
        try:
            self.child: Child = spawn(argv, environ, stdin=null, stdout=null, stderr=error_write, keep=keep)
        except BaseException:
            ours.close()
            os.close(error_read)
            raise
        finally:
            theirs.close()
            os.close(error_write)
            os.close(null)
        ours.setblocking(False)
        os.set_blocking(error_read, False)
        self.whole_torch = whole_torch
        self.serving: int | None = None  # the attempt whose store is served
        self.stderr_fd = error_read
        self.last_words = b""
        self._socket = ours
        self._received = b""

    @property
    def fd(self) -> int:
        """What becomes readable when the coordinator says something or ends."""
        return self._socket.fileno()

    def send(self, message: JsonObject) -> None:
        """Send a message; a coordinator that is gone is noticed by its exit, not here."""
        data = json.dumps(message).encode() + b"\n"
        with suppress(OSError):
            # A message fits the socket's buffer many times over; one that is not read is bounded by the timeout.
            self._socket.settimeout(5.0)
            self._socket.sendall(data)
        self._socket.setblocking(False)

    def receive(self) -> list[JsonObject] | None:
        """The messages that have come; None when the coordinator has closed its end."""
        try:
            chunk = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk or len(self._received) > _LONGEST_MESSAGE_BYTES:
            return None
        *lines, self._received = (self._received + chunk).split(b"\n")
        messages = []
        for line in lines:
            with suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages

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
        self._socket.close()
        os.close(self.stderr_fd)
        if self.child.pidfd >= 0:
            os.close(self.child.pidfd)
