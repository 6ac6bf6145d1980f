"""torchrun's events, forwarded to the handler of ``torch.distributed.elastic.events`` that the user named."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from saferun.config import LaunchConfig
from saferun.launch.launch_context import HostAttempt
from saferun.launch.ranks import Rank
from saferun.model import JsonObject, Placement, RankAssignment, RankEnd

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.cluster.coordinator_client import CoordinatorClient


class TorchrunEvents:
    """Makes torchrun's events of what happens here. Where the user named no handler it does nothing.

    Args:
        config: the launch.
        coordinator: has torch, and with it the handler.
    """

    def __init__(self, config: LaunchConfig, coordinator: CoordinatorClient) -> None:
        self._config = config
        self._coordinator = coordinator
        self._launched_at = time.monotonic()

    def ranks_started(self, attempt: HostAttempt, restarts: int) -> None:
        """The ranks of an attempt have been started, as far as they could be."""
        self._forward(attempt, restarts, lambda _: "START")

    def hosts_joined(self, placement: Placement | None, restarts: int) -> None:
        """The hosts have met. ``placement``: this host's; None: for the first time."""
        # What torchrun's two events measure takes no time of its own here.
        for state in ("RENDEZVOUS", "ASSIGN_WORKER_RANKS"):
            self._forward_own(state, restarts, placement, 0.0)

    def launch_ended(self, attempt: HostAttempt | None, restarts: int, *, stopped: bool) -> None:
        """The launch is over: what became of the ranks that ended last, and of the launcher."""
        placement = None
        if attempt is not None:
            self._forward(attempt, restarts, _state_of)
            placement = attempt.assignment.placement if attempt.assignment is not None else None
        self._forward_own("FAILED" if stopped else "SUCCEEDED", restarts, placement)

    def _forward(self, attempt: HostAttempt, restarts: int, state_of: Callable[[Rank], str]) -> None:
        if not self._coordinator.forwards_events or attempt.assignment is None:
            return
        common = self._common_fields(restarts)
        for rank in attempt.ranks:
            state, error = state_of(rank), None
            failed = rank.end if state == "FAILED" else None
            if failed is not None:
                recorded = rank.recorded
                error = json.dumps(
                    recorded["content"] if recorded is not None else missing_error(failed.status.returncode)
                )
            self._coordinator.forward_event(
                rank_event(state, common, attempt.assignment.placement, rank.place, rank.child.pid, failed, error)
            )

    def _forward_own(
        self, state: str, restarts: int, placement: Placement | None, duration_ms: float | None = None
    ) -> None:
        if self._coordinator.forwards_events:
            self._coordinator.forward_event(agent_event(state, self._common_fields(restarts), placement, duration_ms))

    def _common_fields(self, restarts: int) -> JsonObject:
        return common_fields(
            run_id=self._config.rendezvous.run_id,
            role=self._config.role,
            backend=self._config.rendezvous.backend,
            restarts=restarts,
            total_s=time.monotonic() - self._launched_at,
            entry_point=os.path.basename(self._config.command.argv[0]),
        )


def _state_of(rank: Rank) -> str:
    """Torchrun's word for how a rank ended."""
    if rank.end is None or rank.end.stopped_by_us:
        return "TERMINATED"
    return "SUCCEEDED" if rank.end.status.ok else "FAILED"


def rank_event(
    state: str,
    common: JsonObject,
    placement: Placement,
    place: RankAssignment,
    pid: int,
    end: RankEnd | None,
    error: str | None,
) -> JsonObject:
    """The event about one rank.

    Args:
        state: torchrun's word: START, SUCCEEDED, FAILED or TERMINATED.
        common: what all events of the launch share, see ``common_fields``.
        placement: this host's place in the job.
        place: the rank's place.
        pid: its process.
        end: how it failed, for FAILED.
        error: the content of its error file, for FAILED.
    """
    details = {
        "group_world_size": placement.group_world_size,
        "entry_point": common["entry_point"],
        "local_rank": [place.local_rank],
        "role_rank": [place.role_rank],
        "role_world_size": [placement.role_world_size],
        "exit_code": [end.status.returncode if end is not None else None],
        "worker_pid": [pid if end is not None else None],
    }
    own = {"global_rank": place.rank, "worker_id": str(pid), "raw_error": error}
    return _event("WORKER", state, common, placement.group_rank, details, own)


def agent_event(state: str, common: JsonObject, placement: Placement | None, duration_ms: float | None) -> JsonObject:
    """The event about the launcher itself: RENDEZVOUS, ASSIGN_WORKER_RANKS, SUCCEEDED or FAILED.

    ``placement`` is None until the hosts have met for the first time.
    """
    size = placement.group_world_size if placement is not None else None
    own = {"global_rank": None, "worker_id": None, "raw_error": None, "duration_ms": duration_ms}
    rank = placement.group_rank if placement is not None else None
    return _event("AGENT", state, common, rank, {"group_world_size": size, "entry_point": common["entry_point"]}, own)


def common_fields(
    *, run_id: str, role: str, backend: str, restarts: int, total_s: float, entry_point: str
) -> JsonObject:
    """What all events share. ``total_s``: seconds since the start."""
    return {
        "run_id": run_id,
        "role": role,
        "rdzv_backend": backend,
        "agent_restarts": restarts,
        "total_run_time": int(total_s),
        "entry_point": entry_point,
    }


def missing_error(returncode: int) -> JsonObject:
    """What torchrun reports of a rank that left no error file."""
    error: JsonObject = {"message": "<NONE>"}
    if returncode >= 0:
        error["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
    return error


def _event(
    source: str, state: str, common: JsonObject, group_rank: int | None, details: JsonObject, own: JsonObject
) -> JsonObject:
    shared = {name: value for name, value in common.items() if name != "entry_point"}
    metadata = {**shared, "group_rank": group_rank, "state": state, "duration_ms": None, **own}
    return {"source": source, "metadata": {**metadata, "metadata": json.dumps(details)}}
