"""The number of ranks that ``--nproc-per-node auto|cpu|gpu|xpu|<backend>`` stands for on this host.

torchrun asks torch, which takes seconds before the first rank runs. Here the driver is asked, and torch only if its
answer might differ: see ``resolve_nproc_per_node``.

Neither NVIDIA's management library nor torch is loaded into this process: both run in a child with a deadline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from saferun.linux.gpu_drivers import (
    NvmlLike,
    NvmlReading,
    count_visible_amd,
    count_visible_nvidia,
    parse_cuda_visible_devices,
    read_nvml,
    read_nvml_apart,
)
from saferun.linux.gpu_nodes import gpu_vendor, read_kfd_gpus
from saferun.linux.installed_torch import (
    TorchBuild,
    ask_torch,
    may_load_backends,
    read_torch_build,
    refuse,
    refuse_name,
)

__all__ = ["ask_torch", "count_cpus", "count_gpus", "gpu_vendor", "resolve_nproc_per_node", "shows_accelerators"]

# More than any host has CPUs: a typing error that would bring the host down.
MAX_LOCAL_WORLD_SIZE = 4096
NVML_TIMEOUT_S = 15.0

# Prefixes of names below /dev: GPUs, NVIDIA's boards with an integrated GPU, GPUs that Windows passes through, and
# accelerators of other vendors, some of which come with a torch that calls them "cuda".
_DEVICE_NAMES = (
    *("nvidia", "kfd", "dri", "nvhost", "nvmap", "nvgpu", "dxg", "accel", "hl", "davinci", "iluvatar"),
    *("mxcd",),
)
# PCI classes of 3D controllers, other display controllers and processing accelerators. Plain VGA (0x0300) is left out:
# nearly every server has such a chip for its console, and a real GPU of that class has a node below /dev.
_PCI_CLASSES = ("0x0302", "0x0380", "0x12")


def shows_accelerators(sysfs_root: str = "/sys", *, dev_root: str = "/dev") -> bool:
    """Whether this host may have a GPU or another accelerator of any vendor, with or without a driver."""
    try:
        names = os.listdir(dev_root)
    except OSError:
        return True
    return any(name.startswith(_DEVICE_NAMES) for name in names) or _has_pci_accelerator(
        f"{sysfs_root}/bus/pci/devices"
    )


def _has_pci_accelerator(devices: str) -> bool:
    try:
        for name in os.listdir(devices):
            with open(f"{devices}/{name}/class", encoding="ascii") as file:
                if file.read().startswith(_PCI_CLASSES):
                    return True
    except FileNotFoundError:
        return False  # no PCI bus
    except OSError:
        return True
    return False


def count_cpus() -> int:
    """How many CPUs this process may run on, which is torch's count for ``cpu``.

    Releases of torch before 2.13 may count all of the host's, even if a scheduler has granted a few.

    Source: sched_getaffinity(2). Like torch, it ignores a cgroup's CPU quota.
    """
    return len(os.sched_getaffinity(0))


def count_gpus(
    environ: Mapping[str, str],
    *,
    sysfs_root: str = "/sys",
    nvml: NvmlLike | None = None,
    dev_root: str = "/dev",
    cuda: str | None = None,
) -> int | None:
    """How many CUDA or HIP devices a rank with this environment would see; None if only torch can tell.

    Args:
        environ: the rank's environment: ``CUDA_VISIBLE_DEVICES``, ``HIP_VISIBLE_DEVICES``, ``ROCR_VISIBLE_DEVICES``.
        sysfs_root: where sysfs is mounted.
        nvml: a stand-in for ``pynvml``. The real one runs in a child, and only if NVIDIA's device nodes exist.
        dev_root: the directory of the device nodes.
        cuda: the CUDA release that the rank's torch was built with (``12.8``), None if that is not known. Such a torch
            ignores AMD's GPUs; and it may see no GPU at all with a driver of an older major release, which still lists
            every GPU.
    """
    vendor = gpu_vendor(sysfs_root, dev_root=dev_root)
    if vendor is None:
        return None if shows_accelerators(sysfs_root, dev_root=dev_root) else 0
    amd = read_kfd_gpus(sysfs_root, dev_root)
    if vendor == "amd":
        return None if amd is None else count_visible_amd(environ, amd)
    # CUDA needs the second node, unlike the driver's own tools: a container may lack it.
    if (amd != [] and cuda is None) or not os.path.exists(f"{dev_root}/nvidia-uvm"):
        return None
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is not None and parse_cuda_visible_devices(mask) == []:
        return 0  # whatever the driver reports
    reading = read_nvml(nvml) if nvml is not None else read_nvml_apart(NVML_TIMEOUT_S)
    if reading is None or not _serves(reading, cuda):
        return None
    return count_visible_nvidia(mask, reading)


def _serves(reading: NvmlReading, cuda: str | None) -> bool:
    if cuda is None:
        return True
    major = cuda.partition(".")[0]
    return major.isdecimal() and int(major) <= reading.cuda_major


def resolve_nproc_per_node(
    value: str, python: str, environ: Mapping[str, str], on_wait: Callable[[float], None] | None = None
) -> int:
    """The number of ranks that a value of ``--nproc-per-node`` stands for on this host, by torchrun's rules.

    A number stands for itself and ``cpu`` for the CPUs. Torch is asked about the rest, unless its answer is known
    beforehand. That is so if the ranks run under this very interpreter, so that the torch found here is theirs, and

    - for ``gpu`` and ``auto``: torch is built for CUDA or ROCm, the host has that vendor's GPUs, the driver serves
      torch's CUDA, no GPU uses MIG, and the driver counts at least one that the environment leaves visible;
    - for ``auto``: torch finds no accelerator here and counts the CPUs: torch is built for the CPU only, or the
    environment hides every GPU that torch is built for, or neither ``/dev`` nor the PCI bus shows an accelerator of any
    vendor; - for a name: no installed package provides a backend, so that none can have that name.

    For ``auto`` no installed package may provide a backend either: torch loads it automatically, and prefers it to
    CUDA. If there seem to be no GPUs for ``gpu``, torch is always asked: an error may take its time, and must be true.

    Args:
        value: as the user gave it.
        python: the ranks' interpreter.
        environ: the ranks' environment.
        on_wait: takes how long torch has taken so far, in seconds, once a minute.

    Raises:
        UsageError: torchrun would reject the value, or the number is out of bounds.
        SaferunError: the devices asked for are not there, or torch cannot be asked.
    """
    try:
        number = int(value)
    except ValueError:
        pass
    else:
        if not 1 <= number <= MAX_LOCAL_WORLD_SIZE:
            refuse(value, f"is not between 1 and {MAX_LOCAL_WORLD_SIZE}")
        return number
    if value == "cpu":
        return count_cpus()
    if not value.isidentifier():
        refuse(value, "is neither a number of ranks nor the name of a device")
    # Another interpreter, or the same one with another search path, may have another torch.
    if python == sys.executable and environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH"):
        build = read_torch_build()
        count = None if build is None else _count_for_build(value, build, environ)
        if count is not None:
            return count
    return ask_torch(python, value, environ) if on_wait is None else ask_torch(python, value, environ, on_wait)


def _count_for_build(value: str, build: TorchBuild, environ: Mapping[str, str]) -> int | None:
    """The count for a name of devices other than ``cpu``; None if only torch can tell."""
    if value == "gpu":
        return _count_gpus_for_build(build, environ) or None
    # A backend that has not been renamed is called privateuseone.
    if value in {"xpu", "privateuseone"} or may_load_backends(environ):
        return None
    if value != "auto":
        refuse_name(value)
    if build.for_cpu_only:
        return count_cpus()
    count = _count_gpus_for_build(build, environ)
    if count == 0 or (count is None and not shows_accelerators()):
        return count_cpus()
    return count


def _count_gpus_for_build(build: TorchBuild, environ: Mapping[str, str]) -> int | None:
    vendor = gpu_vendor()
    return count_gpus(environ, cuda=build.cuda) if vendor is not None and vendor == build.vendor else None
