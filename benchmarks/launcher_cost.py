"""The processes that a benchmark has started, and what they cost: processor time, memory, wake-ups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

MARK = "BENCHMARK_RUN"
"""Every process a benchmark starts inherits this variable; that is how it is found again, reparented or not."""


class BenchmarkError(SystemExit):
    """A side did not do its work, so there is nothing to measure: uncaught, it ends the benchmark with these words."""


def marked_pids(mark: str, *, without_ranks: bool = False) -> list[int]:
    """Every live process that carries the mark, this one excepted; `without_ranks` leaves only launcher processes.

    Ranks, and what they start, are known by LOCAL_RANK in their environment.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            variables = Path("/proc", entry, "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"{MARK}={mark}".encode() not in variables:
            continue
        if not without_ranks or not any(variable.startswith(b"LOCAL_RANK=") for variable in variables):
            found.append(int(entry))
    return sorted(found)


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of live processes together, in seconds; threads that have ended are counted.

    The clock of another process, of nanosecond resolution: clock_getcpuclockid(3), whose number is made like this.
    """
    return sum(time.clock_gettime_ns((~pid << 3) | 2) for pid in pids) / 1e9


def user_s(pids: Iterable[int]) -> float:
    """The part of it that was spent outside of the kernel, in steps of a clock tick (10 ms), see proc(5)."""
    # The name in parentheses may hold spaces; user time is the 14th field, the 12th after it.
    stats = [Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(fields[11]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def settle(pids: Callable[[], list[int]], share: float = 0.03, window_s: float = 0.25, timeout_s: float = 120) -> None:
    """Returns when the processes are at rest: the same ones, below `share` of a core, in two windows on end."""
    deadline = time.monotonic() + timeout_s
    quiet = 0
    while quiet < 2:
        if time.monotonic() > deadline:
            message = f"launcher processes not at rest after {timeout_s:g} s"
            raise BenchmarkError(message)
        before = pids()
        try:
            used = -cpu_s(before)
            time.sleep(window_s)
            used += cpu_s(before)
        except OSError:  # one of them ended inside the window
            quiet = 0
            continue
        quiet = quiet + 1 if before and pids() == before and used < share * window_s else 0


class Memory(NamedTuple):
    """Memory of one process in MiB: resident, highest resident, and proportional (shared pages divided)."""

    rss_mib: float
    peak_mib: float
    pss_mib: float


def read_memory(pid: int) -> Memory:
    """Reads /proc/PID/status and /proc/PID/smaps_rollup, see proc(5)."""
    numbers: dict[str, float] = {}
    for name in ("status", "smaps_rollup"):
        for line in Path("/proc", str(pid), name).read_text().splitlines():
            key, _, rest = line.partition(":")
            if rest.endswith(" kB"):
                numbers.setdefault(key, int(rest.split()[0]) / 1024)
    return Memory(numbers["VmRSS"], numbers["VmHWM"], numbers["Pss"])


def read_wakeups(pid: int) -> int:
    """How often the process's threads have gone to sleep so far: voluntary context switches, see proc(5)."""
    total = 0
    for status in Path("/proc", str(pid), "task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total


def role_of(pid: int, launcher_pid: int) -> str:
    """The name a launcher process goes by in tables: supervisor, coordinator, its own (``sr-writer``) or helper."""
    if pid == launcher_pid:
        return "supervisor"
    name = Path("/proc", str(pid), "comm").read_text(encoding="utf-8", errors="replace").strip()
    if name.startswith("sr-"):
        return name
    arguments = Path("/proc", str(pid), "cmdline").read_bytes()
    return "coordinator" if b"coordinator" in arguments else "helper"
