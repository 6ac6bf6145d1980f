"""The stacks of all hosts of a running job, now or over some seconds, by the saferun that lives here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from saferun.captures.recording import Recording, RecordOptions, decode_recordings
from saferun.cluster.evidence import HostPart, HostPeer, decode_part, merge_parts
from saferun.ctl.live_run import find_live
from saferun.errors import UsageError
from saferun.evidence.job_evidence import Evidence
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED
from saferun.text.typed_json import fit, line_of, list_of, number_of, text_of
from saferun.text.wording import ranks_text

# saferun itself answers by then, with what has come; see launch/asked_stacks.py.
_PATIENCE_S = 60.0
_NATIVE_PATIENCE_S = 180.0
_RECORDING_PATIENCE_S = 60.0
_LONGEST_STACKS = 16 << 20
_LONGEST_NAME = 255
_MOST_HOSTS = 1 << 17
_MOST_RANKS = 1 << 20
_NAMED_HOSTS = 8

_Number = Annotated[int, number_of(_MOST_RANKS)]
_Name = Annotated[str, line_of(_LONGEST_NAME)]


class _First(Value):
    """The first answer. ``spans_hosts``: the job may have several hosts, and the stacks of all follow."""

    spans_hosts: bool


class _Peer(Value):
    host: _Number
    label: _Name
    base_rank: _Number
    ranks: _Number


class _Part(Value):
    host: _Number
    task: _Number
    label: _Name
    stacks: Annotated[str, text_of(_LONGEST_STACKS)]


class _Answer(Value):
    world_size: _Number
    host: _Number
    peers: Annotated[tuple[_Peer, ...], list_of(_Peer, _MOST_HOSTS)]
    parts: Annotated[tuple[_Part, ...], list_of(_Part, _MOST_HOSTS)]


class JobStacks(Value):
    """The stacks of a job, or why there are only those of this host.

    Attributes:
        evidence: of all hosts; None: the stacks have to be taken here.
        remarks: what is missing, in lines.
        silent: the hosts without stacks.
    """

    evidence: Evidence | None = None
    remarks: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()


class JobRecording(Value):
    """A recording of a job, or why there is only one of this host.

    Attributes:
        recordings: of all hosts, by their names; None: the ranks have to be recorded here.
        remarks: what is missing, in lines.
    """

    recordings: tuple[tuple[str, Recording], ...] | None = None
    remarks: tuple[str, ...] = ()


class _AloneError(Exception):
    """Only the ranks of this host can be read. ``remark``: why, for people; empty: the job has no others."""

    def __init__(self, remark: str = "") -> None:
        super().__init__(remark)
        self.remarks = (f"the ranks of this host alone: {remark}",) if remark else ()


def read_job_stacks(directory: Path, *, native: bool) -> JobStacks:
    """The stacks of all hosts, if the job has several; never raises for what its saferun does not answer.

    Args:
        directory: the run's.
        native: whether to take native stacks as well.
    """
    try:
        with _asked(directory, {"kind": "stacks", "native": native}) as receive:
            return _merged(receive(_NATIVE_PATIENCE_S if native else _PATIENCE_S))
    except _AloneError as error:
        return JobStacks(None, error.remarks)


def read_job_recording(
    directory: Path, ranks: Sequence[int], options: RecordOptions, *, on_begin: Callable[[], None]
) -> JobRecording:
    """A recording of ranks of all hosts, if the job has several; never raises for what its saferun does not answer.

    Args:
        directory: the run's.
        ranks: whose; empty: of all.
        options: how.
        on_begin: called when the saferun has taken the request.
    """
    wanted = {"kind": "recording", "ranks": list(ranks), **options._asdict()}
    try:
        with _asked(directory, wanted) as receive:
            on_begin()
            return _collected(receive(options.seconds + _RECORDING_PATIENCE_S), ranks)
    except _AloneError as error:
        return JobRecording(None, error.remarks)


@contextmanager
def _asked(directory: Path, wanted: JsonObject) -> Iterator[Callable[[float], _Answer]]:
    """Ask the saferun of a run; yields what receives the answer, and takes how long that may last.

    Raises:
        _AloneError: the ranks of this host have to be read here.
    """
    try:
        live = find_live(directory)
    except UsageError:
        raise _AloneError from None  # it has no control socket (yet), or has ended: what is left of it is seen without
    try:
        first: _First = fit(_First, live.ask("stacks", wanted=wanted))
        if not first.spans_hosts:
            raise _AloneError

        def receive(patience_s: float) -> _Answer:
            answer: _Answer = fit(_Answer, live.next_answer(patience_s))
            if sum(peer.ranks for peer in answer.peers) > _MOST_RANKS:
                raise ValueError("no job has as many ranks")
            return answer

        yield receive
    except UsageError as error:
        raise _AloneError(error.what) from None
    except MALFORMED:
        raise _AloneError("use the saferunctl of that saferun for all") from None
    finally:
        live.close()


def _collected(answer: _Answer, ranks: Sequence[int]) -> JobRecording:
    found: list[tuple[str, Recording]] = []
    owner = {rank: peer.label for peer in answer.peers for rank in range(peer.base_rank, peer.base_rank + peer.ranks)}
    for part in answer.parts:
        with suppress(ValueError):
            # A host speaks for its own ranks only.
            found += [(part.label, one) for one in decode_recordings(part.stacks) if owner.get(one.rank) == part.label]
    if not found:
        raise _AloneError("no host has handed in a recording")
    missing: dict[str, list[int]] = {}
    recorded = {one.rank for _, one in found}
    for rank in sorted((set(ranks) or set(owner)) & set(owner) - recorded):
        missing.setdefault(owner[rank], []).append(rank)
    remarks = [f"no recording from {host} ({ranks_text(those)})" for host, those in missing.items()]
    unknown = sorted(set(ranks) - set(owner))
    if unknown:
        remarks.append(f"{ranks_text(unknown)}: there is no such rank in this job")
    return JobRecording(tuple(sorted(found, key=lambda item: item[1].rank)), tuple(remarks[:_NAMED_HOSTS]))


def _merged(answer: _Answer) -> JobStacks:
    parts, heard = [], set()
    for part in answer.parts:
        evidence = decode_part(part.stacks)
        if evidence is not None:
            parts.append(HostPart(part.host, part.task, part.label, 0.0, evidence))
            heard.add(part.host)
    peers = [
        HostPeer(peer.host, peer.label, tuple(range(peer.base_rank, min(peer.base_rank + peer.ranks, _MOST_RANKS))))
        for peer in answer.peers
    ]
    if not parts:
        raise _AloneError("no host has handed in its stacks")
    merged = merge_parts(parts, world_size=answer.world_size, peers=peers, leader=answer.host)
    silent = [peer for peer in peers if peer.host not in heard]
    remarks = [f"no stacks from {peer.label} ({ranks_text(peer.ranks)})" for peer in silent[:_NAMED_HOSTS]]
    if len(silent) > _NAMED_HOSTS:
        remarks.append(f"and none from {len(silent) - _NAMED_HOSTS} more hosts")
    return JobStacks(merged, tuple(remarks), tuple(peer.label for peer in silent))
