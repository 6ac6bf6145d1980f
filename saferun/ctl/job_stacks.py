"""The stacks of all hosts of a running job, by the saferun that leads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from saferun.cluster.evidence import HostPart, HostPeer, decode_part, merge_parts
from saferun.ctl.live_run import find_live
from saferun.errors import UsageError
from saferun.evidence import Evidence
from saferun.model import Value
from saferun.text.decoding import MALFORMED
from saferun.text.typed_json import fit, line_of, list_of, number_of, text_of
from saferun.text.wording import ranks_text

# saferun itself answers by then, with what has come; see launch/asked_stacks.py.
_PATIENCE_S = 60.0
_NATIVE_PATIENCE_S = 180.0
_LONGEST_STACKS = 16 << 20
_LONGEST_NAME = 255
_MOST_HOSTS = 1 << 17
_MOST_RANKS = 1 << 20
_NAMED_HOSTS = 8

_Number = Annotated[int, number_of(_MOST_RANKS)]
_Name = Annotated[str, line_of(_LONGEST_NAME)]


class _First(Value):
    """The first answer. ``together``: the job may have several hosts. ``collects``: the stacks of all follow."""

    together: bool
    leader: _Name
    collects: bool


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


def read_job_stacks(directory: Path, *, native: bool) -> JobStacks:
    """The stacks of all hosts, if the job has several; never raises for what its saferun does not answer.

    Args:
        directory: the run's.
        native: whether to take native stacks as well.
    """
    try:
        live = find_live(directory)
    except UsageError:
        return JobStacks()  # it has no control socket (yet), or has ended: whatever is left of it is seen without
    try:
        first: _First = fit(_First, live.ask("stacks", native=native))
        if not first.together:
            return JobStacks()
        if not first.collects:
            return JobStacks(None, (f"the ranks of this host alone: ask on {first.leader} for those of all hosts",))
        answer: _Answer = fit(_Answer, live.next_answer(_NATIVE_PATIENCE_S if native else _PATIENCE_S))
        return _merged(answer)
    except UsageError as error:
        return JobStacks(None, (f"the ranks of this host alone: {error.what}",))
    except MALFORMED:
        return JobStacks(None, ("the ranks of this host alone: use the saferunctl of that saferun for all",))
    finally:
        live.close()


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
        return JobStacks(None, ("the ranks of this host alone: no host has handed in its stacks",))
    merged = merge_parts(parts, world_size=answer.world_size, peers=peers, leader=answer.host)
    silent = [peer for peer in peers if peer.host not in heard]
    remarks = [f"no stacks from {peer.label} ({ranks_text(peer.ranks)})" for peer in silent[:_NAMED_HOSTS]]
    if len(silent) > _NAMED_HOSTS:
        remarks.append(f"and none from {len(silent) - _NAMED_HOSTS} more hosts")
    return JobStacks(merged, tuple(remarks), tuple(peer.label for peer in silent))
