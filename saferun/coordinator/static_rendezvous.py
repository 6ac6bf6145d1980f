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
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from saferun.coordinator.assignment_wait import BegunWithout, MissedError, await_assignment, is_for
from saferun.coordinator.control_finder import CONTROL_KEY, NO_CONTROL_S, ControlFinder
from saferun.coordinator.control_search import JOB_KEY, connect_again
from saferun.coordinator.dial import shown
from saferun.coordinator.failure_messages import publish_failure
from saferun.coordinator.host_record_collection import (
    HostRecordCollection,
    MovedError,
    OnePortError,
    attempt_prefix,
    forget_round,
    left_error,
)
from saferun.coordinator.leader_address import (
    ASK_KEY,
    LeaderAddress,
    mismatch_on_first_host,
    publish_address,
)
from saferun.coordinator.prefix_store import PrefixStore, prefix_class
from saferun.coordinator.rendezvous_round import JoinFailedError, RendezvousResult, RendezvousRound
from saferun.coordinator.resumption import Resumption, SharedSecret
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.spare_rounds import LATE_HINT, SpareRounds, late_key
from saferun.coordinator.store_client import FORGED, StoreBrokenError, StoreClient
from saferun.coordinator.successor_search import find_successor, own_address
from saferun.coordinator.withdrawals import withdraw, withdraw_alone
from saferun.text.master_port import another_port_hint, is_started_hint

if TYPE_CHECKING:
    from saferun.cluster.join_messages import EndNote, Replacement, Withdrawal
    from saferun.coordinator.assignments import HostAssignment, HostRecord
    from saferun.coordinator.secrecy import SecretMismatch

# How long the hosts may take to leave a store that is about to be replaced.
_LEFT_S = 5.0
# How long a leader of many may take to answer them all, and how long an answer that is there may take to be read.
_ANSWER_S, _READ_S = 10.0, 2.0
_LEADER = "the leader"
# Of earlier rendezvous, what hosts have written is kept for those that are late.
_KEPT_ROUNDS = 2


