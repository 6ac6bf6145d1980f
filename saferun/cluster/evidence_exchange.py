"""Evidence between the hosts of a job: each hands in its part, and the host that decides lays the parts together.

Loaded only where there are other hosts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from saferun.cluster.evidence import HostPart, HostPeer, LostHost, decode_part, encode_part, merge_parts
from saferun.cluster.job import Job
from saferun.cluster.job_values import EvidenceChunk
from saferun.evidence import AbortReason, Evidence, HangVerdict
from saferun.watchdog.job import packed
from saferun.watchdog.job_detector import JobWatch

if TYPE_CHECKING:
    pass

# How long the other hosts' parts of a picture are waited for: they look at the same time, within the same budget.
OTHERS_S = 10.0


class EvidenceExchange:
    """What this host and the others have seen.

    Args:
        job: the other hosts.
        task: which of several saferuns of this host this is.
        hang_timeout_s: how long nothing may move on any host; 0: nobody looks.
        peers_s: how long the other hosts' last words are waited for after a failure.
        on_recovery: told how many seconds a hang has lasted that is over.
        guarded: calls, and says in one line what could not be done.
    """

    def __init__(
        self,
        job: Job,
        task: int,
        *,
        hang_timeout_s: float,
        peers_s: float,
        on_recovery: Callable[[float], None],
        guarded: Callable[..., Any],
    ) -> None:
        self._job = job
        self._task = task
        self._hang_timeout_s = hang_timeout_s
        self._peers_s = peers_s
        self._on_recovery = on_recovery
        self._guarded = guarded
        job.subscribe(self.states_changed)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Ranks have been started."""
        self._watch: JobWatch | None = None
        self.hang_number = 0  # of the job's hang that is being captured

    # ----------------------------------------------------------------------------------------------------------------
    # The job's hang

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        return self._watch.deadline if self._watch is not None else None

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._watch is not None and self._watch.deadline is not None and self._watch.deadline <= now:
            self._guarded("watch the job", self._watch.tick, now)

    def tell_quiet(self, verdict: HangVerdict) -> None:
        """Nothing moves on this host; whether the job hangs is for all hosts to say together."""
        self._job.set_state({"s": "quiet", **packed(verdict), "since": time.time() - verdict.quiet_s})

    def tell_moving(self) -> None:
        """Something moves here again."""
        self._job.set_state({"s": "run"})

    def states_changed(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """How the ranks of all hosts do, on the host that decides."""
        if self._hang_timeout_s <= 0:
            return
        if self._watch is None:
            self._watch = JobWatch(
                self._hang_timeout_s, on_hang=self._job.broadcast_hang, on_recovery=self._on_recovery
            )
        self._guarded("watch the job", self._watch.feed, states, time.monotonic())

    def hang_captured(self, now: float) -> None:
        """All hosts have captured it."""
        if self._watch is not None:
            self._watch.captured(now)

    def next_capture_s(self) -> float | None:
        """How long a hang must go on to be captured again; None: it has been captured often enough."""
        return self._watch.next_capture_s() if self._watch is not None else None

    def share_hang(
        self, evidence: Evidence, *, label: str, moved: bool, on_done: Callable[[Evidence, bool], None]
    ) -> None:
        """Hand in this host's part of the picture; where this host decides, wait for the others'.

        Args:
            evidence: what this host has seen.
            label: its name in the job.
            moved: whether its ranks moved while they were looked at.
            on_done: told what is known now, and whether any rank of the job moved.
        """
        name = f"hang-{self.hang_number}"
        if not self._job.leads:
            self._job.share(name, encode_part(evidence, self._job.chunk_limit_bytes), moved=moved)
            on_done(evidence, moved)
            return

        def on_pieces(pieces: list[EvidenceChunk]) -> None:
            merged = self._merge(evidence, label, pieces)
            on_done(merged, moved or any(piece.moved for piece in pieces))

        self._job.collect(name, OTHERS_S, on_pieces)

    # ----------------------------------------------------------------------------------------------------------------
    # The job's failure

    def share_end(
        self, evidence: Evidence | None, *, label: str, stopped: bool, on_done: Callable[[Evidence | None, bool], None]
    ) -> None:
        """Hand in what this host knows of a failed attempt; where this host decides, wait for the others' parts.

        Args:
            evidence: what this host has seen.
            label: its name in the job.
            stopped: whether the user or the scheduler ended the attempt here.
            on_done: told what is known now, and whether somebody ended it on any host.
        """
        if not self._job.leads:
            if evidence is not None:
                self._job.share("end", encode_part(evidence, self._job.chunk_limit_bytes), stopped=stopped)
            on_done(evidence, stopped)
            return

        def on_pieces(pieces: list[EvidenceChunk]) -> None:
            merged = self._merge(evidence, label, pieces) if evidence is not None else None
            on_done(merged, any(piece.stopped for piece in pieces))

        self._job.collect("end", self._peers_s, on_pieces)

    def _merge(self, own: Evidence, label: str, pieces: Sequence[EvidenceChunk]) -> Evidence:
        """What all hosts have seen; what this one has where they do not fit together."""
        merged: Evidence | None = self._guarded(
            "put together what the hosts have seen", self._merged, own, label, pieces
        )
        return merged if merged is not None else own

    def _merged(self, own: Evidence, label: str, pieces: Sequence[EvidenceChunk]) -> Evidence:
        job = self._job
        parts = [HostPart(job.host, self._task, label, 0.0, own)]
        for piece in pieces:
            evidence = self._guarded(f"read the evidence of {piece.label}", decode_part, piece.evidence)
            if evidence is not None:
                parts.append(HostPart(piece.host, piece.task, piece.label, piece.offset_s, evidence))
        lost = [LostHost(*host) for host in job.lost.values()]
        peers = [
            HostPeer(peer.host, peer.label, tuple(range(peer.base_rank, peer.base_rank + peer.ranks)), peer.addresses)
            for peer in job.peers.values()
        ]
        return merge_parts(
            parts, lost, world_size=own.world_size, peers=peers, leader=job.host, trouble=self.told_trouble()
        )

    def told_trouble(self) -> AbortReason | None:
        """What made all hosts stop."""
        trouble = self._job.abort_reason
        if trouble is None or trouble.reason in {"membership", "leave"}:
            return None  # whoever leaves knows why, and the others have nothing to diagnose
        return AbortReason(*trouble)
