"""The checks as a part of the loop: those that the ranks wait for, and those that are made beside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from saferun.config import LaunchConfig
from saferun.linux.process_room import may_be_short_of_processes
from saferun.model import ExitStatus

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.preflight.driver import PreflightRun

_GLOO_IFNAME = "GLOO_SOCKET_IFNAME"
# Where a retry waits for memory that the ranks of the attempt before have not given back yet.
_GPU_NODES = ("/dev/nvidiactl", "/dev/kfd")


def ranks_wait(config: LaunchConfig, environ: Mapping[str, str], attempt: int = 0) -> bool:
    """Whether the ranks are not to be started before the checks have reported.

    On one host next to nothing can be found that would keep the ranks from being started: saferun binds the port,
    and needs no names. Whether anything else may be found is known beforehand from the settings and from /proc. So
    the ranks of most launches wait for nothing, and the checks are made beside them.

    Args:
        config: the launch.
        environ: the environment that the ranks inherit.
        attempt: from 0.
    """
    checks = config.checks
    if config.hosts.together or checks.preflight == "only" or checks.collective or checks.nics:
        return True
    if attempt and any(map(os.path.exists, _GPU_NODES)):
        return True
    names = filter(None, environ.get(_GLOO_IFNAME, "").split(","))
    if any(not os.path.exists(f"/sys/class/net/{name[:64]}") for name in names):
        return True
    return may_be_short_of_processes(config.nproc_per_node)


class Checks:
    """The checks of a launch, made when they are needed: what they take to import is not needed at most starts.

    Args:
        open_run: makes them.
    """

    def __init__(self, open_run: Callable[[], PreflightRun]) -> None:
        self._open_run = open_run
        self._run: PreflightRun | None = None
        self._begin: Callable[[PreflightRun], None] | None = None
        self._begin_at: float | None = None
        self._is_imported = False

    def opened(self) -> PreflightRun:
        """The checks themselves."""
        if self._run is None:
            self._run = self._open_run()
        return self._run

    def imported(self) -> None:
        """What the checks beside the ranks take is imported by now: until then they do not begin."""
        self._is_imported = True

    def begin_at(self, moment: float, begin: Callable[[PreflightRun], None]) -> None:
        """Make them beside the ranks, from a moment on (monotonic seconds)."""
        self._begin_at, self._begin = moment, begin

    def settle(self) -> None:
        """The launch is over: what has been found so far counts."""
        self._begin_at = None
        if self._run is not None:
            self._run.settle()

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        run = self._run.deadline if self._run is not None else None
        begin_at = self._begin_at if self._is_imported else None
        return min((moment for moment in (run, begin_at) if moment is not None), default=None)

    def tick(self, now: float) -> None:
        """Do what is due."""
        if self._is_imported and self._begin_at is not None and self._begin_at <= now:
            self._begin_at = None
            if self._begin is not None:
                self._begin(self.opened())
        if self._run is not None:
            self._run.tick(now)

    @property
    def pids(self) -> set[int]:
        """Processes of the checks' own."""
        return self._run.pids if self._run is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Whether it was one of the checks' own."""
        return self._run is not None and self._run.on_exit(pid, status)

    def close(self) -> None:
        """End the check process, and what is tried."""
        self._begin_at = None
        if self._run is not None:
            self._run.close()
