"""Runs the process that saves cores from being overwritten; separate, because their file system may not respond.

It is forked a moment after the ranks, like the examiner: of earlier cores, only the last one is saved.
"""

from __future__ import annotations

import json
import os
import select

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket
from saferun.linux.core_pattern import read_core_pattern, share_a_name
from saferun.linux.helper import Helper, PartBase
from saferun.linux.poller import Poller
from saferun.model import JsonObject

_STARTED_AT_MOST = 3


class CoreWatch(PartBase):
    """The supervisor's handle on the process that saves cores; there is one only if cores share a name.

    Args:
        directory: the directory in which the ranks start.
        poller: the loop's.
    """

    def __init__(self, directory: str, poller: Poller) -> None:
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""
        self._directory = directory
        self._poller = poller
        self._is_wanted = share_a_name(read_core_pattern())
        self._started = 0
        self._has_saved = False

    def begin_at(self, at: float) -> None:
        """Start the watch at that time (monotonic seconds), unless it runs."""
        if self._is_wanted and self._helper is None:
            self.deadline = at

    def tick(self, now: float) -> None:
        """Start the watch, if that is due."""
        if self.deadline is not None and self.deadline <= now:
            self.deadline = None
            self._begin()

    @property
    def has_saved(self) -> bool:
        """Whether a core is known to have been saved."""
        if self._helper is not None:
            self._helper.receive()
        return self._has_saved

    def close(self) -> None:
        """End the process."""
        self._is_wanted, self.deadline = False, None
        if self._helper is not None:
            self._helper.kill()

    def _begin(self) -> None:
        if self._started >= _STARTED_AT_MOST:
            return
        self._started += 1
        owner_pid = os.getpid()
        with suppress(OSError):  # without it cores overwrite each other, as without saferun
            self._helper = Helper("sr-cores", lambda connection: _save_cores(connection, self._directory, owner_pid))
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _on_message(self, _message: JsonObject) -> None:
        self._has_saved = True

    def _on_lost(self) -> None:
        """It was killed, or the kernel has no inotify watch left."""
        if self._is_wanted:
            self._begin()


def _save_cores(connection: Socket, directory: str, owner_pid: int) -> None:
    """Run in the process, until the supervisor closes its end."""
    from saferun.linux.core_saving import CoreSaver

    saver = CoreSaver(directory, owner_pid)
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if saver.fd >= 0:
        poll.register(saver.fd, select.POLLIN)
    saver.save_present()
    reported = 0
    while True:
        for path in saver.renamed[reported:]:
            connection.sendall(json.dumps({"saved": path}).encode() + b"\n")
        reported = len(saver.renamed)
        ready = [fd for fd, _ in poll.poll()]
        if connection.fileno() in ready:
            return
        saver.handle_events()
