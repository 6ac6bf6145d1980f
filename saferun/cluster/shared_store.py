"""The ranks' store of several hosts: the coordinator serves it by itself, from when the hosts have met."""

from __future__ import annotations

__all__ = ["SharedStore"]


class SharedStore:
    """The methods of ``JobPort`` that matter only where the store is this host's alone."""

    def release(self) -> None:
        """The port of several hosts is the scheduler's choice, or the user's."""

    def serve_soon(self) -> None:
        """The coordinator serves the store since the hosts have met."""

    def attempt_ended(self) -> None:
        """The store is served until the hosts meet again."""

    def ask_start_stage(self, world_size: int) -> None:
        """The leader asks, when it hears that the attempt is to end."""
