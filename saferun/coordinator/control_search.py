"""The search for a job's control store, at several addresses of the first host at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from saferun.coordinator.prefix_store import prefix_class
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.coordinator.store_search import StoreSearch

if TYPE_CHECKING:
    from saferun.cluster.signed import Signer
    from saferun.coordinator.leader_address import LeaderAddress

JOB_KEY = "saferun/job"
_JOB_TIMEOUT_S = 10.0
# How long one of several searches is waited for before the next.
_TURN_S = 0.05
_FIRST_TURN_S = 0.5


class ControlSearch:
    """Several searches, of which the first that finds the store of this job counts.

    Args:
        store_class: torch's TCPStore, or ``StoreConnection``.
        leader: what the first host has published.
        addresses: of that host, at which to search; the one that is preferred comes first.
        signer: goes with the connection.
        patience_s: how long the first address is waited for before another one counts; until it has failed, at most.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(
        self,
        store_class: Any,  # noqa: ANN401 - torch may be there in part only
        leader: LeaderAddress,
        addresses: Sequence[str],
        signer: Signer | None,
        patience_s: float = _FIRST_TURN_S,
    ) -> None:
        def accept(client: StoreClient) -> str | None:
            # Where the store of the rendezvous keeps its keys, the address may be from before the last attempt.
            job = client.get(JOB_KEY, _JOB_TIMEOUT_S, forged=FORGED)
            return None if job == leader.job.encode() else "is not this job's store"

        kind = prefix_class(store_class) if leader.one_port else store_class
        self.leader = leader
        self._first_until = time.monotonic() + patience_s
        self._searches: list[StoreSearch] = []
        for address in dict.fromkeys(addresses):
            try:
                self._searches.append(StoreSearch(kind, address, [leader.control_port], accept, signer))
            except RuntimeError:
                if not self._searches:
                    raise
                break  # no more threads: one address is enough

    def wait(self, timeout_s: float) -> StoreClient | None:
        """A connection to the store, waited for; None when it is not found in time."""
        now = time.monotonic()
        give_up_at = now + timeout_s
        first = self._searches[0]
        if self._first_until > now and len(self._searches) > 1:
            # One packet that was lost costs a second, and does not send the ranks another way.
            client = first.wait(min(self._first_until, give_up_at) - now, or_failure=True)
            if client is not None or (not first.has_failed and self._first_until > give_up_at):
                return client
        while True:
            for search in self._searches:
                client = search.wait(min(_TURN_S, timeout_s))
                if client is not None:
                    return client
            if time.monotonic() >= give_up_at:
                return None

    def message(self) -> str:
        """Why it has not been found so far."""
        return self._searches[0].message()

    def end(self) -> None:
        """Give up."""
        for search in self._searches:
            search.end()


def connect_again(client: StoreClient, job: str) -> StoreClient | None:
    """Another connection to the control store of a job; None: it is not there any more, or serves another job."""
    another: StoreClient | None = None
    with suppress(StoreBrokenError):
        another = client.another()
        if another.get(JOB_KEY, _JOB_TIMEOUT_S, forged=FORGED) == job.encode():
            return another
    if another is not None:
        another.end()
    return None
