"""Where the store of torch's c10d rendezvous is: on this host, or wherever the endpoint's name leads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from saferun.coordinator.arrivals import Arrivals
from saferun.coordinator.leader_address import leads_to
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.store_search import StoreSearch
from saferun.text.master_port import ENDPOINT

_RECHECK_S = 0.5
# torch gives a store as long before it fails.
_NO_WAY_S = 60.0


def find_endpoint_store(
    rdzv: RendezvousRound,
    store_class: Any,  # noqa: ANN401 - torch may be there in part only
    own: StoreClient | None = None,
    addresses: tuple[str, ...] = (),
) -> StoreClient:
    """The store to which the endpoint leads.

    torch's client connects to the endpoint even where its host serves a store of its own (``--rdzv-conf is_host=1``),
    so that hosts of which several do so meet in the same one.

    Args:
        rdzv: the rendezvous.
        store_class: torch's TCPStore, or ``StoreConnection``.
        own: to the store that this host serves, if it does. It is the right one where the endpoint is an address of
            this host, where another host has come to it, and where the endpoint leads nowhere for a minute.
        addresses: of this host.

    Raises:
        JoinFailedError: there is no store in time.
    """
    host, port = rdzv.endpoint_address
    if own is not None and ("is_host" not in rdzv.request.conf or leads_to(host, addresses)):
        return own  # by the endpoint's name it is this host
    has_guests = _guests(rdzv, own)
    search = StoreSearch(store_class, host, [port], lambda _: None, here=rdzv.name)
    try:
        while (client := search.wait(_RECHECK_S)) is None:
            rdzv.check()
            if own is not None and has_guests():
                return own
            message = search.message()
            rdzv.set_status(message, is_fault=search.is_in_vain)
            if rdzv.connect_remaining_s <= 0:
                waited_s = rdzv.request.connect_s or rdzv.timeout_s
                raise JoinFailedError(f"{message}, for {waited_s:.0f} s", search.hint(ENDPOINT))
    finally:
        search.end()
    # From here on the hosts are waited for, as long as if the store had been there at once.
    rdzv.allow(rdzv.timeout_s)
    return client


def _guests(rdzv: RendezvousRound, own: StoreClient | None) -> Callable[[], bool]:
    """Whether this host's own store is the one in which the hosts meet, though the endpoint does not lead to it."""
    if own is None:
        return lambda: False
    arrivals = Arrivals(own, rdzv.run_id, rdzv.name)
    return lambda: bool(arrivals.names().names) or time.monotonic() - rdzv.began_at > _NO_WAY_S
