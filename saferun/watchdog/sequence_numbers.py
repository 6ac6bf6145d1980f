"""The sequence numbers of one rank's collectives, as far as it has answered, and when it is to be asked for them."""

from __future__ import annotations

from saferun.watchdog.samples import Numbers


class SequenceNumbers:
    """Those of one rank. Times are those of the watchdog's clock.

    Args:
        clock_s: the time.

    Attributes:
        is_asked: whether it has been asked for them and has not answered.
    """

    def __init__(self, clock_s: float) -> None:
        self.is_asked = False
        self._numbers: Numbers | None = None
        self._moved_at = clock_s
        self._unanswered_since: float | None = None  # since when they may be old: it did not answer
        self._marks = 0  # of the timeout, at which it has been asked
        self._is_disturbed = False

    def move(self) -> None:
        """It makes progress, and is not asked before it reaches the first mark again."""
        self._marks = 0

    def rebase(self) -> None:
        """What happened since the last sample is not the rank's doing."""
        self.is_asked = self._is_disturbed = False
        self._marks = 0

    def take_disturbance(self) -> bool:
        """Whether a query may have made the rank busy since the last call."""
        disturbed, self._is_disturbed = self._is_disturbed, self.is_asked
        return disturbed

    def note_query_due(self, reached: int, clock_s: float, again_s: float) -> bool:
        """As ``note_query``, if a query is due now that it has reached so many of the marks; False if none is.

        If it has answered before, and the last time it did not, it is asked again after ``again_s``.
        """
        is_due_again = self.are_old and clock_s - (self._unanswered_since or 0.0) >= again_s
        if reached <= self._marks and not (reached and is_due_again):
            return False
        self._marks = reached
        return self.note_query()

    def note_query(self) -> bool:
        """Note that they are asked for; False if they already are. The caller sends the query."""
        is_new = not self.is_asked
        self.is_asked = self._is_disturbed = True
        return is_new

    def take(self, numbers: Numbers | None, clock_s: float) -> bool:
        """Take the answer; None where there is none. Returns whether the numbers have moved."""
        self.is_asked = False
        self._unanswered_since = clock_s if numbers is None else None
        if numbers is None or numbers == self._numbers:
            return False
        moved = self._numbers is not None
        self._numbers, self._moved_at = numbers, clock_s
        return moved

    @property
    def are_old(self) -> bool:
        """Whether it has answered before, and did not when it was asked the last time."""
        return self._numbers is not None and self._unanswered_since is not None

    @property
    def was_in_collective(self) -> bool:
        """Whether it was in a collective by its last answer, however old that is."""
        return self._numbers is not None and any(enqueued > completed for enqueued, completed in self._numbers.values())

    @property
    def is_in_collective(self) -> bool:
        """Whether it has begun a collective that is not complete; not if the numbers may be old.

        With NCCL sends are numbered for themselves, and a rank's last call may have a lower number than the last that
        is complete both while it waits and when it is idle. That does not count; ``NumbersQuery`` asks for the calls.
        """
        return self.was_in_collective and not self.are_old

    def frozen_s(self, clock_s: float) -> float:
        """How long they are known not to have moved."""
        return clock_s - self._moved_at
