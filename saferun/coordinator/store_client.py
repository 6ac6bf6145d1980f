"""A connection to a TCPStore: bounded waits, errors of one kind, and a count of what it costs."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

from saferun.coordinator.dial import dial

# What a request and its answer cost beside keys and values: one byte for the kind of request, eight for a length.
_KIND = 1
_LENGTH = 8
_NUMBER = 8
# Enough for a name service that does not answer, see ``__main__.py``.
_CONNECT_TIMEOUT_S = 15.0


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
        store: torch's TCPStore.
        address: where it leads.
    """

    def __init__(self, store: Any, address: tuple[str, int]) -> None:  # noqa: ANN401 - torch may be there in part only
        self.store = store
        self.address = address
        self.answers = 0  # operations that the server has answered: it lives as long as this grows
        self.store_class = type(store)
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, store_class: Any, address: tuple[str, int], *, dialled: bool = False) -> StoreClient:  # noqa: ANN401
        """Connect; blocks for as long as somebody accepts the connection and does not answer as a store.

        Args:
            store_class: torch's TCPStore.
            address: name or address, and port.
            dialled: whether the address is known to accept connections.

        Raises:
            StoreBrokenError: it cannot be reached.
        """
        host, port = address
        if not dialled:
            # torch's own client would go on trying for the whole of its time-out where connections are refused.
            connection, _, words = dial(host, port)
            if connection is None:
                raise StoreBrokenError(words)
            connection.close()
        try:
            # By position: the first arguments are the same in all releases.
            store = store_class(host, port, None, False, timedelta(seconds=_CONNECT_TIMEOUT_S), wait_for_workers=False)
        except Exception as error:
            raise StoreBrokenError(_first_line(error)) from error
        TRAFFIC.count(2 * (_KIND + 4) + 4)
        return cls(store, address)

    def another(self) -> StoreClient:
        """A second connection to the same store.

        Raises:
            StoreBrokenError: it cannot be reached.
        """
        return self.connect(self.store_class, self.address)

    def end(self) -> None:
        """Let go of the store; every operation fails from now on."""
        with self._lock:
            self.store = None

    def set(self, key: str, value: str) -> None:
        """Set a key. The server does not answer: an error may show at the next operation only."""
        self._ask(_KIND + _sized(key) + _sized(value), "set", key, value, answered=False)

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum; a key that does not exist is 0."""
        return int(self._ask(_KIND + _sized(key) + 2 * _NUMBER, "add", key, amount))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a key that has the expected value (empty: that does not exist), and return what it has now."""
        found: bytes = self._ask(
            _KIND + _sized(key) + _sized(expected) + _sized(value), "compare_set", key, expected, value
        )
        TRAFFIC.add(_LENGTH + len(found))
        return found

    def check(self, key: str) -> bool:
        """Whether a key exists."""
        return bool(self._ask(_KIND + _LENGTH + _sized(key) + _KIND, "check", [key]))

    def delete(self, key: str) -> bool:
        """Delete a key; whether it existed."""
        return bool(self._ask(_KIND + _sized(key) + _NUMBER, "delete_key", key))

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        """Wait until all keys exist; False when they do not in time."""
        give_up_at = time.monotonic() + timeout_s
        asked = timedelta(milliseconds=max(1, int(timeout_s * 1000)))
        try:
            self._ask(_KIND + _LENGTH + sum(map(_sized, keys)) + _KIND, "wait", keys, asked)
        except StoreBrokenError:
            # A time-out and a broken connection come as the same kind of error in some releases.
            if time.monotonic() < give_up_at - 0.002:
                raise
            return False
        return True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value of a key, waited for; None when it does not exist in time."""
        return self._read(key) if self.wait([key], timeout_s) else None

    def find(self, key: str) -> bytes | None:
        """The value of a key that may or may not exist."""
        return self._read(key) if self.check(key) else None

    def read_all(self, keys: list[str]) -> list[bytes]:
        """The values of keys that all exist."""
        sizes = sum(map(_sized, keys))
        values: list[bytes] = self._ask(2 * (_KIND + _LENGTH + sizes) + _KIND, "multi_get", keys)
        TRAFFIC.add(sum(_LENGTH + len(value) for value in values))
        return values

    def _read(self, key: str) -> bytes:
        # torch's own `get` waits for the key first: three messages of a client are two round trips.
        value: bytes = self._ask(2 * (_KIND + _sized(key)) + _LENGTH + _KIND, "get", key)
        TRAFFIC.add(_LENGTH + len(value))
        return value

    def _ask(self, size_bytes: int, operation: str, *arguments: Any, answered: bool = True) -> Any:  # noqa: ANN401
        with self._lock:
            TRAFFIC.count(size_bytes)
            try:
                answer = getattr(self.store, operation)(*arguments)
            except Exception as error:
                raise StoreBrokenError(_first_line(error)) from error
            if answered:
                self.answers += 1
            return answer


def _sized(text: str) -> int:
    return _LENGTH + len(text)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
