"""How ranks failed that only failed because another one had, by the tracebacks that they printed themselves. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from saferun.diagnosis.causes.failure import Failure, read_failure, shortened
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.tracebacks import ends_with_traceback
from saferun.evidence.diagnosis_values import Cause, LostPeer
from saferun.evidence.job_evidence import Evidence
from saferun.model import ExitStatus

# What a signal raises in a rank: saferun's own, when it stops the ranks.
_OF_SIGNALS = frozenset({"KeyboardInterrupt", "SystemExit", "SignalException"})
_COLLECTIVES = "/torch/distributed/"
_WRAPPERS = frozenset({"wrapper", "inner", "_fn", "__call__"})


def stopped_failures(evidence: Evidence, hosts: Hosts) -> Iterator[Failure]:
    """The failures of ranks that saferun stopped when, or while, they printed a traceback of their own."""
    outputs = evidence.outputs_by_rank
    for end in evidence.ends:
        output = outputs.get(end.rank)
        if end.status.ok or not end.stopped_by_us or output is None or not ends_with_traceback(output.last_lines):
            continue
        failure = read_failure(evidence, end._replace(status=ExitStatus(1, None)), output, hosts)
        if failure.error is not None and failure.error.last.exception.rpartition(".")[2] not in _OF_SIGNALS:
            yield failure._replace(end=end)


def lost_peers(victims: Iterable[tuple[Failure, Cause]]) -> tuple[LostPeer, ...]:
    """How victims failed; those that failed alike are one entry, ordered by their first rank."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for failure, cause in victims:
        key = (shortened(cause.message, 160), call_of(failure), cause.location)
        ranks.setdefault(key, []).append(failure.end.rank)
    found = [LostPeer(tuple(sorted(members)), *key) for key, members in ranks.items()]
    return tuple(sorted(found, key=lambda peers: peers.ranks))


def call_of(failure: Failure) -> str:
    """The call of torch.distributed that the user's code had made; empty where the traceback shows none."""
    frames = failure.error.last.frames if failure.error is not None else ()
    calls = (frame.function for frame in frames if _COLLECTIVES in frame.file and frame.function not in _WRAPPERS)
    return shortened(next(calls, ""), 80)
