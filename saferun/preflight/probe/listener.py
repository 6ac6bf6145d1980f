"""Where other hosts can probe this one: listens on its interfaces during the checks, answers who knows the secret.

One thread serves all connections. Everything about a visitor is bounded: how long it may take to say who it is, how
long it may stay, what it may send; and so are the visitors, and how many strangers are served in a second. A
visitor that does not prove to know the secret gets no answer at all.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from saferun.preflight.probe.protocol import (
    HELLO,
    LARGE,
    LARGE_BYTES,
    MAGIC,
    MOST_LARGE,
    MOST_SMALL,
    RECEIVED,
    RECORD_BYTES,
    SMALL,
    kind_of,
    read_hello,
    record,
    welcome,
)
from saferun.preflight.results import ProbeEndpoint

_BACKLOG = 1024
_MOST_VISITORS = 256
_MOST_STRANGERS_A_SECOND = 1000
_ACCEPTED_AT_ONCE = 64
# A visitor says hello as soon as it is connected; its host may be busy, and its first packets may get lost.
_HELLO_TIMEOUT_S = 5.0
_STAY_S = 20.0
_AGAIN_S = 0.5
_CHUNK_BYTES = 256 << 10
_CHUNKS_AT_ONCE = 8
_PORT_TRIES = 32
# linux/in.h and linux/in6.h: an address that is only about to be the host's can be bound.
_IP_FREEBIND = 15
_IPV6_FREEBIND = 78


class _Visitor:
    """A connection, and how far it has come."""

    __slots__ = ("give_up_at", "is_known", "large", "left_bytes", "received", "small", "socket")

    def __init__(self, connection: socket.socket, now: float) -> None:
        self.socket = connection
        self.give_up_at = now + _HELLO_TIMEOUT_S
        self.received = b""
        self.is_known = False
        self.small = 0
        self.large = 0
        self.left_bytes = 0


class Listener:
    """Answers the probes of other hosts until it is closed.

    Args:
        routes: pairs of an interface and an address of it; one that cannot be bound is left out of the endpoint.

    Raises:
        OSError: none of several addresses can be bound.
    """

    def __init__(self, routes: Sequence[tuple[str, str]]) -> None:
        self._token = os.urandom(16).hex()
        self._sockets, bound = _listen(routes)
        port = self._sockets[0].getsockname()[1] if self._sockets else 0
        self.endpoint = ProbeEndpoint(port, self._token, tuple(bound))
        self._visitors: dict[int, _Visitor] = {}
        self._buffer = bytearray(_CHUNK_BYTES)
        self._window_ends_at = 0.0
        self._strangers = 0
        self._deaf_until = 0.0
        self._hears = True
        self._wake, self._waker = os.pipe()
        self._is_closed = False
        self._poll = select.epoll()
        self._poll.register(self._wake, select.EPOLLIN)
        self._listening = {sock.fileno(): sock for sock in self._sockets}
        for fd in self._listening:
            self._poll.register(fd, select.EPOLLIN)
        self._thread = threading.Thread(target=self._serve, name="listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering; the port is free when this returns."""
        if not self._is_closed:
            self._is_closed = True
            os.write(self._waker, b"x")
            self._thread.join()
            os.close(self._waker)
            os.close(self._wake)

    # --------------------------------------------------------------------------------------------- the thread's side

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._turn()
        finally:
            for visitor in list(self._visitors.values()):
                visitor.socket.close()
            for sock in self._sockets:
                sock.close()
            self._poll.close()

    def _turn(self) -> None:
        events = self._poll.poll(_AGAIN_S if self._visitors or not self._hears else None)
        now = time.monotonic()
        for fd, _ in events:
            visitor = self._visitors.get(fd)
            if visitor is not None:
                self._hear(visitor, now)
            elif fd in self._listening:
                self._accept(self._listening[fd], now)
        for visitor in [visitor for visitor in self._visitors.values() if visitor.give_up_at <= now]:
            self._part(visitor)
        if not self._hears and now >= self._deaf_until and len(self._visitors) < _MOST_VISITORS:
            self._listen_to(hears=True)

    def _listen_to(self, *, hears: bool) -> None:
        self._hears = hears
        for fd in self._listening:
            self._poll.modify(fd, select.EPOLLIN if hears else 0)

    def _rest(self, until: float) -> None:
        """Let new connections wait in the kernel."""
        self._deaf_until = until
        self._listen_to(hears=False)

    def _accept(self, listening: socket.socket, now: float) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            if not self._hears:
                return
            if len(self._visitors) >= _MOST_VISITORS and not self._make_room():
                self._rest(now)
                return
            try:
                connection, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # It has gone meanwhile; or there are no descriptors, which may pass.
                if error.errno in {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}:
                    self._rest(now + _AGAIN_S)
                continue
            connection.setblocking(False)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            visitor = self._visitors[connection.fileno()] = _Visitor(connection, now)
            self._poll.register(connection.fileno(), select.EPOLLIN)
            # Most have said hello by now.
            self._hear(visitor, now)

    def _make_room(self) -> bool:
        """Part with who has been here longest without saying who it is."""
        for visitor in self._visitors.values():
            if not visitor.is_known:
                self._part(visitor)
                return True
        return False

    def _part(self, visitor: _Visitor) -> None:
        self._visitors.pop(visitor.socket.fileno(), None)
        visitor.socket.close()
        if not visitor.is_known:
            now = time.monotonic()
            if now >= self._window_ends_at:
                self._window_ends_at, self._strangers = now + 1.0, 0
            self._strangers += 1
            if self._strangers >= _MOST_STRANGERS_A_SECOND and self._hears:
                self._rest(self._window_ends_at)

    def _hear(self, visitor: _Visitor, now: float) -> None:
        try:
            goes_on = self._hear_large(visitor) if visitor.left_bytes else self._hear_record(visitor, now)
        except BlockingIOError:
            return
        except OSError:
            goes_on = False
        if not goes_on:
            self._part(visitor)

    def _hear_large(self, visitor: _Visitor) -> bool:
        for _ in range(_CHUNKS_AT_ONCE):
            size = visitor.socket.recv_into(self._buffer, min(visitor.left_bytes, _CHUNK_BYTES))
            if not size:
                return False
            visitor.left_bytes -= size
            if not visitor.left_bytes:
                return _send(visitor, record(RECEIVED))
        return True

    def _hear_record(self, visitor: _Visitor, now: float) -> bool:
        chunk = visitor.socket.recv(RECORD_BYTES - len(visitor.received))
        visitor.received += chunk
        if not chunk or not visitor.received.startswith(MAGIC[: len(visitor.received)]):
            return False
        if len(visitor.received) < RECORD_BYTES:
            return True
        received, visitor.received = visitor.received, b""
        kind = kind_of(received)
        if not visitor.is_known:
            nonce = read_hello(received, self._token) if kind == HELLO else b""
            if not nonce:
                return False
            visitor.is_known = True
            visitor.give_up_at = now + _STAY_S
            return _send(visitor, welcome(self._token, nonce, time.time()))
        if kind == SMALL and visitor.small < MOST_SMALL:
            visitor.small += 1
            return _send(visitor, record(SMALL, time.time()))
        if kind == LARGE and visitor.large < MOST_LARGE:
            visitor.large += 1
            visitor.left_bytes = LARGE_BYTES
            return True
        return False


