"""Whether processes are at work: CPU time used, bytes read and written, waiting for a disk.

Sources: proc_pid_stat(5); proc_pid_io(5).
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.linux.procfs import read_stat
from saferun.linux.small_files import read_bytes

# Below this a family does what a process that waits does: it wakes up now and then, and looks.
_WORK_CPU_S = 0.01
_WORK_BYTES = 4096
_BYTES = frozenset({b"rchar", b"wchar", b"read_bytes", b"write_bytes"})


class Activity:
    """When families of processes did something last.

    A family is looked at as one: a shell waits for the program that it has started, and does nothing itself.
    """

    def __init__(self) -> None:
        self._families: dict[int, tuple[float, float, int, frozenset[int]]] = {}

    def look(self, family: int, pids: Iterable[int], now: float) -> float:
        """Look at a family's processes.

        Args:
            family: stands for the family.
            pids: its processes.
            now: monotonic seconds.

        Returns:
            When the family was last at work, in monotonic seconds: used CPU time, read or wrote anything, waited for a
            disk, or began or ended a process.
        """
        members = frozenset(pids)
        cpu_s, size_bytes, waits_for_disk = 0.0, 0, False
        for pid in members:
            one = _read(pid)
            cpu_s += one[0]
            size_bytes += one[1]
            waits_for_disk = waits_for_disk or one[2]
        known = self._families.get(family)
        if (
            known is not None
            and not waits_for_disk
            and members == known[3]
            and cpu_s - known[1] < _WORK_CPU_S
            and size_bytes - known[2] < _WORK_BYTES
        ):
            return known[0]
        self._families[family] = (now, cpu_s, size_bytes, members)
        return now


def _read(pid: int) -> tuple[float, int, bool]:
    """CPU seconds, bytes read and written, and whether it is in an uninterruptible sleep; zeros where it is gone."""
    stat = read_stat(pid)
    if stat is None:
        return 0.0, 0, False
    # Another user's may not be read.
    pairs = (line.partition(b": ") for line in read_bytes(f"/proc/{pid}/io").splitlines())
    size_bytes = sum(int(number) for name, _, number in pairs if name in _BYTES and number.isdigit())
    return stat.cpu_s, size_bytes, stat.state == "D"
