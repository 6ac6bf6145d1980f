"""The hosts of a job, as the one that merges their parts knows them. Pure."""

from __future__ import annotations

from saferun.evidence.job_evidence import Evidence
from saferun.model import Value

__all__ = ["HostPart", "HostPeer"]

_LONGEST_LABEL = 253


class HostPart(Value):
    """What one saferun process tells of its host.

    Attributes:
        host: the host's number in the job.
        task: the process's number on its host.
        label: the name under which the job knows the host.
        offset_s: what is to be added to its time of day to have the leader's.
        evidence: what it knows.
        measured: whether the offset is exact.
    """

    host: int
    task: int
    label: str
    offset_s: float
    evidence: Evidence
    measured: bool = False


class HostPeer(Value):
    """A host of the job, or a part of one that one of its saferun processes looks after."""

    host: int
    label: str
    ranks: tuple[int, ...]
    addresses: tuple[str, ...] = ()
