"""Where the store of torch's c10d rendezvous is: on this host, or wherever the endpoint's name leads."""

from __future__ import annotations

import os
import time
from typing import Any

from saferun.coordinator.arrivals import Arrivals
from saferun.coordinator.leader_address import leads_to
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.store_search import StoreSearch
from saferun.text.master_port import ENDPOINT

_RECHECK_S = 0.5
# torch's own read_timeout: for as long its client tries to connect.
_READ_TIMEOUT_S = 60.0


def find_endpoint_store(
    rdzv: RendezvousRound,
    store_class: Any,  # noqa: ANN401 - torch may be there in part only
    own: StoreClient | None = None,
    addresses: tuple[str, ...] = (),
) -> StoreClient:
    """Connect to the store to which the endpoint leads.

    torch's client connects to the endpoint even where its host serves a store (``--rdzv-conf is_host=1``), so that
    hosts of which several serve one meet in the same.

    Args:
        rdzv: the rendezvous.
        store_class: torch's TCPStore, or ``StoreConnection``.
        own: the connection to the store that this host serves, if it does. The hosts meet there if the endpoint is an
            address of this host, if another host has come there, or, where this host alone is enough for the job, if
            torch's client would have given the endpoint up.
        addresses: of this host.

    Raises:
        JoinFailedError: there is no store in time.
    """
    host, port = rdzv.endpoint_address
    if own is not None and ("is_host" not in rdzv.request.conf or leads_to(host, addresses)):
        return own  # by the endpoint's name it is this host
    search = StoreSearch(store_class, host, [port], lambda _: None, here=rdzv.name)
    guests = Arrivals(own, rdzv.run_id, rdzv.name) if own is not None else None
    give_up_at = time.monotonic() + (rdzv.request.connect_s or _READ_TIMEOUT_S)
    try:
        while (client := search.wait(_RECHECK_S)) is None:
            rdzv.check()
            is_late = rdzv.connect_remaining_s <= 0
            if own is not None and guests is not None:
                is_given_up = rdzv.least == 1 and (is_late or time.monotonic() >= give_up_at)
                if is_given_up or guests.names().names:
                    return own
            message = search.message()
            rdzv.set_status(message, is_fault=search.is_in_vain)
            if is_late:
                waited_s = rdzv.request.connect_s or rdzv.timeout_s
                raise JoinFailedError(f"{message}, for {waited_s:.0f} s", search.hint(ENDPOINT))
    finally:
        search.end()
    # From here on the hosts are waited for, as long as if the store had been there at once.
    rdzv.allow(rdzv.timeout_s)
    return client


def is_same_store(client: StoreClient, own: StoreClient | None, run_id: str) -> bool:
    """Whether a connection leads to the store that this host serves, perhaps by way of a service in front of it.

    Raises:
        StoreBrokenError: a store does not answer.
    """
    if own is None or client is own:
        return own is not None
    key, nonce = f"saferun/{run_id}/server", os.urandom(8).hex()
    own.set(key, nonce)
    own.check(key)  # it is there as soon as this is answered
    return client.find(key) == nonce.encode()
