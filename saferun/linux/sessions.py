"""The sessions that ranks made, by which a process is known to be ours whatever its environment says.

Each rank leads a session of its own, and whatever it starts stays in that session unless it leaves it with setsid(2).
A session's number is its leader's pid. The kernel gives that number to nobody else while the session has a member; it
may give it to another process afterwards, which is why the leader's start time is remembered too.

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
        """Remember the session of a rank.

        Args:
            pid: the rank, which has not been reaped.
            start_ticks: when it started; None: that is read now.

        Returns:
            When it started, in clock ticks since boot; 0 where it is gone.
        """
        if start_ticks is None:
            stat = read_stat(pid)
            start_ticks = stat.start_ticks if stat is not None else 0
        self._leaders[pid] = start_ticks
        return start_ticks

    def discard(self, pid: int) -> None:
        """Forget a session."""
        self._leaders.pop(pid, None)

    def clear(self) -> None:
        """Forget all of them."""
        self._leaders.clear()

    def session_of(self, pid: int) -> int | None:
        """The rank whose session a process lives in, by its pid; None: in none of these."""
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
        # Another process has the number by now, and made a session of its own.
        return None if leader is not None and started and leader.start_ticks != started else session

    def living(self, pids: Iterable[int]) -> set[int]:
        """Those of these sessions in which any of the processes lives."""
        return {session for pid in pids if (session := self.session_of(pid)) is not None}
