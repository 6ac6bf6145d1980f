"""What the ranks left behind when they ended, and the end of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.host.children import reap
from saferun.host.procfs import belongs_to_run, descendants_of, sessions_of
from saferun.model import ExitStatus

_SWEEP_INTERVAL_S = 0.05
_LAST_SWEEP_S = 2.0


class Leftovers:
    """Processes that came from the ranks, the ranks themselves apart.

    Args:
        run_id: marks the processes of this run.
        not_ours: children of this process that have nothing to do with the launch.
        older_children: those among them that this process had before the launch.
        exempt: tells which processes are saferun's own, or ranks that were given up.
        on_gone: told, with all that had to be ended, that none is left.
        warn: told of those that cannot be ended.
    """

    def __init__(
        self,
        run_id: str,
        *,
        not_ours: frozenset[int],
        older_children: frozenset[int],
        exempt: Callable[[], set[int]],
        on_gone: Callable[[tuple[int, ...]], None],
        warn: Callable[[str], None],
    ) -> None:
        self.deadline: float | None = None  # when ``sweep`` is due, in monotonic seconds
        self.given_up: set[int] = set()  # of earlier attempts, which no signal ends
        self._run_id = run_id
        self._not_ours = not_ours
        self._foreign_sessions = sessions_of({0, *older_children}) if older_children else frozenset()
        self._exempt = exempt
        self._on_gone = on_gone
        self._warn = warn
        self._swept: set[int] = set()
        self._kill_at = 0.0

    def forget(self) -> None:
        """A new attempt begins."""
        self._swept = set()

    def begin(self, now: float, term_s: float) -> None:
        """End them: ``term_s`` seconds after SIGTERM comes SIGKILL."""
        self._kill_at = now + term_s
        self.sweep(now)

    def sweep(self, now: float) -> None:
        """End what is left: SIGTERM once to each process, SIGKILL later, and look again until there is none."""
        pids = self.remaining()
        if not pids:
            self.deadline = None
            self._on_gone(tuple(sorted(self._swept)))
            return
        killing = now >= self._kill_at
        for pid in pids:
            if killing or pid not in self._swept:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if killing else signal.SIGTERM)
            self._swept.add(pid)
        self.deadline = now + _SWEEP_INTERVAL_S

    def end(self) -> None:
        """The time for it is over: what is still there is named and left, and the next attempt is not disturbed."""
        if self.deadline is None:
            return
        self.deadline = None
        left = self.remaining()
        if left:
            self.given_up.update(left)
            self._warn(f"could not be ended and is left behind: pid {', '.join(map(str, left))}")

    def tick(self, now: float) -> None:
        """Look again, where that is due."""
        if self.deadline is not None and self.deadline <= now:
            self.sweep(now)

    @property
    def pids(self) -> set[int]:
        """Nothing of this part's own is exempt from the sweep."""
        return set()

    def on_exit(self, _pid: int, _status: ExitStatus) -> bool:
        """Whoever was waited for, the next sweep notices."""
        return False

    def close(self) -> None:
        """Whatever the reason for the end: none of them lives on."""
        give_up_at = time.monotonic() + _LAST_SWEEP_S
        while (pids := self.remaining()) and time.monotonic() < give_up_at:
            for pid in pids:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            reap()
            time.sleep(_SWEEP_INTERVAL_S)
        reap()

    def remaining(self) -> list[int]:
        """Those that are there now."""
        leave_out = {*self._not_ours, *self._exempt(), *self.given_up}
        pids = descendants_of(os.getpid(), frozenset(leave_out))
        if self._foreign_sessions:
            # Orphans of somebody else's family were handed to this process too. They are in sessions from before, where
            # no rank can go; what detached itself from those is told apart by the run's id.
            return [pid for pid in pids if self._is_ours(pid)]
        return pids

    def _is_ours(self, pid: int) -> bool:
        with suppress(OSError):
            return os.getsid(pid) not in self._foreign_sessions or belongs_to_run(pid, self._run_id)
        return False
