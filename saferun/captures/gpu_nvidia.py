"""The state of NVIDIA's GPUs, from the driver's management library."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from saferun.captures.gpu_lines import gpu_lines
from saferun.captures.wire import HostCapture
from saferun.linux.gpu_reading import families_of, read_until
from saferun.linux.nvidia_gpus import NvidiaReader, error_text


def capture_gpu_nvidia(
    pids: Sequence[int],
    deadline: float,
    *,
    nvml: Any = None,  # noqa: ANN401 - a module
    dev_root: str = "/dev",
) -> HostCapture:
    """The state of NVIDIA's GPUs, as far as it was read by the deadline, even if a call never returns.

    Args:
        pids: the ranks; they and their descendants count as the job's processes.
        deadline: in monotonic seconds.
        nvml: a stand-in for ``pynvml``.
        dev_root: where the device nodes are.
    """
    if not os.path.exists(f"{dev_root}/nvidiactl"):
        return HostCapture((), {}, "no NVIDIA driver here")
    if nvml is None:
        try:
            nvml = import_module("pynvml")
        except Exception as error:
            return HostCapture((), {}, f"pynvml cannot be imported: {error_text(error)}")
    reader = NvidiaReader(nvml, families_of(pids))
    done = read_until(deadline, reader.read)
    content = reader.snapshot.as_json()
    if not done:
        content["stuck_in"] = reader.snapshot.step or "NVML"
    failure = f"{content['stuck_in']} does not return" if not done else reader.failure
    return HostCapture(reader.lines or gpu_lines(content), content, failure)
