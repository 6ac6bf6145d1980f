"""A connection to a TCPStore: bounded waits, errors of one kind, and a count of what it costs.

With a job secret this is the one place where values are signed, and where those that are not are taken for none: what
``set``, ``put``, ``create``, ``claim`` and ``swap`` write, and what ``get``, ``find``, ``create``, ``swap`` and
``read_all`` return. Numbers that are added up, and whether a key exists, cannot be signed, and nothing is believed
because of them.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from saferun.coordinator.dial import dial
from saferun.coordinator.store_connection import encoded
from saferun.text.wording import first_line

if TYPE_CHECKING:
    from socket import socket

    from saferun.cluster.signed import Signer

# What a request and its answer cost beside keys and values: one byte for the kind of request, eight for a length.
_KIND = 1
_LENGTH = 8
_NUMBER = 8
# Enough for a name service that does not answer, see ``__main__.py``.
_CONNECT_TIMEOUT_S = 15.0
# How soon the true value is read again where there is a forged one.
_FORGED_PAUSE_S = 0.1
FORGED = b"\0forged"
"""Stands for a value that is not signed, where it is not waited for a true one. No host signs this."""


class StoreBrokenError(Exception):
    """The store's server, or the connection to it, is gone."""


class Traffic:
    """How many operations the stores of this process were asked for, and the bytes on the wire without TCP's own."""

    def __init__(self) -> None:
        self.operations = 0
        self.size_bytes = 0
        self._lock = threading.Lock()

    def count(self, size_bytes: int) -> None:
        """Count one operation."""
        with self._lock:
            self.operations += 1
            self.size_bytes += size_bytes

    def add(self, size_bytes: int) -> None:
        """Count more of the bytes of an operation."""
        with self._lock:
            self.size_bytes += size_bytes


TRAFFIC = Traffic()


