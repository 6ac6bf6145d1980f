"""What follows a failed attempt or a hang. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple


class RestartPolicy(NamedTuple):
    """torchrun's rule: at most ``max_restarts`` further attempts, at once."""

    max_restarts: int

    def next_attempt_after_s(self, restarts: int) -> float | None:
        """Seconds to wait before the next attempt; None: there is none. ``restarts``: how many there have been."""
        return 0.0 if restarts < self.max_restarts else None


class JobPolicy(NamedTuple):
    """How this process stands to the others of its job.

    ``together``: there are others. ``outlives_leader``: they can meet again where the host that decides is gone.
    ``peers_s``: how long the host that decides waits for what the others have seen. ``hurries``: a scheduler that asks
    for an end by a signal kills whatever is still there soon afterwards, saferun included.
    """

    together: bool = False
    outlives_leader: bool = False
    peers_s: float = 0.0
    hurries: bool = False


class HangPolicy(NamedTuple):
    """What to do about a hang.

    ``abort_culprits``: its culprits are ended by SIGABRT, for a core of the hang; the others get SIGTERM.
    """

    on_hang: Literal["report", "stop", "restart"] = "report"
    abort_culprits: bool = False

    def next_step(self, *, certain: bool) -> Literal["report", "stop", "restart"]:
        """A suspicion is told and never acted upon."""
        return self.on_hang if certain else "report"
