"""Merges the parts of all hosts into one evidence for the job, in the clock of the judging host. Pure.

A host's part counts for its own ranks only: what it contains about others is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from saferun.cluster.evidence.hosts import HostPart, HostPeer
from saferun.cluster.job_values import LostHost
from saferun.evidence.job_evidence import AbortReason, Capture, CoreDump, Evidence, HangVerdict, HostView, RankOutput
from saferun.model import RankEnd, signal_name

__all__ = ["merge_parts"]

_MOST_LINES = 2000
_MOST_NAMED_HOSTS = 4
# If clocks were not measured, a smaller offset is noise.
_LEAST_OFFSET_S = 0.25
_DAY_S = 86400

_T = TypeVar("_T")


def merge_parts(
    parts: Iterable[HostPart],
    lost: Iterable[LostHost] = (),
    *,
    world_size: int,
    peers: Sequence[HostPeer] = (),
    leader: int = 0,
    hang: HangVerdict | None = None,
    abort_reason: AbortReason | None = None,
) -> Evidence:
    """One evidence of all hosts.

    Args:
        parts: the parts received, and the judging host's own. Of two parts of one process the later counts.
        lost: the hosts that are silent.
        world_size: how many ranks the job has.
        peers: the ranks of each host; None: as the hosts say, the judging one first.
        leader: the number of the judging host: times are in its clock, paths without a host's name are its own.
        hang: the job's verdict; None: that of the judging host, or of another one.
        abort_reason: what made all hosts stop; without it a signal that a host got.
    """
    by_task = {(part.host, part.task): part for part in parts if part.host >= 0}
    ordered = sorted(by_task.values(), key=lambda part: (part.host != leader, part.host, part.task))
    return _Merging(ordered, tuple(lost), world_size, peers, leader).evidence(hang, abort_reason)


class _Merging:
    """One merging under way. ``parts`` has the judging host's first."""

    def __init__(
        self,
        parts: Sequence[HostPart],
        lost: Sequence[LostHost],
        world_size: int,
        peers: Sequence[HostPeer],
        leader: int,
    ) -> None:
        self._parts = parts
        self._lost = lost
        self._world_size = world_size
        self._leader = leader
        self._own = parts[0].evidence if parts and parts[0].host == leader else None
        self._labels = {lost.host: lost.label for lost in lost} | {peer.host: peer.label for peer in peers}
        for part in parts:
            self._labels.setdefault(part.host, part.label)
        self._addresses: dict[int, tuple[str, ...]] = {}
        for peer in peers:
            known = self._addresses.get(peer.host, ())
            self._addresses[peer.host] = tuple(dict.fromkeys((*known, *peer.addresses)))
        for part in parts:
            known = self._addresses.get(part.host, ())
            self._addresses[part.host] = tuple(dict.fromkeys((*known, *part.evidence.bridges)))
        self._owner = self._owners(peers)
        base = self._own or (parts[0].evidence if parts else None)
        self._started_at = base.started_at if base is not None else 0.0
        self._started_time = self._leaders_start()

    def _owners(self, peers: Sequence[HostPeer]) -> dict[int, int]:
        """The host of each rank."""
        owner: dict[int, int] = {}
        claims: Iterable[tuple[int, Iterable[int]]]
        if peers:
            claims = ((peer.host, peer.ranks) for peer in peers)
        else:
            claims = [(part.host, _ranks_of(part.evidence)) for part in self._parts]
            claims += [(lost.host, lost.ranks) for lost in self._lost]
        for host, ranks in claims:
            for rank in ranks:
                if 0 <= rank < self._world_size:
                    owner.setdefault(rank, host)
        return owner

    def _leaders_start(self) -> float:
        """When the judging host started its ranks, in seconds since the epoch; 0.0 where nothing tells."""
        for part in self._parts:
            evidence = part.evidence
            offset_s = _correction_s(part)
            if evidence.started_time > 0:
                return evidence.started_time + offset_s
            if evidence.ends:
                end = evidence.ends[0]
                return end.time + offset_s - (end.at - evidence.started_at)
        return 0.0

    def evidence(self, hang: HangVerdict | None, abort_reason: AbortReason | None) -> Evidence:
        base = self._own or (self._parts[0].evidence if self._parts else None)
        mine = [self._of_one(part) for part in self._parts]
        return Evidence(
            host=self._labels.get(self._leader, base.host if base is not None else ""),
            started_at=self._started_at,
            ends=tuple(_sorted_ends(_all(mine, lambda one: one.ends))),
            outputs=tuple(sorted(_all(mine, lambda one: one.outputs), key=lambda output: output.rank)),
            abandoned=(),
            stop_signum=next((one.stop_signum for one in mine if one.stop_signum is not None), None),
            error=base.error if base is not None else "",
            error_hint=base.error_hint if base is not None else "",
            is_checked=base is not None and base.is_checked,
            ranks=tuple(range(self._world_size)),
            capture=self._capture(mine),
            hang=hang or self._hang(mine),
            cores=_all(mine, lambda one: one.cores),
            oom=next((one.oom for one in mine if one.oom is not None), None),
            kernel_lines=self._labelled(mine, lambda one: one.kernel_lines),
            supervisor_pid=base.supervisor_pid if base is not None else 0,
            script=base.script if base is not None else "",
            cwd=base.cwd if base is not None else "",
            store_port=base.store_port if base is not None else 0,
            hosts=self._hosts(mine),
            started_time=self._started_time,
            world_size=self._world_size,
            abort_reason=abort_reason or self._signal(),
            start=self._start(),
        )

    def _start(self) -> str:
        """How far the start had come on all hosts together; empty where some of them do not know."""
        stages = {part.evidence.start for part in self._parts}
        if "inside" in stages or stages == {"before", "through"}:
            return "inside"
        heard = {rank for part in self._parts for rank in _ranks_of(part.evidence)}
        return stages.pop() if heard.issuperset(self._owner) and stages in ({"before"}, {"through"}) else ""

    def _signal(self) -> AbortReason | None:
        """The signal that some hosts got."""
        signals = {
            part.host: part.evidence.stop_signum for part in self._parts if part.evidence.stop_signum is not None
        }
        if not signals:
            return None
        labels = [self._labels[host] for host in signals]
        some = ", ".join(labels) if len(labels) <= _MOST_NAMED_HOSTS else f"{len(labels)} hosts"
        return AbortReason("signal", some, signal_name(next(iter(signals.values())) or 0))

    # -------------------------------------------------------------------------------------------------- one host's part

    def _of_one(self, part: HostPart) -> Evidence:
        """A part with its own ranks only, in the judging host's time, and with the host's name in paths."""
        evidence = part.evidence
        offset_s = _correction_s(part)
        label = self._labels[part.host]
        prefix = f"{label}:" if part.host != self._leader else ""

        def is_own(rank: int) -> bool:
            return self._owner.get(rank) == part.host

        capture = evidence.capture
        notes = (
            note._replace(path=_at_host(prefix, note.path), host=label if prefix else "")
            for note in capture.notes
            if note.rank < 0 or is_own(note.rank)
        )
        hang = evidence.hang
        if hang is not None:
            hang = hang._replace(ranks=tuple(filter(is_own, hang.ranks)), busy=tuple(filter(is_own, hang.busy)))
        return evidence._replace(
            ends=tuple(self._end(end, offset_s) for end in evidence.ends if is_own(end.rank)),
            outputs=tuple(
                _output(output, rank, offset_s, prefix)
                for rank, output in evidence.outputs_by_rank.items()
                if is_own(rank)
            ),
            abandoned=tuple(rank for rank in _abandoned(evidence) if is_own(rank)),
            capture=capture._replace(
                processes=tuple(process for process in capture.processes if is_own(process.rank)),
                stacks=tuple(dump for dump in capture.stacks if is_own(dump.rank)),
                collectives=tuple(one for one in capture.collectives if is_own(one.rank)),
                notes=tuple(notes),
                links=tuple(link for link in capture.links if is_own(link.rank)),
                gpus=tuple(gpu for gpu in capture.gpus if is_own(gpu.rank)),
                ports=tuple(one for one in capture.ports if one.ranks and all(map(is_own, one.ranks))),
                calls=tuple(calls for calls in capture.calls if is_own(calls.rank)),
                kernel_lines=(),
            ),
            hang=hang,
            cores=tuple(_core(core, prefix) for core in evidence.cores if is_own(core.rank)),
            oom=evidence.oom._replace(host=label) if evidence.oom is not None else None,
        )

    def _end(self, end: RankEnd, offset_s: float) -> RankEnd:
        moment = end.time + offset_s
        at = self._started_at + (moment - self._started_time)
        return end._replace(at=at, time=moment, clock=_shifted(end.clock, end.time % 1 + offset_s))

    # ------------------------------------------------------------------------------------------------------ all of them

    def _hosts(self, mine: Sequence[Evidence]) -> tuple[HostView, ...]:
        ranks: dict[int, list[int]] = {}
        for rank, host in self._owner.items():
            ranks.setdefault(host, []).append(rank)
        lost = {one.host: one for one in self._lost}
        parts: dict[int, list[Evidence]] = {}
        for part, evidence in zip(self._parts, mine, strict=True):
            parts.setdefault(part.host, []).append(evidence)
        views = []
        for host in sorted({*ranks, *lost, *parts, *self._labels}):
            own = parts.get(host, [])
            gone = lost.get(host)
            views.append(
                HostView(
                    host,
                    self._labels.get(host, f"host {host}"),
                    tuple(sorted(ranks.get(host, ()))),
                    self._addresses.get(host, ()),
                    cwd=next((one.cwd for one in own if one.cwd), ""),
                    script=next((one.script for one in own if one.script), ""),
                    has_evidence=bool(own),
                    lost_reason=(gone.why or "unknown") if gone is not None else "",
                    lost_message=gone.message if gone is not None else "",
                    supervisor_pids=tuple(one.supervisor_pid for one in own if one.supervisor_pid > 0),
                    oom=next((one.oom for one in own if one.oom is not None), None),
                    # The tasks of a host read the same log.
                    kernel_lines=tuple(dict.fromkeys(line for one in own for line in one.kernel_lines)),
                    abandoned_ranks=tuple(sorted({rank for one in own for rank in one.abandoned})),
                    stop_signum=next((one.stop_signum for one in own if one.stop_signum is not None), None),
                    nics=tuple(dict.fromkeys(line for one in own for line in one.nics)),
                )
            )
        return tuple(views)

    def _capture(self, mine: Sequence[Evidence]) -> Capture:
        captures = [one.capture for one in mine]
        return Capture(
            processes=_all(captures, lambda one: one.processes),
            stacks=_all(captures, lambda one: one.stacks),
            collectives=_all(captures, lambda one: one.collectives),
            host_lines=self._labelled(mine, lambda one: one.capture.host_lines),
            notes=_all(captures, lambda one: one.notes),
            timed_out=self._unfinished(captures),
            elapsed_s=max((one.elapsed_s for one in captures), default=0.0),
            links=_all(captures, lambda one: one.links),
            gpus=_all(captures, lambda one: one.gpus),
            nccl=_all(captures, lambda one: one.nccl),
            ports=_all(captures, lambda one: one.ports),
            calls=_all(captures, lambda one: one.calls),
        )

    def _labelled(self, mine: Sequence[Evidence], lines_of: Callable[[Evidence], Sequence[str]]) -> tuple[str, ...]:
        """The lines of all hosts, each with its host's name."""
        found: dict[str, None] = {}
        for part, one in zip(self._parts, mine, strict=True):
            label = self._labels[part.host]
            found.update(dict.fromkeys(f"{label}: {line}" for line in lines_of(one)))
            if len(found) >= _MOST_LINES:
                break
        return tuple(found)[:_MOST_LINES]

    def _unfinished(self, captures: Sequence[Capture]) -> tuple[str, ...]:
        """What was not ready: what is named by its rank stands by itself, else the hosts are named."""
        hosts: dict[str, list[str]] = {}
        for part, capture in zip(self._parts, captures, strict=True):
            for name in capture.timed_out:
                hosts.setdefault(name, []).append(self._labels[part.host])
        named = []
        for name, labels in hosts.items():
            distinct = list(dict.fromkeys(labels))
            shown = ", ".join(distinct[:_MOST_NAMED_HOSTS])
            more = f" and {len(distinct) - _MOST_NAMED_HOSTS} more" if len(distinct) > _MOST_NAMED_HOSTS else ""
            named.append(name if " of rank " in name else f"{name} on {shown}{more}")
        return tuple(named)

    def _hang(self, mine: Sequence[Evidence]) -> HangVerdict | None:
        if self._own is not None and self._own.hang is not None:
            return self._own.hang
        verdicts = [one.hang for one in mine if one.hang is not None]
        if not verdicts:
            return None
        # Each host has the verdict of the job, which ``watchdog.job_verdicts`` has combined from theirs: the kinds
        # differ only where a host knows of another hang.
        first = verdicts[0]
        alike = [verdict for verdict in verdicts if verdict.kind == first.kind]
        return HangVerdict(
            first.kind,
            tuple(sorted({rank for verdict in alike for rank in verdict.ranks})),
            min(verdict.lasted_s for verdict in alike),
            all(verdict.certain for verdict in alike),
            tuple(sorted({rank for verdict in alike for rank in verdict.busy})),
            next((verdict.overdue for verdict in verdicts if verdict.overdue), ""),
        )


