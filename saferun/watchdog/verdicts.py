"""Which verdicts were reported, when one is reported again, and when what they reported is over. Pure."""

from __future__ import annotations

from saferun.evidence.job_evidence import HangVerdict
from saferun.model import Value

# Suspicions and verdicts that may be acted upon are counted apart, so that the first never use up the second.
AT_ONCE = 4
"""How many new hangs are reported without delay; after that they have to wait as one hang that goes on does."""
LONGEST_PAUSE_S = 3600.0
"""Between two reports of a hang that goes on, unless the timeout is longer."""
_ABOUT_ALL = frozenset({"quiescent", "stuck_collective"})


class Repeat(Value):
    """How often a hang has been reported, and in how many seconds it is captured again; None: not again."""

    times: int = 1
    next_s: float | None = None


class _Reported(Value):
    """The last report of a hang. ``certain_after_s``: suspected only until it has lasted so long; 0: not downgraded."""

    ranks: frozenset[int]
    clock_s: float
    times: int
    certain: bool
    was_new: bool = True
    certain_after_s: float = 0.0


class _New(Value):
    """The new hangs of one certainty: how many were reported, and when the last one was reported."""

    times: int = 0
    clock_s: float = 0.0


class Verdicts:
    """Remembers what was reported: the only place that decides when a hang is reported again.

    A hang that goes on is reported until it is over: T after the first report, then 2 T, 4 T and so on later, at most
    an hour (or T, if that is longer). New hangs are reported at once; from the fifth on likewise at growing intervals,
    since a job whose ranks are stopped and continued again and again has a new one each time.

    Args:
        timeout_s: T, the timeout.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reported: dict[str, _Reported] = {}
        self._open: dict[str, HangVerdict] = {}
        self._began_at = 0.0
        self._new = {True: _New(), False: _New()}
        self._doubts = 0  # how many new hangs were downgraded to suspected
        self._doubt_lasts_s = 0.0  # ``certain_after_s`` of the last of them

    def may_report(self, verdict: HangVerdict, clock_s: float) -> bool:
        """Whether it is new, or was reported long enough ago."""
        last = self._reported.get(verdict.kind)
        if last is None or self._is_new(verdict, last, clock_s):
            if verdict.certain and verdict.lasted_s < self._least_s():
                return False
            new = self._new[verdict.certain]
            return new.times < AT_ONCE or clock_s - new.clock_s >= self._pause_s(new.times - AT_ONCE + 1)
        if not verdict.certain and any(known.certain for known in self._open.values()):
            # The certain verdict has been reported, and what was done about it too.
            return False
        if last.certain_after_s > 0 and verdict.certain and verdict.lasted_s >= last.certain_after_s:
            return True
        return clock_s - last.clock_s >= self._pause_s(last.times)

    def _is_new(self, verdict: HangVerdict, last: _Reported, clock_s: float) -> bool:
        if last.certain_after_s > 0:
            # What has moved since then may wait for something else by now.
            return verdict.lasted_s < clock_s - last.clock_s
        if verdict.certain and not last.certain:
            return True
        return verdict.kind not in _ABOUT_ALL and not last.ranks.issuperset(verdict.ranks)

    def report(self, verdict: HangVerdict, clock_s: float) -> None:
        """Note that a verdict is reported now."""
        last = self._reported.get(verdict.kind)
        is_new = last is None or self._is_new(verdict, last, clock_s)
        if is_new:
            self._new[verdict.certain] = _New(self._new[verdict.certain].times + 1, clock_s)
        self._reported[verdict.kind] = _Reported(
            frozenset(verdict.ranks) | (last.ranks if last is not None else frozenset()),
            clock_s,
            last.times + 1 if last is not None else 1,
            verdict.certain,
            is_new,
        )
        began_at = clock_s - verdict.lasted_s
        self._began_at = min(self._began_at, began_at) if self._open else began_at
        self._open[verdict.kind] = verdict

    def downgrade_to_suspected(self, kind: str, certain_after_s: float) -> None:
        """The capture has shown that the hang of this kind that was just reported may be none.

        It counts as suspected from now on, and is reported again once it has lasted ``certain_after_s``. In a job with
        many such waits, the quiet time after which a new hang is reported grows.
        """
        last = self._reported.get(kind)
        if last is None or not last.certain:
            return
        self._reported[kind] = last._replace(certain=False, certain_after_s=certain_after_s)
        if kind in self._open:
            self._open[kind] = self._open[kind]._replace(certain=False)
        if last.was_new:
            self._doubts += 1
            self._doubt_lasts_s = certain_after_s
            self._new[True] = self._new[True]._replace(times=max(self._new[True].times - 1, 0))

    def _least_s(self) -> float:
        """For how long nothing must have moved for a new hang to be captured."""
        if self._doubts < AT_ONCE:
            return 0.0
        return min(self._pause_s(self._doubts - AT_ONCE + 2), max(self._doubt_lasts_s, self._timeout_s))

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often a verdict of this kind has been reported, and when it is reported next."""
        last = self._reported.get(verdict.kind)
        times = last.times if last is not None else 1
        next_s = self._pause_s(times)
        if last is not None and last.certain_after_s > verdict.lasted_s:
            next_s = min(next_s, last.certain_after_s - verdict.lasted_s)
        return Repeat(times, next_s)

    def _pause_s(self, times: int) -> float:
        """How long after so many reports the next one is."""
        # (A power of two beyond the longest pause is of no use, and one of many reports is no number of seconds.)
        return min(self._timeout_s * (1 << min(times - 1, 40)), max(self._timeout_s, LONGEST_PAUSE_S))

    @property
    def open(self) -> tuple[HangVerdict, ...]:
        """What was reported and is not over."""
        return tuple(self._open.values())

    def close(self, kind: str, clock_s: float) -> float | None:
        """The hang of a kind is over; a later one is new. If none is left open, returns how long all of them lasted."""
        self._reported.pop(kind, None)
        if self._open.pop(kind, None) is None or self._open:
            return None
        return clock_s - self._began_at
