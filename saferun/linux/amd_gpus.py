"""The state of AMD's GPUs from sysfs, for hosts without ROCm's tools, or where they are not to be run.

Source: Linux, Documentation/gpu/amdgpu (RAS: ``ue``, ``ce``, ``gpu_vram_bad_pages``), and
drivers/gpu/drm/amd/amdkfd/kfd_process.c for /sys/class/kfd/kfd/proc.
"""

from __future__ import annotations

import os

from saferun.linux.gpu_reading import Snapshot, owned
from saferun.linux.small_files import list_directory, read_line, read_text
from saferun.model import JsonObject

SYSFS_STEP = "amdgpu's files in sysfs"
_AMD = "0x1002"


def read_amd_sysfs(snapshot: Snapshot, ours: frozenset[int], sysfs_root: str = "/sys") -> None:
    """Fill a snapshot from the files of amdgpu and amdkfd. No tool is run.

    Args:
        snapshot: the snapshot to fill.
        ours: the pids of the job.
        sysfs_root: where sysfs is mounted.
    """
    snapshot.step = SYSFS_STEP
    snapshot.facts["source"] = "sysfs"
    if driver := read_line(f"{sysfs_root}/module/amdgpu/version"):
        snapshot.facts["driver"] = driver
    kfd_ids = read_kfd_ids(sysfs_root)
    drm = f"{sysfs_root}/class/drm"
    cards = [name for name in list_directory(drm) if name.startswith("card") and name[4:].isdigit()]
    devices = [f"{drm}/{name}/device" for name in sorted(cards, key=lambda name: int(name[4:]))]
    amd = [device for device in devices if read_line(f"{device}/vendor") == _AMD]
    for index, device in enumerate(amd):
        gpu: JsonObject = {"index": index, "pci": os.path.basename(os.path.realpath(device))}
        snapshot.gpus.append(gpu)
        for key, name in (
            ("busy_percent", "gpu_busy_percent"),
            ("memory_used_bytes", "mem_info_vram_used"),
            ("memory_total_bytes", "mem_info_vram_total"),
            ("pcie_width", "current_link_width"),
            ("pcie_width_max", "max_link_width"),
        ):
            if (value := read_line(f"{device}/{name}")).isdigit():
                gpu[key] = int(value)
        if name := read_line(f"{device}/product_name"):
            gpu["name"] = name
        _read_ras(gpu, device)
        _read_bad_pages(gpu, device)
        if (kfd_id := kfd_ids.get(gpu["pci"])) is not None:
            gpu["processes"] = owned(_read_kfd_processes(sysfs_root, kfd_id), ours)


def _read_ras(gpu: JsonObject, device: str) -> None:
    counts = {"ue": 0, "ce": 0}
    known = False
    for name in list_directory(f"{device}/ras"):
        if not name.endswith("_err_count"):
            continue
        for line in read_text(f"{device}/ras/{name}", 4096).splitlines():
            kind, _, count = line.partition(":")
            if kind in counts and count.strip().isdigit():
                known = True
                counts[kind] += int(count)
    if known:
        gpu["ecc_uncorrected"], gpu["ecc_corrected"] = counts["ue"], counts["ce"]


def _read_bad_pages(gpu: JsonObject, device: str) -> None:
    """Read pages that will be reserved at the next reset: ``0x00000001 : 0x00001000 : P``."""
    path = f"{device}/ras/gpu_vram_bad_pages"
    if os.access(path, os.R_OK):
        lines = read_text(path, 65536).splitlines()
        gpu["retirement_pending"] = any(line.rpartition(":")[2].strip() == "P" for line in lines)


def read_kfd_ids(sysfs_root: str, *, with_apus: bool = True) -> dict[str, str]:
    """The compute driver's GPU IDs by PCI address (``0000:83:00.0``).

    Args:
        sysfs_root: where sysfs is mounted.
        with_apus: whether a GPU counts that is a part of a processor.
    """
    nodes = f"{sysfs_root}/class/kfd/kfd/topology/nodes"
    found: dict[str, str] = {}
    for node in list_directory(nodes):
        kfd_id = read_line(f"{nodes}/{node}/gpu_id")
        if kfd_id in {"", "0"}:
            continue  # processors
        lines = [line.split() for line in read_text(f"{nodes}/{node}/properties").splitlines()]
        properties = {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
        if not properties or (properties.get("cpu_cores_count", 0) > 0 and not with_apus):
            continue
        location = properties.get("location_id", 0)
        bus, slot, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
        found[f"{properties.get('domain', 0):04x}:{bus:02x}:{slot:02x}.{function}"] = kfd_id
    return found


def _read_kfd_processes(sysfs_root: str, kfd_id: str) -> list[tuple[int, int | None, str]]:
    processes = f"{sysfs_root}/class/kfd/kfd/proc"
    found: list[tuple[int, int | None, str]] = []
    for pid in list_directory(processes):
        used = read_line(f"{processes}/{pid}/vram_{kfd_id}")
        if pid.isdigit() and used.isdigit() and int(used) > 0:
            found.append((int(pid), int(used), ""))
    return found
