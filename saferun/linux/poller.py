"""The loop's poller: handlers of descriptors and processes."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable

from saferun.errors import suppress
from saferun.linux.pidfd import open_pidfd
from saferun.linux.procfs import read_stat

_PROC_POLL_S = 1.0
# epoll_wait(2) takes milliseconds as an int; the loop waits again after that.
_LONGEST_WAIT_S = 1e6


class Poller:
    """epoll with a handler for each descriptor. Level-triggered: unread data is reported again."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], None]] = {}
        self._processes: dict[int, _Process] = {}
        self._poll_at = 0.0
        self._first_fd = -1
        self._first: Callable[[], bool] = bool

    def watch(self, fd: int, handler: Callable[[], None], events: int = select.EPOLLIN) -> None:
        """Call the handler whenever the descriptor is ready.

        Raises:
            OSError: epoll does not support it (a regular file).
        """
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def watch_first(self, fd: int, handler: Callable[[], bool]) -> None:
        """Call this handler before all others; if it returns True, they are called in the next ``wait``."""
        self._epoll.register(fd, select.EPOLLIN)
        self._first_fd, self._first = fd, handler

    def unwatch(self, fd: int, handler: Callable[[], None] | None = None) -> None:
        """End the watch of a descriptor, if it is watched; with a handler, only if that is its handler."""
        if handler is not None and self._handlers.get(fd) is not handler:
            return
        if self._handlers.pop(fd, None) is not None:
            with suppress(OSError, ValueError):
                self._epoll.unregister(fd)

    def is_watched(self, fd: int) -> bool:
        """Whether the descriptor has a handler."""
        return fd in self._handlers

    def watch_process(self, pid: int, handler: Callable[[], None]) -> None:
        """Call the handler once, when a process exits, which need not be a child.

        By a pidfd or, if there is none, by polling /proc each second.
        """
        pidfd = open_pidfd(pid)
        self._processes[pid] = _Process(pidfd, pid, handler)
        if pidfd >= 0:
            self.watch(pidfd, lambda: self._ended(pid))

    def unwatch_process(self, pid: int) -> None:
        """End the watch of a process, if it is watched."""
        process = self._processes.pop(pid, None)
        if process is not None and process.pidfd >= 0:
            self.unwatch(process.pidfd)
            os.close(process.pidfd)

    def _ended(self, pid: int) -> None:
        process = self._processes[pid]
        self.unwatch_process(pid)
        process.handler()

    def _poll_processes(self) -> None:
        self._poll_at = time.monotonic() + _PROC_POLL_S
        for process in list(self._processes.values()):
            if process.pidfd < 0 and process.pid in self._processes and process.has_ended():
                self._ended(process.pid)

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something is ready, at most ``timeout_s`` (None: forever), and call the handlers."""
        is_polling = any(process.pidfd < 0 for process in self._processes.values())
        if is_polling:
            left_s = max(self._poll_at - time.monotonic(), 0.0)
            timeout_s = left_s if timeout_s is None else min(timeout_s, left_s)
        ready = self._epoll.poll(-1 if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S))
        called = [(fd, self._handlers.get(fd)) for fd, _ in ready]
        if any(fd == self._first_fd for fd, _ in ready) and self._first():
            return
        for fd, handler in called:
            # A handler may have ended the watch of another ready descriptor, whose number may have a new one already.
            if handler is not None and self._handlers.get(fd) is handler:
                handler()
        if is_polling and time.monotonic() >= self._poll_at:
            self._poll_processes()

    def close(self) -> None:
        """End all watches."""
        for pid in list(self._processes):
            self.unwatch_process(pid)
        self._handlers.clear()
        self._epoll.close()


class _Process:
    """A watched process; ``pidfd`` is -1 if /proc is polled."""

    def __init__(self, pidfd: int, pid: int, handler: Callable[[], None]) -> None:
        self.pidfd = pidfd
        self.pid = pid
        self.handler = handler
        stat = read_stat(pid) if pidfd < 0 else None
        self._start_ticks = stat.start_ticks if stat is not None else None

    def has_ended(self) -> bool:
        stat = read_stat(self.pid)
        if stat is not None:
            return stat.state in "ZX" or self._start_ticks not in {None, stat.start_ticks}
        try:
            # Not in /proc: it has exited, or is another user's and /proc is mounted with hidepid.
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
        return False
