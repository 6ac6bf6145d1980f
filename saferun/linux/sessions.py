"""The sessions of ranks, which identify a process as the run's whatever its environment says.

Each rank leads a session of its own, and its descendants stay in that session unless they call setsid(2). A session's
number is its leader's pid. The kernel does not reuse that number while the session has a member; it may do so
afterwards, which is why the leader's start time is recorded too.

Sources: setsid(2); credentials(7); proc_pid_stat(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from saferun.linux.procfs import read_stat


class Sessions:
    """Sessions of ranks, by number."""

    def __init__(self) -> None:
        self._leaders: dict[int, int] = {}  # pid -> start time in clock ticks since boot

    def add(self, pid: int, start_ticks: int | None = None) -> int:
        """Record the session of a rank.

        Args:
            pid: the rank, which has not been reaped.
            start_ticks: when it started; None: read from /proc.

        Returns:
            When it started, in clock ticks since boot; 0 if it has exited.
        """
        if start_ticks is None:
            stat = read_stat(pid)
            start_ticks = stat.start_ticks if stat is not None else 0
        self._leaders[pid] = start_ticks
        return start_ticks

    def discard(self, pid: int) -> None:
        """Forget a session."""
        self._leaders.pop(pid, None)

    def __bool__(self) -> bool:
        return bool(self._leaders)

    def keep(self, sessions: set[int]) -> None:
        """Forget all others."""
        self._leaders = {pid: started for pid, started in self._leaders.items() if pid in sessions}

    def clear(self) -> None:
        """Forget all of them."""
        self._leaders.clear()

    def session_of(self, pid: int) -> int | None:
        """The pid of the rank whose session a process is in; None: in none of these."""
        if not self._leaders:
            return None
        try:
            session = os.getsid(pid)
        except OSError:
            return None
        started = self._leaders.get(session)
        if started is None:
            return None
        leader = read_stat(session)
        # The pid may have been reused for a process with a session of its own.
        return None if leader is not None and started and leader.start_ticks != started else session

    def living(self, pids: Iterable[int]) -> set[int]:
        """The sessions that any of the processes is in."""
        return {session for pid in pids if (session := self.session_of(pid)) is not None}
