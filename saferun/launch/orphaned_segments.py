"""Shared memory that the ranks of an attempt leave in /dev/shm, and the end of it.

What a rank has mapped is known only while it lives, and reading that may wait for a rank in an uninterruptible sleep.
So a helper is forked before the ranks are stopped: it reads their maps at once, waits until they are gone, and then
removes what no other process uses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.children import await_exits, fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import die_with_parent
from saferun.linux.procfs import descendants_of
from saferun.model import ExitStatus

_LAST_S = 2.0


class OrphanedSegments:
    """The shared memory of one launch's attempts."""

    def __init__(self) -> None:
        self.deadline: float | None = None  # nothing is done by time
        self._pid: int | None = None
        self._write_end = -1

    def tick(self, now: float) -> None:
        """Nothing is done by time."""

    @property
    def pids(self) -> set[int]:
        """The helper process."""
        return {self._pid} if self._pid is not None else set()

    @property
    def is_noted(self) -> bool:
        """Whether the maps of this attempt's ranks have been read, or are being."""
        return self._pid is not None

    def note(self, pids: Sequence[int], since: float) -> None:
        """Read what these ranks, and all that came from them, have mapped now; once an attempt.

        Args:
            pids: the ranks.
            since: when they were started, in seconds since the epoch.
        """
        if self._pid is not None or not pids:
            return
        parent_pid = os.getpid()
        try:
            read_end, write_end = os.pipe()
        except OSError:  # no descriptor is left, and the ranks are stopped all the same
            return

        def remove_when_gone() -> None:
            die_with_parent(parent_pid)
            os.dup2(read_end, 0)
            close_all_but()
            from saferun.linux.shm_segments import remove_orphans, segments_of

            family = set(pids).union(*(descendants_of(pid) for pid in pids))
            paths = segments_of(family)
            # The end of the pipe says that they are gone.
            if os.read(0, 1) == b"x":
                remove_orphans(paths, family, since=since)

        try:
            self._pid = fork(remove_when_gone)
        except OSError:
            os.close(write_end)
            return
        finally:
            os.close(read_end)
        self._write_end = write_end

    def sweep(self) -> None:
        """The ranks are gone: nothing of theirs is to be left."""
        if self._write_end >= 0:
            with suppress(OSError):
                os.write(self._write_end, b"x")
            os.close(self._write_end)
            self._write_end = -1

    def on_exit(self, pid: int, _status: ExitStatus) -> bool:
        """A child has been reaped. Whether it was the helper."""
        if pid != self._pid:
            return False
        self._pid = None
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        return True

    def close(self) -> None:
        """The launch is over: wait a moment for what is being removed."""
        self.sweep()
        for pid in await_exits(self.pids, _LAST_S):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._pid = None
