"""GPUs and NVSwitches whose failure the kernel log shows, as the cause of a hang. Pure.

A fatal error counts where it is of the GPU of a rank that other evidence suspects, or of any rank where none is
suspected: another rank's GPU does not explain why a rank sleeps in its own code. Errors that are not fatal are only
listed, with the other lines of the kernel log.
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.diagnosis.gpu_errors import GpuError, error_in, failure_text
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.judgement import Judgement
from saferun.text.wording import ranks_text

# What a rank with a dead GPU looks like.
_MAYBE_GPU = frozenset(
    {
        "hang_all_in_collective",
        "hang_gpu",
        "hang_missing_collective",
        "hang_spinning",
        "hang_stuck_collective",
        "hang_uninterruptible",
        "hang_unknown",
        "network_between_hosts",
    }
)
_RESET = "reset the GPU or reboot the host before it is used again"


def with_failed_gpus(judgement: Judgement, hosts: Hosts, ranks: Iterable[int]) -> Judgement:
    """The judgement, with a failed GPU as its cause where there is one.

    Args:
        judgement: by the other evidence.
        hosts: of the job.
        ranks: all that are known.
    """
    cause = judgement.cause
    if cause.class_name not in _MAYBE_GPU:
        return judgement
    suspects = [*cause.ranks] or [*ranks]
    errors = _fatal(hosts, suspects)
    owned: dict[int, GpuError] = {}
    for rank, error in errors:
        if hosts.gpu_owners(rank).rank_of(error) == rank:
            owned.setdefault(rank, error)
    if owned:
        named = tuple(sorted(owned))
        error = owned[named[0]]
        what, advice = failure_text(error)
        its = "its GPU has" if len(named) == 1 else "their GPUs have"
        message = f"{its} failed, as the kernel log says{f': {what}' if what else ''}"
        headline = f"{hosts.names(named)} cannot go on: {message}"
        found = cause._replace(
            class_name="hang_gpu", message=message, ranks=named, proof=error.line, advice=advice or _RESET
        )
        findings = (*([cause.proof] if cause.proof else ()), *judgement.findings)
        return judgement._replace(cause=found, headline=headline, findings=findings)
    switch = next((error for _, error in errors if error.is_switch), None)
    if switch is None:
        return judgement
    what, advice = failure_text(switch)
    on_host = sorted({rank for rank, error in errors if error == switch})
    where = f"; NVSwitches connect the GPUs of {ranks_text(on_host)}" if on_host else ""
    headline = f"{judgement.headline}; the kernel log has a fatal error: {what}{where}"
    proof = (cause.proof,) if cause.proof else ()
    return judgement._replace(
        cause=cause._replace(proof=switch.line, advice=advice),
        headline=headline,
        findings=(*proof, *judgement.findings),
    )


def has_failed_gpu(hosts: Hosts, rank: int) -> bool:
    """Whether the kernel log of a rank's host has a fatal error that is probably of the rank's GPU.

    Args:
        hosts: of the job.
        rank: to be judged.
    """
    owners = hosts.gpu_owners(rank)
    return any(owners.is_probably_of(error, rank) for _, error in _fatal(hosts, (rank,)))


def _fatal(hosts: Hosts, ranks: Iterable[int]) -> list[tuple[int, GpuError]]:
    """Ranks, and the fatal errors that the kernel logs of their hosts have."""
    by_lines: dict[tuple[str, ...], list[GpuError]] = {}
    found = []
    for rank in ranks:
        lines = hosts.kernel_lines(rank)
        if lines not in by_lines:
            errors = [error for line in lines if (error := error_in(line)) is not None]
            by_lines[lines] = [error for error in errors if error.is_fatal]
        found += [(rank, error) for error in by_lines[lines]]
    return found
