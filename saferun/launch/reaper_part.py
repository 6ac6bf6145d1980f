"""The reaper as a part of the launch: where it is killed, another one is forked."""

from __future__ import annotations

from saferun.launch.launch_context import LaunchContext
from saferun.launch.passed_signals import PassedSignals
from saferun.linux.reaper import Reaper
from saferun.model import ExitStatus

# One that is killed again and again is not forked forever.
_MOST = 5


class ReaperPart:
    """Sees that there is a reaper as long as the launch lasts.

    Args:
        context: the launch.
        reaper: the first one.
        passed: the signals whose witness it is.
    """

    deadline = None  # nothing is done by time

    def __init__(self, context: LaunchContext, reaper: Reaper, passed: PassedSignals) -> None:
        self._context = context
        self._reaper = reaper
        self._passed = passed
        self._left = _MOST
        self._is_alive = True

    @property
    def pids(self) -> set[int]:
        """The reaper, until it has been reaped itself."""
        return {self._reaper.pid} if self._is_alive else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was the reaper."""
        if not self._is_alive or pid != self._reaper.pid:
            return False
        self._is_alive = False
        what = f"the reaper, which kills the ranks if saferun is killed, has ended ({status.description})"
        if self._left == 0:
            self._context.warn(f"{what} again, and is not started any more")
            return True
        self._left -= 1
        try:
            self._reaper.replace()
        except OSError as error:
            self._context.warn(f"{what}, and another one cannot be started: {error.strerror}")
            return True
        self._is_alive = True
        self._passed.set_witness(self._reaper.pid, self._reaper.witness_fd)
        self._context.warn(f"{what}; another one has taken its place, and the job goes on")
        return True

    def tick(self, now: float) -> None:
        """Nothing is done by time."""

    def close(self) -> None:
        """The end of a launch dismisses the reaper last, when all else is closed."""
