"""Whether a failed attempt is followed by another. Pure."""

from __future__ import annotations

from typing import NamedTuple


class RestartPolicy(NamedTuple):
    """torchrun's rule: at most ``max_restarts`` further attempts, at once."""

    max_restarts: int

    def next_attempt_after_s(self, attempt: int) -> float | None:
        """Seconds to wait before the attempt after this one; None: there is none."""
        return 0.0 if attempt < self.max_restarts else None