class StoreClient:
    """One connection to a store. It carries one operation at a time: who has to wait long needs one of its own.

    Args:
        store: torch's TCPStore, or a ``StoreConnection``.
        address: where it leads.
        signer: signs what is written, and says what of what is read has a valid signature; None: nothing is signed.
    """

    wakes_waiting: ClassVar[bool] = True
    """Whether torch's usual server of this host's release wakes those that wait for what ``compare_set`` sets."""

    def __init__(
        self,
        store: Any,  # noqa: ANN401 - torch may be there in part only
        address: tuple[str, int],
        signer: Signer | None = None,
    ) -> None:
        self.store = store
        self.address = address
        self.signer = signer
        self.answers = 0  # operations that the server has answered: it lives as long as this grows
        self.store_class = type(store)
        self._lock = threading.Lock()

    @classmethod
    def connect(
        cls,
        store_class: Any,  # noqa: ANN401
        address: tuple[str, int],
        *,
        dialled: bool = False,
        connection: socket | None = None,
        signer: Signer | None = None,
    ) -> StoreClient:
        """Connect; blocks for as long as a process accepts the connection and does not answer as a store.

        Args:
            store_class: torch's TCPStore, or ``StoreConnection``.
            address: name or address, and port.
            dialled: whether the address is known to accept connections.
            connection: a connection to it, if there is one: it is used, or closed.
            signer: as for the class.

        Raises:
            StoreBrokenError: it cannot be reached.
        """
        host, port = address
        if connection is None and not dialled:
            # torch's own client would go on trying for the whole of its timeout where connections are refused.
            connection, _, message = dial(host, port)
            if connection is None:
                raise StoreBrokenError(message)
        more = {"connection": connection} if getattr(store_class, "takes_connection", False) else {}
        if connection is not None and not more:
            connection.close()
        timeout = timedelta(seconds=_CONNECT_TIMEOUT_S)
        try:
            # By position: the first arguments are the same in all releases.
            store = store_class(host, port, None, False, timeout, wait_for_workers=False, **more)
        except Exception as error:
            raise StoreBrokenError(first_line(error) or type(error).__name__) from error
        TRAFFIC.count(2 * (_KIND + 4) + 4)
        return cls(store, address, signer)

    def another(self) -> StoreClient:
        """A second connection to the same store.

        Raises:
            StoreBrokenError: it cannot be reached.
        """
        return self.connect(self.store_class, self.address, signer=self.signer)

    def end(self) -> None:
        """Let go of the store; every operation fails from now on."""
        with self._lock:
            self.store = None

    def set(self, key: str, value: str | bytes, counter: int = 0) -> None:
        """Set a key. The server does not answer: an error may show at the next operation only.

        Args:
            key: the key.
            value: the value.
            counter: higher than before, where a key is written again and an old value must not count for a new one.
        """
        self._set(key, self._protected(key, value, counter))

    def put(self, key: str, before: bytes, value: str, counter: int) -> bytes:
        """The same of a key that only this host writes, and the server answers. One request if no other process writes.

        Args:
            key: the key.
            before: what this returned the last time; empty at first.
            value: the value.
            counter: as in ``set``.
        """
        stored = self._protected(key, value, counter)
        if self._compare_set(key, before, stored) != encoded(stored):
            self._set(key, stored)
            self.check(key)
        return encoded(stored)

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum; a key that does not exist is 0."""
        return int(self._ask(_KIND + _sized(key) + 2 * _NUMBER, "add", key, amount))

    def create(self, key: str, value: str) -> bytes:
        """Set a key that does not exist, for good, and return what it has now; ``FORGED`` where that is not signed.

        Whoever waits for the key sees it at once. It is set a second time, since not every server wakes those that wait
        for a key which ``compare_set`` sets: libuv's does since torch 2.8, the other one never does, and which of the
        two the leader has is not known here.
        """
        stored = self._protected(key, value)
        now = self._compare_set(key, b"", stored)
        if now == encoded(stored):
            self._set(key, stored)
        found = self._opened(key, now)
        return FORGED if found is None else found

    def claim(self, key: str, value: str) -> bool:
        """Set a key that does not exist, and that its reader deletes; whether this one has set it.

        It is set twice with an old torch only, as its reader may have deleted it in between.
        """
        stored = self._protected(key, value)
        is_set = self._compare_set(key, b"", stored) == encoded(stored)
        if is_set and not self.wakes_waiting:
            self._set(key, stored)
        return is_set

    def swap(self, key: str, expected: bytes, value: str) -> tuple[bytes, bytes | None]:
        """Set a key to another value, if it has the expected one, or none where that is empty.

        Returns:
            What it has now, as it is stored: to be expected the next time. And the value; None: it is not signed.
        """
        found = self._compare_set(key, expected, self._protected(key, value))
        return found, self._opened(key, found)

    def check(self, key: str) -> bool:
        """Whether a key exists, whoever has set it."""
        return bool(self._ask(_KIND + _LENGTH + _sized(key) + _KIND, "check", [key]))

    def exists(self, key: str) -> bool:
        """Whether a key exists, and a host of this job has set it."""
        return self.check(key) if self.signer is None else self.find(key) is not None

    def delete(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return bool(self._ask(_KIND + _sized(key) + _NUMBER, "delete_key", key))

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait until all keys exist, whoever sets them; False when they do not in time."""
        give_up_at = time.monotonic() + timeout_s
        asked = timedelta(milliseconds=max(1, int(timeout_s * 1000)))
        try:
            self._ask(_KIND + _LENGTH + sum(map(_sized, keys)) + _KIND, "wait", keys, asked)
        except StoreBrokenError:
            # A timeout and a broken connection come as the same kind of error in some releases.
            if time.monotonic() < give_up_at - 0.002:
                raise
            return False
        return True

    def await_key(self, key: str, timeout_s: float) -> bool:
        """Wait until a key exists that a host of this job has set; False when it does not in time."""
        return self.wait([key], timeout_s) if self.signer is None else self.get(key, timeout_s) is not None

    def get(
        self, key: str, timeout_s: float, *, forged: bytes | None = None, longest: int | None = None
    ) -> bytes | None:
        """The value of a key, waited for; None when it does not exist in time.

        Args:
            key: the key.
            timeout_s: how long.
            forged: what to return at once for a value that is not signed; None: the true one is waited for.
            longest: what is longer is none; in bytes, where values are signed.
        """
        give_up_at = time.monotonic() + timeout_s
        while self.wait([key], max(0.001, give_up_at - time.monotonic())):
            value = self._opened(key, self._read(key), longest)
            if value is None:
                value = forged
            remaining_s = give_up_at - time.monotonic()
            if value is not None or remaining_s <= 0:
                return value
            time.sleep(min(_FORGED_PAUSE_S, remaining_s))
        return None

    def find(self, key: str, *, longest: int | None = None) -> bytes | None:
        """The value of a key that may or may not exist. ``longest``: as in ``get``."""
        return self._opened(key, self._read(key), longest) if self.check(key) else None

    def find_all(self, keys: list[str], *, longest: int | None = None) -> list[bytes | None]:
        """The same of many keys, in two requests if all of them exist."""
        sizes = sum(map(_sized, keys))
        if len(keys) > 1 and self._ask(_KIND + _LENGTH + sizes + _KIND, "check", keys):
            return [self._opened(key, value, longest) for key, value in zip(keys, self._read_many(keys), strict=True)]
        return [self.find(key, longest=longest) for key in keys]

    def find_stored(self, key: str, timeout_s: float) -> bytes | None:
        """The same as it is stored, signed or not, waited for."""
        return self._read(key) if self.wait([key], timeout_s) else None

    def read_all(self, keys: list[str], *, newest: bool = False) -> list[bytes | None]:
        """The values of keys that all exist; None for those that are not signed.

        Args:
            keys: the keys.
            newest: whether values that are older than one that was read before are none.
        """
        values = self._read_many(keys)
        signer = self.signer
        if signer is None:
            return list(values)
        open_one = signer.open_newest if newest else signer.open
        opened = [open_one(key, value) for key, value in zip(keys, values, strict=True)]
        return [one.content if one is not None else None for one in opened]

    def _protected(self, key: str, value: str | bytes, counter: int = 0) -> str | bytes:
        return value if self.signer is None else self.signer.protect(key, value, counter)

    def _opened(self, key: str, stored: bytes, longest: int | None = None) -> bytes | None:
        if self.signer is None:
            return stored
        more = {} if longest is None else {"longest": longest}
        opened = self.signer.open(key, stored, **more)
        return opened.content if opened is not None else None

    def _set(self, key: str, stored: str | bytes) -> None:
        self._ask(_KIND + _sized(key) + _sized(stored), "set", key, stored, answered=False)

    def _compare_set(self, key: str, expected: str | bytes, stored: str | bytes) -> bytes:
        sizes = _KIND + _sized(key) + _sized(expected) + _sized(stored)
        found: bytes = self._ask(sizes, "compare_set", key, expected, stored)
        TRAFFIC.add(_LENGTH + len(found))
        return found

    def _read(self, key: str) -> bytes:
        # torch's own `get` waits for the key first: three messages of a client are two round trips.
        value: bytes = self._ask(2 * (_KIND + _sized(key)) + _LENGTH + _KIND, "get", key)
        TRAFFIC.add(_LENGTH + len(value))
        return value

    def _read_many(self, keys: list[str]) -> list[bytes]:
        sizes = sum(map(_sized, keys))
        values: list[bytes] = self._ask(2 * (_KIND + _LENGTH + sizes) + _KIND, "multi_get", keys)
        TRAFFIC.add(sum(_LENGTH + len(value) for value in values))
        return values

    def _ask(self, size_bytes: int, operation: str, *arguments: Any, answered: bool = True) -> Any:  # noqa: ANN401
        with self._lock:
            TRAFFIC.count(size_bytes)
            try:
                answer = getattr(self.store, operation)(*arguments)
            except Exception as error:
                raise StoreBrokenError(first_line(error) or type(error).__name__) from error
            if answered:
                self.answers += 1
            return answer


def _sized(text: str | bytes) -> int:
    return _LENGTH + len(text)
