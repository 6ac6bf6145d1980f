"""What this host has, as far as the lint asks: interfaces, GPUs, and what the paths are that variables name."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping

from saferun.env.lint.known_names import HostFacts, PathFact
from saferun.env.lint.rules import paths_to_examine
from saferun.linux.gpus import gpu_vendor
from saferun.linux.small_files import read_text

_DRIVER_GPUS = "driver/nvidia/gpus"  # below /proc: one folder for each GPU, those that a job may not use included


def read_host_facts(environ: Mapping[str, str], *, proc_root: str = "/proc", sysfs_root: str = "/sys") -> HostFacts:
    """The facts of this host that a lint of this environment needs. What cannot be read is left unknown.

    Args:
        environ: the environment of the ranks, whose paths are looked at.
        proc_root: where procfs is.
        sysfs_root: where sysfs is.
    """
    vendor = gpu_vendor(sysfs_root)
    return HostFacts(
        interfaces=_interfaces(),
        ib_devices=_listed(f"{sysfs_root}/class/infiniband"),
        gpu_count=_count_gpus(vendor, proc_root, sysfs_root),
        vendor=vendor or "",
        paths={path: examine(path) for path in paths_to_examine(environ)},
    )


def examine(path: str) -> PathFact:
    """What a path is. Looks at names and permissions only, and opens nothing."""
    try:
        exists = os.path.exists(path)
        above = path
        while above and not os.path.exists(above):
            above = os.path.dirname(above.rstrip("/"))
        # What has to be made below it needs a directory; what is there is written to as it is.
        may_be_made = os.access(above or ".", os.W_OK) and (exists or os.path.isdir(above or "."))
        return PathFact(exists, os.path.isdir(path), may_be_made)
    except (OSError, ValueError):
        return PathFact(exists=False, is_directory=False, may_be_made=False)


def _interfaces() -> frozenset[str] | None:
    try:
        return frozenset(name for _, name in socket.if_nameindex())
    except OSError:
        return None


def _listed(directory: str) -> frozenset[str] | None:
    try:
        return frozenset(os.listdir(directory))
    except FileNotFoundError:
        return frozenset()
    except OSError:
        return None


def _count_gpus(vendor: str | None, proc_root: str, sysfs_root: str) -> int | None:
    if vendor == "nvidia":
        gpus: Iterable[str] | None = _listed(f"{proc_root}/{_DRIVER_GPUS}")
        return len(list(gpus)) or None if gpus is not None else None
    if vendor == "amd":
        # The processors among the nodes have no SIMD units.
        nodes = _listed(f"{sysfs_root}/class/kfd/kfd/topology/nodes")
        counted = [node for node in nodes or () if _has_simd(f"{sysfs_root}/class/kfd/kfd/topology/nodes/{node}")]
        return len(counted) or None
    return None


def _has_simd(node: str) -> bool:
    words = read_text(f"{node}/properties").split()
    # One that may not be read may be a GPU: better one too many than a false alarm.
    return not words or dict(zip(words[::2], words[1::2], strict=False)).get("simd_count", "0") != "0"