def _send(visitor: _Visitor, answer: bytes) -> bool:
    """Whether it went out whole; who does not read what it asked for is none of ours."""
    try:
        return visitor.socket.send(answer, socket.MSG_NOSIGNAL) == len(answer)
    except BlockingIOError:
        return False


# ------------------------------------------------------------------------------------------------------------- sockets


def _listen(routes: Sequence[tuple[str, str]]) -> tuple[list[socket.socket], list[tuple[str, str]]]:
    """Sockets that listen on one port of all these addresses, and those that can be bound."""
    error: OSError | None = None
    for _ in range(_PORT_TRIES if routes else 0):
        sockets: list[socket.socket] = []
        bound: list[tuple[str, str]] = []
        port, is_taken = 0, False
        for nic, address in dict.fromkeys(routes):
            try:
                sock = _listen_on(nic, address, port)
            except OSError as failed:
                error = failed
                is_taken = failed.errno == errno.EADDRINUSE and port != 0
                if is_taken:
                    break
                continue
            sockets.append(sock)
            bound.append((nic, address))
            port = sock.getsockname()[1]
        if sockets and not is_taken:
            return sockets, bound
        for sock in sockets:
            sock.close()
        if not is_taken:
            break
    if error is not None:
        raise error
    return [], []


def _listen_on(nic: str, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IPV6, _IPV6_FREEBIND, 1)
        else:
            with suppress(OSError):
                sock.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        sock.bind(sockaddr(address, port, nic))
        sock.listen(_BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def sockaddr(address: str, port: int, nic: str) -> tuple[str, int] | tuple[str, int, int, int]:
    """A numeric address as the socket module wants it; IPv6's link-local addresses belong to an interface.

    Raises:
        OSError: there is no such interface on this host.
    """
    if ":" not in address:
        return address, port
    scope = socket.if_nametoindex(nic) if address.lower().startswith("fe80:") else 0
    return address.partition("%")[0], port, 0, scope
