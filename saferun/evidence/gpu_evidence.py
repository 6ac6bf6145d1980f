"""What is known of GPUs and of NCCL when something has gone wrong. Values only; pure."""

from __future__ import annotations

from saferun.model import Value


class RankGpu(Value):
    """A GPU that a rank, or a descendant of it, uses. ``pci`` is its address: ``0000:1b:00.0``."""

    rank: int
    pci: str


class NcclProcess(Value):
    """A process as NCCL's RAS subsystem names it. ``member`` is its number in the communicator; -1: unknown."""

    member: int
    host: str
    pid: int


class NcclOutlier(Value):
    """Members of a communicator that differ from the others, as NCCL's RAS subsystem sees them.

    Attributes:
        communicator: its hash; empty: it is not about a single one.
        size: how many members it has; 0: unknown.
        kind: ``dead`` and ``unanswering`` (RAS does not reach them), ``failed``, ``finalizing``, ``aborted``, ``left``
            (they are no members any more), ``behind`` and ``ahead`` (in the number of calls that they have launched).
        processes: who they are, not all of them if they are many.
        total: how many they are.
        message: what they have launched, ``41 AllReduce, and others 42``; empty for other kinds.
        is_timed: whether two answers of different times agree on it.
    """

    communicator: str
    size: int
    kind: str
    processes: tuple[NcclProcess, ...]
    total: int
    message: str = ""
    is_timed: bool = False
