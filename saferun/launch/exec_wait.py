"""From the fork of the ranks to the last one's exec, without waiting for any of them.

The exec of a program on a file system that does not answer may last forever, and nothing ends it. So all ranks are
forked first, and the kernel's answers are taken in as they come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from saferun.errors import SaferunError, suppress
from saferun.linux.children import spawn_error
from saferun.linux.helper import PartBase
from saferun.linux.poller import Poller
from saferun.linux.procfs import read_stat
from saferun.linux.program_start import ForkedRank, start_error

# Ranks whose programs are read from a slow file system take their time: a warning comes after so long each, and they
# fail when even a file system that moves to another server (Lustre: some 5 minutes) should be back, and other ranks
# that wait for them in init_process_group have timed out too (gloo: 30 minutes, NCCL: 10).
_WARN_AFTER_S = (5.0, 30.0, 120.0, 300.0, 600.0, 1200.0)
_PATIENCE_S = 1800.0
# A failure is reported when the others have answered, or after so long.
_OTHERS_S = 1.0


class ExecWait(PartBase):
    """The ranks of one attempt that have been forked and have not become their programs yet. A part of the loop.

    Args:
        poller: the loop's.
        on_started: called once, when every rank has been started.
        on_failed: called once with why one could not be started, and the local ranks that run or may come to.
        warn: takes one line.
    """

    def __init__(
        self,
        poller: Poller,
        *,
        on_started: Callable[[], None],
        on_failed: Callable[[SaferunError, tuple[int, ...]], None],
        warn: Callable[[str], None],
    ) -> None:
        self.deadline: float | None = None  # when ``tick`` is due, in monotonic seconds
        self._poller = poller
        self._on_started = on_started
        self._on_failed = on_failed
        self._warn = warn
        self._waiting: dict[int, ForkedRank] = {}  # pid -> what is known of it
        self._failures: dict[int, SaferunError] = {}  # local rank -> why
        self._never: set[int] = set()  # pids of those that failed and have not been reaped
        self._running: set[int] = set()  # local ranks
        self._since = 0.0
        self._warned = 0  # times
        self._is_reported = True

    def begin(self, started: Sequence[ForkedRank], failure: SaferunError | None) -> None:
        """Take the ranks of a new attempt.

        Args:
            started: those that were forked.
            failure: why there is not one more.
        """
        self.close()
        now = time.monotonic()
        self._failures = {-1: failure} if failure is not None else {}
        self._running = {one.local_rank for one in started}
        self._is_reported = False
        self._since, self._warned = now, 0
        self.deadline = now + (_OTHERS_S if failure is not None else _WARN_AFTER_S[0])
        for one in started:
            if one.report >= 0:
                self._waiting[one.pid] = one
                self._poller.watch(one.report, partial(self._take_in, one))
        self._conclude()

    @property
    def waiting(self) -> set[int]:
        """The local ranks that have not become their programs."""
        return {one.local_rank for one in self._waiting.values()}

    def _take_in(self, one: ForkedRank) -> None:
        self._poller.unwatch(one.report)
        try:
            error = spawn_error(one.report)
        except BlockingIOError:
            self._poller.watch(one.report, partial(self._take_in, one))
            return
        del self._waiting[one.pid]
        if error is not None and not self._is_reported:
            self._never.add(one.pid)
            self._running.discard(one.local_rank)
            self._failures[one.local_rank] = start_error(error, one.rank, one.argv, one.environ)
            if self.deadline is not None:
                self.deadline = min(self.deadline, time.monotonic() + _OTHERS_S)
        self._conclude()

    def _conclude(self) -> None:
        """Report what has become of all, once nothing more is to be found out."""
        if not self._waiting and not self._is_reported:
            self._report()

    def _report(self) -> None:
        self._is_reported = True
        self.deadline = None
        if self._failures:
            self._on_failed(self._failures[min(self._failures)], tuple(sorted(self._running)))
        else:
            self._on_started()

    # ----------------------------------------------------------------------------------------------------------------
    # The loop's side

    def tick(self, now: float) -> None:
        """Warn who is waited for, and give up in the end."""
        if self.deadline is None or now < self.deadline or self._is_reported:
            return
        if self._failures:
            self._report()
            return
        one = next(iter(self._waiting.values()), None)
        if one is None:
            self.deadline = None
        elif self._warned < len(_WARN_AFTER_S):
            waited_s = _WARN_AFTER_S[self._warned]
            self._warned += 1
            self.deadline = self._since + (*_WARN_AFTER_S, _PATIENCE_S)[self._warned]
            self._warn(f"rank {one.rank} has not been started for {waited_s:g} s: {_exec_state(one)}")
        else:
            self._failures[-1] = SaferunError(
                f"rank {one.rank} cannot be started: {_exec_state(one)} for {_PATIENCE_S:g} s",
                "check the file system that the program is on",
            )
            self._report()

    def take_failed(self, pid: int) -> bool:
        """Call once for a child that has been reaped. Returns whether it was a rank that never became its program."""
        if pid in self._waiting:
            self._take_in(self._waiting[pid])
        is_failed = pid in self._never
        self._never.discard(pid)
        return is_failed

    def close(self) -> None:
        """The attempt is over."""
        self.deadline = None
        self._is_reported = True
        self._never.clear()
        for one in self._waiting.values():
            self._poller.unwatch(one.report)
            with suppress(OSError):
                os.close(one.report)
        self._waiting.clear()


def _exec_state(one: ForkedRank) -> str:
    stat = read_stat(one.pid)
    state = f", state {stat.state}" if stat is not None else ""
    return f"exec of {one.argv[0]} has not returned (pid {one.pid}{state})"
