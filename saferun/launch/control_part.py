"""Answers saferunctl while the ranks run, over a Unix socket of the same user (``linux/control_socket.py``).

A request is a JSON object on one line, and so is each answer; a connection carries one request. A client that
misbehaves loses its connection, and nothing else happens: connections, bytes, time and connections per second are
bounded. If the control socket itself fails it is closed, with one line, and the launch goes on without it.
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
from saferun.supervisor import requests as _requests  # noqa: F401 - imported now: no file may be opened once ranks run
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
# A client that sends no request, or does not read its answer, is disconnected after this time.
_PATIENCE_S = 10.0
_ACCEPTED_AT_ONCE = 8
# No person makes more connections than this in a second. Further ones wait until the second is over.
_ACCEPTED_A_SECOND = 100
_LONGEST_REQUEST_BYTES = 1 << 14
_READ_BYTES = 1 << 12
_QUEUE_BYTES = 16 << 20
_LONGEST_NAME = 60
# What is collected from all hosts has arrived by then.
_COLLECTED_S = 30.0
_LONGEST_WAIT_S = 30 * 86400.0
# The hosts have yet to meet for the attempt, and must all end together. In BACKOFF they have not met either, but there
# the supervisor itself broadcasts the request as it ends (``supervisor.requests``).
_BEFORE_RENDEZVOUS = frozenset({State.CHECKING, State.JOINING})
# The leader answers at once if it can. A host that gets no answer by then ends by itself, as after SIGTERM.
_LEADER_REPLY_S = 10.0
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class ControlRequest(Value):
    """What saferunctl asks for.

    Attributes:
        op: what.
        user: the name of the user, for people.
        signum: of ``checkpoint``: the signal that the ranks handle.
        timeout_s: of ``checkpoint``: how long the ranks may take to end; they are stopped then.
        wanted: of ``stacks``: what of the ranks.
        rank: of ``attach``, ``locate`` and ``debug``: its number; for ``attach`` empty: the rank that asks for input.
        run_id: the run that is meant; empty: whichever this is.
    """

    op: Annotated[str, line_of(_LONGEST_NAME)]
    user: Annotated[str, line_of(_LONGEST_NAME)] = ""
    signum: Annotated[int, number_of(64)] = 0
    timeout_s: Annotated[float, seconds_of(_LONGEST_WAIT_S)] = 0.0
    wanted: Wanted = Wanted("stacks")
    rank: Annotated[str, line_of(_LONGEST_NAME)] = ""
    run_id: Annotated[str, line_of(_LONGEST_NAME)] = ""


class _Client:
    """One connection. ``close_at``: in monotonic seconds; None: it stays open to the end of the launch."""

    def __init__(self, lines: JsonLines, peer: PeerProcess, close_at: float) -> None:
        self.lines = lines
        self.peer = peer
        self.close_at: float | None = close_at
        self.has_asked = False
        self.restarted_attempt: int | None = None  # the client waits for an attempt after this one
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
        self._deferred_stops: list[StopRequested] = []
        self._deferred_until: float | None = None  # until the leader has answered, or this moment
        self._stop_at: float | None = None  # when ranks that were to save a checkpoint are stopped
        self._stop_by = ""
        self._has_failed = False
        self._live_status = LiveStatus(context, self._wrapped)
        self._asked_stacks = AskedStacks(context, self._wrapped)

    def open(self) -> None:
        """Listen from now on.

        Raises:
            OSError: that is not possible here.
        """
        # Found before the ranks started: from now on no file system is searched for another one.
        directory = self._context.investigation.hook.memory_directory
        self._listener, self._path = listen(directory, self._context.run_id)
        self._accept_again()
        self._context.log.set_control_socket(self._path)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        moments = [client.close_at for client in self._clients.values()]
        own = (self._listen_at, self._stop_at, self._deferred_until)
        moments += [*own, self._live_status.deadline, self._asked_stacks.deadline]
        return min((moment for moment in moments if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Drop clients that are late, and do what was deferred."""
        self._wrapped(self._tick)(now)

    def _tick(self, now: float) -> None:
        if self._stop_at is not None and self._stop_at <= now:
            self._stop_at = None
            self._post_stop(self._stop_by, now=now)
        for fd, client in list(self._clients.items()):
            is_over = client.is_answered and client.close_at is not None and not client.lines.queued_bytes
            if is_over or (client.close_at is not None and client.close_at <= now):
                self._drop(fd)
        self._live_status.tick(now)
        self._asked_stacks.tick(now)
        if self._listen_at is not None and self._listen_at <= now:
            self._accept_again()
        self._report_restart()
        self._end_debuggers()
        is_late = self._deferred_until is not None and self._deferred_until <= now
        if self._deferred_stops and (is_late or self._context.supervisor.state not in _BEFORE_RENDEZVOUS):
            stops, self._deferred_stops, self._deferred_until = self._deferred_stops, [], None
            for request in stops:
                self._context.post(request._replace(at=now, attempt=self._context.attempt))

    def close(self) -> None:
        """The launch is over: whoever waits for its end learns of it."""
        self._live_status.close()
        self._asked_stacks.close()
        ended = self._context.log.ended
        for fd, client in list(self._clients.items()):
            if ended and client.close_at is None and client.restarted_attempt is None:
                client.lines.send(dict(ended))
            self._drop(fd)
        self._listen_at = None
        self._deferred_stops.clear()
        self._deferred_until = None
        self._stop_at = None
        listener, self._listener = self._listener, None
        if listener is not None:
            self._context.poller.unwatch(listener.fileno())
            listener.close()
            if self._path.startswith("/"):
                with suppress(OSError):
                    os.unlink(self._path)

    # --------------------------------------------------------------------------------------------------- connections

    def _wrapped(self, call: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback: an exception only disables this feature."""

        def wrapped(*arguments: object) -> None:
            try:
                call(*arguments)
            except Exception as error:
                stop_at, stops, until = self._stop_at, tuple(self._deferred_stops), self._deferred_until
                with suppress(Exception):
                    self.close()
                if self._has_failed:
                    return
                self._has_failed = True
                # What has been promised is kept, unless this fails again.
                self._stop_at, self._deferred_stops, self._deferred_until = stop_at, list(stops), until
                self._context.warn(f"the control socket is closed: {type(error).__name__}: {error}; the job goes on")

        return wrapped

    def _accept_again(self) -> None:
        self._listen_at = None
        if self._listener is not None and not self._context.poller.is_watched(self._listener.fileno()):
            self._context.poller.watch(self._listener.fileno(), self._wrapped(self._on_connection))

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
            if len(self._clients) >= _MOST_CLIENTS and not self._drop_silent():
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

    def _drop_silent(self) -> bool:
        """Drop the client that has asked nothing for the longest time. Returns whether there was one."""
        silent = next((fd for fd, client in self._clients.items() if not client.has_asked), None)
        if silent is not None:
            self._drop(silent)
        return silent is not None

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

        def hear() -> None:
            # What cannot be dealt with ends this connection, and no other.
            if not self._context.succeeds("hear saferunctl", self._on_readable, fd):
                self._drop(fd)

        self._context.poller.watch(fd, self._wrapped(hear))

    def _drop(self, fd: int) -> None:
        client = self._clients.pop(fd, None)
        if client is None:
            return
        self._context.poller.unwatch(fd)
        client.lines.close()
        self._context.succeeds("end what saferunctl asked for", client.on_gone)
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
        if request.run_id and request.run_id != self._context.run_id:
            what = f"this is not run {request.run_id}: the directory of that run names the control socket of another"
            self._send(client, {"error": what, "hint": "see saferunctl list, and name the run that is meant"})
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
            client.close_at = 0.0
        elif client.close_at is not None:
            client.close_at = time.monotonic() + (_PATIENCE_S if client.lines.queued_bytes or not is_last else 0.0)

    def _stop(self, client: _Client, request: ControlRequest) -> None:
        """End the job: gracefully, or at once (``kill``)."""
        context, by = self._context, self._by(request.op, client, request)
        client.close_at = None  # the end of the connection is the end of the launch
        self._send(client, {**self._job_summary(), "grace_s": context.config.shutdown_timeout_s})
        self._post_stop(by, at_once=request.op == "kill", now=time.monotonic())

    def _post_stop(self, by: str, *, at_once: bool = False, now: float) -> None:
        context = self._context
        idle_s = context.investigation.hangs.strict_idle_s()
        event = StopRequested(now, context.attempt, by, at_once, idle_s=idle_s)
        if not context.config.hosts.spans_hosts or context.supervisor.state not in _BEFORE_RENDEZVOUS:
            context.post(event)
            return
        # Hosts that are about to meet must end together, or some wait for those that have ended: the leader decides.
        context.job.broadcast_request(by, at_once=at_once)
        self._deferred_stops.append(event)
        if self._deferred_until is None:
            self._deferred_until = now + _LEADER_REPLY_S

    def _job_summary(self) -> JsonObject:
        """The state and the size of the job, for the first line that saferunctl prints."""
        context, plan = self._context, self._context.current.plan
        return {
            "ok": True,
            "state": context.supervisor.state.value,
            "ranks": len(context.current.living()),
            "hosts": plan.placement.group_world_size if plan is not None else 1,
        }

    def _checkpoint(self, client: _Client, request: ControlRequest) -> None:
        """Have the ranks save a checkpoint and end; if they have not ended in time, stop the job."""
        context = self._context
        ranks = context.current.living()
        name = signal_name(request.signum)
        if request.signum not in SURVIVED:
            hint = "choose one that does not end a process of its own: SIGUSR1 (the default), SIGUSR2, …"
            self._send(client, {"error": f"{name} does not ask for a checkpoint", "hint": hint})
            return
        # With an event on its way the ranks may be about to end.
        if context.supervisor.state is not State.RUNNING or self._stop_at is not None or context.events:
            self._refuse(client, "a checkpoint")
            return
        handling = sum(request.signum in caught_signals(rank.pid) for rank in ranks)
        if not handling:
            hint = "use --signal with the one that the script handles; saferunctl stop RUN sends SIGTERM"
            self._send(client, {"error": f"no rank of {context.host} handles {name}", "hint": hint})
            return
        client.close_at = None
        self._send(client, {**self._job_summary(), "handling": handling})
        self._stop_by = self._by("stop --after-checkpoint", client, request)
        now = time.monotonic()
        self._stop_at = now + request.timeout_s
        context.post(CheckpointRequested(now, context.attempt, self._stop_by, request.signum))

    def _restart(self, client: _Client, request: ControlRequest) -> None:
        """End all ranks, and start them again."""
        context = self._context
        state, is_ending = context.supervisor.state, self._stop_at is not None
        if state not in {State.STARTING, State.RUNNING} or is_ending or context.events:
            self._refuse(client, "another attempt")
            return
        if context.job.storeless_job is not None:
            what = "the hosts no longer hear of each other, and cannot restart their ranks together"
            self._send(client, {"error": what, "hint": "stop the job (saferunctl stop), and start it again"})
            return
        client.close_at = None
        client.restarted_attempt = context.attempt
        self._send(client, {**self._job_summary(), "grace_s": context.config.shutdown_timeout_s}, is_last=False)
        now, idle_s = time.monotonic(), context.investigation.hangs.strict_idle_s()
        context.post(RestartRequested(now, context.attempt, self._by("restart", client, request), idle_s))

    def _report_restart(self) -> None:
        """Answer clients that wait for the next attempt, once its ranks run."""
        context = self._context
        for client in self._clients.values():
            before = client.restarted_attempt
            if before is not None and context.attempt > before and context.supervisor.state is State.RUNNING:
                client.restarted_attempt, client.close_at = None, time.monotonic()
                self._send(client, {**self._job_summary(), "attempt": context.attempt})

    def _refuse(self, client: _Client, what: str) -> None:
        state = "being ended" if self._stop_at is not None else self._context.supervisor.state.value
        hint = "try again when saferunctl status shows that its ranks run"
        self._send(client, {"error": f"the job is {state}: {what} is not possible now", "hint": hint})

    @staticmethod
    def _by(verb: str, client: _Client, request: ControlRequest) -> str:
        """Who asks, for people."""
        user = f" by {request.user}" if request.user else ""
        return f"saferunctl {verb}{user} (pid {client.peer.pid})"

    def _status(self, client: _Client, _request: ControlRequest) -> None:
        """What all ranks are doing."""
        client.close_at = time.monotonic() + _COLLECTED_S

        def on_done(answer: JsonObject) -> None:
            if client in self._clients.values():
                self._send(client, answer)

        self._live_status.request(on_done)

    def _stacks(self, client: _Client, request: ControlRequest) -> None:
        """The stacks of the ranks of all hosts. In a job of one host saferunctl reads them itself."""
        spans_hosts = self._context.config.hosts.spans_hosts
        self._send(client, {"ok": True, "spans_hosts": spans_hosts}, is_last=not spans_hosts)
        if not spans_hosts or client not in self._clients.values():
            return
        client.close_at = time.monotonic() + longest_s(request.wanted) + _PATIENCE_S

        def on_done(answer: JsonObject) -> None:
            if client in self._clients.values():
                self._send(client, answer)

        client.on_gone = lambda: self._asked_stacks.forget(on_done)
        self._asked_stacks.request(request.wanted, on_done)

    def _attach(self, client: _Client, request: ControlRequest) -> None:
        """Connect the client's terminal to a rank."""
        from saferun.launch.attached_viewer import AttachedViewer, find_terminal

        terminals, found = self._context.terminals, find_terminal(self._context, request.rank)
        if isinstance(found, dict) or terminals is None:
            self._send(client, found if isinstance(found, dict) else {})
            return
        terminal = found

        def end() -> None:
            client.close_at = time.monotonic() + _PATIENCE_S
            self._send(client, {"ended": True})

        client.viewer = AttachedViewer(terminal, client.lines, end)
        client.close_at = None
        client.on_gone = lambda: terminals.detach(terminal)
        self._send(client, {"ok": True, "rank": terminal.number}, is_last=False)
        terminals.attach(terminal, client.viewer)

    def _locate(self, client: _Client, request: ControlRequest) -> None:
        """The process of the rank that is to be debugged, or the host that it runs on."""
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
        client.debugged, client.close_at, client.on_gone = found, None, found.release
        self._send(client, {"ok": True, "rank": found.number}, is_last=False)

    def _end_debuggers(self) -> None:
        """Detach debuggers from ranks that have ended, or are about to."""
        for client in self._clients.values():
            if client.debugged is not None and client.close_at is None and (why := client.debugged.end_reason()):
                client.close_at = time.monotonic() + _PATIENCE_S
                self._send(client, {"ended": why}, is_last=False)

    _METHODS: ClassVar[dict[str, Callable[[ControlPart, _Client, ControlRequest], None]]] = {
        "stop": _stop,
        "kill": _stop,
        "checkpoint": _checkpoint,
        "restart": _restart,
        "status": _status,
        "stacks": _stacks,
        "attach": _attach,
        "locate": _locate,
        "debug": _debug,
    }
