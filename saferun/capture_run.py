"""The capture process beside a job: started when there is something to be looked at, read without ever waiting."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress

from saferun.captures.wire import CaptureReader, CoreRequest, Request, encode_request
from saferun.host.children import JOB_SIGNALS, Child, SpawnError, spawn
from saferun.host.poller import Poller
from saferun.linux.memory_file import memory_file

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# What the user has on PYTHONPATH comes last: a sitecustomize of theirs, or a module called like one of Python's, is
# meant for the ranks. Whatever this process starts finds it where it was.
_PROGRAM = """
import os, sys
root, path = sys.argv[1:]
sys.path += [root, *filter(None, path.split(os.pathsep))]
if path:
    os.environ["PYTHONPATH"] = path
from saferun.captures.__main__ import main
sys.exit(main())
"""
_READ_BYTES = 1 << 18


class CaptureRun:
    """One capture. ``on_done`` is called exactly once: when it is complete, cut short, or could not begin.

    Args:
        request: what to look at.
        environ: the environment of the process.
        poller: the loop's.
        deadline: monotonic seconds after which what has come must do; the owner calls ``expire`` then.
        on_done: takes what was seen, and in one line why that is not all (empty: it is).
    """

    def __init__(
        self,
        request: Request | CoreRequest,
        environ: Mapping[str, str],
        poller: Poller,
        *,
        deadline: float,
        on_done: Callable[[CaptureReader, str], None],
    ) -> None:
        self.deadline = deadline
        self._poller = poller
        self._on_done = on_done
        self._reader = CaptureReader()
        self._fd = -1
        self._child: Child | None = None
        self._failure = ""
        try:
            self._start(request, environ)
        except (OSError, SpawnError) as error:
            self._failure = f"the capture process cannot be started: {error}"

    def _start(self, request: Request | CoreRequest, environ: Mapping[str, str]) -> None:
        environ = dict(environ)
        argv = [sys.executable, "-P", "-c", _PROGRAM, _ROOT, environ.pop("PYTHONPATH", "")]
        opened: list[int] = []
        try:
            # A file in memory rather than a pipe: however long the request is, writing it never waits for the reader.
            opened.append(memory_file("saferun-request", encode_request(request)))
            opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            opened += os.pipe()
            stdin, null, read_end, write_end = opened
            self._child = spawn(argv, environ, stdin=stdin, stdout=write_end, stderr=null, ignored=JOB_SIGNALS)
            opened.remove(read_end)
        finally:
            for fd in opened:
                os.close(fd)
        os.set_blocking(read_end, False)
        self._fd = read_end
        self._poller.watch(read_end, self._on_readable)

    @property
    def pid(self) -> int | None:
        """The process, until it has been reaped."""
        return self._child.pid if self._child is not None else None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come."""
        return self._fd < 0

    def on_exit(self) -> None:
        """The process has been reaped; what it wrote is still in the pipe."""
        if self._child is not None and self._child.pidfd >= 0:
            os.close(self._child.pidfd)
        self._child = None

    def begin(self) -> None:
        """Call ``on_done`` where it could not even be started."""
        if self._failure:
            self._finish(self._failure)

    def expire(self) -> None:
        """The time is over: what has come is all there is."""
        if not self.is_over:
            self.close()
            self._finish("the time for it was over")

    def close(self) -> None:
        """End the process. ``on_done`` is not called."""
        if self._child is not None:
            with suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGKILL)
        self._stop_reading()

    def _stop_reading(self) -> None:
        if self._fd >= 0:
            self._poller.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_readable(self) -> None:
        try:
            chunk = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        if chunk:
            self._reader.feed(chunk)
        if self._reader.is_done or not chunk:
            self.close()
            self._finish("" if self._reader.is_done else "the capture process ended before it was done")

    def _finish(self, failure: str) -> None:
        self._failure = ""
        self._on_done(self._reader, failure)
