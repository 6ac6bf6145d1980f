"""Whether processes are at work: CPU time used, bytes read and written, waiting for a disk.

Sources: proc_pid_stat(5); proc_pid_io(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

# Below this a family does what a process that waits does: it wakes up now and then, and looks.
_WORK_CPU_S = 0.01
_WORK_BYTES = 4096
_BYTES = frozenset({b"rchar", b"wchar", b"read_bytes", b"write_bytes"})
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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
    cpu_s, size_bytes, waits_for_disk = 0.0, 0, False
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            content = file.read()
        # The name stands in parentheses and may itself hold spaces and parentheses.
        fields = content[content.rfind(b")") + 2 :].split()
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        waits_for_disk = fields[0] == b"D"
        with open(f"/proc/{pid}/io", "rb") as file:  # another user's may not be read
            for line in file.read().splitlines():
                name, _, number = line.partition(b": ")
                size_bytes += int(number) if name in _BYTES else 0
    except (OSError, ValueError, IndexError):
        pass
    return cpu_s, size_bytes, waits_for_disk
