"""Which process this is, in a form that another process can check later: does it still live?

A pid alone is used again. With the time at which the process started, the boot and the pid namespace it is unique.

Sources: proc(5), /proc/PID/stat and /proc/sys/kernel/random/boot_id; pid_namespaces(7).
"""

from __future__ import annotations

import os

from saferun.linux.procfs import read_stat
from saferun.linux.small_files import read_line, read_link
from saferun.model import Value

_ENDED = frozenset("ZX")


class ProcessIdentity(Value):
    """A process. ``start_ticks`` is 0, and the names are empty, where /proc does not have them."""

    pid: int
    start_ticks: int
    boot_id: str
    pid_namespace: str


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    pid = os.getpid()
    stat = read_stat(pid)
    return ProcessIdentity(pid, stat.start_ticks if stat is not None else 0, *_here())


def is_living(process: ProcessIdentity) -> bool | None:
    """Whether a process lives; None: it cannot be seen from here (another host or container, no /proc)."""
    boot_id, pid_namespace = _here()
    if not (process.start_ticks and boot_id and pid_namespace):
        return None
    if (process.boot_id, process.pid_namespace) != (boot_id, pid_namespace):
        return None
    stat = read_stat(process.pid)
    if stat is not None:
        return stat.start_ticks == process.start_ticks and stat.state not in _ENDED
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return None  # another user's, where /proc is mounted with hidepid


def _here() -> tuple[str, str]:
    return read_line("/proc/sys/kernel/random/boot_id"), read_link("/proc/self/ns/pid")
