"""Answers saferunctl while the ranks run, by a Unix socket of the same user (``linux/control_socket.py``).

A request is a JSON object in a line, and so are the answers to it; one request a connection. Whatever a client sends,
or does not read, costs its connection and nothing else: connections, bytes, time and the number of connections a second
are bounded. A control socket that fails is closed, with one line, and the launch goes on without it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from typing import Annotated, ClassVar

from saferun.errors import suppress
from saferun.launch.asked_stacks import AskedStacks, longest_s
from saferun.launch.host_stacks import Wanted
from saferun.launch.launch_context import LaunchContext
from saferun.launch.live_status import LiveStatus
from saferun.linux.control_socket import PeerProcess, accept, listen
from saferun.linux.helper import PartBase
from saferun.linux.json_lines import JsonLines
from saferun.linux.signals import SURVIVED, caught_signals
from saferun.model import JsonObject, Value, signal_name
from saferun.supervisor import requests as _requests  # noqa: F401 - what a request does is in memory before one comes
from saferun.supervisor.events import CheckpointRequested, RestartRequested, StopRequested
from saferun.supervisor.machine import State
from saferun.text.decoding import MALFORMED
from saferun.text.typed_json import fit, line_of, number_of, seconds_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.attached_viewer import AttachedViewer
    from saferun.launch.debugged_ranks import DebuggedRank
    from saferun.linux.bare_socket import Socket

_MOST_CLIENTS = 32
# Of a client that sends no request, or does not read its answer.
_PATIENCE_S = 10.0
_ACCEPTED_AT_ONCE = 8
# More connections than that in a second are no person's. The next ones wait until the second is over.
_ACCEPTED_A_SECOND = 100
_LONGEST_REQUEST_BYTES = 1 << 14
_READ_BYTES = 1 << 12
_QUEUE_BYTES = 16 << 20
_LONGEST_NAME = 60
# What has to be collected of all hosts is there by then.
_COLLECTED_S = 30.0
_LONGEST_WAIT_S = 30 * 86400.0
# The hosts have yet to meet for the attempt.
_BETWEEN_ATTEMPTS = frozenset({State.CHECKING, State.JOINING})
# The leader answers at once where it can. A host without one ends for itself, as for SIGTERM.
_LEADER_S = 10.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ControlRequest(Value):
    """What saferunctl asks for.

    Attributes:
        op: what.
        user: the name of the user, for people.
        signum: of ``checkpoint``: the signal that the ranks handle.
        timeout_s: of ``checkpoint``: how long the ranks may take to end; they are stopped then.
        wanted: of ``stacks``: what of the ranks.
        rank: of ``attach``, ``locate`` and ``debug``: which one; of ``attach`` empty: the one that asks for input.
    """

    op: Annotated[str, line_of(_LONGEST_NAME)]
    user: Annotated[str, line_of(_LONGEST_NAME)] = ""
    signum: Annotated[int, number_of(64)] = 0
    timeout_s: Annotated[float, seconds_of(_LONGEST_WAIT_S)] = 0.0
    wanted: Wanted = Wanted("stacks")
    rank: Annotated[str, line_of(_LONGEST_NAME)] = ""


class _Client:
    """One connection. ``until``: when it is closed, in monotonic seconds; None: it waits for the end of the launch."""

    def __init__(self, lines: JsonLines, peer: PeerProcess, until: float) -> None:
        self.lines = lines
        self.peer = peer
        self.until: float | None = until
        self.has_asked = False
        self.restarted_attempt: int | None = None  # waits for another one than this
        self.is_answered = False
        self.viewer: AttachedViewer | None = None
        self.debugged: DebuggedRank | None = None
        self.on_gone: Callable[[], None] = lambda: None


class ControlPart(PartBase):
    """The control socket of a launch. A part of the loop.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._context = context
        self._listener: Socket | None = None
        self._path = ""
        self._clients: dict[int, _Client] = {}
        self._listen_at: float | None = None  # when connections are accepted again
        self._second = 0.0
        self._accepted = 0
        self._held: list[StopRequested] = []
        self._held_until: float | None = None
        self._stop_at: float | None = None  # when ranks that were to save a checkpoint are stopped
        self._stop_by = ""
        self._status = LiveStatus(context, self._guarded)
        self._stacks = AskedStacks(context, self._guarded)

    def open(self) -> None:
        """Listen from now on.

        Raises:
            OSError: that is not possible here.
        """
        # The one that was found before the ranks: no file system is searched for another now.
        directory = self._context.investigation.hook.memory_directory
        self._listener, self._path = listen(directory, self._context.run_id)
        self._accept_again()
        self._context.log.set_control_socket(self._path)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [client.until for client in self._clients.values()]
        own = (self._listen_at, self._stop_at, self._held_until)
        moments += [*own, self._status.deadline, self._stacks.deadline]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Drop who is late, and do what had to wait."""
        for fd, client in list(self._clients.items()):
            is_over = client.is_answered and client.until is not None and not client.lines.queued_bytes
            if is_over or (client.until is not None and client.until <= now):
                self._drop(fd)
        self._status.tick(now)
        self._stacks.tick(now)
        if self._listen_at is not None and self._listen_at <= now:
            self._accept_again()
        if self._stop_at is not None and self._stop_at <= now:
            self._stop_at = None
            self._post_stop(self._stop_by, now=now)
        self._report_restart()
        self._end_debuggers()
        is_late = self._held_until is not None and self._held_until <= now
        if self._held and (is_late or self._context.supervisor.state not in _BETWEEN_ATTEMPTS):
            held, self._held, self._held_until = self._held, [], None
            for request in held:
                self._context.post(request._replace(at=now, attempt=self._context.attempt))

    def close(self) -> None:
        """The launch is over: whoever waits for its end learns of it."""
        self._status.close()
        self._stacks.close()
        ended = self._context.log.ended
        for fd, client in list(self._clients.items()):
            if ended and client.until is None and client.restarted_attempt is None:
                client.lines.send(dict(ended))
            self._drop(fd)
        self._listen_at = None
        self._held.clear()
        self._held_until = None
        self._stop_at = None
        listener, self._listener = self._listener, None
        if listener is not None:
            self._context.poller.unwatch(listener.fileno())
            listener.close()
            if self._path.startswith("/"):
                with suppress(OSError):
                    os.unlink(self._path)

    # --------------------------------------------------------------------------------------------------- connections

    def _guarded(self, call: Callable[..., None]) -> Callable[..., None]:
        """A handler of the loop's that may fail."""

        def guarded(*arguments: object) -> None:
            try:
                call(*arguments)
            except Exception as error:
                with suppress(Exception):
                    self.close()
                self._context.warn(f"the control socket is closed: {type(error).__name__}: {error}; the job goes on")

        return guarded

    def _accept_again(self) -> None:
        self._listen_at = None
        if self._listener is not None and not self._context.poller.is_watched(self._listener.fileno()):
            self._context.poller.watch(self._listener.fileno(), self._guarded(self._on_connection))

    def _pause(self, until: float | None) -> None:
        """Accept no connection for a while; None: until one is closed."""
        if self._listener is not None:
            self._context.poller.unwatch(self._listener.fileno())
            self._listen_at = until

    def _on_connection(self) -> None:
        now = time.monotonic()
        if now - self._second >= 1.0:
            self._second, self._accepted = now, 0
        for _ in range(_ACCEPTED_AT_ONCE):
            if self._listener is None:
                return
            if len(self._clients) >= _MOST_CLIENTS:
                self._pause(None)
                return
            if self._accepted >= _ACCEPTED_A_SECOND:
                self._pause(self._second + 1.0)
                return
            try:
                connection, peer = accept(self._listener)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._pause(now + 1.0)
                    return
                continue
            self._accepted += 1
            if peer.uid != os.geteuid():
                connection.close()
                continue
            self._add(connection, peer, now)

    def _add(self, connection: Socket, peer: PeerProcess, now: float) -> None:
        lines = JsonLines(
            connection,
            self._context.guarded_poller,
            queue_bytes=_QUEUE_BYTES,
            longest_bytes=_LONGEST_REQUEST_BYTES,
            read_bytes=_READ_BYTES,
        )
        fd = lines.fd
        self._clients[fd] = _Client(lines, peer, now + _PATIENCE_S)
        self._context.poller.watch(fd, self._guarded(lambda: self._on_readable(fd)))

    def _drop(self, fd: int) -> None:
        client = self._clients.pop(fd, None)
        if client is None:
            return
        self._context.poller.unwatch(fd)
        client.lines.close()
        client.on_gone()
        if self._listen_at is None:
            self._accept_again()

    # ------------------------------------------------------------------------------------------------------ requests

    def _on_readable(self, fd: int) -> None:
        client = self._clients[fd]
        messages = client.lines.receive()
        if client.viewer is not None and messages is not None:
            for message in messages:
                client.viewer.take(message)
        elif messages is None or len(messages) > 1 or (messages and client.has_asked):
            self._drop(fd)
        elif messages:
            client.has_asked = True
            self._answer(client, messages[0])

    def _answer(self, client: _Client, message: JsonObject) -> None:
        try:
            request: ControlRequest = fit(ControlRequest, message)
            method = self._METHODS[request.op]
        except MALFORMED:
            self._send(client, {"error": "the request is not known", "hint": "use the saferunctl of the same version"})
            return
        try:
            method(self, client, request)
        except Exception as error:
            what = f"the request has failed: {type(error).__name__}: {error}"
            self._send(client, {"error": what, "hint": "the job goes on"})

    def _send(self, client: _Client, answer: JsonObject, *, is_last: bool = True) -> None:
        """Send an answer. With the last one the connection is over, unless it waits for the end of the launch."""
        has_room = client.lines.send(answer)
        client.is_answered = is_last
        if not has_room:
            client.until = 0.0
        elif client.until is not None:
            client.until = time.monotonic() + (_PATIENCE_S if client.lines.queued_bytes or not is_last else 0.0)

    def _stop(self, client: _Client, request: ControlRequest) -> None:
        """The job is to end: in good order, or at once."""
        context, by = self._context, self._by(request.op, client, request)
        client.until = None  # the end of the connection is the end of the launch
        self._send(client, {**self._scale(), "grace_s": context.config.shutdown_timeout_s})
        self._post_stop(by, at_once=request.op == "kill", now=time.monotonic())

    def _post_stop(self, by: str, *, at_once: bool = False, now: float) -> None:
        context = self._context
        quiet_s = context.investigation.hangs.still_s()
        event = StopRequested(now, context.attempt, by, at_once, quiet_s=quiet_s)
        if not context.config.hosts.together or context.supervisor.state not in _BETWEEN_ATTEMPTS:
            context.post(event)
            return
        # Hosts that are about to meet must end together, or they wait for those that did: the leader says when.
        context.job.broadcast_request(by, at_once=at_once)
        self._held.append(event)
        if self._held_until is None:
            self._held_until = now + _LEADER_S

    def _scale(self) -> JsonObject:
        """What the job is, for the first line that saferunctl prints."""
        context, plan = self._context, self._context.current.plan
        return {
            "ok": True,
            "state": context.supervisor.state.value,
            "ranks": len(context.current.living()),
            "hosts": plan.placement.group_world_size if plan is not None else 1,
        }

    def _checkpoint(self, client: _Client, request: ControlRequest) -> None:
        """The ranks are to save a checkpoint and to end; if they do not, the job is stopped."""
        context = self._context
        ranks = context.current.living()
        name = signal_name(request.signum)
        if request.signum not in SURVIVED:
            hint = "choose one that does not end a process of its own: SIGUSR1 (the default), SIGUSR2, …"
            self._send(client, {"error": f"{name} does not ask for a checkpoint", "hint": hint})
            return
        if context.supervisor.state is not State.RUNNING or self._stop_at is not None:
            self._refuse(client, "a checkpoint")
            return
        handling = sum(request.signum in caught_signals(rank.pid) for rank in ranks)
        if not handling:
            hint = "use --signal with the one that the script handles; saferunctl stop RUN sends SIGTERM"
            self._send(client, {"error": f"no rank of {context.host} handles {name}", "hint": hint})
            return
        client.until = None
        self._send(client, {**self._scale(), "handling": handling})
        self._stop_by = self._by("stop --after-checkpoint", client, request)
        now = time.monotonic()
        self._stop_at = now + request.timeout_s
        context.post(CheckpointRequested(now, context.attempt, self._stop_by, request.signum))

    def _restart(self, client: _Client, request: ControlRequest) -> None:
        """All ranks are to be ended and started again."""
        context = self._context
        state, is_ending = context.supervisor.state, self._stop_at is not None
        if state not in {State.STARTING, State.RUNNING} or is_ending:
            self._refuse(client, "another attempt")
            return
        if context.job.storeless_job is not None:
            what = "the hosts no longer hear of each other, and cannot restart their ranks together"
            self._send(client, {"error": what, "hint": "stop the job (saferunctl stop), and start it again"})
            return
        client.until = None
        client.restarted_attempt = context.attempt
        self._send(client, {**self._scale(), "grace_s": context.config.shutdown_timeout_s}, is_last=False)
        now, quiet_s = time.monotonic(), context.investigation.hangs.still_s()
        context.post(RestartRequested(now, context.attempt, self._by("restart", client, request), quiet_s))

    def _report_restart(self) -> None:
        """Tell those who wait for another attempt that its ranks run."""
        context = self._context
        for client in self._clients.values():
            before = client.restarted_attempt
            if before is not None and context.attempt > before and context.supervisor.state is State.RUNNING:
                client.restarted_attempt, client.until = None, time.monotonic()
                self._send(client, {**self._scale(), "attempt": context.attempt})

    def _refuse(self, client: _Client, what: str) -> None:
        state = "being ended" if self._stop_at is not None else self._context.supervisor.state.value
        hint = "try again when saferunctl status shows that its ranks run"
        self._send(client, {"error": f"the job is {state}: {what} is not possible now", "hint": hint})

    @staticmethod
    def _by(verb: str, client: _Client, request: ControlRequest) -> str:
        """Who asks, for people."""
        user = f" by {request.user}" if request.user else ""
        return f"saferunctl {verb}{user} (pid {client.peer.pid})"

    def _show(self, client: _Client, _request: ControlRequest) -> None:
        """What the ranks do."""
        client.until = time.monotonic() + _COLLECTED_S

        def on_done(answer: JsonObject) -> None:
            if client in self._clients.values():
                self._send(client, answer)

        self._status.request(on_done)

    def _read_ranks(self, client: _Client, request: ControlRequest) -> None:
        """Where the ranks of all hosts are in their code. Of a job of one host saferunctl looks itself."""
        together = self._context.config.hosts.together
        self._send(client, {"ok": True, "together": together}, is_last=not together)
        if not together or client not in self._clients.values():
            return
        client.until = time.monotonic() + longest_s(request.wanted) + _PATIENCE_S

        def on_done(answer: JsonObject) -> None:
            if client in self._clients.values():
                self._send(client, answer)

        client.on_gone = lambda: self._stacks.forget(on_done)
        self._stacks.request(request.wanted, on_done)

    def _attach(self, client: _Client, request: ControlRequest) -> None:
        """A rank gets the terminal that the client is in."""
        from saferun.launch.attached_viewer import AttachedViewer, find_terminal

        terminals, found = self._context.terminals, find_terminal(self._context, request.rank)
        if isinstance(found, dict) or terminals is None:
            self._send(client, found if isinstance(found, dict) else {})
            return
        one = found

        def end() -> None:
            client.until = time.monotonic() + _PATIENCE_S
            self._send(client, {"ended": True})

        client.viewer = AttachedViewer(one, client.lines, end)
        client.until = None
        client.on_gone = lambda: terminals.detach(one)
        self._send(client, {"ok": True, "rank": one.number}, is_last=False)
        terminals.attach(one, client.viewer)

    def _locate(self, client: _Client, request: ControlRequest) -> None:
        """Where a rank is that a debugger is wanted for."""
        from saferun.launch.debugged_ranks import locate

        self._send(client, locate(self._context, request.rank))

    def _debug(self, client: _Client, request: ControlRequest) -> None:
        """A debugger stops a rank, for as long as the connection lasts."""
        from saferun.launch.debugged_ranks import debug

        held = {one.debugged.number for one in self._clients.values() if one.debugged is not None}
        found = debug(self._context, request.rank, held, self._by("debug", client, request))
        if isinstance(found, dict):
            self._send(client, found)
            return
        client.debugged, client.until, client.on_gone = found, None, found.release
        self._send(client, {"ok": True, "rank": found.number}, is_last=False)

    def _end_debuggers(self) -> None:
        """Have debuggers let go of ranks that have ended, or are to end; they hold nothing much longer."""
        for client in self._clients.values():
            if client.debugged is not None and client.until is None and (why := client.debugged.end_reason()):
                client.until = time.monotonic() + _PATIENCE_S
                self._send(client, {"ended": why}, is_last=False)

    _METHODS: ClassVar[dict[str, Callable[[ControlPart, _Client, ControlRequest], None]]] = {
        "stop": _stop,
        "kill": _stop,
        "checkpoint": _checkpoint,
        "restart": _restart,
        "status": _show,
        "stacks": _read_ranks,
        "attach": _attach,
        "locate": _locate,
        "debug": _debug,
    }
