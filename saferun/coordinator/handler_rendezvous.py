"""The rendezvous that torch has handlers for: c10d, etcd, and whatever else is registered, elastic ones included.

The handler says which hosts take part and in what order. The first of them then serves a control store and a ranks'
store of its own and publishes where, in the store that the handler gives; from there on all is as in a static job.
"""

from __future__ import annotations

import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from saferun.cluster.join_messages import EndNote
from saferun.cluster.signed import Signer
from saferun.coordinator.arrivals import Arrivals, Waiting, waiting_text
from saferun.coordinator.assignment_wait import await_assignment
from saferun.coordinator.assignments import HostRecord
from saferun.coordinator.control_search import JOB_KEY, connect_again
from saferun.coordinator.endpoint_store import find_endpoint_store, is_same_store
from saferun.coordinator.host_record_collection import (
    HostRecordCollection,
    MovedError,
    OnePortError,
    attempt_prefix,
)
from saferun.coordinator.leader_address import (
    ASK_KEY,
    LeaderAddress,
    leads_to,
    master_addr,
    mismatch_on_first_host,
    publish_address,
)
from saferun.coordinator.leader_search import LEADER_KEY, LeaderSearch
from saferun.coordinator.prefix_store import prefix_class
from saferun.coordinator.rendezvous_file import await_file
from saferun.coordinator.rendezvous_pace import RendezvousPace
from saferun.coordinator.rendezvous_round import JobEndedError, JoinFailedError, RendezvousResult, RendezvousRound
from saferun.coordinator.secrecy import SecretMismatch
from saferun.coordinator.secret_agreement import SecretAgreement
from saferun.coordinator.served_stores import ServedStores
from saferun.coordinator.store_client import StoreBrokenError, StoreClient
from saferun.coordinator.torch_handler import NextRendezvous, handler_conf, has_room, wait_as_torch_does
from saferun.coordinator.torch_store import loopback_address, open_store
from saferun.text.wording import count_text, first_line

_POLL_S = 1.0
_RECHECK_S = 0.5
# When torch's own handlers have decided who takes part, all of them were there a moment ago, with all that they are to
# say of themselves. What may still take long: a store that stands still, for which torch's clients wait a minute or as
# the user has set it, names that are looked up in vain, a machine that is stopped for a while, a leader of many hosts.
# A host that is gone is waited for no longer. Other handlers may let each host go on as it comes, and have an id and an
# address of their own for the ranks.
_OF_TORCH = {"c10d", "etcd", "etcd-v2"}
_LEAST_EXCHANGE_S = 60.0
_EXCHANGE_S = 180.0
_EXCHANGE_PER_HOST_S = 0.25
# How often hosts meet again because of newcomers that cannot take part, before the job ends.
_MOST_AGAIN = 3
_EXIT_S = _RUN_ID_S = 2.0
# torch looks at the state of a rendezvous every second, and a host is asked to read more than that now and then.
_DEPARTURES_S = 3.0
_BEFORE_THE_END_S = 2.0
_CLOSED = {"RendezvousClosedError", "RendezvousGracefulExitError", "EtcdRendezvousClosedError"}


