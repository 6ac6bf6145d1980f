"""A part of another TCPStore that looks like a store of its own: every key lies behind one prefix.

It is what a job has for its own messages where the hosts can reach no other port than that of the ranks' store.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

_PREFIX = "saferun/own/"


class PrefixStore:
    """The calls of a TCPStore that ``StoreClient`` makes. To be made by ``prefix_class``."""

    store_class: ClassVar[Any]
    takes_connection: ClassVar[bool] = False

    def __init__(self, *arguments: Any, **more: Any) -> None:  # noqa: ANN401 - as torch's class takes them
        self._store = self.store_class(*arguments, **more)

    def set(self, key: str, value: str | bytes) -> None:
        """As of a TCPStore."""
        self._store.set(_PREFIX + key, value)

    def add(self, key: str, amount: int) -> int:
        """As of a TCPStore."""
        return int(self._store.add(_PREFIX + key, amount))

    def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
        """As of a TCPStore."""
        found: bytes = self._store.compare_set(_PREFIX + key, expected, value)
        return found

    def check(self, keys: list[str]) -> bool:
        """As of a TCPStore."""
        return bool(self._store.check([_PREFIX + key for key in keys]))

    def delete_key(self, key: str) -> bool:
        """As of a TCPStore."""
        return bool(self._store.delete_key(_PREFIX + key))

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """As of a TCPStore."""
        self._store.wait([_PREFIX + key for key in keys], timeout)

    def get(self, key: str) -> bytes:
        """As of a TCPStore."""
        value: bytes = self._store.get(_PREFIX + key)
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """As of a TCPStore."""
        values: list[bytes] = self._store.multi_get([_PREFIX + key for key in keys])
        return values


def prefix_class(store_class: Any) -> type[PrefixStore]:  # noqa: ANN401 - torch may be there in part only
    """A class to connect with, instead of torch's own."""
    takes = getattr(store_class, "takes_connection", False)
    return type("PrefixStore", (PrefixStore,), {"store_class": store_class, "takes_connection": takes})


def torchs_own(store_class: Any) -> Any:  # noqa: ANN401 - torch may be there in part only
    """Torch's class, for ``StoreConnection`` or a part of one.

    Raises:
        ImportError: it cannot be imported.
    """
    from saferun.coordinator.torch_store import import_store_class

    own, _ = import_store_class("store")
    return prefix_class(own) if issubclass(store_class, PrefixStore) else own
