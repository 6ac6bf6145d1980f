"""What follows a failed attempt or a hang. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple


class RestartPolicy(NamedTuple):
    """torchrun's rule: at most ``max_restarts`` further attempts, at once."""

    max_restarts: int

    def next_attempt_after_s(self, attempt: int) -> float | None:
        """Seconds to wait before the attempt after this one; None: there is none."""
        return 0.0 if attempt < self.max_restarts else None


class HangPolicy(NamedTuple):
    """What to do about a hang.

    ``abort_culprits``: its culprits are ended by SIGABRT, for a core of the hang; the others get SIGTERM.
    """

    on_hang: Literal["report", "stop", "restart"] = "report"
    abort_culprits: bool = False

    def next_step(self, *, certain: bool) -> Literal["report", "stop", "restart"]:
        """A suspicion is told and never acted upon."""
        return self.on_hang if certain else "report"
