"""How a host finds the leader where torch's handler has decided who leads: by its address in the handler's store."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from saferun.coordinator.control_search import ControlSearch
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.failure_messages import publish_failure
from saferun.coordinator.leader_address import ASK_AFTER_S, ASK_KEY, LeaderAddress, mismatch_error, read_address
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.store_client import StoreClient

if TYPE_CHECKING:
    from saferun.cluster.signed import Signer
    from saferun.coordinator.assignments import HostRecord
    from saferun.coordinator.secret_agreement import SecretAgreement

LEADER_KEY = "saferun/leader"
_RECHECK_S = 0.5
_FIND_S = 3.5


class LeaderSearch:
    """The search of a host that does not lead.

    Args:
        store_class: what connects to the leader's stores.
        store: the one that the handler gives.
        own: this host's record.
        host: its number.
    """

    def __init__(self, store_class: Any, store: StoreClient, own: HostRecord, host: int) -> None:  # noqa: ANN401
        self._store_class = store_class
        self._store = store
        self._own = own
        self._host = host
        self._agreement: SecretAgreement | None = None  # of the job that was found last

    def find(self, rdzv: RendezvousRound, *, moved: bool) -> tuple[StoreClient, LeaderAddress, str]:
        """A connection to the leader's control store, who that is, and the address under which ranks find it.

        Where the control store cannot be reached, it is asked for as a part of the ranks' store. ``moved``: it is one.

        Raises:
            JoinFailedError: it is not found in time, or has another job secret.
            CancelledError: no task waits for it any more.
            StoreBrokenError: the handler's store is gone.
        """
        with ExitStack() as searches:
            return self._await_leader(rdzv, searches, moved=moved)

    def _await_leader(
        self, rdzv: RendezvousRound, searches: ExitStack, *, moved: bool
    ) -> tuple[StoreClient, LeaderAddress, str]:
        message = "the leader has not published its address yet"
        failing_since: float | None = None
        search: ControlSearch | None = None
        while True:
            rdzv.check()
            rdzv.set_status(message)
            if rdzv.remaining_s <= 0:
                hint = "see the output of saferun on the other hosts, and whether they can be reached"
                raise JoinFailedError(message, hint, kind=rdzv.failure_kind)
            stored = self._store.find_stored(LEADER_KEY, _RECHECK_S)
            leader = read_address(stored)
            if leader is None or stored is None or (moved and not leader.one_port):
                continue
            if kind := rdzv.secrecy.mismatch(LEADER_KEY, stored):
                message = "the leader has another job secret, or none"
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > ASK_AFTER_S:
                    raise self._mismatched(rdzv, kind, leader)
                time.sleep(_RECHECK_S)
                continue
            if self._agreement is None or self._agreement.job != leader.job:
                self._agreement = rdzv.make_agreement(leader.job)
            signer = rdzv.secrecy.signer(rdzv.run_id, leader.job) or self._agreement
            if search is None or search.leader != leader:
                searches.close()
                search = self._search(leader, signer)
                searches.callback(search.end)
            client = search.wait(_RECHECK_S)
            if client is not None:
                return client, leader, client.address[0]
            message = search.message()
            failing_since = failing_since or time.monotonic()
            if time.monotonic() - failing_since > ASK_AFTER_S:
                self._store.set(ASK_KEY, "")

    def _search(self, leader: LeaderAddress, signer: Signer | SecretAgreement | None) -> ControlSearch:
        others = addresses_elsewhere(leader.addresses, self._own.addresses) or leader.addresses
        # The ranks use the address at which it is found.
        addresses = [leader.master_addr, *others]
        return ControlSearch(self._store_class, leader, addresses, signer, patience_s=_FIND_S)

    def _mismatched(self, rdzv: RendezvousRound, kind: str, leader: LeaderAddress) -> JoinFailedError:
        def fail_round(error: JoinFailedError) -> None:
            search = self._search(leader, None)
            client = search.wait(_FIND_S + _RECHECK_S)
            search.end()
            if client is not None:
                publish_failure(client, "r0/", error)
                client.add("r0/read", 1)

        return mismatch_error(kind, self._store, rdzv, self._host, leader, fail_round)
