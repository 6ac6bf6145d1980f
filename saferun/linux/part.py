"""What the loop knows of everything that lives beside it."""

from __future__ import annotations

from typing import Protocol

from saferun.model import ExitStatus


class Part(Protocol):
    """Something beside the loop: it is woken at its deadline, owns processes, and is closed at the end.

    None of the members may wait for anything.
    """

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds; None: not by time."""

    def tick(self, now: float) -> None:
        """The loop has woken up, at the deadline or for another reason."""

    @property
    def pids(self) -> set[int]:
        """The part's processes that have not been reaped. No sweep of orphaned processes touches them."""

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was one of this part's."""

    def close(self) -> None:
        """The launch is over: end the processes and close the descriptors."""
