"""A bound on the memory of this process, for work on what somebody else has written.

Source: getrlimit(2), RLIMIT_AS: the address space, of which memory that was only reserved is a part.
"""

from __future__ import annotations

import os
import resource

from saferun.errors import suppress


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
