"""A TCPStore's calls on a dictionary, and somebody who writes into it past all signatures."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from saferun.coordinator.store_client import StoreClient

if TYPE_CHECKING:
    from datetime import timedelta

    from saferun.cluster.signed import Signer


class MemoryStore:
    """What ``StoreClient`` asks a store for; ``values`` is what anybody could have written there."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.wakes_waiting = True  # when compare_set sets a key
        self._changed = threading.Condition()

    def client(self, signer: Signer | None = None) -> StoreClient:
        """A connection."""
        return _Client(self, ("memory", 1), signer)

    def write(self, key: str, value: str | bytes) -> None:
        """As somebody would who has no secret."""
        with self._changed:
            self.values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def set(self, key: str, value: str | bytes) -> None:
        self.write(key, value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.values[key] for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._changed:
            return self.values.pop(key, None) is not None

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self.values.get(key, b"0")) + amount
            self.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        wanted = expected.encode() if isinstance(expected, str) else expected
        with self._changed:
            found = self.values.get(key)
            if found is None and wanted:
                return wanted
            if found is None or found == wanted:
                self.values[key] = value.encode() if isinstance(value, str) else value
                if self.wakes_waiting:
                    self._changed.notify_all()
            return self.values[key]

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        give_up_at = time.monotonic() + timeout.total_seconds()
        with self._changed:
            while not self.check(keys):
                remaining_s = give_up_at - time.monotonic()
                if remaining_s <= 0:
                    raise TimeoutError("not there")
                self._changed.wait(remaining_s)


class _Client(StoreClient):
    def another(self) -> StoreClient:
        return _Client(self.store, self.address, self.signer)
