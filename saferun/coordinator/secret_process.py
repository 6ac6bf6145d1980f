"""The process that shares a job secret with other hosts (``cluster/secret_sharing.py``), as the coordinator sees it.

It is forked before torch is imported, while the coordinator is small and has no threads, and imports what it needs
beside that: so the rendezvous of the hosts waits for nothing but the call of munge. After a while without a request,
soon after the hosts have met, it exits and gives its memory back; hosts that meet again start another one.
Whatever becomes of it, there is no secret then, and the job goes on.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from saferun.text.framing import MessageBuffer

_NAME = "sr-secret"
# Longer than each way takes at most, and the imports before the first.
_ANSWER_S = 10.0
_END_S = 1.0
_MOST_BYTES = 64 << 10


class SecretProcess:
    """A handle on that process.

    Args:
        close_fds: descriptors of this process that it must not keep: ports, and the line to the supervisor.
        serve: what the process does; for tests.
    """

    def __init__(self, close_fds: Sequence[int] = (), serve: Callable[[socket.socket], None] | None = None) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._close_fds = tuple(close_fds)
        self._serve = serve
        self._line: socket.socket | None = None
        self._buffer = MessageBuffer(_MOST_BYTES)
        self._pid = -1
        self._start()
        if self._pid > 0:
            with suppress(RuntimeError):  # a zombie, as long as this process lives
                threading.Thread(target=_reap, args=(self._pid,), daemon=True).start()

    def _start(self) -> None:
        parent_pid = os.getpid()
        try:
            ours, theirs = socket.socketpair()
        except OSError:
            return
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of threads, of which the process needs none
                self._pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return
        if self._pid == 0:
            _run(parent_pid, theirs.detach(), (ours.fileno(), *self._close_fds), self._serve)
        theirs.close()
        self._line, self._buffer = ours, MessageBuffer(_MOST_BYTES)

    @property
    def pid(self) -> int:
        """The process; -1: there is none."""
        return self._pid

    def offer(self, secret: bytes, run_id: str, job: str, ttl_s: int, base: str) -> dict[str, Any]:
        """Offer a secret to the other hosts; blocks for some seconds at most.

        Args:
            secret: 32 bytes.
            run_id: the job's name, which every host knows by itself.
            job: the number that the first host has drawn.
            ttl_s: for how many seconds a credential can be read.
            base: where this user's run directories are; empty: there are none.

        Returns:
            ``text``: the offer, empty where there is none; ``why``; ``made``: what a killed run leaves behind.
        """
        return self._ask(op="offer", secret=secret.hex(), run_id=run_id, job=job, ttl_s=ttl_s, base=base)

    def take(self, offer: str, run_id: str, job: str, base: str) -> tuple[bytes, str]:
        """Take a secret; blocks for some seconds at most. For the arguments see ``offer``.

        Returns:
            The secret, empty where there is none, and why.
        """
        answer = self._ask(op="take", offer=offer, run_id=run_id, job=job, base=base)
        with suppress(ValueError, TypeError):
            return bytes.fromhex(answer.get("secret", "")), str(answer.get("why", ""))
        return b"", "an invalid answer"

    def withdraw(self) -> None:
        """All have taken the offer: remove what others could still read."""
        self._ask(op="withdraw")

    def close(self) -> None:
        """Remove what others could still read, and end the process."""
        with self._lock:
            line, self._line = self._line, None
            pid, self._pid = self._pid, -1
        if line is not None:
            line.close()
        if pid > 0 and not _ended(pid, _END_S):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            _ended(pid, 0.1)

    def _ask(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
        with self._lock:
            self._number += 1
            content = json.dumps({**request, "id": self._number}).encode() + b"\n"
            for _ in range(2):
                answer = self._exchange(content)
                if "exits" not in answer:
                    return answer
                self._restart()
            return {"why": "the process that shares the secret exits at once"}

    def _exchange(self, content: bytes) -> dict[str, Any]:
        line = self._line
        if line is None:
            return {"why": "the process that shares the secret is gone"}
        try:
            line.settimeout(_ANSWER_S)
            with suppress(BrokenPipeError, ConnectionResetError):  # the last that it has said is still to be read
                line.sendall(content)
            return self._answer(line)
        except (OSError, ValueError):
            # It is not asked again: an answer that comes late could be taken for another one.
            line.close()
            self._line = None
            return {"why": "the process that shares the secret does not answer"}

    def _answer(self, line: socket.socket) -> dict[str, Any]:
        give_up_at = time.monotonic() + _ANSWER_S
        answers: list[dict[str, Any]] = []
        while not answers:
            line.settimeout(max(0.001, give_up_at - time.monotonic()))
            chunk = line.recv(4096)
            found = self._buffer.feed(chunk) if chunk else None
            if found is None:
                raise OSError("no answer")
            answers = found
        if answers[0].get("id") != self._number and "exits" not in answers[0]:
            raise ValueError("another answer")
        return answers[0]

    def _restart(self) -> None:
        """Start another process in the place of one that has exited for want of requests."""
        if self._line is not None:
            self._line.close()
        self._line, self._pid = None, -1
        has_started = threading.Event()

        def keep() -> None:
            # The kernel ends the process when the thread that has forked it exits.
            try:
                self._start()
                pid = self._pid
            finally:
                has_started.set()
            _reap(pid)

        with suppress(RuntimeError):
            threading.Thread(target=keep, daemon=True).start()
            has_started.wait()


def _reap(pid: int) -> None:
    if pid > 0:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _run(parent_pid: int, fd: int, close_fds: Sequence[int], serve: Callable[[socket.socket], None] | None) -> None:
    """In the forked process. Does not return."""
    try:
        # First of all, before anything that may wait for a file system: ports must not stay bound because of it.
        for other in close_fds:
            if other >= 0 and other != fd:
                with suppress(OSError):
                    os.close(other)
        from saferun.linux.descriptors import close_all_but, open_null

        null = open_null()
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.setsid()  # signals of the job are ignored, as by the coordinator
        from saferun.linux.prctl import die_with_parent, hide_environ_entry, set_name

        set_name(_NAME)
        die_with_parent(parent_pid)
        # What ends all processes of a killed run would end this one before it has removed its file.
        hide_environ_entry("SAFERUN_RUN_ID")
        close_all_but(fd)
        if serve is None:
            from saferun.cluster.secret_sharing import serve as serve_secrets

            serve = serve_secrets
        serve(socket.socket(fileno=fd))
    finally:
        os._exit(0)


def _ended(pid: int, timeout_s: float) -> bool:
    """Whether a child ends in time; it is reaped then."""
    give_up_at = time.monotonic() + timeout_s
    pause_s = 0.0005
    while True:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == pid:
                return True
        except ChildProcessError:
            return True
        if time.monotonic() >= give_up_at:
            return False
        select.select([], [], [], pause_s)
        pause_s = min(2 * pause_s, 0.02)
