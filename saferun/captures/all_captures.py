"""The captures of a live job, each a function and when it runs. Only loaded by the examiner."""

from __future__ import annotations

from collections.abc import Callable

from saferun.captures.host_captures import (
    capture_flight_recorder,
    capture_gpu_amd,
    capture_gpu_nvidia,
    capture_kernel_log,
    capture_rdma_errors,
)
from saferun.captures.last_calls import capture_last_calls
from saferun.captures.links import capture_links
from saferun.captures.nccl_ras import capture_nccl_ras
from saferun.captures.process_state import capture_process_state
from saferun.captures.scene import Scene
from saferun.captures.stacks import capture_stacks
from saferun.captures.strace import capture_strace
from saferun.model import Value


class CaptureStep(Value):
    """One capture.

    Attributes:
        name: its name in notes.
        run: the function; it emits its findings.
        wanted_by: the field of the request that enables it; empty: it always runs.
        is_late: whether it begins after the others have ended, because it would disturb them.
        memory_bytes: a limit on its address space, if it parses untrusted input and starts no program; 0: none.
    """

    name: str
    run: Callable[[Scene], None]
    wanted_by: str = ""
    is_late: bool = False
    memory_bytes: int = 0


# For the answers of eight ranks at a time, the decoded values of one, and malloc's arenas of each thread.
_RECORDERS_BYTES = 1 << 30

CAPTURES: tuple[CaptureStep, ...] = (
    CaptureStep("stacks", capture_stacks),
    CaptureStep("process_state", capture_process_state),
    CaptureStep("links", capture_links),
    CaptureStep("flight_recorder", capture_flight_recorder, memory_bytes=_RECORDERS_BYTES),
    CaptureStep("last_calls", capture_last_calls, "calls", memory_bytes=_RECORDERS_BYTES),
    CaptureStep("gpu_nvidia", capture_gpu_nvidia, "gpu"),
    CaptureStep("gpu_amd", capture_gpu_amd, "gpu"),
    CaptureStep("kernel_log", capture_kernel_log),
    CaptureStep("rdma_errors", capture_rdma_errors, "gpu"),
    CaptureStep("nccl_ras", capture_nccl_ras, "nccl", memory_bytes=_RECORDERS_BYTES),
    # Only one tracer per process, and strace slows it down.
    CaptureStep("strace", capture_strace, "strace", is_late=True),
)
