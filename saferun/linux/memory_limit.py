"""Bounds on the memory of this process, and on the files that it writes, for processing untrusted input.

Source: getrlimit(2), RLIMIT_AS: the address space, which includes memory that is only reserved.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

from saferun.errors import suppress

READING_BYTES = 512 << 20
"""For parsing a tool's output (8 MiB at most), or a core's notes."""

TOO_MUCH = "what it says takes too much memory"


def be_killed_first() -> None:
    """Have the OOM killer prefer this process, and those that it starts, to the ranks. Never raises.

    Source: proc(5), /proc/PID/oom_score_adj.
    """
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as file:
        file.write(b"1000")


@contextlib.contextmanager
def limited_memory(more_bytes: int = READING_BYTES) -> Iterator[None]:
    """The same for a block of code that starts no programs."""
    before = resource.RLIM_INFINITY, resource.RLIM_INFINITY
    with suppress(OSError):  # a sandbox refuses prlimit(2)
        before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(more_bytes)
    try:
        yield
    finally:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, before)


def limit_files(most_bytes: int) -> None:
    """Limit the size of the files that this process writes. Never raises. A lower existing limit is kept.

    Source: getrlimit(2), RLIMIT_FSIZE.
    """
    with suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if soft == resource.RLIM_INFINITY or most_bytes < soft:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))


def limit_memory(more_bytes: int) -> None:
    """Limit the additional address space of this process; beyond it, MemoryError is raised. Never raises itself.

    A lower existing limit is kept. Programs that this process starts inherit it.
    """
    with suppress(OSError, ValueError):
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        wanted = pages * os.sysconf("SC_PAGE_SIZE") + more_bytes
        if soft == resource.RLIM_INFINITY or wanted < soft:
            resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
