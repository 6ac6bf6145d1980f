"""Evidence -> diagnosis. Pure."""

from __future__ import annotations

from saferun.model import Diagnosis, Evidence, RankEnd, RankOutput, signal_name

__all__ = ["diagnose"]

# An error file is stamped in whole seconds when the exception is raised; the exit follows when the interpreter has
# shut down. Only a difference beyond that rounding can put one failure before another.
_ERROR_FILE_RESOLUTION_S = 1.0


def diagnose(evidence: Evidence) -> Diagnosis:
    """Name the rank that failed first, and what became of the others."""
    outputs = {output.local_rank: output for output in evidence.outputs}
    failed = [end for end in evidence.ends if not end.status.ok and not end.stopped_by_us]
    failed.sort(key=lambda end: _failed_at(end, outputs.get(end.local_rank), evidence.started_at))
    stopped = tuple(end.rank for end in evidence.ends if end.stopped_by_us)
    first = failed[0] if failed else None
    return Diagnosis(
        headline=_headline(evidence, first),
        first=first,
        output=outputs.get(first.local_rank) if first else None,
        also_failed=tuple(failed[1:]),
        stopped=stopped,
        abandoned=evidence.abandoned,
        hint=evidence.trouble_hint,
    )


def _failed_at(end: RankEnd, output: RankOutput | None, started_at: float) -> float:
    """When a rank failed, in seconds since the epoch: when it raised, if its error file can be believed."""
    started_time = end.time - (end.at - started_at)
    if output is None or not started_time - _ERROR_FILE_RESOLUTION_S <= output.error_time:
        return end.time
    return output.error_time if output.error_time < end.time - _ERROR_FILE_RESOLUTION_S else end.time


def _headline(evidence: Evidence, first: RankEnd | None) -> str:
    if evidence.trouble:
        return evidence.trouble
    if evidence.stop_signum is not None:
        return f"stopped by {signal_name(evidence.stop_signum)}"
    if first is None:
        return "the attempt failed, and no rank ended badly by itself"
    after_s = first.at - evidence.started_at
    clock = f" at {first.clock}" if first.clock else ""
    return (
        f"rank {first.rank} ({evidence.host}, local rank {first.local_rank}, pid {first.pid}) failed first{clock}, "
        f"{after_s:.1f} s after the start: {first.status.words}"
    )
