"""The static rendezvous: node ranks are known beforehand, and node rank 0 serves both stores.

The ranks' store is where the others come first: its key ``saferun/control`` says where the control store is: its port,
at any address of that host. There, ``saferun/job`` is unique to the job, and ``round`` counts its rendezvous rounds,
each with a prefix of its own.

Where hosts reach the port of the ranks' store only (a NAT, a Kubernetes service, a firewall), the control store is a
part of that one: from the start if the user says so, else as soon as one host asks for it. It then ends with each
attempt, as the ranks' store does; everybody is sent to the next one when all have met.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from saferun.coordinator.control_search import JOB_KEY, ControlSearch
from saferun.coordinator.dial import shown
from saferun.coordinator.leader_address import (
    ASK_AFTER_S,
    ASK_KEY,
    LeaderAddress,
    mismatch_error,
    mismatch_on_first_host,
    publish_address,
    read_address,
)
from saferun.coordinator.prefix_store import PrefixStore, prefix_class
from saferun.coordinator.record_collection import (
    MovedError,
    OnePortError,
    RecordCollection,
    attempt_prefix,
    await_assignment,
    publish_failure,
    withdraw,
)
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousResult, RendezvousRound
from saferun.coordinator.resumption import Resumption, SharedSecret
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.coordinator.store_search import StoreSearch
from saferun.text.master_port import another_port_hint, is_started_hint

if TYPE_CHECKING:
    from saferun.cluster.join_messages import EndNote, Withdrawal
    from saferun.cluster.signed import Signer
    from saferun.coordinator.assignments import HostRecord

_CONTROL_KEY = "saferun/control"
_NO_CONTROL_S = 10.0
# A job before this one may take a moment to give its port back.
_FOREIGN_GRACE_S = 5.0
_RECHECK_S = 0.5
# How long the hosts may take to leave a store that is about to be replaced.
_LEFT_S = 5.0
_CONTROL_HINT = "saferun's own messages go there: open that port (--control-port), or pass --control-port same"


class StaticRendezvous:
    """All rendezvous of this host.

    Args:
        stores: what this host serves if it is node rank 0.
    """

    def __init__(self, stores: ServedStores) -> None:
        self._stores = stores
        self._job = os.urandom(8).hex()
        self._client: StoreClient | None = None  # to the control store
        self._port = 0  # of the ranks' store
        self._round = -1  # of the last rendezvous that this host took part in
        self._one_port = False  # on the first host: whether the ranks' store holds the control store as well
        self._moves = 0  # how often the control store has become another one
        self._leader_script = ""  # what the ranks of the first host run, for people
        self._agreement: SecretAgreement | None = None  # signs the messages where no secret was named

    def meet(self, rdzv: RendezvousRound) -> RendezvousResult:
        """Meet the other hosts.

        Raises:
            JoinFailedError: it cannot be.
            CancelledError: no task waits for it any more.
        """
        if rdzv.request.node_rank is None:
            raise JoinFailedError("this host's node rank is unknown", "pass --node-rank (0 to the number of hosts - 1)")
        if rdzv.request.node_rank >= rdzv.most:
            raise JoinFailedError(
                f"{rdzv.name} has node rank {rdzv.request.node_rank}, but was started for {rdzv.most} hosts",
                "node ranks begin at 0: pass another --node-rank or --nnodes",
            )
        withdrawal = rdzv.request.withdrawal
        if withdrawal is not None:
            raise self._withdraw(rdzv, withdrawal)
        if rdzv.request.node_rank == 0:
            try:
                return self._lead(rdzv)
            except StoreBrokenError as error:
                raise JoinFailedError(f"the store of this host is gone: {error}", "start the job again") from error
        while True:
            try:
                return self._follow(rdzv, rdzv.request.node_rank)
            except StoreBrokenError:
                # The first host has gone, perhaps to come again.
                self._client = None
                self._round = -1
                rdzv.check()
                if rdzv.remaining_s <= 0:
                    where = shown(rdzv.master_addr, self._port)
                    what = f"{where} closed the connection, for {rdzv.timeout_s:.0f} s"
                    hint = is_started_hint(rdzv.request.master.source, rdzv.master_addr, self._port)
                    raise JoinFailedError(what, hint) from None

    def resumption(self, result: RendezvousResult, own: HostRecord) -> Resumption | None:
        """What a successor of this process goes on from; None: the stores end with this one."""
        if result.assignment.host == 0:
            return None
        agreement = self._agreement
        return Resumption(
            result.assignment,
            self._job,
            result.client.address,
            is_shared=issubclass(result.client.store_class, PrefixStore),
            master_port=self._port,
            moves=self._moves,
            round=max(self._round, 0),
            script=self._leader_script,
            shared=agreement.shared if agreement is not None else SharedSecret(),
            record=own,
        )

    def resume(self, rdzv: RendezvousRound, found: Resumption) -> RendezvousResult:
        """Take the place of a process of this host that has been killed while the attempt was under way.

        Raises:
            StoreBrokenError: the control store cannot be reached, or is not this job's any more.
            CannotSealError: evidence cannot be encrypted.
        """
        self._job, self._port, self._moves, self._round = found.job, found.master_port, found.moves, found.round
        self._leader_script = found.script
        signer = self._signer(rdzv, found.job)
        if isinstance(signer, SecretAgreement):
            signer.resume(found.shared)
        store_class = self._stores.store_class
        shared_class = prefix_class(store_class) if found.is_shared else store_class
        client = StoreClient.connect(shared_class, found.control, signer=signer)
        if client.get(JOB_KEY, _NO_CONTROL_S, forged=FORGED) != found.job.encode():
            raise StoreBrokenError("the store is not this job's any more")
        self._client = client
        prefix = attempt_prefix(found.assignment.attempt)
        return RendezvousResult(found.assignment, client, found.job, prefix, [], rdzv.master_addr, self._port)

    def move(self, client: StoreClient) -> None:
        """The control store is reached by this connection from now on."""
        if self._client is not None:
            self._client = client

    def watch_membership(self, on_waiting: Callable[[str], None] | None) -> None:
        """A static job has no hosts that come later."""

    def leave(self) -> None:
        """Nothing is kept alive between rendezvous."""

    def close(self, note: EndNote | None) -> None:
        """The stores end with the process."""

    # ------------------------------------------------------------------------------------------------------ node rank 0

    def _lead(self, rdzv: RendezvousRound) -> RendezvousResult:
        again = self._client is not None
        if not again:
            self._serve(rdzv)
        own = rdzv.wait_for_tasks()
        self._round += 1
        collection = self._open_round(rdzv)
        try:
            records = collection.collect(rdzv, own)
        except OnePortError:
            self._one_port = True
            self._share(rdzv)
            self._publish(rdzv)
            # Those who have come to the control store, which is served on for those who have yet to.
            collection.move()
            collection = self._open_round(rdzv)
            records = collection.collect(rdzv, own)
        rdzv.on_all_here()
        if again:
            # All hosts have stopped their ranks. Nothing of theirs may be found by those that come.
            if self._one_port:
                collection.move()
                collection.wait_until_left(_LEFT_S)
            self._serve_ranks(rdzv)
            collection = self._open_round(rdzv) if self._one_port else collection
        client, prefix = self._control, f"r{self._round}/"
        client.set(f"{prefix}done", "")
        assignment = collection.publish_assignments(records)
        prefix = attempt_prefix(assignment.attempt)
        return RendezvousResult(
            assignment, client, self._job, prefix, records, rdzv.master_addr, self._stores.ranks_port
        )

    def _serve(self, rdzv: RendezvousRound) -> None:
        """Serve both stores, before anybody is waited for: whoever comes finds them."""
        self._one_port = rdzv.request.one_port
        if not self._one_port:
            self._client = self._stores.serve_control()
            self._client.signer = self._signer(rdzv, self._job)
            self._client.set(JOB_KEY, self._job)
        self._serve_ranks(rdzv)

    @property
    def _control(self) -> StoreClient:
        assert self._client is not None  # noqa: S101 - it is made first of all
        return self._client

    def _withdraw(self, rdzv: RendezvousRound, withdrawal: Withdrawal) -> JoinFailedError:
        """Tell the other hosts why this one cannot start. A job that has begun is left alone."""
        what = f"{rdzv.name} cannot start: {withdrawal.what}"
        error = JoinFailedError(what, withdrawal.hint, is_published=True, is_usage=withdrawal.is_usage)
        try:
            if withdrawal.leads:
                self._serve(rdzv)
                self._round = 0
                collection = self._open_round(rdzv)
                publish_failure(self._control, "r0/", error)
                collection.fail_for_late(rdzv, rdzv.remaining_s)
                return error
            client = self._find_control(rdzv)
            if client.get("round", max(1.0, rdzv.remaining_s)) == b"0" and not client.exists("r0/done"):
                withdraw(client, "r0/", rdzv.request.node_rank, error)
        except StoreBrokenError:
            pass  # the first host is gone
        return error

    def _signer(self, rdzv: RendezvousRound, job: str) -> Signer | None:
        """What signs the messages of the job with this number."""
        named = rdzv.secrecy.signer(rdzv.run_id, job)
        if named is not None:
            return named
        if self._agreement is None or self._agreement.job != job:
            self._agreement = rdzv.make_agreement(job)
        return self._agreement

    def _open_round(self, rdzv: RendezvousRound) -> RecordCollection:
        client, prefix = self._control, f"r{self._round}/"
        if isinstance(client.signer, SecretAgreement):
            client.signer.offer(client)
        client.set("round", str(self._round))
        client.set(f"{prefix}open", "")
        ranks = self._stores.ranks
        may_move = not self._one_port and self._round == 0 and ranks is not None
        return RecordCollection(
            client,
            prefix,
            rdzv.most,
            can_probe=not self._one_port,
            is_asked_for=lambda: may_move and ranks is not None and ranks.check(ASK_KEY),
            mismatch=lambda: mismatch_on_first_host(self._stores.ranks, rdzv, self._job),
        )

    def _serve_ranks(self, rdzv: RendezvousRound) -> None:
        """Serve a new ranks' store, with the job's own messages in it where there is no other port for them."""
        self._stores.serve_ranks()
        if self._one_port:
            self._share(rdzv)
        self._publish(rdzv)

    def _share(self, rdzv: RendezvousRound) -> None:
        ranks = self._stores.ranks
        assert ranks is not None  # noqa: S101 - it is served
        signer = self._signer(rdzv, self._job)
        self._client = StoreClient.connect(prefix_class(self._stores.store_class), ranks.address, signer=signer)
        self._client.set(JOB_KEY, self._job)
        self._moves += 1

    def _publish(self, rdzv: RendezvousRound) -> None:
        ranks = self._stores.ranks
        assert ranks is not None  # noqa: S101 - it is served
        address = LeaderAddress(
            self._job,
            self._stores.control_port,
            self._stores.ranks_port,
            rdzv.master_addr,
            tuple(rdzv.request.record.addresses),
            rdzv.run_id,
            rdzv.most,
            one_port=self._one_port,
            moves=self._moves,
            script=rdzv.request.script,
        )
        publish_address(ranks, _CONTROL_KEY, rdzv, address)

    # ------------------------------------------------------------------------------------------------------- the others

    def _follow(self, rdzv: RendezvousRound, host: int) -> RendezvousResult:
        if self._client is None:
            self._client = self._find_control(rdzv)
        own = rdzv.wait_for_tasks()
        number = self._wait_for_round(self._client, rdzv)
        self._round = number
        assignment = None
        while assignment is None:
            try:
                assignment = await_assignment(self._control, f"r{number}/", host, rdzv, own)
            except MovedError:
                # All are here, and the previous store may end at any moment; or this is the first rendezvous.
                rdzv.on_all_here()
                self._client = self._find_control(rdzv, moved=True)
        prefix = attempt_prefix(assignment.attempt)
        return RendezvousResult(assignment, self._control, self._job, prefix, [], rdzv.master_addr, self._port)

    def _wait_for_round(self, client: StoreClient, rdzv: RendezvousRound) -> int:
        """The number of the rendezvous that this host can take part in."""
        wanted = self._round + 1
        has_begun = False
        if wanted == 0:
            found = client.get("round", max(1.0, rdzv.remaining_s))
            wanted = int(found) if found is not None and found.isdigit() and len(found) <= 9 else 0  # noqa: PLR2004
            if client.exists(f"r{wanted}/done"):
                wanted, has_begun = wanted + 1, True
                self._wait_for_place(rdzv)
        while not client.await_key(f"r{wanted}/open", max(0.1, min(rdzv.request.report_every_s / 2, rdzv.remaining_s))):
            rdzv.check()
            first = rdzv.request.expected[0] if rdzv.request.expected else "the first host"
            if has_begun:
                self._wait_for_place(rdzv)
                continue
            rdzv.set_status(f"waiting for {first} to begin the next attempt")
            if rdzv.remaining_s <= 0:
                raise JoinFailedError(
                    f"{first} did not begin another attempt within {rdzv.timeout_s:.0f} s",
                    f"see what saferun says on {first}",
                )
        return wanted

    def _wait_for_place(self, rdzv: RendezvousRound) -> None:
        """This host is late: where it is not a part of that job that was started again, it has come to another one."""
        scripts = [f" (script {script})" if script else "" for script in (self._leader_script, rdzv.request.script)]
        where = shown(rdzv.master_addr, self._port)
        what = f"the job at {where}{scripts[0]} has begun without {rdzv.name}{scripts[1]}"
        rdzv.set_status(f"{what}; waiting for its next attempt", is_fault=True)
        if rdzv.remaining_s <= 0:
            raise JoinFailedError(
                f"{what}, and did not begin another attempt within {rdzv.timeout_s:.0f} s",
                f"if that is another job, {another_port_hint(rdzv.request.master.source, self._port)},"
                " or give each job an --rdzv-id of its own",
            )

    def _find_control(self, rdzv: RendezvousRound, *, moved: bool = False) -> StoreClient:
        """A connection to the control store; ``moved``: not to where it was before."""
        control: dict[int, LeaderAddress] = {}
        mismatches: list[tuple[str, StoreClient, LeaderAddress]] = []

        def accept(client: StoreClient) -> str | None:
            stored = client.find_stored(_CONTROL_KEY, _NO_CONTROL_S)
            found = read_address(stored)
            if found is None or stored is None:
                return "serves a store that is not saferun's"
            if found.run_id != rdzv.run_id:
                return f"belongs to another job: its run id is {found.run_id!r}, this one's {rdzv.run_id!r}"
            if kind := rdzv.secrecy.mismatch(_CONTROL_KEY, stored):
                mismatches.append((kind, client, found))
                return "belongs to a job with another job secret, or without one"
            self._check_moved(found, moved=moved)
            control[client.address[1]] = found
            return None

        master = rdzv.request.master
        search = StoreSearch(self._stores.store_class, rdzv.master_addr, master.ports, accept, here=rdzv.name)
        try:
            while (client := search.wait(_RECHECK_S)) is None:
                rdzv.check()
                message = search.message()
                rdzv.set_status(message, is_fault=search.is_in_vain)
                if rdzv.remaining_s <= 0:
                    raise JoinFailedError(f"{message}, for {rdzv.timeout_s:.0f} s", search.hint(master.source))
                if search.foreign_for_s() > _FOREIGN_GRACE_S:
                    hint = "give all hosts of a job the same --rdzv-id and --master-port, and other jobs other ports"
                    raise self._mismatched(rdzv, *mismatches[-1]) if mismatches else JoinFailedError(message, hint)
        finally:
            search.end()
        self._port = client.address[1]
        return self._connect_found(rdzv, client, control[self._port], moved=moved)

    def _connect_found(
        self, rdzv: RendezvousRound, ranks: StoreClient, found: LeaderAddress, *, moved: bool
    ) -> StoreClient:
        """A connection to the control store of a job that is the right one."""
        if moved and found.job != self._job:
            raise StoreBrokenError("the first host has gone, and come again")
        self._job, self._moves, self._leader_script = found.job, found.moves, found.script
        signer = self._signer(rdzv, found.job)
        if found.hosts != rdzv.most:
            first = rdzv.request.expected[0] if rdzv.request.expected else "the first host"
            message = f"{rdzv.name} was started for {rdzv.most} hosts, {first} for {found.hosts}"
            error = JoinFailedError(message, "give all hosts the same --nnodes")
            self._spoil(rdzv, ranks, found, error, signer=signer)
            raise error
        return self._connect_control(rdzv, ranks, found, signer)

    def _check_moved(self, found: LeaderAddress, *, moved: bool) -> None:
        if moved and found.job == self._job and found.moves <= self._moves:
            raise StoreBrokenError("the store of the previous attempt is still there")

    def _mismatched(
        self, rdzv: RendezvousRound, kind: str, ranks: StoreClient, found: LeaderAddress
    ) -> JoinFailedError:
        def fail_round(error: JoinFailedError) -> None:
            self._spoil(rdzv, ranks, found, error, signer=None)

        seen = found._replace(master_addr=rdzv.master_addr)
        return mismatch_error(kind, ranks, rdzv, rdzv.request.node_rank or 0, seen, fail_round)

    def _connect_control(
        self, rdzv: RendezvousRound, ranks: StoreClient, found: LeaderAddress, signer: Signer | None
    ) -> StoreClient:
        """A connection to the control store: at its own port, at whichever address; else at the ranks' store's port."""
        if found.one_port:
            return self._connect_shared(ranks, found, signer)

        others = [address for address in found.addresses if address not in rdzv.request.record.addresses]
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
        stored = ranks.find_stored(_CONTROL_KEY, _NO_CONTROL_S)
        found = read_address(stored)
        if found is None or stored is None or found.job != self._job or not found.one_port:
            return False
        if rdzv.secrecy.mismatch(_CONTROL_KEY, stored):
            return False
        self._moves = found.moves
        return True

    def _connect_shared(self, ranks: StoreClient, found: LeaderAddress, signer: Signer | None) -> StoreClient:
        client = StoreClient.connect(prefix_class(self._stores.store_class), ranks.address, signer=signer)
        job = client.get(JOB_KEY, _NO_CONTROL_S, forged=FORGED)
        if job is None or job.decode(errors="replace") != found.job:
            raise StoreBrokenError("the store is not this job's any more")
        return client

    def _spoil(
        self,
        rdzv: RendezvousRound,
        ranks: StoreClient,
        found: LeaderAddress,
        error: JoinFailedError,
        *,
        signer: Signer | None,
    ) -> None:
        """Let the rendezvous that is under way fail for all."""
        try:
            client = self._connect_control(rdzv, ranks, found, signer)
            number = client.get("round", 1.0)
            if number is not None and number.isdigit() and not client.exists(f"r{int(number)}/done"):
                publish_failure(client, f"r{int(number)}/", error)
        except StoreBrokenError:
            pass