_S = TypeVar("_S")


def _all(parts: Iterable[_S], items_of: Callable[[_S], Iterable[_T]]) -> tuple[_T, ...]:
    return tuple(item for part in parts for item in items_of(part))


def _sorted_ends(ends: Iterable[RankEnd]) -> list[RankEnd]:
    return sorted({end.rank: end for end in ends}.values(), key=lambda end: end.rank)


def _ranks_of(evidence: Evidence) -> Iterable[int]:
    capture = evidence.capture
    yield from evidence.ranks
    yield from (end.rank for end in evidence.ends)
    yield from (process.rank for process in capture.processes)
    yield from (dump.rank for dump in capture.stacks)
    yield from (one.rank for one in capture.collectives)


def _abandoned(evidence: Evidence) -> Iterable[int]:
    """Ranks that could not be killed; of those that never ended only their place tells which they are."""
    by_local: Mapping[int, int] = {output.local_rank: rank for rank, output in evidence.outputs_by_rank.items()}
    for local_rank in evidence.abandoned:
        rank = by_local.get(local_rank)
        if rank is None and 0 <= local_rank < len(evidence.ranks):
            rank = evidence.ranks[local_rank]
        if rank is not None:
            yield rank


def _correction_s(part: HostPart) -> float:
    return part.offset_s if part.measured or abs(part.offset_s) >= _LEAST_OFFSET_S else 0.0


def _at_host(prefix: str, path: str) -> str:
    return f"{prefix}{path}" if path else ""


def _output(output: RankOutput, rank: int, offset_s: float, prefix: str) -> RankOutput:
    error_time = output.error_time + offset_s if output.error_time > 0 else output.error_time
    uncaught_time = output.uncaught_time + offset_s if output.uncaught_time > 0 else output.uncaught_time
    output = output._replace(rank=rank, error_time=error_time, uncaught_time=uncaught_time)
    return output._replace(stderr_path=_at_host(prefix, output.stderr_path))


def _core(core: CoreDump, prefix: str) -> CoreDump:
    return core._replace(path=_at_host(prefix, core.path))


def _shifted(clock: str, offset_s: float) -> str:
    """A time of day in another clock: ``03:15:33`` and 2.5 s are ``03:15:35``."""
    parts = clock.split(":")
    if not offset_s or len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):  # noqa: PLR2004
        return clock
    hours, minutes, seconds = (int(part[:4]) for part in parts)
    moment = math.floor(hours * 3600 + minutes * 60 + seconds + offset_s) % _DAY_S
    return f"{moment // 3600:02}:{moment // 60 % 60:02}:{moment % 60:02}"
