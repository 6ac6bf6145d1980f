"""What attempts leave in the coordinator's memory when they have ended."""

from __future__ import annotations

import gc

# A thread may wait in the store for two minutes after the end of its attempt.
_COLLECT_AFTER_S = 130.0
# A job that fails again and again has more of them than two minutes should bring together.
_MOST = 4


class EndedAttempts:
    """Closes the connections of ended attempts.

    An attempt's objects refer to each other, so that only Python's collector frees them, and with them up to five
    connections of the first host, and two of each other one. A coordinator has so little to do that the collector would
    hardly ever run by itself: a job with many restarts ran out of descriptors.
    """

    def __init__(self) -> None:
        self._count = 0  # since the collector last ran
        self._waited_s = 0.0  # since the last of them ended

    def add(self, attempt: object) -> None:
        """An attempt has ended; None: there was none before the one that begins."""
        if attempt is not None:
            self._count, self._waited_s = self._count + 1, 0.0

    def tick(self, elapsed_s: float) -> None:
        """Time has passed."""
        self._waited_s += elapsed_s
        if self._count >= _MOST or (self._count and self._waited_s >= _COLLECT_AFTER_S):
            self._count = 0
            gc.collect()
