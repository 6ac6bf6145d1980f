"""``--metrics-port``: numbers about the launch for Prometheus, over HTTP, on the host that leads the job.

The loop itself answers: it never waits for a client, and whatever clients do is bounded. Reads are at most so many
bytes, connections at most so many at once (the oldest one goes first) and so many a second, each for a short time.
A port that is in use costs the numbers, and one line.
"""

from __future__ import annotations

import errno
import select
import time
from collections.abc import Callable

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext
from saferun.launch.metrics_samples import MetricsSamples
from saferun.linux.bare_socket import SO_REUSEADDR, SOL_SOCKET, Socket, accept_connection, inet_socket
from saferun.linux.helper import PartBase

PATH = "/metrics"
MOST_CONNECTIONS = 32
MOST_A_SECOND = 50
_LONGEST_REQUEST = 8 << 10
_PATIENCE_S = 5.0
_TICK_S = 1.0
_BACKLOG = 64
_HEAD_END = b"\r\n\r\n"
_OPENMETRICS = "application/openmetrics-text"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPort(PartBase):
    """Listens while this host leads the job. A part of the loop.

    Args:
        context: the launch.
        address: an address of this host, and the port; 0: the kernel chooses one.
    """

    def __init__(self, context: LaunchContext, address: tuple[str, int]) -> None:
        self.deadline: float | None = time.monotonic()
        self._context = context
        self._address = address
        self._samples = MetricsSamples(context)
        self._texts: dict[bool, bytes] = {}
        self._listener: Socket | None = None
        self._connections: dict[int, _Connection] = {}  # the oldest first
        self._accepted = 0

    def tick(self, now: float) -> None:
        """A second is over: listen or not, forget old numbers, close what takes too long."""
        if self.deadline is None or self.deadline > now:
            return
        self.deadline = now + _TICK_S
        self._texts.clear()
        if self._context.job.leads and self._listener is None:
            self._listen()
        elif not self._context.job.leads and self._listener is not None:
            self._stop_listening()
        if self._listener is not None and not self._context.guarded_poller.is_watched(self._listener.fileno()):
            self._context.guarded_poller.watch(self._listener.fileno(), self._accept)
        self._accepted = 0
        for connection in [one for one in self._connections.values() if one.until < now]:
            self._close(connection)

    def close(self) -> None:
        """The launch is over."""
        self.deadline = None
        self._stop_listening()

    def _listen(self) -> None:
        try:
            listener = inet_socket(self._address[0])
            try:
                listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
                listener.setblocking(False)
                listener.bind(self._address)
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            self.deadline = None
            self._give_up(str(error.strerror))
            return
        self._listener = listener
        if not self._address[1]:
            port = listener.getsockname()[1]
            self._context.report(f"metrics are at http://{self._shown(port)}{PATH}")
        self._context.guarded_poller.watch(listener.fileno(), self._accept)

    def _give_up(self, reason: str) -> None:
        shown = self._shown(self._address[1])
        self._context.warn(
            f"--metrics-port {shown}: {reason}; there are no metrics, and the job does not depend on them"
        )

    def _shown(self, port: int) -> str:
        host = self._address[0]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _stop_listening(self) -> None:
        for connection in [*self._connections.values()]:
            self._close(connection)
        if self._listener is not None:
            self._context.guarded_poller.unwatch(self._listener.fileno())
            with suppress(OSError):
                self._listener.close()
            self._listener = None

    def _accept(self) -> None:
        """Take in who is waiting. Those above the limit wait for the next second."""
        listener = self._listener
        if listener is None:
            return
        self._accepted += 1
        if self._accepted >= MOST_A_SECOND:
            self._context.guarded_poller.unwatch(listener.fileno())
        try:
            self._begin(accept_connection(listener))
        except OSError as error:
            if error.errno not in {errno.EAGAIN, errno.ECONNABORTED}:
                # Perhaps there is no descriptor left: it stays ready, and is not asked again before the next second.
                self._context.guarded_poller.unwatch(listener.fileno())
        except Exception as error:
            self._fail(error)

    def _begin(self, socket: Socket) -> None:
        if len(self._connections) >= MOST_CONNECTIONS:
            self._close(next(iter(self._connections.values())))
        connection = _Connection(socket, time.monotonic() + _PATIENCE_S)
        self._connections[socket.fileno()] = connection
        self._context.guarded_poller.watch(socket.fileno(), lambda: self._guarded(connection, self._read))

    def _guarded(self, connection: _Connection, step: Callable[[_Connection], None]) -> None:
        """What a client does ends its connection, and nothing else."""
        try:
            step(connection)
        except OSError:
            self._close(connection)
        except Exception as error:
            self._close(connection)
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.close()
        self._give_up(f"{type(error).__name__}: {error}")

    def _read(self, connection: _Connection) -> None:
        try:
            chunk = connection.socket.recv(_LONGEST_REQUEST)
        except (BlockingIOError, InterruptedError):
            return
        connection.request += chunk
        if _HEAD_END in connection.request:
            connection.answer = self._answer(connection.request)
            self._write(connection)
        elif not chunk or len(connection.request) > _LONGEST_REQUEST:
            self._close(connection)

    def _write(self, connection: _Connection) -> None:
        try:
            sent = connection.socket.send(connection.answer)
        except (BlockingIOError, InterruptedError):
            sent = 0
        connection.answer = connection.answer[sent:]
        if not connection.answer:
            self._close(connection)
        elif not connection.is_writing:
            connection.is_writing = True
            fd = connection.socket.fileno()
            self._context.guarded_poller.unwatch(fd)
            self._context.guarded_poller.watch(fd, lambda: self._guarded(connection, self._write), select.EPOLLOUT)

    def _close(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        if self._connections.pop(fd, None) is not None:
            self._context.guarded_poller.unwatch(fd)
            with suppress(OSError):
                connection.socket.close()

    def _answer(self, request: bytes) -> bytes:
        head = request.partition(_HEAD_END)[0].decode("latin-1")
        method, _, rest = head.partition("\r\n")[0].partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        kind = "text/plain; charset=utf-8"
        if method not in {"GET", "HEAD"}:
            status, content = "405 Method Not Allowed", b"only GET and HEAD\n"
        elif path == "/":
            status, content = "200 OK", f"saferun: metrics are at {PATH}\n".encode()
        elif path != PATH:
            status, content = "404 Not Found", f"metrics are at {PATH}\n".encode()
        else:
            is_openmetrics = _OPENMETRICS in head
            status, content = "200 OK", self._text(is_openmetrics=is_openmetrics)
            kind = f"{_OPENMETRICS}; version=1.0.0; charset=utf-8" if is_openmetrics else _TEXT
        fields = (
            f"HTTP/1.1 {status}",
            f"Content-Type: {kind}",
            f"Content-Length: {len(content)}",
            "X-Content-Type-Options: nosniff",
            "Cache-Control: no-store",
            "Connection: close",
        )
        return "\r\n".join(fields).encode() + _HEAD_END + (content if method != "HEAD" else b"")

    def _text(self, *, is_openmetrics: bool) -> bytes:
        """The numbers, which are counted once a second at most."""
        text = self._texts.get(is_openmetrics)
        if text is None:
            text = self._texts[is_openmetrics] = self._samples.text(is_openmetrics=is_openmetrics).encode()
        return text


class _Connection:
    """A client. ``until``: when it is closed, whatever it does; in monotonic seconds."""

    def __init__(self, socket: Socket, until: float) -> None:
        self.socket = socket
        self.until = until
        self.request = b""
        self.answer = b""
        self.is_writing = False
