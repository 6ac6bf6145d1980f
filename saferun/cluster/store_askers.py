"""Which connections to the port of a store that is gone are ranks: port scanners connect to every port as well."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from functools import partial

from saferun.errors import suppress
from saferun.linux.bare_socket import MSG_DONTWAIT, Socket, accept_connection
from saferun.linux.poller import Poller

GREETING = b"\0" + (0x3C85F7CE).to_bytes(4, sys.byteorder)
"""What a client of torch's TCPStore sends first: ``VALIDATE`` and ``validationMagicNumber`` (TCPStoreBackend.hpp)."""
_MOST_AT_ONCE = 64
# Of connections on which nothing is sent the newest are kept: a rank sends the greeting as soon as it has connected.
_MOST_PENDING = 32
# ENOSPC: the user watches as many descriptors as one may.
_NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENOSPC})


class StoreAskers:
    """Waits for a rank that asks for the store.

    Args:
        listener: the store's socket. Nothing else accepts its connections meanwhile.
        poller: the loop's.
        on_asked: called once a rank asks; and if no connection can be accepted any more: then it is unknown who asks.
            Nothing is accepted from then on, and what was accepted stays open until ``close``.
    """

    def __init__(self, listener: Socket, poller: Poller, on_asked: Callable[[], None]) -> None:
        self._listener = listener
        self._poller = poller
        self._on_asked = on_asked
        self._pending: dict[int, tuple[Socket, bytearray]] = {}  # oldest first
        listener.setblocking(False)
        poller.watch(listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            for _ in range(_MOST_AT_ONCE):
                connection = accept_connection(self._listener)
                fd = connection.fileno()
                self._pending[fd] = connection, bytearray()
                self._poller.watch(fd, partial(self._read, fd))
                if len(self._pending) > _MOST_PENDING:
                    self._drop(next(iter(self._pending)))
        except OSError as error:
            # All others are those of a single connection, or there is none any more.
            if error.errno in _NO_ROOM:
                self._end_watch()
                self._on_asked()

    def _read(self, fd: int) -> None:
        connection, received = self._pending[fd]
        chunk = b""
        try:
            chunk = connection.recv(len(GREETING) - len(received), MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            pass
        received += chunk
        if not chunk or not GREETING.startswith(received):
            self._drop(fd)
        elif received == GREETING:
            self._end_watch()
            self._on_asked()

    def _drop(self, fd: int) -> None:
        self._poller.unwatch(fd)
        connection, _ = self._pending.pop(fd)
        connection.close()

    def _end_watch(self) -> None:
        for fd in (self._listener.fileno(), *self._pending):
            self._poller.unwatch(fd)
        with suppress(OSError):
            self._listener.setblocking(True)

    def close(self) -> None:
        """Ranks that asked are gone, or another store is on its way."""
        self._end_watch()
        for fd in list(self._pending):
            self._drop(fd)
