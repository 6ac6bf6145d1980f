"""How far the clock of this host is from the leader's, as its coordinator has measured it."""

from __future__ import annotations

import time
from collections.abc import Callable

from saferun.model import JsonObject
from saferun.text.decoding import measure

__all__ = ["LeaderClock"]

_MOST_S = float(1 << 41)
# What is further off than this is no better than the moment at which a message came.
_LARGEST_ERROR_S = 0.25
_LEAST_NEWS_S = 0.0005


class LeaderClock:
    """What is known of it.

    Args:
        note: takes an event for the run's files, each time that more is known; None: another process notes it.
    """

    def __init__(self, note: Callable[[JsonObject], None] | None) -> None:
        self._note = note
        # What is to be added to this host's monotonic clock to have the leader's time of day.
        self._leader_s: float | None = None
        self._noted_s: float | None = None

    @property
    def behind_s(self) -> float | None:
        """What is to be added to this host's time of day to have the leader's; None: unknown."""
        return None if self._leader_s is None else self._leader_s + time.monotonic() - time.time()

    def forget(self) -> None:
        """Another host leads."""
        self._leader_s = self._noted_s = None

    def take(self, attempt: int, message: JsonObject) -> None:
        """What the coordinator reports.

        Raises:
            One of ``MALFORMED``: it makes no sense.
        """
        error_s = measure(message["error_s"], 0.0, _MOST_S)
        leader_s = measure(message["leader_s"], -_MOST_S, _MOST_S)
        if error_s > _LARGEST_ERROR_S:
            return
        self._leader_s = leader_s
        if self._note is None or (self._noted_s is not None and abs(leader_s - self._noted_s) < _LEAST_NEWS_S):
            return
        self._noted_s = leader_s
        at = {"time": time.time(), "monotonic_s": time.monotonic(), "attempt": attempt}
        ahead_s = at["time"] - at["monotonic_s"] - leader_s
        self._note({"event": "ClockMeasured", **at, "ahead_s": round(ahead_s, 6), "error_s": round(error_s, 6)})
