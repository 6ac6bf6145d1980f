"""Whether a job gets further from attempt to attempt, by the steps that its ranks report (``saferun.step``). Pure."""

from __future__ import annotations

__all__ = ["StepProgress"]


class StepProgress:
    """The steps of all attempts of a launch."""

    def __init__(self) -> None:
        self._furthest = -1  # of all attempts
        self._before = -1  # of all but the last one
        self.in_row = 0  # how many attempts in a row got no further than one before
        self.has_advanced = False  # whether the last attempt got further than all before

    @property
    def is_known(self) -> bool:
        """Whether any rank has ever reported a step."""
        return self._furthest >= 0

    def note(self, step: int) -> None:
        """An attempt has ended. ``step``: the last one that a rank of it has reported; -1: none."""
        self._before = self._furthest
        self.has_advanced = step > self._furthest
        if self.has_advanced:
            self._furthest = step
        self.in_row = 0 if self.has_advanced else self.in_row + 1

    def restart_text(self, number: int, in_row: int) -> str:
        """``restart 7, step 1500 was reached, 1000 before``.

        Args:
            number: of the restart.
            in_row: how many restarts in a row are allowed after which no rank got further.
        """
        if not self.has_advanced:
            return f"restart {number}, {self.in_row} of {in_row} in a row with no further step than {self._furthest}"
        before = f", {self._before} before" if self._before >= 0 else ""
        return f"restart {number}, step {self._furthest} was reached{before}"

    @property
    def end_text(self) -> str:
        """``no rank got further than step 1000 in 3 attempts in a row``."""
        tries = f" in {self.in_row} attempts in a row" if self.in_row > 1 else ""
        return f"no rank got further than step {self._furthest}{tries}"