class HandlerRendezvous:
    """All rendezvous of this host through one of torch's handlers. All calls of the handler are made by one thread.

    Args:
        stores: what this host serves when it comes first.
        endpoint_fd: the listening socket of the c10d rendezvous' own store; -1: another host has it.
    """

    def __init__(self, stores: ServedStores, endpoint_fd: int) -> None:
        self._stores = stores
        self._endpoint_fd = endpoint_fd
        self._endpoint_store: Any = None  # served here
        self._serves = False  # the hosts meet in it
        self._handler: Any = None
        self._arrivals: Arrivals | None = None
        self._pace: RendezvousPace | None = None
        self._one_port = False  # whether some host has asked for it
        self._is_waiting = False  # the handler waits for other hosts
        self._is_full = False  # the job has as many hosts as it takes
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], _Answer]] = queue.SimpleQueue()
        self._on_waiting: Callable[[str], None] | None = None
        threading.Thread(target=self._call, daemon=True).start()

    def meet(self, rdzv: RendezvousRound) -> RendezvousResult:
        """Meet the other hosts.

        Raises:
            JoinFailedError: the hosts cannot meet.
            JobEndedError: a user has ended the job.
            CancelledError: no task waits for it any more.
        """
        own = rdzv.wait_for_tasks()
        if self._handler is None:
            self._handler = self._open(rdzv, own.addresses)
        own = own._replace(serves_rendezvous=self._serves)
        goes_on, left = own.attempt > 0 and rdzv.request.elastic, _MOST_AGAIN
        while True:
            try:
                return self._meet(rdzv, own, goes_on=goes_on and left > 0)
            except JoinFailedError as error:
                # A job that has run goes on without a newcomer that was started in another way, as under torchrun. The
                # newcomer ends, and torch's rendezvous begins again as soon as it has left.
                if left == 0 or not (error.is_again or (goes_on and error.is_usage)):
                    raise
            left -= 1
            rdzv.on_leave = None
            rdzv.allow(rdzv.timeout_s)

    def _meet(self, rdzv: RendezvousRound, own: HostRecord, *, goes_on: bool) -> RendezvousResult:
        if self._arrivals is not None:
            self._arrivals.arrive()
        try:
            info = self._next_rendezvous(rdzv)
        finally:
            if self._arrivals is not None:
                self._arrivals.depart()
        store, host, hosts = (info.store, info.rank, info.world_size) if hasattr(info, "store") else info
        # The control store of the previous attempt may end at any moment now.
        rdzv.on_all_here()
        rdzv.allow(_LEAST_EXCHANGE_S)
        if rdzv.request.backend in _OF_TORCH:
            self._is_full = hosts >= rdzv.most
            rdzv.limit(max(_EXCHANGE_S, 2 * rdzv.request.connect_s) + hosts * _EXCHANGE_PER_HOST_S)
        try:
            if host == 0:
                bootstrap = getattr(info, "bootstrap_store_info", None)
                result = self._lead(rdzv, own, store, hosts, bootstrap, goes_on=goes_on)
            else:
                result = self._follow(rdzv, own, store, host)
            run_id = self._run_id(rdzv)
            return result._replace(run_id=run_id) if run_id else result
        except StoreBrokenError as error:
            what, hint = f"a store broke while the hosts met: {error}", "see the output of saferun on the other hosts"
            raise JoinFailedError(what, hint, kind=rdzv.failure_kind) from error

    def resumption(self, result: RendezvousResult, own: HostRecord) -> None:
        """Torch's handler cannot be taken over by another process."""

    def move(self, client: StoreClient) -> None:
        """Each rendezvous has a control store of its own."""

    def watch_membership(self, on_waiting: Callable[[str], None] | None) -> None:
        """Report, once, the hosts that wait to join while there is room for them; None: stop watching."""
        self._on_waiting = on_waiting
        if on_waiting is not None:
            # The thread blocks until it gets a call where membership is not watched.
            self._ask(lambda: None)

    def miss_next(self, rdzv: RendezvousRound) -> None:
        """Torch's rendezvous knows who waits."""

    def leave(self) -> None:
        """Take this host out of the rendezvous at once, so that the others need not wait for it to be missed."""
        handler, self._handler = self._handler, None
        if self._arrivals is not None:
            self._arrivals.depart()
        executor = getattr(handler, "_op_executor", None)
        if executor is None:
            return
        # torch offers no public way to go without closing the rendezvous for all; without this one, the others notice
        # by missing keep-alives. From this thread, because the handler's own may be waiting for hosts without end.
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _RendezvousExitOp

        executor.run(_RendezvousExitOp(), time.monotonic() + _EXIT_S)

    def close(self, note: EndNote | None) -> None:
        """The job is over: hosts that come now, or wait, are turned away, with the ``note`` of who has ended it."""
        handler, arrivals = self._handler, self._arrivals
        if handler is None:
            return
        if note is not None and arrivals is not None:
            arrivals.note_end(note)
        if self._is_waiting:
            # The handler's own thread waits for hosts, as long as it takes.
            handler.shutdown()
        else:
            self._ask(handler.shutdown).wait(None)
        if note is not None and arrivals is not None and self._serves:
            # The store, which says that the rendezvous is closed, goes with this process.
            arrivals.await_departures(_DEPARTURES_S)

    # ------------------------------------------------------------------------------------------------------ the handler

    def _open(self, rdzv: RendezvousRound, addresses: tuple[str, ...]) -> Any:  # noqa: ANN401
        from torch.distributed.elastic.rendezvous import RendezvousParameters

        conf = handler_conf(rdzv.request.backend, rdzv.timeout_s, rdzv.request.conf)
        try:
            place = (rdzv.request.backend, rdzv.request.endpoint, rdzv.run_id)
            parameters = RendezvousParameters(*place, rdzv.least, rdzv.most, rdzv.request.local_addr, **conf)
            if rdzv.request.backend == "c10d":
                return self._open_c10d(rdzv, parameters, addresses)
            from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

            return get_rendezvous_handler(parameters)
        except (JoinFailedError, StoreBrokenError):
            raise
        except Exception as error:
            raise JoinFailedError(
                f"the rendezvous {rdzv.request.backend!r} at {rdzv.request.endpoint or 'no endpoint'} cannot be opened:"
                f" {_message_of(error)}",
                "look at --rdzv-backend, --rdzv-endpoint and --rdzv-conf",
            ) from error

    def _open_c10d(self, rdzv: RendezvousRound, parameters: Any, addresses: tuple[str, ...]) -> Any:  # noqa: ANN401
        from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, dynamic_rendezvous

        self._pace = RendezvousPace(rdzv.most)
        self._pace.install(dynamic_rendezvous)
        if rdzv.request.conf.get("store_type") == "file":
            await_file(rdzv)
            backend, store = c10d_rendezvous_backend.create_backend(parameters)
            return self._pace.apply(dynamic_rendezvous.create_handler(store, backend, parameters))
        own = None
        if self._endpoint_fd >= 0:
            # A host that tries again serves the same one: others may have come there.
            self._endpoint_store = self._endpoint_store or open_store(self._stores.store_class, self._endpoint_fd)
            own = StoreClient(self._endpoint_store, loopback_address(self._endpoint_fd))
        client = find_endpoint_store(rdzv, self._stores.store_class, own, addresses)
        self._serves = is_same_store(client, own, rdzv.run_id)
        if client is not own:
            wait_as_torch_does(client.store, rdzv.request.connect_s)
        self._arrivals = Arrivals(client, rdzv.run_id, rdzv.name)
        backend = c10d_rendezvous_backend.C10dRendezvousBackend(client.store, rdzv.run_id)
        return self._pace.apply(dynamic_rendezvous.create_handler(client.store, backend, parameters))

    def _run_id(self, rdzv: RendezvousRound) -> str:
        """The job's id for the ranks by a handler that is not torch's own; empty: as the options say."""
        if rdzv.request.backend in _OF_TORCH:
            return ""
        answer = self._ask(lambda: str(self._handler.get_run_id()))
        return answer.value if answer.wait(_RUN_ID_S) and answer.error is None else ""

    def _next_rendezvous(self, rdzv: RendezvousRound) -> Any:  # noqa: ANN401
        call = NextRendezvous(self._handler, rdzv)
        rdzv.is_torchs = rdzv.request.backend in {"c10d", "etcd-v2"}
        self._is_waiting = True
        if self._pace is not None:
            self._pace.begin()
        answer = self._ask(call)
        ask_at = 0.0
        waiting = Waiting([], is_all=False)
        message = ""
        while not answer.wait(_RECHECK_S):
            rdzv.check()
            call.observe()
            # Names cost as many requests as there are hosts, so they are read when they are about to be shown, and
            # before the end, when the first to give up take theirs back, or the store goes with its host.
            if self._arrivals is not None and time.monotonic() > ask_at:
                found = self._arrivals.names()
                next_s = min(rdzv.request.report_every_s / 2, rdzv.timeout_s / 4, rdzv.remaining_s - _BEFORE_THE_END_S)
                ask_at = time.monotonic() + (next_s if next_s > 0 else math.inf)
                if found.is_all or len(found.names) > len(waiting.names):
                    waiting = found
                elif next_s > 0:  # at the end the store may have gone with its host, and what was known last is right
                    waiting = waiting._replace(is_all=False)
                message = self._waiting_text(rdzv, waiting)
            rdzv.wait_for(message or "other hosts")
        rdzv.is_torchs = self._is_waiting = False
        if answer.error is None:
            return answer.value
        if type(answer.error).__name__ in _CLOSED and self._arrivals is not None:
            note = self._arrivals.find_end()
            if note is not None:
                raise JobEndedError(note)
        raise self._explain(rdzv, answer.error, waiting)

    def _waiting_text(self, rdzv: RendezvousRound, waiting: Waiting) -> str:
        return waiting_text(waiting.names, rdzv.least, rdzv.most, rdzv.request.expected, is_all=waiting.is_all)

    def _explain(self, rdzv: RendezvousRound, error: BaseException, waiting: Waiting) -> JoinFailedError:
        where = f"the rendezvous {rdzv.run_id!r}" + (f" at {rdzv.request.endpoint}" if rdzv.request.endpoint else "")
        kind = type(error).__name__
        if kind == "RendezvousConnectionError" and self._arrivals is not None and self._arrivals.store_answers():
            # Another handler would be another host to torch, which still counts this one in.
            return JoinFailedError(
                f"this host's connection to {where} broke ({_message_of(error)}), though its store answers",
                "start saferun on this host again while the others wait there (--start-timeout), and see what ends"
                " connections to that port: a firewall, a proxy",
            )
        here = list(dict.fromkeys([*waiting.names, rdzv.name]))
        # Whoever gives up first closes the rendezvous for all, and may take its store along.
        is_given_up = (waiting.is_all and 1 < len(here) < rdzv.least) or rdzv.remaining_s < _BEFORE_THE_END_S
        if kind in {"RendezvousClosedError", "EtcdRendezvousClosedError"} and not is_given_up:
            return JoinFailedError(
                f"{where} is closed: its job has ended, or has all the hosts that it takes",
                "start the hosts of a job together, and give each job an --rdzv-id of its own",
            )
        if kind == "RendezvousGracefulExitError":
            return JoinFailedError(f"{where} has all the hosts that it takes", "raise --nnodes, or start fewer hosts")
        if "Timeout" in kind or is_given_up:
            missing = ""
            if self._arrivals is not None:
                missing = f"; missing: {self._waiting_text(rdzv, waiting._replace(names=here))}"
            return JoinFailedError(
                f"the hosts of the job did not come to {where} within {rdzv.timeout_s:.0f} s{missing}",
                "check that saferun was started on all of them, and look at its output; --start-timeout is how long"
                " they are waited for",
            )
        if kind in {"DistStoreError", "LookupError"} and rdzv.request.backend in _OF_TORCH:
            # The store answers: the host that comes first has yet to write its address there.
            what = f"the first host came to {where} and then did not answer"
            return JoinFailedError(what, "see the output of saferun on that host, and whether it is up", kind="gone")
        if kind == "RendezvousConnectionError" and rdzv.request.attempt > 0:
            hint = "see whether it runs and can be reached from here"
            if rdzv.request.backend == "c10d":
                hint = "no host can join without what serves it (--rdzv-endpoint): start the job again on all hosts"
            return JoinFailedError(f"{where} does not answer any more: {_message_of(error)}", hint)
        return JoinFailedError(
            f"{where} does not work: {_message_of(error)}",
            "see whether the host of --rdzv-endpoint can be reached from here",
        )

    # -------------------------------------------------------------------------------------------- its thread, and polls

    def _ask(self, do: Callable[[], Any]) -> _Answer:
        answer = _Answer()
        self._calls.put((do, answer))
        return answer

    def _call(self) -> None:
        while True:
            try:
                do, answer = self._calls.get(timeout=_POLL_S if self._on_waiting is not None else None)
            except queue.Empty:
                self._poll()
                continue
            try:
                answer.give(do(), None)
            except BaseException as error:
                answer.give(None, error)  # a handler may call sys.exit, too

    def _poll(self) -> None:
        on_waiting, handler = self._on_waiting, self._handler
        if on_waiting is None or handler is None:
            return
        try:
            waiting = int(handler.num_nodes_waiting())
        except Exception:
            # The job can do without its rendezvous, as long as no host comes or goes.
            return
        if waiting > 0 and on_waiting is self._on_waiting and has_room(handler, self._is_full):
            self._on_waiting = None
            names = self._arrivals.names().names if self._arrivals is not None else []
            named = f": {', '.join(names[:16])}" if names else ""
            on_waiting(f"{count_text(waiting, 'host waits', 'hosts wait')} to join{named}")

    # ----------------------------------------------------------------------------------------------------- who is first

    def _lead(
        self,
        rdzv: RendezvousRound,
        own: HostRecord,
        store: Any,  # noqa: ANN401
        hosts: int,
        bootstrap: Any,  # noqa: ANN401
        *,
        goes_on: bool,
    ) -> RendezvousResult:
        rdzv.check()  # another rendezvous of this host may be under way by now, with stores of its own
        found, port = StoreClient(store, ("", 0)), self._stores.ranks_port
        ranks = self._stores.serve_ranks() if port else None
        job = os.urandom(8).hex()
        host_name = getattr(bootstrap, "master_addr", None)
        if not host_name or (rdzv.request.backend not in _OF_TORCH and not leads_to(str(host_name), own.addresses)):
            # Of another handler it may be the address of a store elsewhere: the ranks' store is here.
            host_name = rdzv.request.local_addr or (socket.getfqdn() if hosts > 1 else "localhost")
        named_signer = rdzv.secrecy.signer(rdzv.run_id, job)
        agreement = rdzv.make_agreement(job) if named_signer is None and hosts > 1 else None
        one_port = ranks is not None and (rdzv.request.one_port or self._one_port)
        address = LeaderAddress(
            job,
            self._stores.control_port,
            port or (int(bootstrap.master_port) if bootstrap is not None else 0),
            master_addr(str(host_name), own.addresses),
            own.addresses,
            rdzv.run_id,
            rdzv.most,
            one_port=one_port,
            moves=0,
        )
        serve = partial(self._serve_control, rdzv, found, address, named_signer or agreement)

        def mismatch() -> SecretMismatch | None:
            return mismatch_on_first_host(found, rdzv, job)

        collection_of = partial(HostRecordCollection, mismatch=mismatch, goes_on=goes_on)
        client = serve(one_port=one_port)
        may_move = ranks is not None and not one_port
        is_asked_for = partial(found.check, ASK_KEY) if may_move else lambda: False
        collection = collection_of(client, "r0/", hosts, can_probe=not one_port, is_asked_for=is_asked_for)
        try:
            records = collection.collect(rdzv, own)
        except OnePortError:
            # From now on, and after a restart as well: the network will be the same.
            self._one_port = True
            client = serve(one_port=True)
            collection.move()
            collection = collection_of(client, "r0/", hosts, can_probe=False)
            records = collection.collect(rdzv, own)
        assignment = collection.publish_assignments(records, probe_after_s=rdzv.request.probe_after_s)
        prefix = attempt_prefix(assignment.attempt)
        return RendezvousResult(assignment, client, job, prefix, records, address.master_addr, address.ranks_port)

    def _serve_control(
        self,
        rdzv: RendezvousRound,
        found: StoreClient,
        address: LeaderAddress,
        signer: Signer | None,
        *,
        one_port: bool,
    ) -> StoreClient:
        """Serve the control store, by itself or as a part of the ranks' store, and publish its address.

        Args:
            rdzv: the rendezvous.
            found: a connection to the store in which the others look for the address.
            address: what is published, but for the control store's port and ``one_port``.
            signer: signs the messages of the job; None: nothing does.
            one_port: whether it is a part of the ranks' store.
        """
        rdzv.check()
        ranks, control_port = self._stores.ranks, self._stores.control_port
        if one_port and ranks is not None:
            client = StoreClient.connect(prefix_class(self._stores.store_class), ranks.address)
            control_port = self._stores.ranks_port
        else:
            client = self._stores.serve_control()
        client.signer = signer
        client.set(JOB_KEY, address.job)
        if isinstance(signer, SecretAgreement):
            signer.offer(client)
        client.check(JOB_KEY)
        address = address._replace(control_port=control_port, one_port=one_port)
        publish_address(found, LEADER_KEY, rdzv, address)
        return client

    def _follow(self, rdzv: RendezvousRound, own: HostRecord, store: Any, host: int) -> RendezvousResult:  # noqa: ANN401
        rdzv.check()
        self._stores.drop_control()
        self._stores.drop_ranks()
        search, moved = LeaderSearch(self._stores.store_class, StoreClient(store, ("", 0)), own, host), False
        while True:
            client, leader, address = search.find(rdzv, moved=moved)
            try:
                assignment = await_assignment(client, "r0/", host, rdzv, own)
            except MovedError:
                moved = True
                continue
            except StoreBrokenError:
                if connect_again(client, leader.job) is None:
                    raise
                time.sleep(_RECHECK_S)  # the connection alone has broken
                continue
            return RendezvousResult(
                assignment, client, leader.job, attempt_prefix(assignment.attempt), [], address, leader.ranks_port
            )


class _Answer:
    """The result of a call of the handler."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._given = threading.Event()

    def give(self, value: Any, error: BaseException | None) -> None:  # noqa: ANN401
        self.value, self.error = value, error
        self._given.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._given.wait(timeout_s)


def _message_of(error: BaseException) -> str:
    """The innermost reason of an error, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"
