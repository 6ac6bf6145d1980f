"""Descriptors and what to do when they are ready."""

from __future__ import annotations

import select
from collections.abc import Callable
from contextlib import suppress


class Poller:
    """epoll with a handler for each descriptor. Level-triggered: what is left unread is told again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call the handler whenever the descriptor is ready.

        Raises:
            OSError: it can never be anything but ready (a regular file).
        """
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def unwatch(self, fd: int) -> None:
        """No longer; a descriptor that is not watched is no error."""
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        """Whether the descriptor has a handler."""
        return fd in self._handlers

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something is ready, at most so long (None: for ever), and call the handlers."""
        for fd, _ in self._epoll.poll(-1 if timeout_s is None else timeout_s):
            # A handler may end the watch of a descriptor whose turn comes later.
            handler = self._handlers.get(fd)
            if handler is not None:
                handler()

    def close(self) -> None:
        """Forget everything."""
        self._handlers.clear()
        self._epoll.close()
