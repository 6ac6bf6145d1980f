"""Probes between the hosts of a job: each probes some others, and the leader judges what all of them found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from saferun.preflight.results import HostInfo, Preflight, Probe

if TYPE_CHECKING:
    from saferun.cluster.job_interface import JobPort
    from saferun.cluster.job_values import Assignment, EvidenceChunk
    from saferun.preflight.check_process import HostChecks
    from saferun.preflight.leader_messages import PairAgain

# How long the hosts may probe each other, and how much longer the leader waits for what they found.
_PROBE_S = 12.0
_OTHERS_S = 5.0

_LOST = '{"lost": true}'
"""What a host hands in whose check process has ended, so that nothing listens there any more; no list of probes."""

Endpoints = Sequence[tuple[int, str, str]]
"""Whom to probe: host number, name, and where, encoded."""


def unguarded(call: Callable[..., object], *arguments: object) -> bool:
    """Call it, whatever comes of it."""
    call(*arguments)
    return True


class HostProbing:
    """This host's part in one attempt: it probes the hosts that it is assigned, and hands in what it found.

    Args:
        assignment: this host's, with whom it is to probe.
        own: its checks, whose process probes.
        job: the other hosts.
    """

    leads = False

    def __init__(self, assignment: Assignment, own: HostChecks, job: JobPort) -> None:
        self._assignment = assignment
        self._own = own
        self._job = job
        self._round = 0

    def begin(self) -> None:
        """Probe the hosts that this one is to probe first."""
        self._probe(self._assignment.probe_endpoints, None)

    def probe_again(self, pairs: Sequence[PairAgain]) -> None:
        """The leader has named the pairs that are to be measured again."""
        endpoints = [(pair.target, pair.label, pair.endpoint) for pair in pairs if pair.source == self._job.host]
        if endpoints or self.leads:
            self._probe(endpoints, sorted({pair.source for pair in pairs}))

    def _probe(self, endpoints: Endpoints, hosts: Sequence[int] | None) -> None:
        """Probe others in one more round.

        Args:
            endpoints: whom; there may be none.
            hosts: those that probe in this round; None: all that are checked.
        """
        del hosts  # it is for the leader to wait for them
        self._round += 1
        self._probe_from_here(endpoints)

    def _probe_from_here(self, endpoints: Endpoints) -> None:
        if endpoints:
            host, limit_bytes = self._job.host, self._limit_bytes
            self._own.probe(
                host, endpoints, _PROBE_S, lambda text: self._probed(text or _LOST), limit_bytes=limit_bytes
            )
        else:
            self._probed("")

    @property
    def _limit_bytes(self) -> int:
        """How long the text of what this host found may be: a longer one would not reach the leader."""
        return self._job.chunk_limit_bytes

    def _probed(self, text: str) -> None:
        self._job.share(self._name, text)

    @property
    def _name(self) -> str:
        return f"probes-{self._round}"


class LeaderProbing(HostProbing):
    """The leader's part: it waits for the probes of all, and has measured again what looks slow.

    Args:
        assignment: this host's, with whom it is to probe.
        own: its checks.
        job: the other hosts.
        nics: what ``--nic`` named.
        on_judged: takes what was found on all hosts and between them.
        succeeds: calls what may fail, and says whether it did not: the job ignores what fails because of a message.
    """

    leads = True

    def __init__(
        self,
        assignment: Assignment,
        own: HostChecks,
        job: JobPort,
        *,
        nics: tuple[str, ...],
        on_judged: Callable[[Preflight], None],
        succeeds: Callable[..., bool] = unguarded,
    ) -> None:
        super().__init__(assignment, own, job)
        self._succeeds = succeeds
        self.infos: dict[int, HostInfo] = {}
        self._nics = nics
        self._on_judged = on_judged
        self._began_at = time.monotonic()
        self._probes: list[Probe] = []
        self._cut: dict[int, int] = {}  # how many probes hosts have left out
        self._missing: dict[int, str] = {}
        self._waits_for_own = False
        self._waits_for_others = False
        self._read_infos()

    def _read_infos(self) -> None:
        from saferun.preflight.host_messages import decode_host_info

        for host, (text, _) in enumerate(self._assignment.host_infos):
            peer = self._job.peers.get(host)
            info = decode_host_info(text) if text else None
            if info is None:
                self._missing[host] = "it was started without checks" if not text else "its message is unreadable"
                info = HostInfo()
            if host == 0:
                # Good results do not travel; this host's own are here.
                info = info._replace(results=tuple(self._own.results))
            self.infos[host] = info._replace(label=peer.label if peer is not None else f"host {host}")

    def _probe(self, endpoints: Endpoints, hosts: Sequence[int] | None) -> None:
        self._round += 1
        self._waits_for_own = self._waits_for_others = True
        expected = [host for host in self.infos if host not in self._missing] if hosts is None else hosts

        def on_chunks(chunks: list[EvidenceChunk]) -> None:
            self._succeeds(self._others_probed, expected, chunks)

        self._job.collect(self._name, _PROBE_S + _OTHERS_S, on_chunks, hosts=expected)
        self._probe_from_here(endpoints)

    @property
    def _limit_bytes(self) -> int:
        from saferun.preflight.host_messages import PROBES_LIMIT_BYTES

        return PROBES_LIMIT_BYTES  # they stay in this process

    def _probed(self, text: str) -> None:
        self._waits_for_own = False
        self._take(text, self._job.host)
        self._judge()

    def _others_probed(self, expected: Sequence[int], chunks: Sequence[EvidenceChunk]) -> None:
        self._waits_for_others = False
        for chunk in chunks:
            self._take(chunk.evidence, chunk.host)
        reported = {self._job.host, *(chunk.host for chunk in chunks)}
        for host in expected:
            if host not in reported:
                self._missing.setdefault(host, "it sent no results")
        self._judge()

    def _take(self, text: str, host: int) -> None:
        if text == _LOST:
            self._missing.setdefault(host, "its check process ended")
        elif text:
            from saferun.preflight.host_messages import decode_probes, left_out_of

            self._probes += decode_probes(text, host)
            if left_out := left_out_of(text):
                self._cut[host] = self._cut.get(host, 0) + left_out

    def _judge(self) -> None:
        """All that will be known is known: measure again, or be done."""
        if self._waits_for_own or self._waits_for_others:
            return
        from saferun.preflight.judge import judge

        preflight = judge(
            self.infos,
            self._probes,
            missing=self._missing,
            cut=self._cut,
            nics=self._nics,
            remeasured=self._round > 1,
            duration_s=self._own.duration_s + time.monotonic() - self._began_at,
        )
        if preflight.again and self._round == 1:
            from saferun.preflight.leader_messages import again_message

            self._job.broadcast_preflight(again_message(self._pairs(preflight.again)))
        else:
            self._on_judged(preflight)

    def _pairs(self, again: Sequence[tuple[int, int]]) -> list[PairAgain]:
        """The pairs as all hosts learn of them."""
        from saferun.preflight.leader_messages import PairAgain

        return [
            PairAgain(source, target, self.infos[target].label, self._assignment.host_infos[target].endpoint)
            for source, target in again
            if target in self.infos
        ]
