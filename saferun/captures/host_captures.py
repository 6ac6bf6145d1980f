"""The Flight Recorder of each rank, and what is captured of the host: GPUs, kernel log, RDMA counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from saferun.captures.scene import UNPTRACEABLE_STATES, Process, Scene
from saferun.captures.wire import CaptureTarget, HostCapture
from saferun.evidence.gpu_evidence import RankGpu
from saferun.evidence.job_evidence import RankCollectives

_RECORDERS_AT_ONCE = 8
# What does not respond by then is stuck, and must not delay the verdict.
_PATIENCE_S = 3.0
_HELD_PATIENCE_S = 0.3
_HOST_PATIENCE_S = 6.0
# One at a time: they are large.
_WRITING = threading.Lock()


def capture_flight_recorder(scene: Scene) -> None:
    """Each rank's collectives from torch's Flight Recorder."""
    targets = [target for target in scene.request.targets if target.hook_prefix]
    if not targets:
        return
    # All ranks are queried at the same time, as far as possible, so that the dumps are of the same moment.
    from saferun.captures.flight_recorder import capture_flight_recorder as ask

    waiting = iter(targets)
    ranks = {process.pid: process for process in scene.processes if process.is_rank}
    for target in targets:
        scene.begin("flight_recorder", (target.rank, target.pid))

    def work() -> None:
        while True:
            # Atomic under the GIL.
            target = next(waiting, None)
            if target is None or not scene.left_s:
                return
            _record(scene, target, ranks.get(target.pid), ask)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_RECORDERS_AT_ONCE, len(targets)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(scene.left_s)


def _record(
    scene: Scene,
    target: CaptureTarget,
    process: Process | None,
    ask: Callable[[CaptureTarget, float], tuple[RankCollectives, bytes]],
) -> None:
    started_at = time.monotonic()
    # A stopped process does not respond; one that sleeps in the kernel has other threads that may.
    is_held = process is not None and process.snapshot.state in UNPTRACEABLE_STATES
    patience_s = _HELD_PATIENCE_S if is_held else _PATIENCE_S
    try:
        found, raw = ask(target, min(scene.deadline, started_at + patience_s))
    except Exception as error:
        found, raw = RankCollectives(target.rank, (), f"{type(error).__name__}: {error}"), b""
    key = target.rank, target.pid
    # Emit the collectives first: writing the file may take the rest of the time.
    scene.emit("collectives", found)
    path = ""
    if process is not None and raw:
        with _WRITING:
            path = scene.write("flight_recorder", raw, "json", process)
    scene.note("flight_recorder", key, started_at, path=path, failure=found.failure)


def capture_gpu_nvidia(scene: Scene) -> None:
    """The state of NVIDIA's GPUs."""
    from saferun.captures import gpu_nvidia

    pids = [target.pid for target in scene.request.targets]
    _emit_gpus(scene, _capture_host(scene, "gpu_nvidia", lambda until: gpu_nvidia.capture_gpu_nvidia(pids, until)))


def capture_gpu_amd(scene: Scene) -> None:
    """The state of AMD's GPUs."""
    from saferun.captures import gpu_amd

    pids = [target.pid for target in scene.request.targets]
    _emit_gpus(scene, _capture_host(scene, "gpu_amd", lambda until: gpu_amd.capture_gpu_amd(pids, until)))


def _emit_gpus(scene: Scene, found: HostCapture) -> None:
    """Emit the GPUs of each rank."""
    ranks = {process.pid: process.rank for process in scene.processes}
    for gpu in found.content.get("gpus", ()):
        for process in gpu.get("processes", ()):
            rank = ranks.get(process.get("pid"))
            if rank is not None and gpu.get("pci"):
                scene.emit("gpu", RankGpu(rank, str(gpu["pci"])))


def capture_kernel_log(scene: Scene) -> None:
    """The kernel log since the start of the job."""
    from saferun.captures import kernel_log

    found = _capture_host(scene, "kernel_log", lambda until: kernel_log.capture_kernel_log(scene.request.since, until))
    lines = found.content.get("lines", ())
    for line in lines if isinstance(lines, list) else ():
        scene.emit("kernel_line", str(line))


def capture_rdma_errors(scene: Scene) -> None:
    """Errors of RDMA ports since the start of the job, on hosts that have such ports."""
    from saferun.captures import rdma_errors

    if rdma_errors.is_remembered():
        _capture_host(scene, "rdma_errors", lambda _until: rdma_errors.capture_rdma_errors())


def _capture_host(scene: Scene, name: str, capture: Callable[[float], HostCapture]) -> HostCapture:
    started_at = time.monotonic()
    scene.begin(name)
    found = capture(min(scene.deadline, started_at + _HOST_PATIENCE_S))
    for line in found.lines:
        scene.emit("host_line", line)
    path = scene.write_json(name, found.content) if found.content else ""
    scene.note(name, (-1, 0), started_at, path=path, failure=found.failure)
    return found
