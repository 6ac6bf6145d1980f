"""A command in a host: a child of the tests, whose signals reach it directly."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.cluster.machines import kernel

# No measure of anything: only what never comes is waited for so long.
DEADLINE_S = 240.0
_LOOK_AGAIN_S = 0.01


class Process(subprocess.Popen[bytes]):
    """A command that was started in a host.

    ``pid`` is its pid on the machine: ``kill``, ``terminate``, ``send_signal`` and ``wait`` are those of any child, and
    /proc/PID is there to be read. What it writes is kept in memory, for ``out`` and ``err``, unless ``stdout`` or
    ``stderr`` are given as for Popen; ``stderr=subprocess.STDOUT`` puts both into ``out``.

    Args:
        pid_one: pid of the host's PID 1.
        command: program and arguments; the program is looked up inside of the host.
        cwd: a folder inside of the host.
        env: the whole environment.
        more: as for Popen.
    """

    def __init__(self, pid_one: int, command: Sequence[str], *, cwd: str, env: Mapping[str, str], **more: Any) -> None:
        self._last_out = self._last_err = ""
        self._out_fd = os.memfd_create("stdout") if more.get("stdout") is None else -1
        self._err_fd = os.memfd_create("stderr") if more.get("stderr") is None else -1
        if self._out_fd >= 0:
            more["stdout"] = self._out_fd
        if self._err_fd >= 0:
            more["stderr"] = self._err_fd
        more.setdefault("stdin", subprocess.DEVNULL)
        more.setdefault("start_new_session", True)
        # Without --pid nsenter does not fork: it becomes env, and env the command.
        enter = ("nsenter", f"--target={pid_one}", "--mount", "--uts", "--ipc", "--net", "--", "env", f"--chdir={cwd}")
        own = os.open("/proc/thread-self/ns/pid", os.O_RDONLY)
        host = os.pidfd_open(pid_one)
        try:
            # For the next child of this thread only.
            kernel.setns(host, kernel.CLONE_NEWPID)
            try:
                super().__init__([*enter, *command], env=dict(env), **more)
            finally:
                kernel.setns(own, kernel.CLONE_NEWPID)
        finally:
            os.close(host)
            os.close(own)

    @property
    def out(self) -> str:
        """What it has written to stdout so far."""
        return self._last_out if self._out_fd < 0 else _content(self._out_fd)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return self._last_err if self._err_fd < 0 else _content(self._err_fd)

    def wait_for(self, pattern: str, timeout_s: float = DEADLINE_S) -> re.Match[str]:
        """Wait until a regular expression is found in ``out`` or ``err``.

        Raises:
            AssertionError: the process has ended, or the time is over, and it was not there.
        """
        expression = re.compile(pattern, re.MULTILINE)
        give_up_at = time.monotonic() + timeout_s
        while True:
            has_ended = self.poll() is not None
            if found := expression.search(self.out) or expression.search(self.err):
                return found
            assert not has_ended, self.story(f"ended with {self.returncode} before it said {pattern!r}")
            assert time.monotonic() < give_up_at, self.story(f"has not said {pattern!r} within {timeout_s:g} s")
            time.sleep(_LOOK_AGAIN_S)

    def finish(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait for its end and return the exit code; a test fails with all output where it does not come.

        Raises:
            AssertionError: the time is over.
        """
        try:
            return self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.story(f"has not ended within {timeout_s:g} s")) from None

    def story(self, what: str) -> str:
        """A message for a failed assertion: what, the command, and the last of its output."""
        return f"{self.args!r}: {what}\nstdout:\n{self.out[-4000:]}\nstderr:\n{self.err[-4000:]}"

    def end(self) -> None:
        """Kill it if it lives, and hold its output no longer open. What it started in turn may live on."""
        if self.poll() is None:
            self.send_signal(signal.SIGCONT)
            self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(DEADLINE_S)
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._last_out, self._last_err = self.out, self.err
        for fd in (self._out_fd, self._err_fd):
            if fd >= 0:
                os.close(fd)
        self._out_fd = self._err_fd = -1


def _content(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
