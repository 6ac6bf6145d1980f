"""How much work a function does, counted in calls: the same on a busy machine as on a quiet one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType


def operations(function: Callable[[], object]) -> int:
    """How many functions are called while one is carried out, those written in C included."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
