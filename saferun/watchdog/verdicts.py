"""Which verdicts were reported, when one is reported again, and when what they reported is over. Pure."""

from __future__ import annotations

from saferun.evidence import HangVerdict
from saferun.model import Value

# Suspicions and verdicts that may be acted upon are counted apart, so that the first never use up the second.
AT_MOST = 4
_ABOUT_ALL = frozenset({"quiescent", "stuck_collective"})


class Repeat(Value):
    """How often a hang has been reported, and in how many seconds it is captured again; None: not again."""

    times: int = 1
    next_s: float | None = None


class _Reported(Value):
    ranks: frozenset[int]
    clock_s: float
    times: int
    certain: bool


class Verdicts:
    """Remembers what was reported: the only place that decides when a hang is reported again.

    Args:
        timeout_s: the first repetition of a verdict comes after so long, the second after twice that, and so on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._reported: dict[str, _Reported] = {}
        self._open: dict[str, HangVerdict] = {}
        self._began_s = 0.0
        self._count = {True: 0, False: 0}

    def may_report(self, verdict: HangVerdict, clock_s: float) -> bool:
        """Whether it is new, or was reported long enough ago, and not too often."""
        if self._count[verdict.certain] >= AT_MOST:
            return False
        last = self._reported.get(verdict.kind)
        if last is None or (verdict.certain and not last.certain):
            return True
        if verdict.kind not in _ABOUT_ALL and not last.ranks.issuperset(verdict.ranks):
            return True
        if not verdict.certain and any(known.certain for known in self._open.values()):
            # The certain verdict has been reported, and what was done about it too.
            return False
        return clock_s - last.clock_s >= self._pause_s(last.times)

    def report(self, verdict: HangVerdict, clock_s: float) -> None:
        """It is being reported."""
        last = self._reported.get(verdict.kind)
        self._reported[verdict.kind] = _Reported(
            frozenset(verdict.ranks) | (last.ranks if last is not None else frozenset()),
            clock_s,
            last.times + 1 if last is not None else 1,
            verdict.certain,
        )
        self._count[verdict.certain] += 1
        began_s = clock_s - verdict.quiet_s
        self._began_s = min(self._began_s, began_s) if self._open else began_s
        self._open[verdict.kind] = verdict

    def repeat(self, verdict: HangVerdict) -> Repeat:
        """How often a verdict of this kind has been reported, and when it is next."""
        last = self._reported.get(verdict.kind)
        times = last.times if last is not None else 1
        is_last = self._count[verdict.certain] >= AT_MOST
        return Repeat(times, None if is_last else self._pause_s(times))

    def _pause_s(self, times: int) -> float:
        return self._timeout_s * (1 << (times - 1))

    @property
    def open(self) -> tuple[HangVerdict, ...]:
        """What was reported and is not over."""
        return tuple(self._open.values())

    def close(self, kind: str, clock_s: float) -> float | None:
        """It is over. Returns how long all of it lasted, if that was the last one. The next one is reported as new."""
        self._reported.pop(kind, None)
        if self._open.pop(kind, None) is None or self._open:
            return None
        return clock_s - self._began_s
