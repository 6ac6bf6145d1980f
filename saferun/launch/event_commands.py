"""The process that runs the command of ``--on-event``: the loop only sends it events, and never waits for it.

Each command leads a session of its own and has a time limit. Its standard input is a file in memory; what it prints
comes back through a pipe, of which the beginning is kept. When it ends, whatever it left in its session is killed, and
when this process ends, so is everything below it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket
from saferun.linux.children import Child, SpawnError, begin_spawn, exit_status, reap, spawn_error
from saferun.linux.memory_file import memory_file
from saferun.linux.prctl import become_subreaper
from saferun.linux.procfs import descendants_of, living_processes
from saferun.linux.signals import JOB_SIGNALS
from saferun.model import JsonObject, Value

_LINE_BYTES = 1 << 16
_KEPT_BYTES = 1 << 13
_POLL_MS = 50
_KILL_PASSES = 20
# What waits for a disk does not end, and each try reads all of /proc.
_KILL_AGAIN_S, _KILL_SELDOM_S = 1.0, 60.0


class CommandLimits(Value):
    """How long a command may take before SIGTERM, how long then before SIGKILL, and how many run at a time.

    ``stuck_s``: how long after SIGKILL another one may take its place, though it has not ended.
    """

    run_s: float = 30.0
    term_s: float = 2.0
    at_once: int = 4
    stuck_s: float = 300.0


class _Running(Value):
    """A command that runs. ``report``: the descriptor of its start, ``output``: that of what it prints."""

    number: int
    child: Child
    report: int
    output: int
    started_at: float


class EventCommands:
    """Runs the command for each event.

    Args:
        connection: the line to the supervisor.
        argv: the command.
        environ: its environment, to which the kind of the event is added.
        limits: what it may take.
    """

    def __init__(
        self, connection: Socket, argv: Sequence[str], environ: Mapping[str, str], limits: CommandLimits
    ) -> None:
        self._connection = connection
        self._argv = argv
        self._environ = environ
        self._limits = limits
        self._poll = select.poll()
        self._waiting: deque[JsonObject] = deque()
        self._running: dict[int, _Running] = {}  # by pid
        self._kept: dict[int, bytearray] = {}  # by the descriptor of the output
        self._dropped: dict[int, int] = {}
        self._termed: set[int] = set()
        self._kill_at: dict[int, tuple[float, float]] = {}  # by pid: when next, and how long to wait after that
        self._rest = b""

    def serve(self) -> None:
        """Run commands until the supervisor hangs up or says that it is over."""
        fd = self._connection.fileno()
        self._poll.register(fd, select.POLLIN)
        try:
            while True:
                for ready, _ in self._poll.poll(_POLL_MS if self._running else None):
                    if ready == fd and not self._receive():
                        return
                    if ready != fd:
                        self._read(ready)
                self._check()
                while self._waiting and len(self._running) < self._limits.at_once:
                    self._start(self._waiting.popleft())
        finally:
            _kill_all()

    def _receive(self) -> bool:
        """Take orders in. Returns whether there may be more."""
        chunk = self._connection.recv(_LINE_BYTES)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        orders = [json.loads(line) for line in lines]
        self._waiting.extend(order for order in orders if "event" in order)
        return bool(chunk) and not any("stop" in order for order in orders)

    # ------------------------------------------------------------------------------------------------- one command

    def _start(self, order: JsonObject) -> None:
        number = int(order["number"])
        environ = {**self._environ, "SAFERUN_EVENT": str(order["event"].get("kind", ""))}
        output, printed = os.pipe()
        try:
            content = memory_file("saferun-event", json.dumps(order["event"]).encode() + b"\n", disks=False)
            try:
                child, report = begin_spawn(
                    self._argv, environ, stdin=content, stdout=printed, stderr=printed, prepare=_restore_signals
                )
            finally:
                os.close(content)
        except (OSError, SpawnError) as error:
            os.close(output)
            self._answer({"number": number, "error": str(error)})
            return
        finally:
            os.close(printed)
        os.set_blocking(output, False)
        self._kept[output], self._dropped[output] = bytearray(), 0
        self._poll.register(output, select.POLLIN)
        self._running[child.pid] = _Running(number, child, report, output, time.monotonic())

    def _read(self, fd: int) -> None:
        """Take in what a command prints: its beginning is kept, the rest is counted."""
        try:
            chunk = os.read(fd, _LINE_BYTES)
        except BlockingIOError:
            return
        if not chunk:
            self._poll.unregister(fd)
            return
        kept = self._kept[fd]
        room = max(_KEPT_BYTES - len(kept), 0)
        kept += chunk[:room]
        self._dropped[fd] += len(chunk) - len(chunk[:room])

    def _check(self) -> None:
        """See which commands have ended, and end those that take too long."""
        now = time.monotonic()
        kill_s = self._limits.run_s + self._limits.term_s
        for pid, running in list(self._running.items()):
            elapsed_s = now - running.started_at
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                # Before it is reaped: until then no other session can have its number.
                _kill_session(pid)
                self._ended(running, exit_status(os.waitpid(pid, 0)[1]).returncode, elapsed_s)
            elif elapsed_s >= kill_s + self._limits.stuck_s:
                self._ended(running, -signal.SIGKILL, elapsed_s, is_stuck=True)
            elif elapsed_s >= kill_s:
                self._kill(pid, now)
            elif elapsed_s >= self._limits.run_s and pid not in self._termed:
                self._termed.add(pid)
                with suppress(OSError):
                    os.killpg(pid, signal.SIGTERM)
        if not self._running:
            reap()  # what was left behind by a command that had moved it to another session

    def _kill(self, pid: int, now: float) -> None:
        at, wait_s = self._kill_at.get(pid, (now, _KILL_AGAIN_S))
        if at <= now:
            _kill_session(pid, _KILL_PASSES if pid not in self._kill_at else 1)
            self._kill_at[pid] = now + wait_s, min(wait_s * 2, _KILL_SELDOM_S)

    def _ended(self, running: _Running, returncode: int, elapsed_s: float, *, is_stuck: bool = False) -> None:
        """A command has ended, or ``is_stuck``: nothing can end it, and it is not waited for any more."""
        del self._running[running.child.pid]
        self._kill_at.pop(running.child.pid, None)
        if running.child.pidfd >= 0:
            os.close(running.child.pidfd)
        error = ""
        try:
            failure = spawn_error(running.report)
            error = str(failure) if failure is not None else ""
        except BlockingIOError:
            os.close(running.report)
        fd = running.output
        for _ in range(_KEPT_BYTES // 64):
            before = len(self._kept[fd]) + self._dropped[fd]
            with suppress(KeyError):  # all has been read
                self._read(fd)
            if len(self._kept[fd]) + self._dropped[fd] == before:
                break
        with suppress(KeyError):
            self._poll.unregister(fd)
        os.close(fd)
        answer: JsonObject = {
            "number": running.number,
            "returncode": returncode,
            "elapsed_s": round(elapsed_s, 3),
            "is_late": running.child.pid in self._termed,
            "is_stuck": is_stuck,
            "output": self._kept.pop(fd).decode(errors="replace"),
            "dropped_bytes": self._dropped.pop(fd),
        }
        self._termed.discard(running.child.pid)
        self._answer(answer | ({"error": error} if error else {}))

    def _answer(self, answer: JsonObject) -> None:
        self._connection.sendall(json.dumps(answer).encode() + b"\n")


def serve(
    connection: Socket, argv: Sequence[str], environ: Mapping[str, str], limits: CommandLimits | None = None
) -> None:
    """Run the command for each line, ``{"number": …, "event": {…}}``, and answer how it ended.

    Args:
        connection: the line to the supervisor.
        argv: the command.
        environ: its environment.
        limits: what it may take.
    """
    become_subreaper()
    EventCommands(connection, argv, environ, limits or CommandLimits()).serve()


def _restore_signals() -> None:
    """A helper process ignores what is meant for the job; a program expects the defaults."""
    for signum in JOB_SIGNALS:
        signal.signal(signum, signal.SIG_DFL)


def _kill_session(leader: int, passes: int = _KILL_PASSES) -> None:
    """Kill every process of a session whose leader has not been reaped."""
    killed: set[int] = set()
    for _ in range(passes):
        members = [pid for pid in living_processes() if pid not in killed and _session_of(pid) == leader]
        for pid in members:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not members:
            return
        killed.update(members)


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _kill_all() -> None:
    """Kill everything below this process, also what has moved to another session."""
    for _ in range(_KILL_PASSES):
        below = descendants_of(os.getpid())
        for pid in below:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        if not below:
            return
