"""Whose GPUs a host shows, from device nodes and sysfs alone. Asked at every start, so it imports next to nothing."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal


def gpu_vendor(sysfs_root: str = "/sys", *, dev_root: str = "/dev") -> Literal["nvidia", "amd"] | None:
    """Whose GPUs this host shows; NVIDIA's where both are there (the other is then nearly always the processor's own).

    Only device nodes and sysfs are looked at: an answer does not say that the driver works.
    """
    # NVML talks to this node before anything else: without it, neither its library nor /proc/driver/nvidia is of use.
    if os.path.exists(f"{dev_root}/nvidiactl"):
        return "nvidia"
    return None if read_kfd_gpus(sysfs_root, dev_root) == [] else "amd"


def read_kfd_gpus(sysfs_root: str = "/sys", dev_root: str = "/dev") -> list[str] | None:
    """The GPUs that AMD's kernel driver offers this process, by UUID (empty where a GPU has none).

    An empty list where there are none; None where there are some and it is uncertain which of them a process can use.

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
            continue  # processors
        render_node = f"{dev_root}/dri/renderD{properties.get('drm_render_minor', 0)}"
        # A node that is both (the processor's own GPU, in old kernels), or that names no instruction set, is one that
        # some releases of ROCm pass over.
        if properties.get("cpu_cores_count", 0) > 0 or properties.get("gfx_target_version", 0) == 0:
            certain = False
        certain = certain and os.access(render_node, os.R_OK | os.W_OK)
        unique_id = properties.get("unique_id", 0)
        gpus.append(f"GPU-{unique_id:016x}" if unique_id else "")
    return gpus if certain or not gpus else None
