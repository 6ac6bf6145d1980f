"""What may make a rank slow: clocks, temperature and faults of its GPU, and errors of its host's interfaces."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence

from saferun.captures import rdma_errors
from saferun.captures.gpu_amd import capture_gpu_amd
from saferun.captures.gpu_nvidia import capture_gpu_nvidia
from saferun.linux.gpu_reading import families_of
from saferun.linux.small_files import list_directory, read_line
from saferun.model import JsonObject

_BUDGET_S = 4.0
_MOST_NICS = 64
_ERRORS = ("rx_errors", "tx_errors")


def lines_beside(pids: Sequence[int], *, root: str = "/") -> list[str]:
    """One line each, the GPUs first. ``pids``: the slow ranks."""
    return [*_gpu_lines(pids), *_rdma_lines(root), *nic_lines(root)]


def beside_json(pids: Sequence[int]) -> bytes:
    """The same as JSON, as the examiner answers."""
    return json.dumps(lines_beside(pids)).encode()


def _gpu_lines(pids: Sequence[int]) -> Iterator[str]:
    for capture in (capture_gpu_nvidia, capture_gpu_amd):
        found = capture(pids, time.monotonic() + _BUDGET_S)
        if found.content:
            yield from clock_lines(found.content, families_of(pids))
            yield from found.lines


def clock_lines(content: JsonObject, pids: frozenset[int]) -> Iterator[str]:
    """Clocks and temperature of the GPUs that these processes use."""
    for gpu in content.get("gpus", ()):
        if not any(one["pid"] in pids for one in gpu.get("processes", ())):
            continue
        parts = []
        if gpu.get("clock_mhz"):
            highest = f" of {gpu['clock_max_mhz']:.0f}" if gpu.get("clock_max_mhz") else ""
            parts.append(f"clock {gpu['clock_mhz']:.0f}{highest} MHz")
        if gpu.get("temperature_c"):
            parts.append(f"{gpu['temperature_c']:.0f} °C")
        if parts:
            yield f"GPU {gpu['index']}: {', '.join(parts)}"


def _rdma_lines(root: str) -> Iterator[str]:
    if rdma_errors.is_remembered():
        yield from rdma_errors.capture_rdma_errors(root).lines


def nic_lines(root: str = "/") -> Iterator[str]:
    """Interfaces that have counted errors, since they came up: what they count while the job runs is not known."""
    base = f"{root.rstrip('/')}/sys/class/net"
    for name in list_directory(base)[:_MOST_NICS]:
        counts = {kind: read_line(f"{base}/{name}/statistics/{kind}") for kind in _ERRORS}
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count.isdecimal() and int(count))
        if shown and name != "lo":
            yield f"{name}: {shown} since it came up"
