"""The loop's poller for handlers that may fail."""

from __future__ import annotations

import select
from collections.abc import Callable

from saferun.linux.poller import Poller


class GuardedPoller(Poller):
    """The loop's poller for handlers that may fail, which an ordinary handler may not: its exception ends the launch.

    Args:
        poller: the loop's.
        succeeds: calls a handler, and reports in one line that it has failed.
    """

    def __init__(self, poller: Poller, succeeds: Callable[[Callable[[], None]], bool]) -> None:
        self._poller = poller
        self._succeeds = succeeds

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """As the poller's; a handler that fails is not called again."""

        def call() -> None:
            if not self._succeeds(handler):
                # What it has left unread would wake the loop again and again. Its owner has a deadline. If it has
                # closed the descriptor, another one may have the number by now.
                self._poller.unwatch(fd, call)

        self._poller.watch(fd, call, events)

    def unwatch(self, fd: int, handler: Callable[[], None] | None = None) -> None:
        """As the poller's."""
        self._poller.unwatch(fd, handler)

    def is_watched(self, fd: int) -> bool:
        """As the poller's."""
        return self._poller.is_watched(fd)
