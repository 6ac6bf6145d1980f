"""A helper process: forked from the supervisor, which exchanges JSON lines with it without ever waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket, socketpair
from saferun.linux.children import KILLED_S, await_exits, fork
from saferun.linux.descriptors import keep_only
from saferun.linux.json_lines import QUEUE_BYTES, JsonLines
from saferun.linux.poller import Poller
from saferun.linux.prctl import die_with_parent, set_name
from saferun.model import ExitStatus, JsonObject

# The end of the stream follows the last messages.
_READS_AT_MOST = 8


class NoHelperError(OSError):
    """This helper process could never be forked: the caller does its work, or it is not done."""


class NoHelperLeftError(OSError):
    """This helper process has been lost for good: it is not replaced any more."""


class Helper:
    """One helper process. It is a fork: no interpreter is started and no file is read for it.

    The process is in a session of its own, dies with the supervisor, ignores the signals that are meant for the job,
    has /dev/null as its standard streams, and inherits no descriptors but those in ``keep``.

    Args:
        name: what ``ps`` shows; at most 15 bytes count.
        serve: runs in the process with its end of the connection, in blocking mode; when it returns the process exits.
        keep: further descriptors that it inherits, under the same numbers.
        dies_with_parent: whether the kernel kills it when the supervisor exits.

    Raises:
        OSError: it cannot be forked.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Socket], None],
        *,
        keep: Sequence[int] = (),
        dies_with_parent: bool = True,
    ) -> None:
        self.name = name
        ours, theirs = socketpair()
        parent_pid = os.getpid()

        def begin() -> None:
            if dies_with_parent:
                die_with_parent(parent_pid)
            set_name(name)
            fd = theirs.detach()
            keep_only(fd, *keep)
            serve(Socket(fileno=fd))

        try:
            self._pid: int | None = fork(begin)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection: Socket | None = ours
        self._lines: JsonLines | None = None
        self._poller: Poller | None = None
        self._on_message: Callable[[JsonObject], None] = _nothing
        self._on_lost: Callable[[], None] = _nothing

    def attach(
        self,
        poller: Poller,
        on_message: Callable[[JsonObject], None],
        on_lost: Callable[[], None],
        *,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        """Start to receive messages of the process.

        Args:
            poller: the loop's.
            on_message: called with each message of the process.
            on_lost: called once, if the process closes its end or exits unexpectedly.
            queue_bytes: the most that is queued for a process that does not read.
        """
        if self._connection is None:
            return
        self._poller, self._on_message, self._on_lost = poller, on_message, on_lost
        self._lines = JsonLines(self._connection, poller, queue_bytes=queue_bytes)
        self._connection = None
        poller.watch(self._lines.fd, self._on_readable)

    @property
    def pids(self) -> set[int]:
        """The process, until it has been reaped."""
        return {self._pid} if self._pid is not None else set()

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent."""
        return self._lines is not None

    @property
    def queued_bytes(self) -> int:
        """How many bytes wait to be read by the process."""
        return self._lines.queued_bytes if self._lines is not None else 0

    def send(self, message: JsonObject, fds: Sequence[int] = ()) -> bool:
        """Send a message, with descriptors if any. Returns whether it was sent or queued."""
        return self._lines is not None and self._lines.send(message, fds)

    def receive(self) -> None:
        """Process pending messages, and the end of the process, now instead of from the loop."""
        for _ in range(_READS_AT_MOST):
            self._on_readable()

    def on_exit(self, pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. Remaining messages are still read; then ``on_lost`` is called."""
        if pid != self._pid:
            return False
        self._pid = None
        return True

    def kill(self) -> None:
        """Kill the process and drop its messages; ``on_lost`` is not called. The loop reaps it."""
        self._hang_up()
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, at the end of the launch."""
        self.kill()

    def discard(self) -> None:
        """Kill a process that is not needed, and reap it, unless it ends late: no loop does, as it is not attached."""
        if self._connection is None:
            return
        self.kill()
        await_exits(self.pids, KILLED_S)

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        lines, self._lines = self._lines, None
        if lines is not None and self._poller is not None:
            self._poller.unwatch(lines.fd)
            lines.close()

    def _on_readable(self) -> None:
        lines = self._lines
        if lines is None:
            return
        messages = lines.receive()
        if messages is None:
            self._hang_up()
            self._on_lost()
            return
        for message in messages:
            if self._lines is lines:  # a message may have closed it
                self._on_message(message)


def _nothing(*_arguments: object) -> None:
    """The callback before ``attach``."""


class PartBase:
    """A base of parts of the loop (``linux.part``): each has at most one helper process."""

    _helper: Helper | None = None

    @property
    def pids(self) -> set[int]:
        """The helper process, until it has been reaped."""
        return self._helper.pids if self._helper is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the helper process."""
        return self._helper is not None and self._helper.on_exit(pid, status)
