"""Whether the ranks of other hosts make progress: what the leader asks, and what a host that is asked reports. Pure."""

from __future__ import annotations

from collections.abc import Callable

from saferun.cluster.silence import Progress
from saferun.model import Value


class ProgressReports:
    """What this host reports to the leader about its ranks, for a while after the leader has asked.

    Args:
        interval_s: how often it reports.
        on_progress: takes each report that differs from the previous one: how often the ranks were seen to move, and to
            be active, in all.
    """

    def __init__(self, interval_s: float, on_progress: Callable[[int, int], None]) -> None:
        self._interval_s = interval_s
        self._on_progress = on_progress
        self._counts = (0, 0)
        self._due_at: float | None = None

    def begin(self, now: float) -> None:
        """The leader asks: the first report is due at once."""
        self._due_at = now

    def end(self) -> None:
        """Report no more."""
        self._due_at = None

    def is_due(self, now: float) -> bool:
        """Whether there is to be a report."""
        return self._due_at is not None and self._due_at <= now

    def report(self, progress: Progress, now: float, until: float) -> None:
        """Report what the ranks have done since the last report; from ``until`` on, this is the last one."""
        moved, active = self._counts
        # Ranks that have just begun to be watched have shown nothing yet.
        seen_s = min(progress.watched_s, self._interval_s)
        counts = (moved + (progress.still_s < seen_s), active + (progress.quiet_s < seen_s))
        self._due_at = now + self._interval_s if now < until else None
        if counts != self._counts:
            self._counts = counts
            self._on_progress(*counts)


class _Heard(Value):
    """Since when ranks of other hosts are watched; when one was last reported to move, and to be active."""

    began_at: float
    moved_at: float
    active_at: float


class ProgressOfOthers:
    """What the leader knows of the ranks of other hosts, some of which it asks.

    Args:
        ask: asks them to report for a while; returns whether there are any whose ranks run.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._heard: _Heard | None = None  # None: none are asked

    @property
    def are_asked(self) -> bool:
        """Whether there are other hosts that report, as far as is known."""
        return self._heard is not None

    def begin(self, now: float) -> None:
        """Ask them, if that is not done already."""
        if self._heard is None and self._ask():
            self._heard = _Heard(now, now, now)

    def ask_again(self) -> bool:
        """Ask them once more, as they report for a limited time only. Returns whether there are any left."""
        if not self._ask():
            self._heard = None
        return self.are_asked

    def hear(self, now: float, *, moved: bool) -> None:
        """One of them reports that its ranks moved, or at least were active."""
        if self._heard is not None:
            self._heard = self._heard._replace(moved_at=now if moved else self._heard.moved_at, active_at=now)

    def progress(self, now: float) -> Progress | None:
        """What they have reported; None: none are asked."""
        if self._heard is None:
            return None
        return Progress(
            runs=True,
            watched_s=now - self._heard.began_at,
            still_s=now - self._heard.moved_at,
            quiet_s=now - self._heard.active_at,
        )

    def end(self) -> None:
        """Forget what they have reported: it is not needed any more."""
        self._heard = None
