"""What ranks use of their host: memory and processors with all their descendants, and the GPUs of the host.

Memory is what /proc/PID/statm has as resident: pages that processes share count in each of them. Nothing is read that
blocks on the lock of another process's memory. Source: proc(5).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence

from saferun.captures.gpu_amd import capture_gpu_amd
from saferun.captures.gpu_nvidia import capture_gpu_nvidia
from saferun.linux.procfs import descendants_of, read_stat
from saferun.linux.small_files import read_bytes
from saferun.model import JsonObject

BUDGET_S = 3.0
# Between the two looks at how much CPU time has been used.
_BETWEEN_S = 0.25
_MOST_PROCESSES = 4096


def usage_json(pids: Sequence[int]) -> bytes:
    """``{"ranks": {PID: {"rss_bytes", "cpu_percent", "processes", "state"}}, "gpus": […], …}`` as JSON.

    Args:
        pids: of the ranks.
    """
    deadline = time.monotonic() + BUDGET_S
    families = {pid: [pid, *descendants_of(pid)][:_MOST_PROCESSES] for pid in pids}
    began, before = time.monotonic(), _cpu_s(families)
    gpus = _gpus(pids, deadline)
    time.sleep(max(0.0, began + _BETWEEN_S - time.monotonic()))
    ended, after = time.monotonic(), _cpu_s(families)
    ranks = {}
    for pid, family in families.items():
        stat = read_stat(pid)
        used_s = sum(after[one] - before[one] for one in family if one in before and one in after)
        ranks[str(pid)] = {
            "state": stat.state if stat is not None else "",
            "rss_bytes": sum(map(_rss_bytes, family)),
            "cpu_percent": round(100 * used_s / (ended - began)),
            "processes": len(family),
        }
    return json.dumps({"ranks": ranks, "cpus": os.cpu_count() or 0, "memory": _memory(), **gpus}).encode()


def _cpu_s(families: dict[int, list[int]]) -> dict[int, float]:
    pids = {pid for family in families.values() for pid in family}
    return {pid: stat.cpu_s for pid in pids if (stat := read_stat(pid)) is not None}


def _rss_bytes(pid: int) -> int:
    fields = read_bytes(f"/proc/{pid}/statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGESIZE") if len(fields) > 1 else 0


def _memory() -> JsonObject:
    found = {}
    for line in read_bytes("/proc/meminfo").splitlines():
        name, _, rest = line.partition(b":")
        if name in {b"MemTotal", b"MemAvailable"}:
            found[name.decode()] = int(rest.split()[0]) << 10
    return {"total_bytes": found.get("MemTotal", 0), "available_bytes": found.get("MemAvailable", 0)}


def _gpus(pids: Sequence[int], deadline: float) -> JsonObject:
    """The host's GPUs, as the driver has them by the deadline; without GPUs there are none."""
    for capture in (capture_gpu_nvidia, capture_gpu_amd):
        content = capture(pids, deadline).content
        if content:
            return {"gpus": content.get("gpus", []), "stuck_in": content.get("stuck_in", "")}
    return {"gpus": [], "stuck_in": ""}
