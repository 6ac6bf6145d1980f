"""The vendor of a host's GPUs, from device nodes and sysfs alone. Called at every start, so it imports very little."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal


def gpu_vendor(sysfs_root: str = "/sys", *, dev_root: str = "/dev") -> Literal["nvidia", "amd"] | None:
    """The vendor of this host's GPUs; NVIDIA if there are both (the other is then nearly always integrated in the CPU).

    Only device nodes and sysfs are read: the driver need not work.
    """
    # NVML opens this node before anything else: without it, neither its library nor /proc/driver/nvidia is of use.
    if os.path.exists(f"{dev_root}/nvidiactl"):
        return "nvidia"
    return None if read_kfd_gpus(sysfs_root, dev_root) == [] else "amd"


def read_kfd_gpus(sysfs_root: str = "/sys", dev_root: str = "/dev") -> list[str] | None:
    """The UUIDs of the GPUs that AMD's kernel driver offers this process (empty if a GPU has none).

    An empty list if there are none; None if there are some and it is uncertain which of them a process can use.

    Source: Linux, drivers/gpu/drm/amd/amdkfd/kfd_topology.c.
    """
    nodes = f"{sysfs_root}/class/kfd/kfd/topology/nodes"
    try:
        names = os.listdir(nodes)
    except OSError:
        return []
    gpus: list[str] = []
    certain = os.access(f"{dev_root}/kfd", os.R_OK | os.W_OK)
    for name in sorted(names, key=lambda name: (len(name), name)):
        try:
            with open(f"{nodes}/{name}/properties", encoding="ascii") as file:
                properties = {key: int(value) for key, value in (line.split() for line in file)}
        except PermissionError:
            continue  # the container has not been granted this GPU
        except (OSError, ValueError):
            certain = False
            continue
        if properties.get("simd_count", 0) == 0:
            continue  # CPUs
        render_node = f"{dev_root}/dri/renderD{properties.get('drm_render_minor', 0)}"
        # Some releases of ROCm skip a node that is both CPU and GPU (an integrated GPU, in old kernels), or that has no
        # instruction set.
        if properties.get("cpu_cores_count", 0) > 0 or properties.get("gfx_target_version", 0) == 0:
            certain = False
        certain = certain and os.access(render_node, os.R_OK | os.W_OK)
        unique_id = properties.get("unique_id", 0)
        gpus.append(f"GPU-{unique_id:016x}" if unique_id else "")
    return gpus if certain or not gpus else None
