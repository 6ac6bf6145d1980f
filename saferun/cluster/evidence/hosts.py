"""The hosts of a job, as the one that lays their parts together knows them. Pure."""

from __future__ import annotations

from saferun.evidence import Evidence
from saferun.model import Value
from saferun.text.typed_json import fit

__all__ = ["HostPart", "HostPeer", "LostHost", "read_peers"]

_LONGEST_LABEL = 253


class HostPart(Value):
    """What one saferun process tells of its host.

    Attributes:
        host: the host's number in the job.
        task: the process's number on its host.
        label: the name under which the job knows the host.
        offset_s: what is to be added to its time of day to have the leader's.
        evidence: what it knows.
    """

    host: int
    task: int
    label: str
    offset_s: float
    evidence: Evidence


class LostHost(Value):
    """A host that is silent. ``why`` and ``message`` as in :class:`~saferun.evidence.HostView`."""

    host: int
    label: str
    why: str
    message: str
    ranks: tuple[int, ...]


class HostPeer(Value):
    """A host of the job, or a part of one that one of its saferun processes looks after."""

    host: int
    label: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...] = ()


class _PeerRow(Value):
    """A row of ``peers`` as the coordinator tells them."""

    host: int
    label: str
    name: str
    pid: int
    addresses: tuple[str, ...]
    base_rank: int
    nproc: int


def read_peers(rows: object, world_size: int) -> tuple[HostPeer, ...]:
    """The hosts of a job from ``[[host, label, name, pid, addresses, base_rank, nproc], …]``; wrong rows are left out.

    Args:
        rows: what JSON gave.
        world_size: how many ranks there are.
    """
    peers = []
    for raw in rows if isinstance(rows, (list, tuple)) else ():
        try:
            row: _PeerRow = fit(_PeerRow, list(raw))
        except (TypeError, ValueError):
            continue
        if row.host >= 0 and 0 <= row.base_rank <= row.base_rank + row.nproc <= world_size:
            ranks = tuple(range(row.base_rank, row.base_rank + row.nproc))
            peers.append(HostPeer(row.host, row.label[:_LONGEST_LABEL], ranks, row.addresses))
    return tuple(peers)
