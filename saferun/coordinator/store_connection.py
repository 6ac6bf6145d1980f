"""A connection to a TCPStore of another host, without torch: a host that serves no store needs nothing of it.

What this saves such a host is the import of torch's C extension: a third of a second, and 75 MiB of memory.

Sources: ``TCPStore.cpp`` and ``TCPStoreBackend.hpp`` of torch (2.5 to 2.15; 2.4 has no ``PING``): each query is one
byte, then its arguments; a text is its length in eight bytes and its bytes; numbers are in the byte order of the host.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import ClassVar

from saferun.coordinator.dial import dial

__all__ = ["ADD", "KNOWN_RELEASES", "MAGIC", "VALIDATE", "StoreConnection", "encoded"]

KNOWN_RELEASES = ((2, 5), (2, 15))
"""The oldest and the newest release of torch whose queries these are."""

VALIDATE, _SET, _COMPARE_SET, _GET, ADD, _CHECK, _WAIT = range(7)
_DELETE_KEY, _MULTI_GET, _CANCEL_WAIT, _PING = 8, 10, 12, 13
MAGIC = 0x3C85F7CE
_READY, _NOT_READY = 0, 1
_STOP_WAITING, _WAIT_CANCELED = 0, 1
# What torch's own clients put before each key.
_KEY_PREFIX = b"/"
_CHUNK_BYTES = 1 << 20
# No value of a job has a hundredth of it; what says so is no store.
_LONGEST_BYTES = 1 << 30
_LONGEST_POLL_MS = (1 << 31) - 1
# A server with too many connections in its backlog resets some of them, as torch's own client expects it to.
_AGAIN_S = 5.0
_PAUSE_S = 0.1
# A leader that is slow answers these all the same; a machine that is gone does not, and nothing else would show it.
_PROBE_IDLE_S, _PROBE_EVERY_S, _MOST_PROBES = 5, 5, 3
_UNANSWERED_MS = 20_000


class _ClosedError(ConnectionError):
    """The server, or the way to it, has ended the connection."""


class StoreConnection:
    """The calls of a TCPStore that ``StoreClient`` makes. One of them at a time.

    As in torch's class, an answer is waited for as long as the connection lasts, but for that of ``wait``.

    Args:
        host: name or address.
        port: the port.
        world_size: as in torch's class; not used.
        is_master: not True: nothing is served here.
        timeout: of connecting to each address, and of ``get`` and ``multi_get`` for a key that does not exist.
        wait_for_workers: not True.
        connection: one to that port, if there is one already: each that is closed takes a place in the server's
            backlog.

    Raises:
        ConnectionError: it cannot be reached, or is no store. All calls raise it when the connection is gone.
    """

    takes_connection: ClassVar[bool] = True
    """Unlike torch's own class."""

    _socket: socket.socket | None = None

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int | None,
        is_master: bool,  # noqa: FBT001 - as in torch's class
        timeout: timedelta,
        *,
        wait_for_workers: bool,
        connection: socket.socket | None = None,
    ) -> None:
        if is_master or wait_for_workers or world_size is not None:
            raise ValueError("only torch's own class serves a store and waits for its clients")
        self._timeout = timeout
        give_up_at = time.monotonic() + min(_AGAIN_S, timeout.total_seconds())
        while True:
            message = ""
            if connection is None:
                connection, _, message = dial(host, port, timeout.total_seconds())
            if connection is None:
                raise ConnectionError(message)
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            self._socket = connection
            try:
                _probe(connection, is_wanted=True)
                self._greet()
                _probe(connection, is_wanted=False)
            except _ClosedError:
                connection = None
                if time.monotonic() + _PAUSE_S > give_up_at:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key. The server does not answer."""
        self._send(_query(_SET) + _key(key) + _sized(value))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """Set a key that has the expected value, or none where that is empty; returns what it has now."""
        self._send(_query(_COMPARE_SET) + _key(key) + _sized(expected) + _sized(value))
        return self._receive_sized()

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum."""
        self._send(_query(ADD) + _key(key) + struct.pack("=q", amount))
        return self._receive_number()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        self._send(_query(_CHECK) + _keys(keys))
        return self._receive_choice(_READY, _NOT_READY) == _READY

    def delete_key(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        self._send(_query(_DELETE_KEY) + _key(key))
        return self._receive_number() == 1

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys exist.

        Raises:
            TimeoutError: they do not in time. The connection can be used on.
        """
        connection = self._open()
        self._send(_query(_WAIT) + _keys(keys))
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        try:
            is_answered = bool(poller.poll(min(timeout / timedelta(milliseconds=1), _LONGEST_POLL_MS)))
        except OSError as error:  # no memory
            raise self._broken(str(error)) from error
        if not is_answered:
            self._send(_query(_CANCEL_WAIT))
            if self._receive_choice(_STOP_WAITING, _WAIT_CANCELED) == _WAIT_CANCELED:
                raise TimeoutError(f"a key did not exist within {timeout.total_seconds():g} s")
            # The last key has come between the two; that there is nothing to cancel is answered as well.
            self._receive_choice(_WAIT_CANCELED)
            return
        self._receive_choice(_STOP_WAITING)

    def get(self, key: str) -> bytes:
        """The value of a key, waited for."""
        self.wait([key], self._timeout)
        self._send(_query(_GET) + _key(key))
        return self._receive_sized()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys, waited for."""
        self.wait(keys, self._timeout)
        self._send(_query(_MULTI_GET) + _keys(keys))
        return [self._receive_sized() for _ in keys]

    # ------------------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        """In one packet: a server that gets a part of it takes the rest for queries."""
        nonce = os.urandom(4)
        self._send(struct.pack("=BI", VALIDATE, MAGIC) + bytes((_PING,)) + nonce)
        # A server of torch returns the number; whatever else listens there does not.
        if self._receive(len(nonce)) != nonce:
            raise self._broken("what listens there is no store")

    def _open(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection to the store is closed")
        return self._socket

    def _send(self, query: bytes) -> None:
        connection = self._open()
        try:
            connection.sendall(query)
        except (OSError, MemoryError) as error:
            raise self._broken(str(error), _ClosedError) from error

    def _receive(self, size: int) -> bytes:
        connection, answer = self._open(), bytearray()
        while len(answer) < size:
            try:
                chunk = connection.recv(min(size - len(answer), _CHUNK_BYTES))
                answer += chunk
            except (OSError, MemoryError) as error:
                raise self._broken(str(error), _ClosedError) from error
            if not chunk:
                raise self._broken("the store has closed the connection", _ClosedError)
        return bytes(answer)

    def _receive_number(self) -> int:
        number: int = struct.unpack("=q", self._receive(8))[0]
        return number

    def _receive_sized(self) -> bytes:
        size: int = struct.unpack("=Q", self._receive(8))[0]
        if size > _LONGEST_BYTES:
            raise self._broken(f"the store has announced a value of {size} bytes")
        return self._receive(size)

    def _receive_choice(self, *expected: int) -> int:
        choice = self._receive(1)[0]
        if choice not in expected:
            raise self._broken(f"the store has answered {choice}, which is no answer to that query")
        return choice

    def _broken(self, message: str, kind: type[ConnectionError] = ConnectionError) -> ConnectionError:
        """Close the connection: after half an answer, the rest of it would be taken for the next one."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
        return kind(message)


def _probe(connection: socket.socket, *, is_wanted: bool) -> None:
    """Have the kernel find out whether the other machine is still there, while nothing is sent (tcp(7))."""
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, is_wanted)
        # While something is on its way, the kernel does not ask.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS if is_wanted else 0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _MOST_PROBES)


def _query(kind: int) -> bytes:
    return bytes((kind,))


def encoded(text: str | bytes) -> bytes:
    """A text as a store has it."""
    return text.encode() if isinstance(text, str) else text


def _sized(text: str | bytes) -> bytes:
    content = encoded(text)
    return struct.pack("=Q", len(content)) + content


def _key(key: str) -> bytes:
    return _sized(_KEY_PREFIX + key.encode())


def _keys(keys: Sequence[str]) -> bytes:
    return struct.pack("=Q", len(keys)) + b"".join(map(_key, keys))
