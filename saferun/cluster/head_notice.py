"""That the head of this host is waited for, by its other tasks: its coordinator can say nothing before it runs."""

from __future__ import annotations

from collections.abc import Callable

from saferun.model import JsonObject

__all__ = ["HeadNotice"]

_FIRST_S = 30.0
# A coordinator that runs says by then what the hosts wait for.
_FIRST_CONNECTED_S = 35.0


class HeadNotice:
    """Says so after a while, and at growing intervals, until the coordinator says anything.

    Args:
        take: takes the message that it is waited for.
    """

    def __init__(self, take: Callable[[JsonObject], None]) -> None:
        self._take = take
        self._began_at = 0.0
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""

    def begin(self, now: float) -> None:
        """This task has asked to join."""
        self._began_at, self.deadline = now, now + _FIRST_S

    def end(self) -> None:
        """It is not waited for any more."""
        self.deadline = None

    def tick(self, now: float, *, is_connected: bool) -> None:
        """Say so if that is due. ``is_connected``: whether the head is there, and has yet to answer."""
        if self.deadline is None or now < self.deadline:
            return
        waited_s = now - self._began_at
        if is_connected and waited_s < _FIRST_CONNECTED_S:
            self.deadline = self._began_at + _FIRST_CONNECTED_S
            return
        self.deadline = now + waited_s
        text = "waiting for local rank 0 of this host"
        self._take({"op": "head_awaited", "text": text, "waited_s": round(waited_s), "for_others": True})
