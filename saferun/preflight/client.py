"""The check process beside a launch: forked before the ranks are started, read without ever waiting.

It is forked rather than started anew: an interpreter takes longer to start than all checks of a healthy host. And it is
forked as soon as the command line has been read, so that it imports what it needs beside the supervisor.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller
from saferun.linux.prctl import die_with_parent
from saferun.model import JsonObject

if TYPE_CHECKING:
    from saferun.preflight.checks.context import CheckContext

# Beyond what any check may take, its patience at a retry included.
_GIVE_UP_S = 45.0
# Less than the ranks get, and enough to be done soon where other programs take all processors.
_IDLE_NICE = 5


class CheckProcess:
    """A check process that has been forked and is told later what to check.

    Args:
        beside: whether ranks are running, from which it takes no time that they want.

    Raises:
        OSError: it cannot be forked.
    """

    def __init__(self, *, beside: bool = False) -> None:
        ours, theirs = socket.socketpair()
        parent_pid = os.getpid()

        def serve() -> None:
            die_with_parent(parent_pid)
            if beside:
                os.nice(_IDLE_NICE)
            fd = theirs.detach()
            _keep_only(fd)
            from saferun.preflight.checks.serve import answer

            answer(socket.socket(fileno=fd))

        try:
            self.pid = fork(serve)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self.connection = ours
        self.is_used = False  # somebody else ends it, and reaps it

    def end(self) -> None:
        """End it if it was forked in vain."""
        if self.is_used:
            return
        self.is_used = True
        self.connection.close()
        with suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


class CheckRun:
    """The checks of one attempt on this host.

    Args:
        context: what the checks are given.
        poller: the loop's.
        opens_door: whether other hosts are to probe this one.
        on_message: takes what the process says: ``result``, ``ready``, ``probes``.
        on_lost: told, once, that nothing more will come.
        process: one that has been forked already.
        beside: whether ranks are running meanwhile.
    """

    def __init__(
        self,
        context: CheckContext,
        poller: Poller,
        *,
        opens_door: bool,
        on_message: Callable[[JsonObject], None],
        on_lost: Callable[[str], None],
        process: CheckProcess | None = None,
        beside: bool = False,
    ) -> None:
        self._context = context
        self._poller = poller
        self._opens_door = opens_door
        self._on_message = on_message
        self._on_lost = on_lost
        self._process = process
        self._beside = beside
        self._lines: JsonLines | None = None
        self.pid: int | None = None
        self.deadline: float | None = None

    def start(self) -> None:
        """Have the process check.

        Raises:
            OSError: it cannot be forked.
        """
        process = self._process or CheckProcess(beside=self._beside)
        process.is_used = True
        self.pid = process.pid
        self._lines = JsonLines(process.connection, self._poller)
        self._lines.send({"opens_door": self._opens_door, "context": self._context._asdict()})
        self._poller.watch(self._lines.fd, self._on_readable)
        self.deadline = time.monotonic() + _GIVE_UP_S

    def expect_until(self, deadline: float | None) -> None:
        """By when it is to have said something; None: nothing is expected of it."""
        self.deadline = deadline

    def send(self, message: JsonObject) -> None:
        """Ask the process for something."""
        if self._lines is not None:
            self._lines.send(message)

    def take_in(self) -> None:
        """Read what it has said by now."""
        self._on_readable()

    def expire(self) -> None:
        """It has taken longer than it may."""
        self._lose("the checks took too long")

    def on_exit(self) -> None:
        """The process has been reaped."""
        self.pid = None
        # What it said last is still to be read; the end of the line follows.

    def close(self) -> None:
        """End the process, and hear no more of it."""
        self.deadline = None
        lines, self._lines = self._lines, None
        if lines is not None:
            self._poller.unwatch(lines.fd)
            lines.close()
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _on_readable(self) -> None:
        lines = self._lines
        if lines is None:
            return
        messages = lines.receive()
        if messages is None:
            self._lose("the check process ended early")
            return
        for message in messages:
            if self._lines is lines:
                self._on_message(message)

    def _lose(self, words: str) -> None:
        self.close()
        self._on_lost(words)


def _keep_only(kept: int) -> None:
    """The child keeps nothing of its parent's: ports, pipes of ranks, terminals."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    close_all_but(kept)
