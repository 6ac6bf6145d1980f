"""``--metrics``: has a file with numbers about the launch written every 15 s and at its end.

A process of its own writes it, since the file system may hang. While it does, no further content is sent to it, and
the launch goes on and ends without the file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.launch.metrics_samples import MetricsSamples
from saferun.linux.bare_socket import Socket
from saferun.linux.helper import Helper, PartBase

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.model import JsonObject

INTERVAL_S = 15.0
PATIENCE_S = 1.0
"""How long the end of a launch waits for the last content to be written."""
_FIRST_S = 0.5
_LINE_BYTES = 1 << 16
_MODE = 0o644  # node_exporter is another user


class MetricsPart(PartBase):
    """Sends numbers to the process that writes the file. A part of the loop.

    Args:
        context: the launch.
        path: the file.
    """

    def __init__(self, context: LaunchContext, path: str) -> None:
        self.deadline: float | None = time.monotonic() + _FIRST_S
        self._context = context
        self._path = path
        self._is_writing = False
        self._samples = MetricsSamples(context)
        self._has_checked_name = path.endswith(".prom")
        try:
            self._helper = Helper("sr-metrics", lambda connection: serve(connection, path))
        except OSError as error:
            self._give_up(f"no process that writes it: {error.strerror}")
            return
        self._helper.attach(context.guarded_poller, self._on_message, lambda: self._give_up("the process was ended"))

    def tick(self, now: float) -> None:
        """Have the file written, if that is due and the last time is over."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = now + INTERVAL_S
            if not self._is_writing:
                self._send(None)

    def close(self) -> None:
        """Nothing: it is ``finish`` that ends the process."""

    def finish(self, exit_code: int | None, is_hurried: Callable[[], bool], on_wait: Callable[[], object]) -> None:
        """The launch is over: have its end written, wait a moment for that, and end the process.

        Args:
            exit_code: saferun's; None: not known.
            is_hurried: whether the user has asked again for the end.
            on_wait: called now and then while there is something to be waited for.
        """
        helper, give_up_at = self._helper, time.monotonic() + PATIENCE_S
        if helper is None:
            return
        try:
            has_sent = False
            while helper.is_open and time.monotonic() < give_up_at and not is_hurried():
                if not self._is_writing:
                    if has_sent:
                        break
                    has_sent = True
                    self._send(-1 if exit_code is None else exit_code)
                on_wait()
                self._context.poller.wait(0.05)
        finally:
            helper.kill()

    def _send(self, exit_code: int | None) -> None:
        text = self._samples.text(exit_code)
        if self._helper is not None and self._helper.send({"text": text}):
            self._is_writing = True

    def _on_message(self, message: JsonObject) -> None:
        self._is_writing = False
        if message.get("failed"):
            self._context.warn(f"--metrics: {message['failed']}; the job does not depend on it")
        elif not self._has_checked_name:
            self._has_checked_name = True
            why = "node_exporter's textfile collector reads only files that end in .prom"
            self._context.warn(f"--metrics {self._path}: {why}")

    def _give_up(self, reason: str) -> None:
        self.deadline = None
        self._context.warn(f"--metrics {self._path}: {reason}; the job does not depend on it")


def serve(connection: Socket, path: str) -> None:
    """Write the file for each line, ``{"text": …}``, as a whole or not at all, and answer.

    Args:
        connection: the line to the supervisor.
        path: the file.
    """
    rest = b""
    while chunk := connection.recv(_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            failed = _write(path, json.loads(line)["text"].encode())
            connection.sendall(json.dumps({"failed": failed}).encode() + b"\n")


def _write(path: str, content: bytes) -> str:
    """Returns why it cannot be written; empty: it is."""
    # The collector reads names that end in .prom only.
    part = f"{path}.{os.getpid()}.tmp"
    try:
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        try:
            os.fchmod(fd, _MODE)
            while content:
                content = content[os.write(fd, content) :]
        finally:
            os.close(fd)
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(part)
        return f"{path}: {error.strerror}"
    return ""
