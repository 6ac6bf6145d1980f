"""What is looked at when ranks hang or crash: one file a capture, failures returned as values.

A capture is a function that takes a :class:`saferun.captures.scene.Scene`, emits what it finds, and is ready by the
scene's deadline. To add one, write the function and a line below. They are named rather than imported, because the
supervisor reads their results and must not load what takes them.
"""

from __future__ import annotations

from saferun.model import Value


class CaptureStep(Value):
    """One capture: where its function is, and when it runs.

    Attributes:
        name: what notes about the whole of it are called.
        module: the module of the function.
        function: its name.
        wanted_by: the field of the request that asks for it; empty where it always runs.
        is_late: whether it begins only when the others have ended, because it would disturb them.
        memory_bytes: how much address space it may take, where it reads what a rank has written and starts no program;
            0: as much as there is.
    """

    name: str
    module: str
    function: str
    wanted_by: str = ""
    is_late: bool = False
    memory_bytes: int = 0


# For the answers of eight ranks at a time, the values of one of them, and what malloc reserves for each thread.
_RECORDERS_BYTES = 1 << 30

CAPTURES: tuple[CaptureStep, ...] = (
    CaptureStep("stacks", "saferun.captures.stacks", "capture_stacks"),
    CaptureStep("process_state", "saferun.captures.process_state", "capture_process_state"),
    CaptureStep("links", "saferun.captures.links", "capture_links"),
    CaptureStep(
        "flight_recorder", "saferun.captures.beside_stacks", "capture_flight_recorder", memory_bytes=_RECORDERS_BYTES
    ),
    CaptureStep("gpu_nvidia", "saferun.captures.beside_stacks", "capture_gpu_nvidia", "gpu"),
    CaptureStep("gpu_amd", "saferun.captures.beside_stacks", "capture_gpu_amd", "gpu"),
    CaptureStep("kernel_log", "saferun.captures.beside_stacks", "capture_kernel_log"),
    # Two cannot trace one process, and strace slows it down.
    CaptureStep("strace", "saferun.captures.strace", "capture_strace", "strace", is_late=True),
)
