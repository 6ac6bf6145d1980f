"""The supervisor's end of the connection to a coordinator: JSON lines over a socket."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping

from saferun.linux.bare_socket import socketpair
from saferun.linux.children import Child, spawn_unawaited
from saferun.linux.descriptors import open_null
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller
from saferun.linux.signals import JOB_SIGNALS
from saferun.model import JsonObject, TorchParts

_PROGRAM = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "coordinator", "__main__.py")
_LAST_STDERR_BYTES = 8 << 10


class CoordinatorLink:
    """A running coordinator.

    Args:
        listen_fd: the store's listening socket, inherited; -1: it serves no store.
        environ: its environment.
        torch_parts: what it imports of torch: ``all`` is needed for numa binding, events, logs specs, and a
            rendezvous that is neither static nor c10d.
        more_fds: further listening sockets, inherited, each with its name.
        poller: the loop's: what the coordinator does not read at once is sent later.

    Raises:
        SpawnError: it cannot be started.
    """

    def __init__(
        self,
        listen_fd: int,
        environ: Mapping[str, str],
        *,
        torch_parts: TorchParts,
        more_fds: Mapping[str, int] | None = None,
        poller: Poller | None = None,
    ) -> None:
        ours, theirs = socketpair()
        error_read, error_write = os.pipe()
        null = open_null()
        # By file, and with -P: nothing in the current directory can stand in for a module. By file also works where
        # saferun is importable from the current directory only.
        argv = [sys.executable, "-P", _PROGRAM, str(theirs.fileno()), str(listen_fd), torch_parts]
        keep = [theirs.fileno()] + ([listen_fd] if listen_fd >= 0 else [])
        if more_fds:
            argv.append(json.dumps(dict(more_fds)))
            keep.extend(more_fds.values())
        try:
            self.child: Child = spawn_unawaited(
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
        self.torch_parts = torch_parts
        self.stderr_fd = error_read
        self.last_stderr = b""
        self.lines = JsonLines(ours, poller)

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
        self.last_stderr = (self.last_stderr + chunk)[-_LAST_STDERR_BYTES:]
        return chunk

    def last_line(self) -> str:
        """The last line it wrote to stderr: with Python, the exception."""
        lines = [line for line in self.last_stderr.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""

    def close(self) -> None:
        """Close the descriptors; the process is someone else's to end."""
        self.lines.close()
        os.close(self.stderr_fd)
        if self.child.pidfd >= 0:
            os.close(self.child.pidfd)
