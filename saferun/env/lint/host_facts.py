"""Facts of this host that the lint needs: interfaces, GPUs, and the paths that variables name."""

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
    """Collect the facts of this host for the lint of an environment. What cannot be read stays unknown.

    Args:
        environ: the environment of the ranks, whose paths are checked.
        proc_root: where procfs is mounted.
        sysfs_root: where sysfs is mounted.
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
    """Check a path, by names and permissions only, without opening it."""
    try:
        exists = os.path.exists(path)
        above = path
        while above and not os.path.exists(above):
            above = os.path.dirname(above.rstrip("/"))
        # A missing file needs a writable directory above it; an existing one must itself be writable.
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
        # CPU nodes have no SIMD units.
        nodes = _listed(f"{sysfs_root}/class/kfd/kfd/topology/nodes")
        counted = [node for node in nodes or () if _has_simd(f"{sysfs_root}/class/kfd/kfd/topology/nodes/{node}")]
        return len(counted) or None
    return None


def _has_simd(node: str) -> bool:
    fields = read_text(f"{node}/properties").split()
    # An unreadable node may be a GPU: count it, rather than risk a false alarm.
    return not fields or dict(zip(fields[::2], fields[1::2], strict=False)).get("simd_count", "0") != "0"