class StaticRendezvous:
    """All rendezvous of this host.

    Args:
        stores: what this host serves if it is node rank 0.
    """

    def __init__(self, stores: ServedStores) -> None:
        self._stores = stores
        self._finder = ControlFinder(stores)
        self._client: StoreClient | None = None  # to the control store
        self._round = -1  # of the last rendezvous that this host took part in
        self._one_port = False  # on the first host: whether the ranks' store holds the control store as well
        self._is_late = False  # the others have met without this host
        self._met: tuple[str, int] | None = None  # the job, and its last rendezvous that gave this host a place
        self._spare_rounds: SpareRounds | None = None  # on the first host of a job with spares
        self._last: HostAssignment | None = None  # of a host that does not lead
        self._leads = False  # this host has taken the place of the first one
        self._leader = ""  # the name of the host that leads; empty: as far as is known the first one

    def meet(self, rdzv: RendezvousRound) -> RendezvousResult:
        """Meet the other hosts.

        Raises:
            JoinFailedError: it cannot be.
            CancelledError: no task waits for it any more.
        """
        if rdzv.request.node_rank is None:
            raise JoinFailedError("this host's node rank is unknown", "pass --node-rank (0 to the number of hosts - 1)")
        if rdzv.request.node_rank >= rdzv.most + rdzv.spares:
            raise JoinFailedError(
                f"{rdzv.name} has node rank {rdzv.request.node_rank}, but was started for {rdzv.hosts_text}",
                "node ranks begin at 0: pass another --node-rank or --nnodes",
            )
        withdrawal = rdzv.request.withdrawal
        if withdrawal is not None:
            raise self._withdraw(rdzv, withdrawal)
        if rdzv.request.replaces_leader and self._last is not None:
            self._replace_leader(rdzv, self._last)
        while not self._leads and rdzv.request.node_rank > 0:
            try:
                return self._follow(rdzv, rdzv.request.node_rank)
            except StoreBrokenError:
                self._lose_store(rdzv)
        try:
            return self._lead(rdzv)
        except StoreBrokenError as error:
            raise JoinFailedError(f"the store of this host is gone: {error}", "start the job again") from error

    def _lose_store(self, rdzv: RendezvousRound) -> None:
        """The first host has gone, perhaps to come again.

        Raises:
            JoinFailedError: it is not waited for any more.
            CancelledError: no task waits for it any more.
        """
        broken, self._client = self._client, None
        is_late, self._round, self._is_late = self._is_late, -1, False
        if is_late and rdzv.spares:
            self._client = self._finder.find_next(rdzv, has_met=self._last is not None)
            return
        rdzv.check()
        if rdzv.remaining_s <= 0:
            where = shown(rdzv.master_addr, self._finder.port)
            what = f"{where} closed the connection, for {rdzv.timeout_s:.0f} s"
            hint = is_started_hint(rdzv.request.master.source, rdzv.master_addr, self._finder.port)
            raise JoinFailedError(what, hint)
        if self._finder.master_addr and self._last is not None:
            if broken is not None:
                self._client = connect_again(broken, self._finder.job)  # the spare that leads may be there
            if self._client is None:
                self._replace_leader(rdzv, self._last)

    def _replace_leader(self, rdzv: RendezvousRound, last: HostAssignment) -> None:
        """The first host does not come again: one of the spares leads from now on, this one or another.

        It has all hosts that the job needs, or none starts a rank: of two that lead, one would be alone.
        """
        before = last.successors[: last.host - last.hosts] if last.is_spare and last.order else None
        old, self._round = self._client, -1
        self._client = find_successor(rdzv, self._stores, self._finder, last.successors, before, old)
        if self._client is not None:
            found = (one.name for one in last.successors if self._finder.master_addr in one.addresses)
            self._leader = next(found, _LEADER)
            return
        self._leads = True
        self._finder.job, self._finder.agreement = os.urandom(8).hex(), None
        self._finder.master_addr = own_address(rdzv.request.record.addresses)
        self._spare_rounds = SpareRounds(rdzv, last.order)

    def resumption(self, result: RendezvousResult, own: HostRecord) -> Resumption | None:
        """What a replacement of this process goes on from; None: the stores end with this one."""
        if result.assignment.host == 0:
            return None
        agreement = self._finder.agreement
        return Resumption(
            result.assignment,
            self._finder.job,
            result.client.address,
            is_shared=issubclass(result.client.store_class, PrefixStore),
            master_port=self._finder.port,
            moves=self._finder.moves,
            round=max(self._round, 0),
            script=self._finder.script,
            shared=agreement.shared if agreement is not None else SharedSecret(),
            record=own,
            successor_addr=self._finder.master_addr,
        )

    def resume(self, rdzv: RendezvousRound, found: Resumption) -> RendezvousResult:
        """Take the place of a process of this host that has been killed while the attempt was under way.

        Raises:
            StoreBrokenError: the control store cannot be reached, or is not this job's any more.
            CannotSealError: evidence cannot be encrypted.
        """
        finder, self._round, self._last = self._finder, found.round, found.assignment
        self._leader, self._met = found.assignment.leader_name, (found.job, found.round)
        finder.job, finder.port, finder.moves, finder.script = found.job, found.master_port, found.moves, found.script
        finder.master_addr = found.successor_addr
        signer = finder.signer(rdzv, found.job)
        if isinstance(signer, SecretAgreement):
            signer.resume(found.shared)
        store_class = self._stores.store_class
        shared_class = prefix_class(store_class) if found.is_shared else store_class
        client = StoreClient.connect(shared_class, found.control, signer=signer)
        if client.get(JOB_KEY, NO_CONTROL_S, forged=FORGED) != found.job.encode():
            raise StoreBrokenError("the store is not this job's any more")
        self._client = client
        prefix, address = attempt_prefix(found.assignment.attempt), finder.master_addr or rdzv.master_addr
        return RendezvousResult(found.assignment, client, found.job, prefix, [], address, finder.port)

    def move(self, client: StoreClient) -> None:
        """The control store is reached by this connection from now on."""
        if self._client is not None:
            self._client = client

    def watch_membership(self, on_waiting: Callable[[str], None] | None) -> None:
        """A static job has no hosts that come later."""

    def leave(self) -> None:
        """Nothing is kept alive between rendezvous."""

    def miss_next(self, rdzv: RendezvousRound) -> None:
        """The other hosts are to meet again, and this one does not come: they would wait for it."""
        seat = rdzv.request.node_rank
        if self._client is None or self._leads or not seat:
            return
        client, prefix = self._client.another(), f"r{self._round + 1}/"
        error = left_error(rdzv.name, rdzv)
        if rdzv.spares and rdzv.end is None:
            withdraw_alone(client, prefix, seat, error)
        else:
            publish_failure(client, prefix, error)
            client.add(f"{prefix}read", 1)

    def close(self, note: EndNote | None) -> None:
        """The stores end with the process."""

    # ------------------------------------------------------------------------------------------------------ node rank 0

    def _lead(self, rdzv: RendezvousRound) -> RendezvousResult:
        rdzv.master_addr = self._finder.master_addr or rdzv.master_addr
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
        answering = self._open_round(rdzv) if again and self._one_port else collection
        client, prefix = self._control, f"r{self._round}/"
        client.set(f"{prefix}done", "")
        replacements: tuple[Replacement, ...] = ()
        seats: list[int] | None = None
        spares = 0
        if self._spare_rounds is not None:
            records, seats, spares = self._spare_rounds.arrange(rdzv, collection, records)
            replacements = self._spare_rounds.replacements
        seat, probe_after_s = rdzv.request.node_rank or 0, rdzv.request.probe_after_s
        assignment = answering.publish_assignments(records, seats, spares, seat, probe_after_s=probe_after_s)
        self._forget_earlier(rdzv)
        prefix = attempt_prefix(assignment.attempt)
        result = RendezvousResult(
            assignment, client, self._finder.job, prefix, records, rdzv.master_addr, self._stores.ranks_port
        )
        return result._replace(replacements=replacements)

    def _forget_earlier(self, rdzv: RendezvousRound) -> None:
        """Delete the records of an earlier rendezvous: no host is late for that any more."""
        if self._round < _KEPT_ROUNDS or self._one_port:
            return
        old = (self._control, f"r{self._round - _KEPT_ROUNDS}/", rdzv.most + rdzv.spares)
        with suppress(RuntimeError):  # no thread can be started now: they stay
            threading.Thread(target=forget_round, args=old, daemon=True).start()

    def _serve(self, rdzv: RendezvousRound) -> None:
        """Serve both stores, before waiting for hosts, so that those that arrive find them."""
        self._one_port = rdzv.request.one_port
        if not self._one_port:
            self._client = self._stores.serve_control()
            self._client.signer = self._finder.signer(rdzv, self._finder.job)
            self._client.set(JOB_KEY, self._finder.job)
        self._serve_ranks(rdzv)

    @property
    def _control(self) -> StoreClient:
        assert self._client is not None  # noqa: S101 - it is made first of all
        return self._client

    def _withdraw(self, rdzv: RendezvousRound, withdrawal: Withdrawal) -> JoinFailedError:
        """Tell the other hosts why this one cannot start. A job that has begun is left alone."""
        what = f"{rdzv.name} cannot start: {withdrawal.what}"
        error = JoinFailedError(what, withdrawal.hint, kind="usage" if withdrawal.is_usage else "", is_published=True)
        try:
            if withdrawal.leads:
                self._serve(rdzv)
                self._round = 0
                collection = self._open_round(rdzv)
                publish_failure(self._control, "r0/", error)
                collection.fail_for_late(rdzv, rdzv.remaining_s)
                return error
            client = self._finder.find(rdzv)
            if client.get("round", max(1.0, rdzv.remaining_s)) == b"0" and not client.exists("r0/done"):
                seat = rdzv.request.node_rank
                if rdzv.spares and seat is not None and not error.is_usage:
                    withdraw_alone(client, "r0/", seat, error)
                else:
                    withdraw(client, "r0/", seat, error)
        except StoreBrokenError:
            pass  # the first host is gone
        return error

    def _open_round(self, rdzv: RendezvousRound) -> HostRecordCollection:
        client, prefix = self._control, f"r{self._round}/"
        if isinstance(client.signer, SecretAgreement):
            client.signer.offer(client)
        client.set("round", str(self._round))
        client.set(f"{prefix}open", "")
        ranks = self._stores.ranks
        may_move = not self._one_port and self._round == 0 and ranks is not None

        def is_asked_for() -> bool:
            return may_move and ranks is not None and ranks.check(ASK_KEY)

        def mismatch() -> SecretMismatch | None:
            return mismatch_on_first_host(self._stores.ranks, rdzv, self._finder.job)

        can_probe = not self._one_port
        if rdzv.spares:
            rounds = self._spare_rounds = self._spare_rounds or SpareRounds(rdzv)
            collection = rounds.collection(
                rdzv, client, prefix, can_probe=can_probe, is_asked_for=is_asked_for, mismatch=mismatch
            )
            rounds.refuse(client, prefix)
            return collection
        return HostRecordCollection(
            client, prefix, rdzv.most, can_probe=can_probe, is_asked_for=is_asked_for, mismatch=mismatch
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
        signer = self._finder.signer(rdzv, self._finder.job)
        self._client = StoreClient.connect(prefix_class(self._stores.store_class), ranks.address, signer=signer)
        self._client.set(JOB_KEY, self._finder.job)
        self._finder.moves += 1

    def _publish(self, rdzv: RendezvousRound) -> None:
        ranks = self._stores.ranks
        assert ranks is not None  # noqa: S101 - it is served
        address = LeaderAddress(
            self._finder.job,
            self._stores.control_port,
            self._stores.ranks_port,
            rdzv.master_addr,
            tuple(rdzv.request.record.addresses),
            rdzv.run_id,
            rdzv.most,
            one_port=self._one_port,
            moves=self._finder.moves,
            script=rdzv.request.script,
            spares=rdzv.spares,
        )
        publish_address(ranks, CONTROL_KEY, rdzv, address)
        if self._leads:
            # The others look for it there, since they know that port.
            plain = StoreClient.connect(self._stores.store_class, self._control.address)
            publish_address(plain, CONTROL_KEY, rdzv, address)

    # ------------------------------------------------------------------------------------------------------- the others

    def _follow(self, rdzv: RendezvousRound, host: int) -> RendezvousResult:
        if self._client is None:
            self._client = self._finder.find(rdzv)
        elif self._round >= 0:
            self._client = self._renewed(self._client)
        own = rdzv.wait_for_tasks()
        number = self._round = self._wait_for_round(self._client, rdzv)
        assignment = None
        while assignment is None:
            rdzv.handed_in = self._finder.job, number
            try:
                assignment = await_assignment(self._control, f"r{number}/", host, rdzv, own, self._begun_without(rdzv))
            except MissedError:
                self._is_late = True
                number = self._round = self._wait_for_round(self._control, rdzv)
            except MovedError:
                # All are here, and the previous store may end at any moment; or this is the first rendezvous.
                rdzv.on_all_here()
                self._client = self._finder.find(rdzv, moved=True)
        self._is_late, self._last, self._leader = False, assignment, assignment.leader_name
        self._met = self._finder.job, number
        prefix, finder = attempt_prefix(assignment.attempt), self._finder
        address = finder.master_addr or rdzv.master_addr
        return RendezvousResult(assignment, self._control, finder.job, prefix, [], address, finder.port)

    def _renewed(self, client: StoreClient) -> StoreClient:
        """Another connection to the same store: this one was idle, so that a firewall may have forgotten it.

        Where none can be made, the old one shows whether the store is gone: a closed connection is an error at once. So
        it does where a leader that was started again serves another job's store at the same port.
        """
        another = connect_again(client, self._finder.job)
        if another is not None:
            client.end()
        return another or client

    def _wait_for_round(self, client: StoreClient, rdzv: RendezvousRound) -> int:
        """The number of the rendezvous that this host can take part in."""
        wanted = self._round + 1
        if wanted == 0:
            found = self._find_round(client, rdzv)
            wanted = int(found) if found is not None and found.isdigit() and len(found) <= 9 else 0  # noqa: PLR2004
            if client.exists(f"r{wanted}/done") and not self._is_answered(client, rdzv, wanted):
                wanted, self._is_late = wanted + 1, (self._finder.job, wanted) != self._met
        if self._is_late:
            self._wait_for_place(rdzv)
            if rdzv.spares:
                client.set(late_key(rdzv.request.node_rank or 0), "")
        while not client.await_key(f"r{wanted}/open", max(0.1, min(rdzv.request.report_every_s / 2, rdzv.remaining_s))):
            rdzv.check()
            if self._is_late:
                self._wait_for_place(rdzv)
            else:
                self._wait_for_first(rdzv, wanted)
        rdzv.wait_for("the leader's answer")  # that it has yet to begin is not reported any more
        return wanted

    def _is_answered(self, client: StoreClient, rdzv: RendezvousRound, number: int) -> bool:
        """Whether the others have met with this host, which has lost the connection before it had its assignment."""
        if rdzv.handed_in != (self._finder.job, number):
            return False
        prefix = f"r{number}/"
        # Those that have one get it a moment after the hosts have met; in a job with spares, by the time of this key.
        wait_s = _ANSWER_S if not client.check(f"{prefix}handed_out") else _READ_S
        answer = client.get(f"{prefix}assignment/{rdzv.request.node_rank}", min(wait_s, max(_READ_S, rdzv.remaining_s)))
        return answer is not None and is_for(answer, rdzv.wait_for_tasks())

    def _find_round(self, client: StoreClient, rdzv: RendezvousRound) -> bytes | None:
        """The number of the job's rendezvous, as the first host has published it."""
        rdzv.wait_for(f"{self._first(rdzv)} to begin the rendezvous")  # what is no longer wrong is not reported
        while (found := client.get("round", min(rdzv.request.report_every_s / 2, max(1.0, rdzv.remaining_s)))) is None:
            rdzv.check()
            self._wait_for_first(rdzv, 0)
        return found

    def _wait_for_first(self, rdzv: RendezvousRound, wanted: int) -> None:
        """The first host has not begun the rendezvous of that number.

        Raises:
            JoinFailedError: the time for that is over.
        """
        first = self._first(rdzv)
        rdzv.wait_for(f"{first} to begin the {'next attempt' if wanted else 'rendezvous'}")
        if rdzv.remaining_s <= 0:
            what = "another attempt" if wanted else "the rendezvous"
            raise JoinFailedError(
                f"{first} did not begin {what} within {rdzv.timeout_s:.0f} s",
                f"see the output of saferun on {first}",
            )

    def _wait_for_place(self, rdzv: RendezvousRound) -> None:
        """This host is late: where it is not a part of that job that was started again, it has come to another one.

        A job with spares goes on without it, unless another attempt needs it.
        """
        what, hint = self._begun_without(rdzv)
        if rdzv.spares:
            rdzv.set_status(f"{what}, which came late and is a spare for its next attempt")
            if rdzv.remaining_s <= 0:
                what = f"{what}, and needed no other host within {rdzv.timeout_s:.0f} s"
                raise JoinFailedError(what, LATE_HINT, kind="needless")
            return
        rdzv.set_status(f"{what}; waiting for its next attempt", is_fault=True)
        if rdzv.remaining_s <= 0:
            raise JoinFailedError(f"{what}, and did not begin another attempt within {rdzv.timeout_s:.0f} s", hint)

    def _begun_without(self, rdzv: RendezvousRound) -> BegunWithout:
        scripts = [f" (script {script})" if script else "" for script in (self._finder.script, rdzv.request.script)]
        where = shown(rdzv.master_addr, self._finder.port)
        port_hint = another_port_hint(rdzv.request.master.source, self._finder.port)
        return BegunWithout(
            f"the job at {where}{scripts[0]} has begun without {rdzv.name}{scripts[1]}",
            f"if that is another job, {port_hint}, or give each job an --rdzv-id of its own",
        )

    def _first(self, rdzv: RendezvousRound) -> str:
        """Who begins the rendezvous: in a job with spares not always the host with node rank 0."""
        return self._leader or next(iter(rdzv.request.expected), _LEADER)
