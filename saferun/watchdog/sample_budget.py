"""What sampling the waits of a host's ranks may cost, and how often it is done for that. Has no clock of its own."""

from __future__ import annotations

# Samples become rarer where they and what it takes to wake up for them would cost more than this share of a core, in a
# window of a minute. A fifth of it is saved, up to so many seconds, and spent at a higher rate once some ranks wait and
# others do not: on a slow machine a sample costs 0.2 ms, and too few are taken in a minute to name the slow rank.
_CPU_SHARE = 0.0003
_USED_SHARE = 0.8
_SAVED_S = 0.09
_SPENT_SHARE = 0.0015
_USUAL_WINDOW_S = 60.0
_AVERAGED = 8  # samples, over which their cost is averaged


class SampleBudget:
    """The CPU time for the samples of one attempt.

    Args:
        window_s: the shortest time over which ranks are compared; a shorter one than usual may cost more.

    Attributes:
        spends: whether what was saved may be spent.
    """

    def __init__(self, window_s: float) -> None:
        self.spends = False
        self._factor = max(1.0, _USUAL_WINDOW_S / window_s)
        self._saved_s = _SAVED_S
        self._cost_s = 0.0  # of a sample, averaged

    def pay(self, cost_s: float, passed_s: float) -> None:
        """A sample has cost so much CPU time, so long after the previous one."""
        self._cost_s += (cost_s - self._cost_s) / _AVERAGED
        earned_s = passed_s * _CPU_SHARE * self._factor
        self._saved_s = min(max(self._saved_s + earned_s - cost_s, 0.0), _SAVED_S)

    def interval_s(self, least_s: float) -> float:
        """The time until the next sample: ``least_s``, or longer, where that is all that can be paid."""
        share = _SPENT_SHARE if self.spends and self._saved_s > 0.0 else _CPU_SHARE * _USED_SHARE
        return max(least_s, self._cost_s / (share * self._factor))
