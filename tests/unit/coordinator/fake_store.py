"""A store in memory, with connections to it that break where torch's would."""

from __future__ import annotations

import threading
from typing import Any

from saferun.coordinator.store_client import StoreBrokenError

DEADLINE_S = 30.0


class Store:
    """The keys, and what has become of them."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}
        self.changed = threading.Condition()
        self.waits: list[float] = []  # how long it was to be waited for something, each time
        self.breaks = 0  # so many operations break the connection that asks for them

    def put(self, key: str, value: str) -> None:
        """Somebody writes a key."""
        with self.changed:
            self.keys[key] = value.encode()
            self.changed.notify_all()

    def take_away(self, key: str) -> None:
        """Somebody deletes a key."""
        with self.changed:
            self.keys.pop(key, None)

    def until(self, key: str, value: str) -> None:
        """Wait until a key has a value."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.keys.get(key) == value.encode(), DEADLINE_S), self.keys


class Client:
    """Stands in for a ``StoreClient``."""

    def __init__(self, store: Store) -> None:
        self.at = store
        self.address = ("node1", 4711)
        self.answers = 0
        self.store_class = Client
        self.signer = None
        self.is_broken = False

    def another(self) -> Client:
        return Client(self.at)

    def _begin(self) -> dict[str, bytes]:
        if self.at.breaks > 0:
            self.at.breaks -= 1
            self.is_broken = True
            self.at.changed.notify_all()
        if self.is_broken:
            raise StoreBrokenError("broken")
        self.answers += 1
        return self.at.keys

    def set(self, key: str, value: str, _counter: int = 0) -> None:
        with self.at.changed:
            self._begin()[key] = value.encode()
            self.at.changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self.at.changed:
            keys = self._begin()
            try:
                total = int(keys.get(key, b"0")) + amount
            except ValueError:
                # As torch's store does where there is no number.
                self.is_broken = True
                raise StoreBrokenError("stoll") from None
            keys[key] = str(total).encode()
            self.at.changed.notify_all()
            return total

    def create(self, key: str, value: str) -> bytes:
        return self._compare_set(key, "", value)

    def claim(self, key: str, value: str) -> bool:
        return self.create(key, value) == value.encode()

    def _compare_set(self, key: str, expected: str, value: str) -> bytes:
        with self.at.changed:
            keys = self._begin()
            if keys.get(key, b"") == expected.encode():
                keys[key] = value.encode()
                self.at.changed.notify_all()
            return keys.get(key, expected.encode())

    def swap(self, key: str, expected: bytes, value: str) -> tuple[bytes, bytes]:
        found = self._compare_set(key, expected.decode(), value)
        return found, found

    def check(self, key: str) -> bool:
        with self.at.changed:
            return key in self._begin()

    def exists(self, key: str) -> bool:
        return self.check(key)

    def delete(self, key: str) -> bool:
        with self.at.changed:
            return self._begin().pop(key, None) is not None

    def wait(self, keys: list[str], timeout_s: float) -> bool:
        with self.at.changed:
            self._begin()
            self.at.waits.append(timeout_s)
            return self.at.changed.wait_for(lambda: all(key in self.at.keys for key in keys), timeout_s)

    def get(self, key: str, timeout_s: float, **_: object) -> bytes | None:
        return self.find(key) if self.wait([key], timeout_s) else None

    def find(self, key: str, **_: object) -> bytes | None:
        with self.at.changed:
            return self._begin().get(key)

    def find_all(self, keys: list[str], **_: object) -> list[bytes | None]:
        with self.at.changed:
            return [self._begin().get(key) for key in keys]

    def read_all(self, keys: list[str], **_: object) -> list[bytes]:
        with self.at.changed:
            found = self._begin()
            if any(key not in found for key in keys):
                # As torch's store does after its time-out.
                self.is_broken = True
                raise StoreBrokenError("wait timeout")
            return [found[key] for key in keys]


class Line:
    """Stands in for a ``Line`` that is made again as soon as it breaks."""

    def __init__(self, store: Store) -> None:
        self.at = store
        self.client: Any = Client(store)
        self.watching: Any = Client(store)
        self.is_closed = False
        self.start: Any = None
        self.repairs = 0

    def is_current(self, client: object) -> bool:
        return not self.is_closed and client in {self.client, self.watching}

    def wait_while_current(self, client: object, timeout_s: float) -> bool:
        with self.at.changed:
            self.at.changed.wait_for(lambda: self.is_closed, timeout_s)
        return self.is_current(client)

    def repair(self, broken: object, **_: bool) -> None:
        del broken
        self.repairs += 1
        self.client, self.watching = self.client.another(), self.client.another()
        self.start()

    def close(self) -> None:
        with self.at.changed:
            self.is_closed = True
            self.at.changed.notify_all()
