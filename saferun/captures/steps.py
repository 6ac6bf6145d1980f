"""The captures of a live job, each a function with when it runs. Loaded by the examiner alone."""

from __future__ import annotations

from collections.abc import Callable

from saferun.captures.beside_stacks import (
    capture_flight_recorder,
    capture_gpu_amd,
    capture_gpu_nvidia,
    capture_kernel_log,
)
from saferun.captures.links import capture_links
from saferun.captures.process_state import capture_process_state
from saferun.captures.scene import Scene
from saferun.captures.stacks import capture_stacks
from saferun.captures.strace import capture_strace
from saferun.model import Value


class CaptureStep(Value):
    """One capture.

    Attributes:
        name: of notes about the whole of it.
        run: captures, and emits what it finds.
        wanted_by: the field of the request that asks for it; empty: it always runs.
        is_late: whether it begins only when the others have ended, because it would disturb them.
        memory_bytes: how much address space it may take, if it reads what a rank has written and starts no program;
            0: as much as there is.
    """

    name: str
    run: Callable[[Scene], None]
    wanted_by: str = ""
    is_late: bool = False
    memory_bytes: int = 0


# For the answers of eight ranks at a time, the values of one of them, and what malloc reserves for each thread.
_RECORDERS_BYTES = 1 << 30

CAPTURES: tuple[CaptureStep, ...] = (
    CaptureStep("stacks", capture_stacks),
    CaptureStep("process_state", capture_process_state),
    CaptureStep("links", capture_links),
    CaptureStep("flight_recorder", capture_flight_recorder, memory_bytes=_RECORDERS_BYTES),
    CaptureStep("gpu_nvidia", capture_gpu_nvidia, "gpu"),
    CaptureStep("gpu_amd", capture_gpu_amd, "gpu"),
    CaptureStep("kernel_log", capture_kernel_log),
    # Two cannot trace one process, and strace slows it down.
    CaptureStep("strace", capture_strace, "strace", is_late=True),
)
