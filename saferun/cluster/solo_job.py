"""A job of one host: there is no rendezvous, and the coordinator serves the ranks' store and what needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence

from saferun.cluster.coordinator_client import CoordinatorClient
from saferun.cluster.coordinator_process import CoordinatorLink
from saferun.cluster.job_values import AbortReason, Assignment, EvidenceChunk, JobCallbacks, LostHost
from saferun.cluster.report_listeners import SoloRankReports
from saferun.cluster.store_port import StorePort
from saferun.config import LaunchConfig
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject
from saferun.supervisor.actions import BroadcastDecision, Finish, JoinHosts
from saferun.supervisor.events import StartFailed, StoreServed, StoreUnavailable
from saferun.supervisor.topology import single_host

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.join_messages import Peer
    from saferun.cluster.storeless_job import StorelessJob
    from saferun.model import AbortKind

# The ranks get this head start, unless one of them connects sooner. A rank that wants the store has torch to import
# first, which takes it much longer and needs the processors; ranks that are done sooner never wanted one, and then no
# coordinator is started at all.
_HEAD_START_S = 0.4
_GOODBYE_S = 5.0


class SoloJob:
    """The job that this host is alone in, with the interface of ``cluster.job_interface.JobPort``.

    Args:
        config: the launch.
        environ: the coordinator's environment.
        poller: the loop's.
        callbacks: what it calls.
        open_link: starts the coordinator.
    """

    is_head = leads = True
    host = 0
    leader = ""
    peers: Mapping[int, Peer] = {}
    other_addresses: tuple[str, ...] = ()
    chunk_limit_bytes = 1 << 16
    is_endpoint_here = is_join_failure_reported = is_refusal_printed = False
    storeless_job: StorelessJob | None = None
    abort_reason: AbortReason | None = None
    lost: Mapping[int, LostHost] = {}

    def __init__(
        self,
        config: LaunchConfig,
        environ: Mapping[str, str],
        poller: Poller,
        callbacks: JobCallbacks,
        *,
        open_link: Callable[..., CoordinatorLink] = CoordinatorLink,
    ) -> None:
        self.end: Finish | None = None
        self.blamed: tuple[int, ...] = ()
        self.start_stage: JsonObject | None = None
        self.deadline: float | None = None  # when the head start of the ranks is over, in monotonic seconds
        self._config = config
        self._callbacks = callbacks
        self.reports = SoloRankReports(config.nproc_per_node)
        self._post, self._attempt = callbacks.post, callbacks.attempt
        self.client = CoordinatorClient(
            config,
            environ,
            poller,
            callbacks,
            on_message=self._on_message,
            on_lost=self._on_lost,
            name="the store's process",
            open_link=open_link,
        )
        self._store_port = StorePort(config.rendezvous, poller)
        self._is_dropping = False  # the store of the previous attempt
        self._serve_sent = False

    # ----------------------------------------------------------------------------------------------------------------
    # The store

    def bind(self) -> None:
        """Bind and listen on the store's port, which stays bound to the end of the launch.

        Raises:
            SaferunError: it cannot be had.
        """
        self._store_port.bind()

    def release(self) -> None:
        """Give the port back, for another one to be bound; only where rank 0 serves the store itself."""
        self._store_port.release()

    def bound_ports(self) -> list[int]:
        """The port of the ranks' store, once it is bound."""
        return self._store_port.numbers

    @property
    def pids(self) -> set[int]:
        """The coordinator, if there is one."""
        return self.client.pids

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the coordinator."""
        return self.client.on_exit(pid, status)

    def tick(self, now: float) -> None:
        """Serve the store when the head start of the ranks is over."""
        if self.deadline is not None and self.deadline <= now:
            self.serve()

    def prepare(self, preparation: JsonObject) -> None:
        """Make everything ready for the ranks of an attempt, then call ``on_prepared``."""
        client = self.client
        self.start_stage = None
        self._store_port.ignore_ranks()  # what the previous attempt missed, the next one gets
        if client.asks_torch:
            client.is_preparing = True  # also if it cannot be started
            self._start()
            if client.is_open:
                self._drop()
                client.prepare(preparation)
        elif client.is_open and self._serve_sent:
            # Nothing of the previous attempt may be found in the store: keys, or the addresses that gloo left there.
            # Also where it is not served yet, the order to serve it must be taken back before new ranks connect.
            self._is_dropping = True
            self._drop()
        else:
            self._callbacks.on_prepared({})

    def _drop(self) -> None:
        self._serve_sent = False
        self.client.unanswered = None
        self.client.send({"op": "drop"})

    def serve_soon(self) -> None:
        """The ranks have been started: serve them, unless they are done at once."""
        if not self._store_port.fds:
            return  # rank 0 serves the store
        self._store_port.ignore_ranks()
        if self.client.is_open:
            self.deadline = time.monotonic()
        else:
            self.deadline = time.monotonic() + _HEAD_START_S
            self._store_port.watch(self.serve)

    def attempt_ended(self) -> None:
        """No rank is left that could be served."""
        self.deadline = None
        self._store_port.ignore_ranks()

    def serve(self) -> None:
        """Have the coordinator serve the store of the current attempt."""
        self.deadline = None
        self._store_port.ignore_ranks()
        self._start()
        if self.client.is_open:
            self._serve_sent = True
            self.client.send({"op": "serve", "attempt": self._attempt()}, answers=("serving",))

    def _start(self) -> None:
        self.client.start(self._store_port.fds)

    def ask_start_stage(self, world_size: int) -> None:
        """How far have the ranks come? ``start_stage`` has the answer, soon; an attempt is asked about once."""
        if self.start_stage is not None:
            return
        self.start_stage = {}
        if self.client.is_open and self._serve_sent:
            self.client.send({"op": "start_stage", "attempt": self._attempt(), "world_size": world_size})

    def _on_message(self, message: JsonObject) -> None:
        is_current = message.get("attempt") == self._attempt()
        match message.get("op"):
            case "serving" if is_current:
                self._callbacks.on_torch(str(message.get("torch")))
                self._post(StoreServed(time.monotonic(), self._attempt()))
            case "start_stage" if is_current:
                self.start_stage = message
            case "dropped" if self._is_dropping:
                self._is_dropping = False
                self._callbacks.on_prepared({})

    def _on_lost(self, what: str, hint: str) -> None:
        """The store is not served. Ranks that never ask for it go on; one that asks would wait forever."""
        self._serve_sent = False
        if self._is_dropping:
            # There was an old store to be dropped, and that is gone now. The next one gets a coordinator of its own.
            self._is_dropping = False
            self._callbacks.on_prepared({})
            return
        if self.client.is_preparing:
            self.client.is_preparing = False
            self._post(StartFailed(time.monotonic(), self._attempt(), what, hint, 1))
            return

        def on_asked() -> None:
            self._post(StoreUnavailable(time.monotonic(), self._attempt(), what, hint))

        self._store_port.await_rank(on_asked)

    def close(self) -> None:
        """End the coordinator and give the port back. Events that are on their way are let through first."""
        has_more = self.client.forwards_events or self.client.serves_timers
        self.client.close(_GOODBYE_S if has_more else 0.0)
        self._store_port.close()

    # ----------------------------------------------------------------------------------------------------------------
    # The other hosts, which there are none of

    def nic_fault(self) -> str:
        """No interface leads to another host."""
        return ""

    def find_endpoint(self, on_found: Callable[[], None]) -> None:
        """There is no rendezvous."""
        on_found()

    def join(self, action: JoinHosts, host_info: str = "", probe_endpoint: str = "") -> None:
        """All ranks are this host's."""
        del host_info, probe_endpoint
        rendezvous = self._config.rendezvous
        name = rendezvous.master_addr or rendezvous.local_addr or "localhost"
        (port,) = self.bound_ports()
        placement = single_host(self._config.nproc_per_node, name, port, rendezvous.run_id)
        placement = placement._replace(restarts=action.restarts)
        self._callbacks.on_assigned(Assignment(placement, action.attempt, leads=True, may_leave=False, files=""))

    def abort_attempt(
        self,
        reason: AbortKind,
        text: str,
        *,
        hint: str = "",
        ranks: Sequence[int] = (),
        signum: int = 0,
        lost_task: int | None = None,
    ) -> None:
        """There are no ranks on other hosts."""

    def broadcast_cause(self) -> None:
        """No other host waits for it."""

    def broadcast_request(self, by: str, *, at_once: bool) -> None:
        """There is no other host to end."""

    def broadcast_checkpoint(self, by: str, signum: int) -> None:
        """There is no other host with ranks."""

    def broadcast_decision(self, action: BroadcastDecision, texts: Sequence[str]) -> None:
        """There is no other host to wait for it."""

    def broadcast_preflight(self, message: JsonObject) -> None:
        """This host is to act on it."""
        self._callbacks.on_preflight(message)

    def share(
        self, name: str, evidence: str, *, attempt: int | None = None, moved: bool = False, stopped: bool = False
    ) -> None:
        """There is no evidence to merge."""

    def collect(
        self,
        name: str,
        timeout_s: float,
        on_done: Callable[[list[EvidenceChunk]], None],
        *,
        attempt: int | None = None,
        hosts: Collection[int] | None = None,
    ) -> None:
        """There is no other host to wait for."""
        del name, timeout_s, attempt, hosts
        on_done([])
