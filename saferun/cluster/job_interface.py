"""What the loop knows of the job that its host belongs to: ``Job`` has other hosts, ``SoloJob`` has none.

Loaded by type checkers only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from saferun.cluster.coordinator_client import CoordinatorClient
from saferun.cluster.job import Job
from saferun.cluster.job_values import AbortReason, EvidenceChunk, LostHost
from saferun.cluster.join_messages import Peer
from saferun.cluster.rank_reports import RankReports
from saferun.cluster.report_listeners import SoloRankReports
from saferun.cluster.solo_job import SoloJob
from saferun.cluster.storeless_job import StorelessJob
from saferun.linux.part import Part
from saferun.model import JsonObject
from saferun.supervisor.actions import BroadcastDecision, Finish, JoinHosts

if TYPE_CHECKING:
    from saferun.model import AbortKind


class JobViewPort(Protocol):
    """What a job only shows: this host's place in it, which is known when the hosts have met, and what has happened."""

    @property
    def host(self) -> int:
        """This host's number."""

    @property
    def leads(self) -> bool:
        """Whether this process decides for the job."""

    @property
    def leader(self) -> str:
        """The name of the host that does; empty where there is only this one."""

    @property
    def peers(self) -> Mapping[int, Peer]:
        """All hosts, on the leader of several."""

    @property
    def other_addresses(self) -> tuple[str, ...]:
        """Of hosts with other ranks of the job, as far as they are known: on the leader all of them."""

    @property
    def lost(self) -> Mapping[int, LostHost]:
        """The hosts that have been lost in this attempt."""

    @property
    def abort_reason(self) -> AbortReason | None:
        """Why the attempt ends on all hosts, if another host or the loss of one ended it."""

    @property
    def start_stage(self) -> JsonObject | None:
        """How far the ranks have come, as their store shows it; empty: asked and not answered; None: not asked."""

    @property
    def storeless_job(self) -> StorelessJob | None:
        """Set while the job runs on without its store, or without this host's coordinator: watches the ranks."""

    @property
    def is_join_failure_reported(self) -> bool:
        """Whether another host prints why the hosts could not meet, or this one printed it while it waited."""

    @property
    def is_refusal_printed(self) -> bool:
        """Whether another host has refused to start, which it prints itself."""

    def nic_fault(self) -> str:
        """What is amiss with an interface to other hosts: ``eth1 has no carrier``; empty: nothing."""


class JobPort(Part, JobViewPort, Protocol):
    """The rendezvous, the ranks' store, and the messages between hosts.

    Attributes:
        client: of the process that has torch, the coordinator on most hosts: takes torchrun's events for its handlers.
        is_head: whether this process speaks for its host: it is the only one, or the one with local rank 0.
        chunk_limit_bytes: how large a chunk of evidence may be.
        end: set before ``close``: how the launch ends; None: by an error.
        blamed: set by whoever finds out: the ranks of the job that caused the last hang.
    """

    client: CoordinatorClient
    is_head: bool
    chunk_limit_bytes: int
    end: Finish | None
    blamed: tuple[int, ...]

    @property
    def reports(self) -> RankReports | SoloRankReports:
        """What hosts report of their ranks."""

    @property
    def is_endpoint_here(self) -> bool:
        """Whether the endpoint of torch's rendezvous is this host, as far as is known."""

    # Before the ranks.

    def find_endpoint(self, on_found: Callable[[], None]) -> None:
        """Find out whether the rendezvous endpoint is this host; then ``bind`` may be called, by ``on_found``."""

    def bind(self) -> None:
        """Bind every port of this host, which stays bound; a coordinator that other hosts need is started then.

        Raises:
            SaferunError: one cannot be had.
        """

    def bound_ports(self) -> list[int]:
        """The port of the ranks' store, where it is bound here."""

    def release(self) -> None:
        """Give the port back, for another one to be bound; only where rank 0 serves the store itself."""

    def join(self, action: JoinHosts, host_info: str = "", probe_endpoint: str = "") -> None:
        """Meet the other hosts; ``on_assigned`` or StartFailed follows.

        Args:
            action: says which attempt it is.
            host_info: what this host found out about itself.
            probe_endpoint: how others can probe it.
        """

    def prepare(self, preparation: JsonObject) -> None:
        """Make everything ready for the ranks of an attempt; ``on_prepared`` or StartFailed follows.

        Args:
            preparation: what only torch can answer about the attempt, if anything.
        """

    # While ranks run.

    def serve_soon(self) -> None:
        """The ranks have been started: serve their store, unless they are done at once."""

    def attempt_ended(self) -> None:
        """No rank is left."""

    def ask_start_stage(self, world_size: int) -> None:
        """A rank of this host has failed: ask once an attempt how far all have come; ``start_stage`` is the answer."""

    # What is broadcast to all hosts, this one included.

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
        """This attempt is to end on all hosts. ``hint``: what to do about it."""

    def broadcast_cause(self) -> None:
        """A rank of this host has shown the cause of a victim's failure, which ended the attempt."""

    def broadcast_request(self, by: str, *, at_once: bool) -> None:
        """The user has asked this host for the end of the job, on all hosts."""

    def broadcast_checkpoint(self, by: str, signum: int) -> None:
        """The user wants the ranks of all hosts to save a checkpoint and to end."""

    def broadcast_decision(self, action: BroadcastDecision, texts: Sequence[str]) -> None:
        """What follows a failed attempt."""

    def broadcast_preflight(self, message: JsonObject) -> None:
        """What the preflight checks came to, or whom to probe again."""

    # Evidence.

    def share(
        self, name: str, evidence: str, *, attempt: int | None = None, moved: bool = False, stopped: bool = False
    ) -> None:
        """Hand a chunk of evidence to the leader. ``attempt``: that it is of; of one that is over nothing is sent."""

    def collect(
        self,
        name: str,
        timeout_s: float,
        on_done: Callable[[list[EvidenceChunk]], None],
        *,
        attempt: int | None = None,
        hosts: Collection[int] | None = None,
    ) -> None:
        """Wait for the chunks of this name of all other tasks, and hand over what has come by then.

        Args:
            name: of the chunks.
            timeout_s: how long they are waited for.
            on_done: takes them.
            attempt: that they are of; of one that is over there are none.
            hosts: only the heads of these hosts have any; None: every task of the job has one.
        """


def _as_port(job: Job, solo_job: SoloJob) -> tuple[JobPort, ...]:
    """Both have the interface: a type checker looks."""
    return job, solo_job
