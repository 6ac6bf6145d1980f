"""Whether a busy process makes progress: many dumps of its stacks, spread over time, that all show the same."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.evidence.job_evidence import ThreadStack

# A loop of a few lines waits as well as one of a single line.
_LOOP_LINES = 3
_FAILURES = 5


class Suspect:
    """One busy process whose stacks are dumped. ``main_only``: its other threads do not matter.

    Attributes:
        dumps: how many of its dumps were alike so far.
        asked_at: when the last dump began.
        is_running: whether a dump is running.
    """

    def __init__(self, *, main_only: bool) -> None:
        self.dumps = 0
        self.asked_at = float("-inf")
        self.is_running = False
        self._main_only = main_only
        self._first_at = 0.0
        self._last_at = 0.0
        self._failures = 0
        self._frames: dict[int, tuple[tuple[str, str, int], ...]] = {}
        self._lines: dict[int, tuple[int, int]] = {}

    @property
    def is_unreadable(self) -> bool:
        """Whether its stacks cannot be dumped at all."""
        return self.dumps == 0 and self._failures >= _FAILURES

    @property
    def span_s(self) -> float:
        """Over how long its dumps were alike."""
        return self._last_at - self._first_at

    def take(self, at: float, threads: Sequence[ThreadStack]) -> bool:
        """Whether this dump shows the same as those before. One without an active thread shows nothing."""
        stacks = {thread.tid: thread for thread in threads if thread.is_main or not self._main_only}
        # Threads that are no Python threads are not dumped: if they are the busy ones, no dumped thread is active.
        if not any(thread.frames and (thread.active or self._main_only) for thread in stacks.values()):
            self._failures += 1
            return True
        if self.dumps == 0:
            self._first_at = at
        alike = [self._is_alike(tid, thread) for tid, thread in stacks.items()]
        self.dumps += 1
        self._last_at = at
        return all(alike)

    def _is_alike(self, tid: int, thread: ThreadStack) -> bool:
        if not thread.frames:
            return True
        # Of the innermost call the line may move a little; those that called it stand still.
        innermost = thread.frames[0]
        callers = ((frame.function, frame.file, frame.line) for frame in thread.frames[1:])
        frames = ((innermost.function, innermost.file, 0), *callers)
        lowest, highest = self._lines.get(tid, (innermost.line, innermost.line))
        lowest, highest = min(lowest, innermost.line), max(highest, innermost.line)
        self._lines[tid] = (lowest, highest)
        return self._frames.setdefault(tid, frames) == frames and highest - lowest <= _LOOP_LINES
