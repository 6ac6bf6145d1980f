"""What tests of captures of GPUs share."""

from __future__ import annotations

import time

GIB = 1 << 30
MIB = 1 << 20


def soon() -> float:
    return time.monotonic() + 60
