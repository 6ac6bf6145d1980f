"""Evidence between the hosts of a job: each hands in its own, and the leader merges all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from saferun.evidence.job_evidence import AbortReason, Evidence
from saferun.model import ABORT_RESTARTS

if TYPE_CHECKING:
    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.job_values import EvidenceChunk


def abort_reason_of(job: JobPort) -> AbortReason | None:
    """Why all hosts have to end the attempt, unless they begin another one without a failure.

    A host that leaves knows why, and the others have nothing to diagnose.
    """
    reason = job.abort_reason
    return AbortReason(**reason._asdict()) if reason is not None and reason.reason not in ABORT_RESTARTS else None


class EvidenceExchange:
    """The evidence of this host and of the others. A job of one host has no others, and nothing is merged.

    Args:
        job: the hosts.
        task: which of several saferuns of this host this is.
        guarded: calls, and says in one line what failed.
    """

    def __init__(self, job: JobPort, task: int, guarded: Callable[..., Any]) -> None:
        self._job = job
        self._task = task
        self._guarded = guarded

    def share(
        self,
        name: str,
        own: Evidence | None,
        timeout_s: float,
        on_done: Callable[[Evidence | None, Sequence[EvidenceChunk]], None],
        *,
        attempt: int,
        moved: bool = False,
        stopped: bool = False,
    ) -> None:
        """Hand in this host's evidence; the leader waits for that of the others, and merges it.

        Args:
            name: what the evidence is of; the same on all hosts.
            own: this host's; None: it could not be gathered.
            timeout_s: how long the leader waits for the others.
            on_done: takes the evidence: on the leader that of the job, elsewhere this host's; and what came from the
                others.
            attempt: that the evidence is of; where that is over, none is sent, and none comes.
            moved: whether ranks of this host moved during the capture.
            stopped: whether the user or the scheduler ended the attempt here.
        """
        if self._job.leads:
            self._job.collect(
                name, timeout_s, lambda chunks: on_done(self._merge(own, chunks), chunks), attempt=attempt
            )
            return
        if own is not None:
            from saferun.cluster.evidence import encode_part

            text = encode_part(own, self._job.chunk_limit_bytes)
            self._job.share(name, text, attempt=attempt, moved=moved, stopped=stopped)
        on_done(own, ())

    def _merge(self, own: Evidence | None, chunks: Sequence[EvidenceChunk]) -> Evidence | None:
        if own is None or not self._job.peers:
            return own
        return self._guarded("merge the evidence of the hosts", self._merged, own, chunks) or own

    def _merged(self, own: Evidence, chunks: Sequence[EvidenceChunk]) -> Evidence:
        from saferun.cluster.evidence import HostPart, HostPeer, decode_part, merge_parts

        job = self._job
        parts = [HostPart(job.host, self._task, own.host, 0.0, own)]
        for chunk in chunks:
            evidence = self._guarded(f"read the evidence of {chunk.label}", decode_part, chunk.evidence)
            if evidence is not None:
                parts.append(HostPart(chunk.host, chunk.task, chunk.label, chunk.offset_s, evidence, chunk.measured))
        peers = [
            HostPeer(peer.host, peer.label, tuple(range(peer.base_rank, peer.base_rank + peer.ranks)), peer.addresses)
            for peer in job.peers.values()
        ]
        lost = list(job.lost.values())
        return merge_parts(
            parts, lost, world_size=own.world_size, peers=peers, leader=job.host, abort_reason=abort_reason_of(job)
        )
