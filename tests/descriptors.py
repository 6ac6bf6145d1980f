"""The descriptors of the test's own process."""

from __future__ import annotations

import gc
import os


def open_descriptors() -> set[str]:
    """Return the numbers of the open descriptors, once those of objects that earlier tests left are closed."""
    gc.collect()
    # The one that this reads with is among them, and has the same number as long as no other one changes.
    return set(os.listdir("/proc/self/fd"))
