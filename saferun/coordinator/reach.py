"""Reaching another host's port, and a store behind it, with words for a person where it does not work."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from saferun.coordinator.store_client import StoreBrokenError, StoreClient

_CONNECT_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0

# Why nothing leads there: the kinds that a knock tells apart.
CONNECTED = "connected"
REFUSED = "refused"
SILENT = "silent"
UNREACHABLE = "unreachable"
UNKNOWN_NAME = "unknown name"
_KINDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: REFUSED,
    errno.ETIMEDOUT: SILENT,
    errno.EAGAIN: SILENT,
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.EHOSTDOWN: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
    errno.ENETDOWN: UNREACHABLE,
}


def shown(host: str, port: int) -> str:
    """``node1:29500``, ``[fd00::1]:29500``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain(host: str) -> str:
    """An address without the brackets that IPv6 addresses have in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def kind_of(error: OSError) -> str:
    """What an error of ``connect`` says about the way: one of the constants above, or the error's own words."""
    if isinstance(error, TimeoutError):
        return SILENT
    if isinstance(error, socket.gaierror):
        return UNKNOWN_NAME
    return _KINDS.get(error.errno or 0, error.strerror or type(error).__name__)


def dial(host: str, port: int, timeout_s: float = _CONNECT_TIMEOUT_S) -> tuple[socket.socket | None, str, str]:
    """A plain connection to a port.

    Returns:
        The connected socket or None; the kind of what happened; and that in words, without the port's own name where
        the words have a subject of their own: ``node1:29500 refuses connections``.
    """
    where = shown(host, port)
    try:
        # As bytes: text would import the IDNA codec.
        infos = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        return None, UNKNOWN_NAME, f"the name {host} cannot be resolved on this host"
    kind, words = UNREACHABLE, f"{where} has no address"
    for family, type_, proto, _, address in infos:
        numeric = str(address[0])
        subject = where if numeric == host else f"{where} ({numeric})"
        connection = socket.socket(family, type_, proto)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
        except OSError as error:
            connection.close()
            kind = kind_of(error)
            words = _in_words(kind, error, subject)
            continue
        return connection, CONNECTED, f"{subject} accepts connections"
    return None, kind, words


def _in_words(kind: str, error: OSError, subject: str) -> str:
    if kind == REFUSED:
        return f"{subject} refuses connections"
    if kind == SILENT:
        return f"{subject} does not answer"
    if error.errno in {errno.ENETUNREACH, errno.ENETDOWN}:
        return f"no network of this host leads to {subject}"
    if kind == UNREACHABLE:
        return f"{subject} cannot be reached (no route to host)"
    return f"{subject} cannot be reached ({kind})"


class Search:
    """The search for a store that may be behind one of several ports of a host, some of which may be someone else's.

    A thread for each port: torch's client waits for the handshake of whatever accepts its connection, without end, and one
    silent listener must not hold up the others.

    Args:
        store_class: torch's TCPStore.
        host: name or address.
        ports: the candidates.
        accept: looks at a store that answers, and returns None for the right one, else words why it is not (a subject is
            put before them). Called in several threads.
    """

    def __init__(
        self,
        store_class: Any,  # noqa: ANN401 - torch may be there in part only
        host: str,
        ports: Sequence[int],
        accept: Callable[[StoreClient], str | None],
    ) -> None:
        self._store_class = store_class
        self._host = host
        self._accept = accept
        self._changed = threading.Condition()
        self._words: dict[int, str] = {}
        self._foreign_since: dict[int, float] = {}
        self._found: StoreClient | None = None
        self._over = False
        self._ports = tuple(ports)
        for port in self._ports:
            threading.Thread(target=self._try_port, args=(port,), daemon=True).start()

    def wait(self, timeout_s: float) -> StoreClient | None:
        """The store, waited for; None when it is not found in time. To be asked again, or to be ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._found is not None, timeout_s)
            return self._found

    def words(self) -> str:
        """Why it has not been found so far."""
        with self._changed:
            return "; ".join(self._words[port] for port in self._ports if port in self._words) or (
                f"{shown(self._host, self._ports[0])} has not been reached yet"
            )

    def foreign_for_s(self) -> float:
        """For how long every port has been known to belong to others; 0: one may still become the right one."""
        with self._changed:
            if len(self._foreign_since) < len(self._ports):
                return 0.0
            return time.monotonic() - max(self._foreign_since.values())

    def end(self) -> None:
        """Give up; threads that wait for a handshake end with the process."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _try_port(self, port: int) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            words, client, foreign = self._look(port)
            with self._changed:
                if client is not None and self._found is None:
                    self._found = client
                if words is not None:
                    self._words[port] = words
                if foreign:
                    self._foreign_since.setdefault(port, time.monotonic())
                else:
                    self._foreign_since.pop(port, None)
                self._changed.notify_all()
                # A condition rather than a sleep: the end of the search wakes it.
                if self._changed.wait_for(lambda: self._over or self._found is not None, pause_s):
                    return
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)

    def _look(self, port: int) -> tuple[str | None, StoreClient | None, bool]:
        """Words why not, or the store; and whether the port is known to be someone else's."""
        connection, _, words = dial(self._host, port)
        if connection is None:
            return words, None, False
        connection.close()
        where = shown(self._host, port)
        with self._changed:
            # True while the next call blocks, and told if that takes long.
            self._words[port] = f"something listens on {where} and does not answer as a store"
        try:
            client = StoreClient.connect(self._store_class, (self._host, port))
            objection = self._accept(client)
        except StoreBrokenError as error:
            return f"something listens on {where} and does not answer as a store ({error})", None, False
        if objection is not None:
            return f"{where} {objection}", None, True
        return None, client, False
