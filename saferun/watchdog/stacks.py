"""Whether a process that burns gets anywhere: many looks at its stacks, spread over time, that all show the same."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.evidence import ThreadStack

# A loop of a few lines waits as well as one of a single line.
_LOOP_LINES = 3
_FAILURES = 5


class Suspect:
    """One process whose stacks are looked at. ``main_only``: its other threads do not matter.

    Attributes:
        looks: how many of its stacks were alike so far.
        asked_at: when the last look began.
        is_out: whether a look is under way.
    """

    def __init__(self, *, main_only: bool) -> None:
        self.looks = 0
        self.asked_at = float("-inf")
        self.is_out = False
        self._main_only = main_only
        self._first_at = 0.0
        self._last_at = 0.0
        self._failures = 0
        self._frames: dict[int, tuple[tuple[str, str, int], ...]] = {}
        self._lines: dict[int, tuple[int, int]] = {}

    @property
    def is_unreadable(self) -> bool:
        """Whether its stacks cannot be had at all."""
        return self.looks == 0 and self._failures >= _FAILURES

    @property
    def span_s(self) -> float:
        """How long it has looked alike."""
        return self._last_at - self._first_at

    def take(self, at: float, threads: Sequence[ThreadStack]) -> bool:
        """Whether this look shows the same as those before. A look that shows nobody at work says nothing."""
        stacks = {thread.tid: thread for thread in threads if thread.is_main or not self._main_only}
        # Threads that are no Python threads burn unseen: then none of those that can be seen is active.
        if not any(thread.frames and (thread.active or self._main_only) for thread in stacks.values()):
            self._failures += 1
            return True
        if self.looks == 0:
            self._first_at = at
        alike = [self._is_alike(tid, thread) for tid, thread in stacks.items()]
        self.looks += 1
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
