"""The console beside the loop: woken when a full one has room again, and drained at the end of the run."""

from __future__ import annotations

import select
import time

from saferun.errors import suppress
from saferun.launch.launch_context import LaunchContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.launch.signal_wakeup import Wakeup

# At the end a reader that does not read is waited for this long, if files keep all of it; else as long as it exists.
_DRAIN_S = 60.0
# After an order to stop: without progress, and in all, where files keep all of it. Schedulers kill what has not ended
# some 5 to 30 s after it, and the exit code is theirs then.
_STOPPED_DRAIN_S, _STOPPED_MOST_S = 2.0, 10.0
# The same without progress, where nothing else keeps it.
_STOPPED_ALONE_S = 10.0
# A pipe wakes it at once, when it has room or its reader has gone: this is for what no event tells of.
_AWAITED_S = 60.0
# How often the end checks whether a file has taken something.
_CONSOLE_S = 0.1
# A wait for a file that takes nothing is explained after this time.
_EXPLAINED_AFTER_S = 2.0
# A file behind stderr has so long to take the last line.
_LAST_LINE_S, _PAUSE_S = 1.0, 0.01


class ConsolePart:
    """The console of a launch, as the loop knows it.

    Args:
        context: the launch.
    """

    def __init__(self, context: LaunchContext) -> None:
        self._screen = context.screen
        self._poller = context.poller
        self._run_dir = context.run_dir
        self._waiting_for_room = set[int]()

    def flush(self) -> None:
        """Write what can be written without waiting, and be woken when there is room for more."""
        self._screen.flush()
        for pane in self._screen.panes:
            target = pane.target
            waiting = target.fd in self._waiting_for_room
            if waiting and not target.waits_for_room:
                self._poller.unwatch(target.fd)
                self._waiting_for_room.discard(target.fd)
            elif target.waits_for_room and not waiting:
                with suppress(OSError):  # EPERM: a file that is always ready
                    self._poller.watch(target.fd, _nothing, select.EPOLLOUT)
                    self._waiting_for_room.add(target.fd)
        self._screen.allow_skipping(self._run_dir.keeps_all, teed=self._run_dir.is_written)

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        with suppress(Exception):
            return self._screen.deadline()
        return None

    def tick(self, now: float) -> None:
        """Do what is due."""
        try:
            self._screen.tick(now)
        except Exception:
            self._screen.show_no_more()

    @property
    def pids(self) -> frozenset[int]:
        """The console's own processes."""
        return self._screen.pids

    def on_exit(self, pid: int) -> bool:
        """A child has been reaped. Returns whether it was one of the console's."""
        return self._screen.on_exit(pid)

    def drain(self, wakeup: Wakeup) -> None:
        """Wait for a slow reader: as long as it exists, or, where files keep everything, while it reads.

        A file that takes nothing (its disk is full, its file system hangs) is given that while as well: it may take
        the verdict yet. What fits into a pipe, which is enlarged for it, is not waited for.

        Where an order to stop has ended the ranks, a reader that does not read is given 2 s, and one that reads 10 s;
        if nothing else keeps what it has not read, 10 s without progress. A further order ends the wait. What has not
        been read then is counted on stderr.
        """
        screen = self._screen
        screen.release()
        screen.flush()
        screen.enlarge()
        is_counted = is_explained = False  # what has not been read, and the wait for a file
        begun_at = moved_at = time.monotonic()
        unwritten_bytes = 0
        while True:
            before, unwritten_bytes = unwritten_bytes, screen.unwritten_bytes
            if screen.flush() or unwritten_bytes != before:
                moved_at = time.monotonic()
            if screen.is_empty and not is_counted and screen.print_unread():
                is_counted = True
                continue
            if screen.is_empty and screen.finish():
                break
            left_s = self._end_at(begun_at, moved_at, is_stopped=wakeup.is_stopped) - time.monotonic()
            if not is_explained and time.monotonic() - moved_at > _EXPLAINED_AFTER_S:
                is_explained = True
                screen.print_waiting(left_s)
            if left_s <= 0 or wakeup.is_hurried() or (self._wait(wakeup.fd, left_s) and wakeup.read_stop()):
                break
        if screen.print_unwritten() or (not is_counted and screen.print_unread()):
            target, give_up_at = screen.err.target, time.monotonic() + _LAST_LINE_S
            while (target.flush() or target.unwritten_bytes) and time.monotonic() < give_up_at:
                time.sleep(_PAUSE_S)
        screen.close()

    def _end_at(self, begun_at: float, moved_at: float, *, is_stopped: bool) -> float:
        """Until when to wait for more progress."""
        screen = self._screen
        if screen.is_awaited and not is_stopped:
            return time.monotonic() + _AWAITED_S
        if not is_stopped or screen.awaits_file:
            return moved_at + _DRAIN_S
        if screen.is_awaited:
            return moved_at + _STOPPED_ALONE_S
        return min(moved_at + _STOPPED_DRAIN_S, begun_at + _STOPPED_MOST_S)

    def _wait(self, wake_fd: int, timeout_s: float) -> bool:
        """Wait until the console can be written. Returns whether a signal has come."""
        poll = select.poll()
        poll.register(wake_fd, select.POLLIN)
        waits_for_time = False
        for pane in self._screen.panes:
            if pane.target.waits_for_room:
                poll.register(pane.target.fd, select.POLLOUT)
            if pane.target.file is not None:
                waits_for_time = True
                # Of one that has ended it would be readable at once, again and again.
                if pane.target.file.end_fd >= 0 and pane.target.file.is_alive:
                    poll.register(pane.target.file.end_fd, select.POLLIN)
            if pane.target.retry_at is not None:
                waits_for_time = True
                timeout_s = min(timeout_s, max(pane.target.retry_at - time.monotonic(), 0.0))
        ready = poll.poll((min(timeout_s, _CONSOLE_S) if waits_for_time else timeout_s) * 1000)
        return any(fd == wake_fd for fd, _ in ready)


def _nothing() -> None:
    """Woken up: the loop writes what it can."""
