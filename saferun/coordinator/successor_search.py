"""The search for the spare host that leads a job whose first host is gone, or is left out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from saferun.cluster.silence import GONE, UNREACHABLE
from saferun.coordinator.assignments import Successor
from saferun.coordinator.control_finder import CONTROL_KEY, NO_CONTROL_S, ControlFinder
from saferun.coordinator.control_search import connect_again
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.leader_address import LeaderAddress, is_loopback, read_address
from saferun.coordinator.liveness_probe import probe_host
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.store_client import StoreClient
from saferun.coordinator.store_search import StoreSearch

_TURN_S = 0.1
# How often a spare finds out whether those before it are gone.
_PROBE_EVERY_S = 5.0
_MOST_ADDRESSES = 4
# How long the preferred address is waited for, once another one has been found to lead there.
_SAME_S = 2.0
# How long a leader that is there after all may take to need this host again: the supervisor waits for a minute more
# than hosts are waited for.
_RETURN_S = 40.0
_HINT = "see the output of saferun on the other hosts, and whether they can be reached"


def own_address(addresses: Sequence[str]) -> str:
    """The address at which other hosts find this one."""
    return next((address for address in addresses if not is_loopback(address)), "127.0.0.1")


def find_successor(
    rdzv: RendezvousRound,
    stores: ServedStores,
    finder: ControlFinder,
    successors: Sequence[Successor],
    before: Sequence[Successor] | None,
    old: StoreClient | None = None,
) -> StoreClient | None:
    """A connection to the control store of the host that leads from now on; None: this host does.

    Where no spare leads, it may have been this host whose network was away: then the leader goes on, and a spare may
    have the place of this host. The spares have their time first: a leader that only stood still has lost the others to
    one of them, and this host would be missing there.

    Args:
        rdzv: the round of this host.
        stores: have the class of stores.
        finder: learns which job it is.
        successors: the spares, in their order.
        before: those of them that lead rather than this host; None: this host does not lead.
        old: a connection to the leader that was lost; None: it is not looked for.

    Raises:
        JoinFailedError: none leads.
        CancelledError: no task waits for it any more.
    """
    if before is not None and not before:
        return None
    found: dict[tuple[str, int], LeaderAddress] = {}

    def accept(client: StoreClient) -> str | None:
        stored = client.find_stored(CONTROL_KEY, NO_CONTROL_S)
        address = read_address(stored)
        if address is None or stored is None or address.run_id != rdzv.run_id:
            return "does not lead this job"
        if rdzv.secrecy.mismatch(CONTROL_KEY, stored):
            return "belongs to a job with another job secret, or without one"
        found[client.address] = address
        return None

    own = rdzv.request.record.addresses
    names = ", ".join(one.name for one in successors)
    rdzv.wait_for(f"a spare to lead the job ({names})")
    probe_at = time.monotonic()
    with ExitStack() as ending:
        searches = {
            (address, one.port): StoreSearch(stores.store_class, address, [one.port], accept)
            for one in successors
            for address in addresses_elsewhere(one.addresses, own)[:_MOST_ADDRESSES]
        }
        for search in searches.values():
            ending.callback(search.end)
        while rdzv.remaining_s > 0:
            rdzv.check()
            client = _first_found(list(searches.values()))
            if client is not None:
                address = found[client.address]
                # All ranks are to have the same address, if it leads there from all hosts.
                same = searches.get((address.master_addr, address.control_port))
                client = (same.wait(_SAME_S) if same is not None else None) or client
                _learn(rdzv, finder, client, address)
                return client
            if before and time.monotonic() >= probe_at:
                probe_at = time.monotonic() + _PROBE_EVERY_S
                if all(_is_gone(one, own) for one in before):
                    return None
    what = f"no spare ({names}) has begun to lead the job within {rdzv.timeout_s:.0f} s"
    return _find_again(rdzv, old, finder.job, JoinFailedError(what, _HINT, kind="" if before is None else "needless"))


def _find_again(rdzv: RendezvousRound, old: StoreClient | None, job: str, error: JoinFailedError) -> StoreClient:
    """Another connection to the leader that was lost.

    Raises:
        JoinFailedError: that error; it is not there.
    """
    if old is not None:
        rdzv.allow(_RETURN_S)
        client = connect_again(old, job)
        if client is not None:
            return client
    raise error


def _first_found(searches: Sequence[StoreSearch]) -> StoreClient | None:
    for search in searches:
        client = search.wait(_TURN_S)
        if client is not None:
            return client
    if not searches:
        time.sleep(_TURN_S)
    return None


def _learn(rdzv: RendezvousRound, finder: ControlFinder, client: StoreClient, address: LeaderAddress) -> None:
    finder.job, finder.moves, finder.script = address.job, address.moves, address.script
    finder.port, finder.master_addr = address.ranks_port, client.address[0]
    client.signer = finder.signer(rdzv, address.job)


def _is_gone(one: Successor, own: Sequence[str]) -> bool:
    addresses = addresses_elsewhere(one.addresses, own) or list(one.addresses)
    return probe_host(one.name, addresses, one.port, address=None).why in {GONE, UNREACHABLE}
