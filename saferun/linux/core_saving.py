"""Has cores saved from each other, by a process of its own that may be lost: their file system may not answer.

It is forked a moment after the ranks, beside the examiner: of cores that come before, the last one is saved.
"""

from __future__ import annotations

import json
import os
import select
import socket

from saferun.errors import suppress
from saferun.linux.core_pattern import read_core_pattern, share_a_name
from saferun.linux.helper import Helper
from saferun.linux.poller import Poller
from saferun.model import ExitStatus, JsonObject

_STARTED_AT_MOST = 3


class CoreWatch:
    """The supervisor's handle on the process that saves cores. There is one only where cores share a name.

    Args:
        directory: the directory that the ranks start in.
        poller: the loop's.
    """

    def __init__(self, directory: str, poller: Poller) -> None:
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""
        self._directory = directory
        self._poller = poller
        self._is_wanted = share_a_name(read_core_pattern())
        self._helper: Helper | None = None
        self._started = 0
        self._has_saved = False

    def begin_at(self, at: float) -> None:
        """Watch from then on (monotonic seconds), unless that has begun."""
        if self._is_wanted and self._helper is None:
            self.deadline = at

    def tick(self, now: float) -> None:
        """Begin, where that is due."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
            self._begin()

    @property
    def has_saved(self) -> bool:
        """Whether there was a core, as far as that has been heard by now."""
        if self._helper is not None:
            self._helper.hear()
        return self._has_saved

    @property
    def pids(self) -> set[int]:
        """The process."""
        return self._helper.pids if self._helper is not None else set()

    def on_exit(self, pid: int, status: ExitStatus) -> bool:
        """A child has been reaped. Returns whether it was this one."""
        return self._helper is not None and self._helper.on_exit(pid, status)

    def close(self) -> None:
        """End it."""
        self._is_wanted, self.deadline = False, None
        if self._helper is not None:
            self._helper.kill()

    def _begin(self) -> None:
        if self._started >= _STARTED_AT_MOST:
            return
        self._started += 1
        owner_pid = os.getpid()
        with suppress(OSError):  # it cannot be forked: cores are lost to each other, as without saferun
            self._helper = Helper("sr-cores", lambda connection: _save_cores(connection, self._directory, owner_pid))
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _on_message(self, _message: JsonObject) -> None:
        self._has_saved = True

    def _on_lost(self) -> None:
        """Somebody has killed it, or the kernel has no watch to give."""
        if self._is_wanted:
            self._begin()


def _save_cores(connection: socket.socket, directory: str, owner_pid: int) -> None:
    """What the process does, until the supervisor closes its end."""
    from saferun.linux.core_watch import CoreSaver

    saver = CoreSaver(directory, owner_pid)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if saver.fd >= 0:
        poll.register(saver.fd, select.POLLIN)
    saver.save_present()
    told = 0
    while True:
        for path in saver.renamed[told:]:
            connection.sendall(json.dumps({"saved": path}).encode() + b"\n")
        told = len(saver.renamed)
        ready = [fd for fd, _ in poll.poll()]
        if connection.fileno() in ready:
            return
        saver.take_in()
