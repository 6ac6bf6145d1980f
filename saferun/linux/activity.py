"""Whether processes work: CPU time, bytes written and read from disks, waiting for a disk, open connections.

What is measured is a rate over a while, because tools that only observe (a logger, ``watch``, ``tail -f``,
``nvidia-smi -l``) do a little again and again.

Sources: proc_pid_stat(5); proc_pid_io(5); proc_pid_wchan(5).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from saferun.linux.procfs import is_fuse_wait, read_stat, waits_uninterruptibly
from saferun.linux.small_files import list_directory, read_bytes
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.connections import Connections

# Compression and conversion take most of a processor. `top`, `vmstat`, `watch ps` and loops of `date`, once a second,
# take 0.1 to 2 % of one.
_WORK_CPU_SHARE = 0.1
# A copy slower than this sleeps in the kernel most of the time, and counts as waiting for a disk. The same tools write
# 1 to 20 KB/s. What they read is left out: up to 600 KB/s, nearly all of it from /proc.
_WORK_BYTES_PER_S = 64 << 10
_BYTES = frozenset({b"wchar", b"read_bytes", b"write_bytes"})
# After its last connection a process may wait for so long before it tries again (urllib3, Retry.DEFAULT_BACKOFF_MAX).
_AFTER_CONNECTION_S = 120.0
_CONNECTIONS_EVERY_S = 2.0


class _Reading(Value):
    """One process: CPU seconds and bytes so far, and whether it waits for a file system."""

    cpu_s: float = 0.0
    size_bytes: int = 0
    waits: bool = False


class _Tree:
    """What a process tree has done since ``idle_since``, in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.idle_since = now
        self.cpu_s = 0.0
        self.size_bytes = 0


class Activity:
    """For how long process trees have been idle.

    A tree is sampled as a whole: a shell waits for the program that it has started, and is idle itself. Trees that are
    connected with each other count as one. To start short-lived processes is no work by itself.

    Args:
        window_s: over how many seconds the rates are measured.
        connections: see :func:`saferun.linux.connections.connections_of`; None: that one, imported when it is needed.
    """

    def __init__(
        self,
        window_s: float,
        connections: Callable[[Collection[int], Iterable[int]], Connections] | None = None,
    ) -> None:
        self._window_s = window_s
        self._find_connections = connections
        self._trees: dict[int, _Tree] = {}  # by each of its processes
        self._readings: dict[int, _Reading] = {}
        self._connected: frozenset[int] = frozenset()
        self._pairs: frozenset[tuple[int, int]] = frozenset()
        self._connections_at = float("-inf")

    def sample(self, pids: Sequence[int], now: float, others: Iterable[int] = ()) -> list[tuple[list[int], float]]:
        """Sample processes.

        Args:
            pids: the processes; parents come before their children.
            now: monotonic seconds.
            others: processes of the same job, a connection to which is no work.

        Returns:
            The processes of each tree, and for how many seconds it has been idle; 0 or less: it works.
        """
        readings = {pid: _read(pid, self._readings.get(pid)) for pid in pids}
        self._update_connections(pids, now, others)
        trees = dict[int, _Tree]()
        sampled = []
        for members in _joined(_families(pids), self._pairs):
            tree = self._tree_of(members, now)
            is_known = any(pid in self._readings for pid in members)
            for pid in members:
                trees[pid] = tree
                # A process that was not there at the last sample has done all of it since.
                before = self._readings.get(pid, _Reading() if is_known else readings[pid])
                tree.cpu_s += max(0.0, readings[pid].cpu_s - before.cpu_s)
                tree.size_bytes += max(0, readings[pid].size_bytes - before.size_bytes)
            waits = any(readings[pid].waits for pid in members)
            self._rate(tree, now, waits=waits, connected=not self._connected.isdisjoint(members))
            sampled.append((members, now - tree.idle_since))
        self._trees, self._readings = trees, readings
        return sampled

    def make_up_for(self, lost_s: float) -> None:
        """Time passed in which the processes may have been suspended: it is no time in which they were idle."""
        for tree in set(self._trees.values()):
            tree.idle_since += lost_s

    def _tree_of(self, members: Iterable[int], now: float) -> _Tree:
        """The tree that these processes were in; if in several, the one that was active last."""
        known = [self._trees[pid] for pid in members if pid in self._trees]
        return max(known, key=lambda tree: tree.idle_since) if known else _Tree(now)

    def _rate(self, tree: _Tree, now: float, *, waits: bool, connected: bool) -> None:
        works = tree.cpu_s >= _WORK_CPU_SHARE * self._window_s or tree.size_bytes >= _WORK_BYTES_PER_S * self._window_s
        if not (works or waits or connected):
            return
        until = now + max(0.0, _AFTER_CONNECTION_S - self._window_s) if connected else now
        tree.idle_since = max(tree.idle_since, until)
        tree.cpu_s, tree.size_bytes = 0.0, 0

    def _update_connections(self, pids: Collection[int], now: float, others: Iterable[int]) -> None:
        if now - self._connections_at < _CONNECTIONS_EVERY_S:
            return
        self._connections_at = now
        try:
            if self._find_connections is None:
                from saferun.linux.connections import connections_of

                self._find_connections = connections_of
            found = self._find_connections(pids, others)
            self._connected, self._pairs = found.outside, found.pairs
        except (ImportError, OSError):
            self._connected = frozenset(pids)  # whether there are any is unknown


def _families(pids: Iterable[int]) -> list[list[int]]:
    """The processes by tree; parents come before their children."""
    families: dict[int, list[int]] = {}
    root_of: dict[int, int] = {}
    for pid in pids:
        stat = read_stat(pid)
        parent = stat.ppid if stat is not None else 0
        root_of[pid] = root_of.get(parent, pid)
        families.setdefault(root_of[pid], []).append(pid)
    return list(families.values())


def _joined(families: list[list[int]], pairs: Iterable[tuple[int, int]]) -> list[list[int]]:
    """The same, those that are connected with each other as one."""
    by_pid = {pid: family for family in families for pid in family}
    for one, other in pairs:
        first, second = by_pid.get(one), by_pid.get(other)
        if first is not None and second is not None and first is not second:
            first += second
            by_pid.update(dict.fromkeys(second, first))
    return list({id(family): family for family in by_pid.values()}.values())


def _read(pid: int, before: _Reading | None) -> _Reading:
    """One process; zeros if it has exited. ``before``: the reading before this one."""
    stat = read_stat(pid)
    if stat is None:
        return _Reading()
    if waits_uninterruptibly(pid) or _waits_for_fuse(pid):
        # It counts as being at work anyway, and before Linux 5.7 the numbers are waited for while it is in exec.
        return _Reading(stat.cpu_s, before.size_bytes if before is not None else 0, waits=True)
    # Another user's is not readable.
    pairs = (line.partition(b": ") for line in read_bytes(f"/proc/{pid}/io").splitlines())
    size_bytes = sum(int(number) for name, _, number in pairs if name in _BYTES and number.isdigit())
    return _Reading(stat.cpu_s, size_bytes)


def _waits_for_fuse(pid: int) -> bool:
    """Whether a thread waits for a file system whose server is a process: that sleep is often not in state D."""
    return any(
        is_fuse_wait(read_bytes(f"/proc/{pid}/task/{task}/wchan")) for task in list_directory(f"/proc/{pid}/task")
    )
