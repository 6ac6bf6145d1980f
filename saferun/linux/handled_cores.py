"""Deletes the cores of subprocesses that crashed while their rank went on: without saferun there would be none.

The limit on cores that saferun raises for a rank holds for its subprocesses too, and a program may well expect some of
them to crash: a decoder that is run on each file, a probe for what a host can do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from saferun.linux.core_files import CoreFile, delete_core, open_core
from saferun.linux.core_notes import CoreError, CoreNotes, open_regular, read_core_notes, was_started_with
from saferun.linux.ownership import identity
from saferun.linux.procfs import children_of, read_stat
from saferun.model import Value

# A rank that fails because of a subprocess mostly does so at once, and one that waits for it until a timeout expires.
_NEEDED_S = 600.0
# The kernel writes the notes first.
_NOTES_S = 60.0
_AGAIN_S = 0.5
# Where one process of several crashes, the others may abort because of it: the first core has the cause.
_BURST_S = 60.0
_MOST_OF_A_BURST = 8
_ANCESTORS_LIMIT = 64


class _Core(Value):
    """A core of a subprocess of a rank: the rank's pid, and when the core was found, in monotonic seconds."""

    core: CoreFile
    rank_pid: int
    at: float


class HandledCores:
    """Keeps the newest cores of each rank's subprocesses for ten minutes, in case the rank fails because of a crash.

    With the newest one those of the minute before it are kept, at most eight, of which the oldest is one. They may not
    take more room together than there was for the cores of all ranks; the newest is kept in any case.

    A core is deleted only if the process in its notes is provably a subprocess of a rank. A rank's own core is left to
    the examiner, and so are those of the subprocesses of a rank that has failed.

    Args:
        owner_pid: the parent of the ranks.
        ranks: pids of its children up to now; a subprocess may outlive its rank.
        spared: how many cores, the newest ones, are not deleted at all; those of ranks that may fail come on top while
            the run goes on.
        room_bytes: how much they may take together; 0: unknown, and not bounded.
    """

    def __init__(self, owner_pid: int, ranks: Collection[int] = (), *, spared: int = 0, room_bytes: int = 0) -> None:
        self._owner_pid = owner_pid
        self._spared = spared
        self._room_bytes = room_bytes
        self._ranks = set(ranks)
        self._failed: set[int] = set()
        self._unread: dict[str, float] = {}
        self._cores: list[_Core] = []

    def add(self, path: str, now: float) -> None:
        """A core has appeared, of whatever process."""
        self._ranks.update(children_of(self._owner_pid))
        self._unread[path] = now

    def add_ranks(self, rank_pids: Collection[int]) -> None:
        """These are ranks, or were."""
        self._ranks.update(rank_pids)

    def add_found(self, core: CoreFile, run_entry: str, now: float) -> bool:
        """A core has been found by a search. Returns whether it is of a subprocess of a rank of this run.

        Args:
            core: with its notes.
            run_entry: what the environment of such a process has, ``NAME=value``.
            now: in monotonic seconds.
        """
        rank_pid = self._rank_of(core.notes) if core.notes is not None else 0
        if not rank_pid or any(one.core.inode == core.inode for one in self._cores):
            return False
        try:
            fd = open_core(core)
            try:
                is_of_run, modified_at = was_started_with(fd, run_entry), os.fstat(fd).st_mtime
            finally:
                os.close(fd)
        except (CoreError, OSError):
            return False
        one = _Core(core, rank_pid, now - max(time.time() - modified_at, 0.0))
        if not is_of_run or self._is_examined(one):
            return False
        self._cores.append(one)
        self._cores.sort(key=lambda found: found.at)
        return True

    def hand_over(self, rank_pids: Collection[int]) -> None:
        """These ranks have failed: the examiner reads the cores of their subprocesses, and deletes or keeps them."""
        self._failed.update(rank_pids)
        self._cores = [one for one in self._cores if not self._is_examined(one)]

    def trim(self, now: float) -> float | None:
        """Delete the cores that are not needed any more. Returns after how many seconds to call again; None: never."""
        self._read(now)
        spared = self._cores[-self._spared :] if self._spared else []
        needed = self._needed([one for one in self._cores if now - one.at < _NEEDED_S], spared)
        self._keep_only([*spared, *needed])
        if self._unread:
            return _AGAIN_S
        return min((one.at + _NEEDED_S - now for one in needed if one not in spared), default=None)

    def _needed(self, cores: Sequence[_Core], spared: Sequence[_Core]) -> list[_Core]:
        """Those that a failure of their rank may be due to, as many as there is room for beside those kept anyway."""
        by_rank: dict[int, list[_Core]] = {}
        for one in reversed(cores):
            newest_first = by_rank.setdefault(one.rank_pid, [])
            if not newest_first or newest_first[0].at - one.at <= _BURST_S:
                newest_first.append(one)
        # Of each rank in the order of how much they are needed: the newest, the oldest, and the others from the newest.
        ordered = [[found[0], *found[:0:-1][:1], *found[1:-1]][:_MOST_OF_A_BURST] for found in by_rank.values()]
        needed: list[_Core] = []
        used = sum(map(_disk_bytes, spared))
        for index in range(_MOST_OF_A_BURST):
            for one in (found[index] for found in ordered if index < len(found)):
                size_bytes = 0 if one in spared else _disk_bytes(one)
                if index == 0 or not size_bytes or not self._room_bytes or used + size_bytes <= self._room_bytes:
                    needed.append(one)
                    used += size_bytes
        return needed

    def _keep_only(self, kept: Collection[_Core]) -> None:
        for one in self._cores:
            if one not in kept:
                delete_core(one.core)
        self._cores = [one for one in self._cores if one in kept]

    def sweep(self, now: float) -> None:
        """Delete all cores but those that are spared: the run has ended."""
        self.trim(now)
        self._keep_only(self._cores[-self._spared :] if self._spared else [])

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


def _disk_bytes(one: _Core) -> int:
    try:
        return os.lstat(one.core.path).st_blocks * 512
    except OSError:
        return 0
