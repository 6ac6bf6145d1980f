"""torchrun's events, as ``torch.distributed.elastic.events`` handlers expect them. Pure."""

from __future__ import annotations

import json

from saferun.model import JsonObject, Placement, RankAssignment, RankEnd


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
