"""The port of the ranks' store of one host, whoever serves the store: bound from before the ranks start to the end."""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.store_askers import StoreAskers
from saferun.config import RendezvousConfig
from saferun.linux.bare_socket import Socket
from saferun.linux.listen_port import hold_port
from saferun.linux.poller import Poller

__all__ = ["StorePort"]


class StorePort:
    """The port, and the ranks that connect to it while nothing else accepts connections there.

    Args:
        rendezvous: which port it is, and whether rank 0 serves the store itself, on a port that is only held for it.
        poller: the loop's.
    """

    def __init__(self, rendezvous: RendezvousConfig, poller: Poller) -> None:
        self._rendezvous = rendezvous
        self._poller = poller
        self._port: Socket | None = None  # bound to the end
        self._listener: Socket | None = None  # the same, where the coordinator serves the store on it
        self._askers: StoreAskers | None = None  # where the store is lost

    def bind(self) -> None:
        """Bind it, and listen if the coordinator serves the store.

        Raises:
            SaferunError: it cannot be had.
        """
        is_served = self._rendezvous.agent_store
        self._port = hold_port(self._rendezvous.master_port, listening=is_served)
        self._listener = self._port if is_served else None

    def release(self) -> None:
        """Give it back, for another one to be bound; only where rank 0 serves the store itself."""
        if self._port is not None and self._listener is None:
            self._port.close()
            self._port = None

    @property
    def numbers(self) -> list[int]:
        """Its number, once it is bound."""
        return [self._port.getsockname()[1]] if self._port is not None else []

    @property
    def fds(self) -> dict[str, int]:
        """The descriptor for the coordinator to inherit, by its name; empty: it does not serve the store."""
        return {"store": self._listener.fileno()} if self._listener is not None else {}

    def watch(self, on_connected: Callable[[], None]) -> None:
        """Have it called when anything connects."""
        if self._listener is not None:
            self._poller.watch(self._listener.fileno(), on_connected)

    def await_rank(self, on_asked: Callable[[], None]) -> None:
        """Have it called when a rank asks for the store, which nothing serves; unless one has asked, or is awaited."""
        if self._listener is not None and self._askers is None:
            self._askers = StoreAskers(self._listener, self._poller, on_asked)

    def ignore_ranks(self) -> None:
        """Ranks that connect wait for a coordinator that is on its way."""
        askers, self._askers = self._askers, None
        if askers is not None:
            askers.close()
        if self._listener is not None:
            self._poller.unwatch(self._listener.fileno())

    def close(self) -> None:
        """The launch is over."""
        self.ignore_ranks()
        if self._port is not None:
            self._port.close()
