"""Whether processes are active: CPU time used, bytes read and written, waiting for a disk.

Sources: proc_pid_stat(5); proc_pid_io(5).
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.linux.procfs import read_stat
from saferun.linux.small_files import read_bytes

# Below this a process tree only waits: such processes wake up now and then to poll.
_WORK_CPU_S = 0.01
_WORK_BYTES = 4096
_BYTES = frozenset({b"rchar", b"wchar", b"read_bytes", b"write_bytes"})


class Activity:
    """When process trees were last active.

    A tree is sampled as a whole: a shell waits for the program that it has started, and is idle itself.
    """

    def __init__(self) -> None:
        self._trees: dict[int, tuple[float, float, int, frozenset[int]]] = {}

    def sample(self, root: int, pids: Iterable[int], now: float) -> float:
        """Sample the processes of a tree.

        Args:
            root: identifies the tree.
            pids: its processes.
            now: monotonic seconds.

        Returns:
            When the tree was last active, in monotonic seconds: used CPU time, read or wrote anything, waited for a
            disk, or started or ended a process.
        """
        members = frozenset(pids)
        cpu_s, size_bytes, waits_for_disk = 0.0, 0, False
        for pid in members:
            one = _read(pid)
            cpu_s += one[0]
            size_bytes += one[1]
            waits_for_disk = waits_for_disk or one[2]
        known = self._trees.get(root)
        if (
            known is not None
            and not waits_for_disk
            and members == known[3]
            and cpu_s - known[1] < _WORK_CPU_S
            and size_bytes - known[2] < _WORK_BYTES
        ):
            return known[0]
        self._trees[root] = (now, cpu_s, size_bytes, members)
        return now


def _read(pid: int) -> tuple[float, int, bool]:
    """CPU seconds, bytes read and written, and whether it is in uninterruptible sleep; zeros if it has exited."""
    stat = read_stat(pid)
    if stat is None:
        return 0.0, 0, False
    # Another user's is not readable.
    pairs = (line.partition(b": ") for line in read_bytes(f"/proc/{pid}/io").splitlines())
    size_bytes = sum(int(number) for name, _, number in pairs if name in _BYTES and number.isdigit())
    return stat.cpu_s, size_bytes, stat.state == "D"
