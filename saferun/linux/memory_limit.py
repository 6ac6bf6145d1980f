"""Bounds on the memory of this process, for work on what somebody else has written.

Source: getrlimit(2), RLIMIT_AS: the address space, of which memory that was only reserved is a part.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from saferun.errors import suppress

READING_BYTES = 512 << 20
"""For reading what a tool has printed (8 MiB at most), or what a core says of its process."""

TOO_MUCH = "what it says takes too much memory"


def be_ended_first() -> None:
    """Where memory runs out the kernel ends this process, and programs that it starts, before the ranks. Never raises.

    Source: proc(5), /proc/PID/oom_score_adj.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")


@contextlib.contextmanager
def limited_memory(more_bytes: int = READING_BYTES) -> Iterator[None]:
    """The same for a moment, in which no program is started."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(more_bytes)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, before)


def limit_memory(more_bytes: int) -> None:
    """Let this process take so much more address space than it has now; beyond that, MemoryError. Never raises.

    A lower limit that is there stays. Programs that this process starts inherit it.
    """
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
