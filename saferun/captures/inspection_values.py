"""What an inspection of ranks that seem quiet finds. Values only; pure.

An inspection consists of several moments, about a second apart; numbers of bytes and wake-ups are totals at these
moments.
"""

from __future__ import annotations

from saferun.model import Value


class Connection(Value):
    """A TCP connection of a rank to a process that is neither another rank nor the store.

    Attributes:
        inode: tells sockets apart.
        is_accepted: whether the rank is the server.
        taken: received bytes that the rank has read, at each moment.
        sent: bytes that the other end has acknowledged, at each moment.
        may_be_internal: whether it may lead to another rank: it goes to a host with other ranks, and both ends have
            ports that the kernel has chosen.
    """

    inode: int
    is_accepted: bool
    taken: tuple[int, ...]
    sent: tuple[int, ...]
    may_be_internal: bool = False


class Thread(Value):
    """A thread of a rank.

    Attributes:
        tid: its number.
        start_ticks: when it started, in clock ticks since boot.
        age_s: how long it has lived.
        name: its ``comm``.
        is_main: whether it is the main thread.
        run_ns: its CPU time at the last moment.
        wakes: how often it was put on a processor, at each moment; empty where unknown.
        io_bytes: what it read and wrote, through system calls and from and to disks.
        major_faults: pages that had to be read from a disk.
        in_disk_waits: in how many of the moments it was in an uninterruptible sleep.
        data_wakes: in each interval between moments, how often data that nothing else counts has woken it up; empty
            where it does not wait for such data.
    """

    tid: int
    start_ticks: int
    age_s: float
    name: str
    is_main: bool
    run_ns: int
    wakes: tuple[int, ...]
    io_bytes: int
    major_faults: int
    in_disk_waits: int
    data_wakes: tuple[int, ...]


class NcclCalls(Value):
    """How many calls a rank has launched in a communicator, as NCCL's RAS subsystem counts them."""

    communicator: str
    launched: int


class RankInspection(Value):
    """One rank.

    Attributes:
        local_rank: its number on this host.
        connections: its TCP connections.
        threads: those of the process that does its work, and the main threads of its other processes.
        servers_busy_s: how long, at each moment, those processes on this host have run, or waited for a processor, that
            a thread waits for an answer of.
        is_frozen: whether its control group is frozen.
        nccl_calls: by communicator; empty where nothing is known.
    """

    local_rank: int
    connections: tuple[Connection, ...]
    threads: tuple[Thread, ...]
    servers_busy_s: tuple[float, ...] = ()
    is_frozen: bool = False
    nccl_calls: tuple[NcclCalls, ...] = ()


class JobInspection(Value):
    """All ranks of this host. ``moments_s``: when the moments were, in monotonic seconds."""

    moments_s: tuple[float, ...]
    ranks: tuple[RankInspection, ...]
