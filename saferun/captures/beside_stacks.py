"""Captures that do not look at processes: Flight Recorder, GPUs, kernel log. What they find as lines and files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from saferun.captures.scene import UNPTRACEABLE_STATES, Process, Scene
from saferun.captures.wire import HostCapture, Target
from saferun.evidence import RankCollectives, RankGpu

_RECORDERS_AT_ONCE = 8
# What does not answer by then is stuck, and the picture of the job waits for nobody.
_PATIENCE_S = 3.0
_HELD_PATIENCE_S = 0.3
_HOST_PATIENCE_S = 6.0
# One after the other: they are large.
_WRITING = threading.Lock()


def capture_flight_recorder(scene: Scene) -> None:
    """What torch's Flight Recorder tells of each rank's collectives."""
    targets = [target for target in scene.request.targets if target.hook_prefix]
    if not targets:
        return
    # All of them are asked at the same time, as far as possible, so that they tell of the same moment.
    from saferun.captures.flight_recorder import capture_flight_recorder as ask

    waiting = iter(targets)
    ranks = {process.pid: process for process in scene.processes if process.is_rank}
    for target in targets:
        scene.begin("flight_recorder", (target.rank, target.pid))

    def work() -> None:
        while True:
            # The interpreter's lock makes this one step.
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
    scene: Scene, target: Target, process: Process | None, ask: Callable[[Target, float], tuple[RankCollectives, bytes]]
) -> None:
    started_at = time.monotonic()
    # Who is stopped does not answer; who sleeps in the kernel has threads that may.
    is_held = process is not None and process.look.state in UNPTRACEABLE_STATES
    patience_s = _HELD_PATIENCE_S if is_held else _PATIENCE_S
    try:
        found, raw = ask(target, min(scene.deadline, started_at + patience_s))
    except Exception as error:
        found, raw = RankCollectives(target.rank, (), f"{type(error).__name__}: {error}"), b""
    place = target.rank, target.pid
    # What is known of the collectives comes first: the file may take the rest of the time.
    scene.emit("collectives", found)
    path = ""
    if process is not None and raw:
        with _WRITING:
            path = scene.write("flight_recorder", raw, "json", process)
    scene.note("flight_recorder", place, started_at, path=path, failure=found.failure)


def capture_gpu_nvidia(scene: Scene) -> None:
    """What NVIDIA's GPUs are doing."""
    from saferun.captures import gpu_nvidia

    pids = [target.pid for target in scene.request.targets]
    _emit_gpus(scene, _tell(scene, "gpu_nvidia", lambda until: gpu_nvidia.capture_gpu_nvidia(pids, until)))


def capture_gpu_amd(scene: Scene) -> None:
    """What AMD's GPUs are doing."""
    from saferun.captures import gpu_amd

    pids = [target.pid for target in scene.request.targets]
    _emit_gpus(scene, _tell(scene, "gpu_amd", lambda until: gpu_amd.capture_gpu_amd(pids, until)))


def _emit_gpus(scene: Scene, found: HostCapture) -> None:
    """Which rank has which GPU."""
    ranks = {process.pid: process.rank for process in scene.processes}
    for gpu in found.content.get("gpus", ()):
        for process in gpu.get("processes", ()):
            rank = ranks.get(process.get("pid"))
            if rank is not None and gpu.get("pci"):
                scene.emit("gpu", RankGpu(rank, str(gpu["pci"])))


def capture_kernel_log(scene: Scene) -> None:
    """What the kernel has said since the job began."""
    from saferun.captures import kernel_log

    found = _tell(scene, "kernel_log", lambda until: kernel_log.capture_kernel_log(scene.request.since, until))
    lines = found.content.get("lines", ())
    for line in lines if isinstance(lines, list) else ():
        scene.emit("kernel_line", str(line))


def _tell(scene: Scene, name: str, look: Callable[[float], HostCapture]) -> HostCapture:
    started_at = time.monotonic()
    scene.begin(name)
    found = look(min(scene.deadline, started_at + _HOST_PATIENCE_S))
    for line in found.lines:
        scene.emit("host_line", line)
    path = scene.write_json(name, found.content) if found.content else ""
    scene.note(name, (-1, 0), started_at, path=path, failure=found.failure)
    return found
