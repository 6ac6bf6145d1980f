"""How far the clock of this host is from the leader's, as its coordinator has measured it."""

from __future__ import annotations

import time

from saferun.model import JsonObject, Value
from saferun.text.decoding import measure

__all__ = ["LeaderClock", "leader_clock_from"]

_MOST_S = float(1 << 41)
# What is further off than this is no better than the moment at which a message came.
_LARGEST_ERROR_S = 0.25


class LeaderClock(Value):
    """A measurement.

    Attributes:
        leader_s: what is to be added to this host's monotonic clock to have the leader's time of day.
        error_s: how far that can be from the truth.
    """

    leader_s: float
    error_s: float

    def behind_s(self) -> float:
        """What is to be added to this host's time of day to have the leader's."""
        return self.leader_s + time.monotonic() - time.time()


def leader_clock_from(message: JsonObject) -> LeaderClock | None:
    """What the coordinator reports; None where it is too inexact to be of use.

    Raises:
        One of ``MALFORMED``: it makes no sense.
    """
    error_s = measure(message["error_s"], 0.0, _MOST_S)
    return (
        LeaderClock(measure(message["leader_s"], -_MOST_S, _MOST_S), error_s) if error_s <= _LARGEST_ERROR_S else None
    )
