"""What is not known of the ranks of a hang, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from saferun.diagnosis.rank_waits import Wait
from saferun.evidence.job_evidence import Evidence, StackDump
from saferun.text.wording import ranks_text

_SHOWN = 4


def blind_spots(evidence: Evidence, waits: Sequence[Wait]) -> Iterable[str]:
    """Where the evidence has holes, and why: each reason once, with its ranks."""
    taken = _taken(evidence.capture.stacks)
    without = (
        (taken[wait.rank][0].failure or "nothing was found", wait.rank)
        for wait in waits
        if wait.found.kind != "dead" and wait.rank in taken and not any(dump.threads for dump in taken[wait.rank])
    )
    for failure, ranks in _by_reason(without):
        yield f"no stacks of {ranks_text(ranks)}: {failure}"
    if not any(wait.found.kind == "collective" for wait in waits):
        return
    # There a rank may hold the recorder's lock, or wait for a GPU that does not answer.
    leaving = {wait.rank for wait in waits if wait.found.detail == "destroy_process_group"}
    failures = ((one.failure, one.rank) for one in evidence.capture.collectives if one.failure)
    for failure, ranks in _by_reason(failures):
        where = ", as ranks in destroy_process_group often do not" if leaving.issuperset(ranks) else ""
        yield f"no Flight Recorder of {ranks_text(ranks)}: {failure}{where}"
    parts = ((one.incomplete, one.rank) for one in evidence.capture.collectives if one.incomplete)
    for incomplete, ranks in _by_reason(parts):
        yield f"{ranks_text(ranks)}: {incomplete}"


def _by_reason(reasons: Iterable[tuple[str, int]]) -> Iterable[tuple[str, list[int]]]:
    found: dict[str, list[int]] = {}
    for reason, rank in reasons:
        found.setdefault(reason, []).append(rank)
    return found.items()


def _taken(dumps: Iterable[StackDump]) -> dict[int, list[StackDump]]:
    """The dumps of each rank itself."""
    taken: dict[int, list[StackDump]] = {}
    for dump in dumps:
        if dump.is_rank:
            taken.setdefault(dump.rank, []).append(dump)
    return taken


def unfinished(evidence: Evidence) -> Iterable[str]:
    """The captures that took too long."""
    names = evidence.capture.timed_out
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        yield f"captures timed out: {', '.join(names[:_SHOWN])}{more}"
