"""The lines that are printed here for other hosts of the job."""

from __future__ import annotations

from saferun.cluster.messages import LONGEST_MESSAGE, MOST_LINES

__all__ = ["LinesOfOthers"]


class LinesOfOthers:
    """Counts the lines printed for other hosts, so that none of them floods this console."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._last: dict[str, str] = {}

    def admit(self, who: str, about: str = "", text: str = "") -> bool:
        """Count one more line of this saferun. Returns whether it is to be printed; not if it repeats the last one."""
        if about and self._last.get(about) == text[:LONGEST_MESSAGE]:
            return False
        self._counts[who] = self._counts.get(who, 0) + 1
        if self._counts[who] > MOST_LINES:
            return False
        self._last[about] = text[:LONGEST_MESSAGE]
        return True
