"""The descriptors of the test's own process."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

_FIRST_THAT_SELECT_REFUSES = 1024


def open_descriptors() -> set[str]:
    """Return the numbers of the open descriptors, once those of objects that earlier tests left are closed."""
    gc.collect()
    # The one that this reads with is among them, and has the same number as long as no other one changes.
    return set(os.listdir("/proc/self/fd"))


@contextmanager
def large_descriptors() -> Iterator[None]:
    """All descriptors that are opened in this block have numbers that select(2) does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    fillers = [os.open("/dev/null", os.O_RDONLY)]
    try:
        while fillers[-1] < _FIRST_THAT_SELECT_REFUSES:
            fillers.append(os.dup(fillers[0]))
        yield
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
