"""torchrun's events, forwarded to the handler of ``torch.distributed.elastic.events`` that the user named."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from saferun.config import LaunchConfig
from saferun.launch.launch_context import HostAttempt
from saferun.launch.rank import Rank
from saferun.model import JsonObject, Placement, RankEnd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.coordinator_client import CoordinatorClient

_WHAT = "forward torchrun's events"


class TorchrunEvents:
    """Makes torchrun's events of what happens here. Where the user named no handler it does nothing.

    Args:
        config: the launch.
        coordinator: has torch, and with it the handler.
        guarded: calls what the launch can do without.
    """

    def __init__(self, config: LaunchConfig, coordinator: CoordinatorClient, guarded: Callable[..., object]) -> None:
        self._config = config
        self._guarded = guarded
        self._coordinator = coordinator
        self._launched_at = time.monotonic()

    def ranks_started(self, attempt: HostAttempt, restarts: int) -> None:
        """The ranks of an attempt have been started, as far as they could be."""
        self._guarded(_WHAT, self._forward, attempt, restarts, lambda _: "START")

    def hosts_joined(self, placement: Placement | None, restarts: int) -> None:
        """The hosts have met. ``placement``: this host's; None: for the first time."""
        # What torchrun's two events measure takes no time of its own here.
        for state in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS"):
            self._guarded(_WHAT, self._forward_own, state, restarts, placement, 0.0)

    def launch_ended(self, attempt: HostAttempt | None, restarts: int, *, stopped: bool) -> None:
        """The launch is over: what became of the ranks that ended last, and of the launcher."""
        assignment = attempt.assignment if attempt is not None else None
        if attempt is not None:
            self._guarded(_WHAT, self._forward, attempt, restarts, _state_of)
        placement = assignment.placement if assignment is not None else None
        self._guarded(_WHAT, self._forward_own, "FAILED" if stopped else "SUCCEEDED", restarts, placement)

    def _forward(self, attempt: HostAttempt, restarts: int, state_of: Callable[[Rank], str]) -> None:
        """Forward an event about each rank."""
        if attempt.assignment is None:
            return
        placement = attempt.assignment.placement
        for rank in attempt.ranks:
            state, error = state_of(rank), None
            failed = rank.end if state == "FAILED" else None
            if failed is not None:
                error = json.dumps(rank.recorded["content"] if rank.recorded is not None else _missing_error(failed))
            details = {
                "local_rank": [rank.assignment.local_rank],
                "role_rank": [rank.assignment.role_rank],
                "role_world_size": [placement.role_world_size],
                "exit_code": [failed.status.returncode if failed is not None else None],
                "worker_pid": [rank.child.pid if failed is not None else None],
            }
            own = {"global_rank": rank.assignment.rank, "worker_id": str(rank.child.pid), "raw_error": error}
            self._send("WORKER", state, restarts, placement, details, own)

    def _forward_own(
        self, state: str, restarts: int, placement: Placement | None, duration_ms: float | None = None
    ) -> None:
        """Forward an event about the launcher itself."""
        own = {"global_rank": None, "worker_id": None, "raw_error": None, "duration_ms": duration_ms}
        self._send("AGENT", state, restarts, placement, {}, own)

    def _send(
        self,
        source: str,
        state: str,
        restarts: int,
        placement: Placement | None,
        details: JsonObject,
        own: JsonObject,
    ) -> None:
        if not self._coordinator.forwards_events:
            return
        details = {
            "group_world_size": placement.group_world_size if placement is not None else None,
            "entry_point": os.path.basename(self._config.command.argv[0]),
            **details,
        }
        metadata = {
            "run_id": self._config.rendezvous.run_id,
            "role": self._config.role,
            "rdzv_backend": self._config.rendezvous.backend,
            "agent_restarts": restarts,
            "total_run_time": int(time.monotonic() - self._launched_at),
            "group_rank": placement.group_rank if placement is not None else None,
            "state": state,
            "duration_ms": None,
            **own,
            "metadata": json.dumps(details),
        }
        self._coordinator.forward_event({"source": source, "metadata": metadata})


def _state_of(rank: Rank) -> str:
    """Torchrun's word for how a rank ended."""
    if rank.end is None or rank.end.stopped_by_us:
        return "TERMINATED"
    return "SUCCEEDED" if rank.end.status.ok else "FAILED"


def _missing_error(end: RankEnd) -> JsonObject:
    """What torchrun reports of a rank that left no error file."""
    error: JsonObject = {"message": "<NONE>"}
    if end.status.returncode >= 0:
        error["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
    return error
