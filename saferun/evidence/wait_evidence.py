"""What is known of the other end of a wait when nothing moves any more. Values only; pure."""

from __future__ import annotations

from saferun.model import Value

EPHEMERAL_FROM = 32768
"""The kernel gives programs that ask for no port of their own one from here on, unless it is configured otherwise."""


class ThreadWait(Value):
    """Who could end the wait of one thread, as far as its system call shows it.

    Attributes:
        tid: the thread.
        outside: something outside the job can: a clock, a program that is not of the job, the holder of a file lock,
            a file system, the user of a terminal.
        timed: whether the call has a timeout.
        pids: processes of the job on this host that can, other than its own.
        addresses: the other ends of connections that no process of the job on this host has: ``10.0.0.2:5432``.
        by_descriptor: whether a descriptor leads outside: a socket that listens, a pipe or a file, and not a clock.
        sleeps: whether it only waits for a clock.
    """

    tid: int
    outside: bool = False
    timed: bool = False
    pids: tuple[int, ...] = ()
    addresses: tuple[str, ...] = ()
    by_descriptor: bool = False
    sleeps: bool = False


class JobPorts(Value):
    """The ports of TCP and UDP by which the processes of some ranks listen or are connected.

    Attributes:
        ranks: whose processes these are, all of one host.
        ports: the numbers, the lowest ones where there are very many.
        is_whole: whether these are all of them.
        kernels_from: from which number on the kernel of that host gives ports to programs that ask for none.
    """

    ranks: tuple[int, ...]
    ports: tuple[int, ...]
    is_whole: bool = False
    kernels_from: int = EPHEMERAL_FROM
