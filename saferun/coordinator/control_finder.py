"""Where the first host of a static job serves the control store, as the others find it out."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from saferun.coordinator.control_search import JOB_KEY, ControlSearch
from saferun.coordinator.dial import addresses_elsewhere
from saferun.coordinator.failure_messages import publish_failure
from saferun.coordinator.leader_address import ASK_AFTER_S, ASK_KEY, LeaderAddress, mismatch_error, read_address
from saferun.coordinator.prefix_store import prefix_class
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousRound, hosts_text
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.spare_rounds import LATE_HINT
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.coordinator.store_search import StoreSearch
from saferun.text.master_port import NO_MASTER_HINT

if TYPE_CHECKING:
    from saferun.cluster.signed import Signer

CONTROL_KEY = "saferun/control"
NO_CONTROL_S = 10.0
# A job before this one may take a moment to give its port back.
_FOREIGN_GRACE_S = 5.0
_RECHECK_S = 0.5
# How much longer a leader is waited for that accepts connections: it may import torch, which this host does not.
_IMPORT_S = 10.0
# How long the next launch of a step may take to begin once the previous one has ended.
_NEXT_S = 60.0
# For so long at most a leader is there after its job has ended, for hosts that have yet to read how.
_LEADER_LEAVES_S = 15.0
_CONTROL_HINT = "saferun's own messages go there: open that port (--control-port), or pass --control-port same"


class ControlFinder:
    """What this host knows of its job, and how it finds the job's control store.

    Args:
        stores: what this host serves if it is node rank 0.

    Attributes:
        job: the number that the first host has drawn; this host's own, until it knows that one.
        port: of the ranks' store.
        moves: how often the control store has become another one.
        script: what the ranks of the first host run, for people.
        agreement: signs the messages where no secret was named.
        master_addr: where the ranks find their store, where another host than the first one leads; else empty.
    """

    def __init__(self, stores: ServedStores) -> None:
        self._stores = stores
        self.job = os.urandom(8).hex()
        self.port = 0
        self.moves = 0
        self.script = ""
        self.agreement: SecretAgreement | None = None
        self.master_addr = ""

    def signer(self, rdzv: RendezvousRound, job: str) -> Signer | None:
        """What signs the messages of the job with this number."""
        named = rdzv.secrecy.signer(rdzv.run_id, job)
        if named is not None:
            return named
        if self.agreement is None or self.agreement.job != job:
            self.agreement = rdzv.make_agreement(job)
        return self.agreement

    def find(self, rdzv: RendezvousRound, *, moved: bool = False) -> StoreClient:
        """A connection to the control store; ``moved``: not to where it was before.

        Raises:
            JoinFailedError: it is not found in time, or this host cannot be a part of its job.
            StoreBrokenError: it is gone again.
            CancelledError: no task waits for it any more.
        """
        control: dict[int, LeaderAddress] = {}
        mismatches: list[tuple[str, StoreClient, LeaderAddress]] = []

        def accept(client: StoreClient) -> str | None:
            stored = client.find_stored(CONTROL_KEY, NO_CONTROL_S)
            found = read_address(stored)
            if found is None or stored is None:
                return "serves a store that is not saferun's"
            if found.run_id != rdzv.run_id:
                return f"belongs to another job: its run id is {found.run_id!r}, this one's {rdzv.run_id!r}"
            if kind := rdzv.secrecy.mismatch(CONTROL_KEY, stored):
                mismatches.append((kind, client, found))
                return "belongs to a job with another job secret, or without one"
            self._check_moved(found, moved=moved)
            control[client.address[1]] = found
            return None

        master = rdzv.request.master
        search = StoreSearch(self._stores.store_class, rdzv.master_addr, master.ports, accept, here=rdzv.name)
        give_up_at, is_late = time.monotonic() + rdzv.remaining_s + _IMPORT_S, False
        try:
            while (client := search.wait(_RECHECK_S)) is None:
                rdzv.check()
                message = search.message()
                rdzv.set_status(message, is_fault=search.is_in_vain)
                if rdzv.remaining_s <= 0:
                    now = time.monotonic()
                    if not search.is_accepted or now >= give_up_at:
                        waited_s = now - rdzv.began_at if is_late else rdzv.timeout_s
                        hint = search.hint(master.source) if master.is_given else NO_MASTER_HINT
                        raise JoinFailedError(f"{message}, for {waited_s:.0f} s", hint)
                    rdzv.allow(_RECHECK_S)
                    is_late = True
                if search.foreign_for_s() > _FOREIGN_GRACE_S:
                    hint = "give all hosts of a job the same --rdzv-id and --master-port, and other jobs other ports"
                    raise self._mismatched(rdzv, *mismatches[-1]) if mismatches else JoinFailedError(message, hint)
        finally:
            search.end()
        if is_late:
            rdzv.allow(_IMPORT_S)  # the leader begins now
        self.port = client.address[1]
        return self._connect_found(rdzv, client, control[self.port], moved=moved)

    def find_next(self, rdzv: RendezvousRound, *, has_met: bool) -> StoreClient:
        """The same after the job has ended that this host came late for.

        Of two launches in one step, that may have been the first one, whose leader waits for a slow host to read how it
        ended: this host's own job begins later, at the same address.

        Args:
            rdzv: the round of this host.
            has_met: whether this process has taken part in that job.

        Raises:
            JoinFailedError: there is no other: it was this host's own, and did without it.
            CancelledError: no task waits for it any more.
        """
        ended = JoinFailedError(f"the job has ended without {rdzv.name}, which came late", LATE_HINT, kind="needless")
        if has_met or time.monotonic() - rdzv.began_at > _LEADER_LEAVES_S:
            raise ended
        give_up_at = time.monotonic() + rdzv.remaining_s
        rdzv.limit(_NEXT_S)
        try:
            while rdzv.remaining_s > 0:
                with suppress(StoreBrokenError):
                    client = self.find(rdzv)
                    if rdzv.request.script and self.script and rdzv.request.script != self.script:
                        client.end()
                        break  # the next launch, and this host belongs to the one that has ended
                    rdzv.allow(give_up_at - time.monotonic())
                    return client
        except JoinFailedError:
            raise ended from None
        raise ended

    def _connect_found(
        self, rdzv: RendezvousRound, ranks: StoreClient, found: LeaderAddress, *, moved: bool
    ) -> StoreClient:
        """A connection to the control store of a job that is the right one."""
        if moved and found.job != self.job:
            raise StoreBrokenError("the leader is gone, and has come again")
        self.job, self.moves, self.script = found.job, found.moves, found.script
        signer = self.signer(rdzv, found.job)
        if (found.hosts, found.spares) != (rdzv.most, rdzv.spares):
            first = rdzv.request.expected[0] if rdzv.request.expected else "the leader"
            theirs = hosts_text(found.hosts, found.spares) if found.spares or rdzv.spares else str(found.hosts)
            message = f"{rdzv.name} was started for {rdzv.hosts_text}, {first} for {theirs}"
            option = "--nnodes" if found.hosts != rdzv.most else "--spares"
            error = JoinFailedError(message, f"give all hosts the same {option}", kind="usage")
            self._fail_for_all(rdzv, ranks, found, error, signer=signer)
            raise error
        return self._connect_control(rdzv, ranks, found, signer)

    def _check_moved(self, found: LeaderAddress, *, moved: bool) -> None:
        if moved and found.job == self.job and found.moves <= self.moves:
            raise StoreBrokenError("the store of the previous attempt is still there")

    def _mismatched(
        self, rdzv: RendezvousRound, kind: str, ranks: StoreClient, found: LeaderAddress
    ) -> JoinFailedError:
        def fail_round(error: JoinFailedError) -> None:
            self._fail_for_all(rdzv, ranks, found, error, signer=None)

        seen = found._replace(master_addr=rdzv.master_addr)
        return mismatch_error(kind, ranks, rdzv, rdzv.request.node_rank or 0, seen, fail_round)

    def _connect_control(
        self, rdzv: RendezvousRound, ranks: StoreClient, found: LeaderAddress, signer: Signer | None
    ) -> StoreClient:
        """A connection to the control store: at its own port, at whichever address; else at the ranks' store's port."""
        if found.one_port:
            return self._connect_shared(ranks, found, signer)

        others = addresses_elsewhere(found.addresses, rdzv.request.record.addresses)
        search = ControlSearch(self._stores.store_class, found, [rdzv.master_addr, *others], signer)
        ask_at = time.monotonic() + min(ASK_AFTER_S, rdzv.remaining_s / 3)
        try:
            while (client := search.wait(_RECHECK_S)) is None:
                rdzv.check()
                message = search.message()
                rdzv.set_status(message)
                if rdzv.remaining_s <= 0:
                    raise JoinFailedError(f"{message} ({rdzv.timeout_s:.0f} s)", _CONTROL_HINT)
                if time.monotonic() >= ask_at and self._has_moved(rdzv, ranks):
                    return self._connect_shared(ranks, found, signer)
            return client
        finally:
            search.end()

    def _has_moved(self, rdzv: RendezvousRound, ranks: StoreClient) -> bool:
        """Whether the control store is a part of the ranks' store by now; asks for it."""
        ranks.set(ASK_KEY, "")
        stored = ranks.find_stored(CONTROL_KEY, NO_CONTROL_S)
        found = read_address(stored)
        if found is None or stored is None or found.job != self.job or not found.one_port:
            return False
        if rdzv.secrecy.mismatch(CONTROL_KEY, stored):
            return False
        self.moves = found.moves
        return True

    def _connect_shared(self, ranks: StoreClient, found: LeaderAddress, signer: Signer | None) -> StoreClient:
        client = StoreClient.connect(prefix_class(self._stores.store_class), ranks.address, signer=signer)
        job = client.get(JOB_KEY, NO_CONTROL_S, forged=FORGED)
        if job is None or job.decode(errors="replace") != found.job:
            raise StoreBrokenError("the store is not this job's any more")
        return client

    def _fail_for_all(
        self,
        rdzv: RendezvousRound,
        ranks: StoreClient,
        found: LeaderAddress,
        error: JoinFailedError,
        *,
        signer: Signer | None,
    ) -> None:
        """Make the current rendezvous fail on all hosts."""
        try:
            client = self._connect_control(rdzv, ranks, found, signer)
            number = client.get("round", 1.0)
            if number is not None and number.isdigit() and not client.exists(f"r{int(number)}/done"):
                publish_failure(client, f"r{int(number)}/", error)
        except StoreBrokenError:
            pass
