"""Deletes the cores of subprocesses that crashed while their rank went on: without saferun there would be none.

The limit on cores that saferun raises for a rank holds for its subprocesses too, and a program may well expect some of
them to crash: a decoder that is run on each file, a probe for what a host can do.
"""

from __future__ import annotations

import os
from collections.abc import Collection

from saferun.linux.core_files import CoreFile, delete_core
from saferun.linux.core_notes import CoreError, CoreNotes, open_regular, read_core_notes
from saferun.linux.ownership import identity
from saferun.linux.procfs import children_of, read_stat
from saferun.model import Value

# A rank that fails because of a subprocess mostly does so at once, and one that waits for it until a timeout expires.
_NEEDED_S = 600.0
# The kernel writes the notes first.
_NOTES_S = 60.0
_AGAIN_S = 0.5
_ANCESTORS_LIMIT = 64


class _Core(Value):
    """A core of a subprocess of a rank: the rank's pid, and when the core was found, in monotonic seconds."""

    core: CoreFile
    rank_pid: int
    at: float


class HandledCores:
    """Keeps the newest core of each rank's subprocesses for ten minutes, in case the rank fails because of that crash.

    A core is deleted only if the process in its notes is provably a subprocess of a rank. A rank's own core is left to
    the examiner, and so are those of the subprocesses of a rank that has failed.

    Args:
        owner_pid: the parent of the ranks.
        ranks: pids of its children up to now; a subprocess may outlive its rank.
        spared: how many cores, the newest ones, are not deleted at all; above 0 only these count.
    """

    def __init__(self, owner_pid: int, ranks: Collection[int] = (), *, spared: int = 0) -> None:
        self._owner_pid = owner_pid
        self._spared = spared
        self._ranks = set(ranks)
        self._failed: set[int] = set()
        self._unread: dict[str, float] = {}
        self._cores: list[_Core] = []

    def add(self, path: str, now: float) -> None:
        """A core has appeared, of whatever process."""
        self._ranks.update(children_of(self._owner_pid))
        self._unread[path] = now

    def hand_over(self, rank_pids: Collection[int]) -> None:
        """These ranks have failed: the examiner reads the cores of their subprocesses, and deletes or keeps them."""
        self._failed.update(rank_pids)
        self._cores = [one for one in self._cores if not self._is_examined(one)]

    def trim(self, now: float) -> float | None:
        """Delete the cores that are not needed any more. Returns after how many seconds to call again; None: never."""
        self._read(now)
        kept: list[_Core] = []
        ranks: set[int] = set()
        for one in reversed(self._cores):
            is_needed = len(kept) < self._spared if self._spared else one.rank_pid not in ranks
            if is_needed and (self._spared or now - one.at < _NEEDED_S):
                ranks.add(one.rank_pid)
                kept.append(one)
            else:
                delete_core(one.core)
        self._cores = kept[::-1]
        if self._unread:
            return _AGAIN_S
        return min((one.at + _NEEDED_S - now for one in kept), default=None) if not self._spared else None

    def sweep(self, now: float) -> None:
        """Delete all cores but those that are spared: the run has ended."""
        self.trim(now)
        if not self._spared:
            for one in self._cores:
                delete_core(one.core)
            self._cores = []

    def _read(self, now: float) -> None:
        """Find out which processes the new cores are of."""
        for path, since in list(self._unread.items()):
            try:
                fd = open_regular(path)
                try:
                    notes, inode = read_core_notes(fd, whole=False), identity(fd)
                finally:
                    os.close(fd)
            except (CoreError, OSError):
                if now - since > _NOTES_S or not os.path.lexists(path):
                    del self._unread[path]
                continue
            del self._unread[path]
            rank_pid = self._rank_of(notes)
            if rank_pid:
                one = _Core(CoreFile(path, notes, inode), rank_pid, since)
                if not self._is_examined(one):
                    self._cores.append(one)

    def _rank_of(self, notes: CoreNotes) -> int:
        """The rank that a process was a subprocess of; 0: unknown, or it was a rank itself."""
        if notes.ppid == self._owner_pid and notes.sid == notes.pid:
            return 0  # a rank leads a session
        for pid in (notes.sid, notes.ppid):
            stat = read_stat(pid)
            if pid in self._ranks and (stat is None or stat.ppid == self._owner_pid):
                return pid
        pid = notes.ppid
        for _ in range(_ANCESTORS_LIMIT):
            stat = read_stat(pid)
            if stat is None:
                break
            if stat.ppid == self._owner_pid:
                return pid
            pid = stat.ppid
        return 0

    def _is_examined(self, one: _Core) -> bool:
        notes = one.core.notes
        return one.rank_pid in self._failed and notes is not None and bool(self._failed & {notes.sid, notes.ppid})
