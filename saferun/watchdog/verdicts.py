"""Which verdicts were told, when one may be told again, and when what they told of is over. Pure."""

from __future__ import annotations

from saferun.evidence import HangVerdict
from saferun.model import Value

# Suspicions and verdicts that may be acted upon are counted apart, so that the first never use up the second.
AT_MOST = 4
_ABOUT_ALL = frozenset({"quiescent", "stuck_collective"})


def pause_s(timeout_s: float, times: int) -> float:
    """How long after having been told so many times a verdict may be told again, in seconds."""
    return timeout_s * (1 << (times - 1))


class _Told(Value):
    ranks: frozenset[int]
    clock_s: float
    times: int


class Verdicts:
    """Remembers what was told.

    Args:
        timeout_s: the first repetition of a verdict comes after so long, the second after twice that, and so on.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._told: dict[str, _Told] = {}
        self._open: dict[str, HangVerdict] = {}
        self._began_s = 0.0
        self._count = {True: 0, False: 0}

    def may_tell(self, verdict: HangVerdict, clock_s: float) -> bool:
        """Whether it is new, or told long enough ago, and not too often."""
        if self._count[verdict.certain] >= AT_MOST:
            return False
        told = self._told.get(verdict.kind)
        if told is None or (verdict.kind not in _ABOUT_ALL and not told.ranks.issuperset(verdict.ranks)):
            return True
        if not verdict.certain and any(known.certain for known in self._open.values()):
            # It has been told, and what has come of it too.
            return False
        return clock_s - told.clock_s >= pause_s(self._timeout_s, told.times)

    def tell(self, verdict: HangVerdict, clock_s: float) -> None:
        """It is being told."""
        told = self._told.get(verdict.kind)
        self._told[verdict.kind] = _Told(
            frozenset(verdict.ranks) | (told.ranks if told is not None else frozenset()),
            clock_s,
            told.times + 1 if told is not None else 1,
        )
        self._count[verdict.certain] += 1
        began_s = clock_s - verdict.quiet_s
        self._began_s = min(self._began_s, began_s) if self._open else began_s
        self._open[verdict.kind] = verdict

    @property
    def open(self) -> tuple[HangVerdict, ...]:
        """What was told and is not over."""
        return tuple(self._open.values())

    def close(self, kind: str, clock_s: float) -> float | None:
        """It is over. How long all of it lasted, where that was the last; a new one is told as if it were the first."""
        self._told.pop(kind, None)
        if self._open.pop(kind, None) is None or self._open:
            return None
        return clock_s - self._began_s
