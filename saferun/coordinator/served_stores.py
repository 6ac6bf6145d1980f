"""The stores that this host may serve, each on a socket that its supervisor listens on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.torch_store import loopback_address, open_store


class ServedStores:
    """The ranks' store and the control store, where this host serves them.

    Args:
        store_class: torch's TCPStore, or ``StoreConnection``.
        ranks_fd: the listening socket of the ranks' store; -1: none.
        control_fd: the one of the control store; -1: none.
        answer_probes: tells the main thread whether to answer at the control socket itself.
    """

    def __init__(
        self,
        store_class: Any,  # noqa: ANN401 - torch may be there in part only
        ranks_fd: int,
        control_fd: int,
        answer_probes: Callable[[bool], None],
    ) -> None:
        self.store_class = store_class
        self.ranks_port = loopback_address(ranks_fd)[1] if ranks_fd >= 0 else 0
        self.control_port = loopback_address(control_fd)[1] if control_fd >= 0 else 0
        self._ranks_fd = ranks_fd
        self._control_fd = control_fd
        self._answer_probes = answer_probes
        self._ranks: StoreClient | None = None
        self._control: StoreClient | None = None

    @property
    def ranks(self) -> StoreClient | None:
        """A connection to the ranks' store; None where it is not served here."""
        return self._ranks

    def serve_ranks(self) -> StoreClient:
        """Serve a ranks' store without any keys, instead of the previous one, and return a connection to it."""
        self.drop_ranks()
        self._ranks = _served(self.store_class, self._ranks_fd)
        return self._ranks

    def drop_ranks(self) -> None:
        """End the ranks' store, with all its keys and connections."""
        if self._ranks is not None:
            self._ranks.end()
        self._ranks = None

    def serve_control(self) -> StoreClient:
        """Serve an empty control store, instead of the previous one, and return a connection to it."""
        if self._control is not None:
            self._control.end()
        self._answer_probes(False)
        self._control = _served(self.store_class, self._control_fd)
        return self._control

    def drop_control(self) -> None:
        """End the control store; the socket answers liveness probes again."""
        if self._control is not None:
            self._control.end()
        self._control = None
        self._answer_probes(True)


def _served(store_class: Any, listen_fd: int) -> StoreClient:  # noqa: ANN401
    # The server's object is a client of its own store as well; the store ends with the last reference to it.
    return StoreClient(open_store(store_class, listen_fd), loopback_address(listen_fd))
