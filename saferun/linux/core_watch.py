"""Runs the process that saves cores from being overwritten; separate, because their file system may not respond.

It is forked a moment after the ranks, like the examiner: of earlier cores of one name, only the last one is saved.
Where they have ended by then, it is forked at the end.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Collection, Sequence

from saferun.errors import suppress
from saferun.linux.bare_socket import Socket
from saferun.linux.core_limits import have_raised, lower_limits
from saferun.linux.core_pattern import are_together, read_core_pattern, share_a_name
from saferun.linux.helper import Helper, PartBase
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller
from saferun.linux.procfs import children_of, own_mounts
from saferun.model import JsonObject, Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.core_saving import CoreSaver
    from saferun.linux.handled_cores import HandledCores

_STARTED_AT_MOST = 3
# How long the end of a launch waits until cores that no failure needs are deleted; without any, for the answer alone.
_SWEEP_S, _ANSWER_S = 2.0, 0.3
_ASK_AGAIN_S = 0.002
# How long cores are searched for below the directory then: a share of how long the launch took, and that at least.
_SEARCH_SHARE, _LEAST_SEARCH_S, _MOST_SEARCH_S = 0.02, 0.1, 0.5
# A script may write a file again and again.
_LOWER_AGAIN_S = 0.5
# Timestamps of a file system may lag a little behind.
_CLOCK_SLACK_S = 0.1


class CoreWatch(PartBase):
    """The supervisor's handle on the process that saves cores; there is one only if cores share a name or are deleted.

    Args:
        directory: the directory in which the ranks start.
        poller: the loop's.
        notes_fd: of ``core_limits.LimitNotes``: cores of subprocesses whose crash their rank survives are deleted where
            the ranks have raised the limit, which makes them saferun's doing; -1: none is deleted.
        spared: how many of those are kept all the same.
        room_bytes: how much they may take together, as long as they may be needed.
        run_id: the run's, which proves that a core is of a rank that has ended.
    """

    def __init__(
        self,
        directory: str,
        poller: Poller,
        *,
        notes_fd: int = -1,
        spared: int = 0,
        room_bytes: int = 0,
        run_id: str = "",
    ) -> None:
        self.deadline: float | None = None
        """When ``tick`` is due, in monotonic seconds."""
        self._directory = directory
        self._poller = poller
        self._notes_fd, self._spared, self._room_bytes = notes_fd, spared, room_bytes
        self._run_entry = f"SAFERUN_RUN_ID={run_id}"
        self._since = time.time() - _CLOCK_SLACK_S
        self._ranks: set[int] = set()
        self._failed: set[int] = set()
        pattern = read_core_pattern()
        self._is_wanted = share_a_name(pattern) or (notes_fd >= 0 and are_together(pattern))
        self._started = 0
        self._has_saved = self._is_swept = False

    def begin_at(self, at: float) -> None:
        """Ranks have been started: start the watch at that time (monotonic seconds), unless it runs."""
        if not self._is_wanted:
            return
        self._ranks.update(children_of(os.getpid()))
        if self._helper is None:
            self.deadline = at
        else:
            self._helper.send({"ranks": sorted(self._ranks)})

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

    def hand_over(self, rank_pids: Sequence[int]) -> None:
        """Leave the cores of these ranks, which have failed, to the examiner."""
        self._failed.update(rank_pids)
        if self._helper is not None:
            self._helper.send({"failed": list(rank_pids)})

    def close(self, *, below: bool = False) -> None:
        """Have the cores deleted that are not needed, and end the process.

        Args:
            below: whether cores below the directory, which have not been seen to appear, may be saferun's doing.
        """
        # What failed ranks have left was not moved, and the report may name it.
        is_late = self._is_wanted and self._helper is None and bool(self._ranks) and not self._failed
        self._is_wanted, self.deadline = False, None
        if is_late and have_raised(self._notes_fd):
            self._begin()
        if self._helper is None:
            return
        search_s = _search_s(time.time() - self._since) if below and have_raised(self._notes_fd) else 0.0
        if self._notes_fd >= 0 and self._helper.send({"end": True, "search_s": search_s}):
            began = time.monotonic()
            while not self._is_swept and self._helper.is_open:
                self._helper.receive()
                if time.monotonic() - began > (_SWEEP_S if self._has_saved else _ANSWER_S + search_s):
                    break
                time.sleep(_ASK_AGAIN_S)
        self._helper.kill()

    def _begin(self) -> None:
        if self._started >= _STARTED_AT_MOST:
            return
        self._started += 1
        owner_pid = os.getpid()
        with suppress(OSError):  # without it cores overwrite each other, as without saferun
            keep = (self._notes_fd,) if self._notes_fd >= 0 else ()
            self._helper = Helper("sr-cores", lambda connection: self._serve(connection, owner_pid), keep=keep)
            self._helper.attach(self._poller, self._on_message, self._on_lost)

    def _on_message(self, message: JsonObject) -> None:
        self._has_saved |= "saved" in message
        self._is_swept |= "swept" in message

    def _on_lost(self) -> None:
        """It was killed, or the kernel has no inotify watch left."""
        if self._is_wanted:
            self._begin()

    def _serve(self, connection: Socket, owner_pid: int) -> None:
        """Run in the process."""
        from saferun.linux.core_saving import CoreSaver

        run_entry = self._run_entry
        saver = CoreSaver(self._directory, owner_pid, since=self._since, ranks=self._ranks, run_entry=run_entry)
        service = _Service(
            JsonLines(connection),
            saver,
            owner_pid,
            self._notes_fd,
            spared=self._spared,
            room_bytes=self._room_bytes,
            search=_Search(self._directory, self._since, run_entry),
            ranks=self._ranks,
            failed=self._failed,
        )
        service.run()


def _search_s(launch_s: float) -> float:
    return min(max(launch_s * _SEARCH_SHARE, _LEAST_SEARCH_S), _MOST_SEARCH_S)


class _Search(Value):
    """Where cores are searched for at the end, since when, and what proves that they are of this run."""

    directory: str
    since: float
    run_entry: str


class _Service:
    """The process: saves cores, and deletes those that are not needed and are there only because of saferun."""

    def __init__(
        self,
        lines: JsonLines,
        saver: CoreSaver,
        owner_pid: int,
        notes_fd: int,
        *,
        spared: int,
        room_bytes: int,
        search: _Search,
        ranks: Collection[int],
        failed: Collection[int],
    ) -> None:
        self._lines = lines
        self._saver = saver
        self._owner_pid = owner_pid
        self._notes_fd = notes_fd
        self._spared, self._room_bytes = spared, room_bytes
        self._handled: HandledCores | None = None
        self._search = search
        self._reported = 0
        self._ranks = {*ranks, *children_of(owner_pid)}
        self._failed = set(failed)
        # When the limits are to be lowered, and when they last were, in monotonic seconds.
        self._lower_at: float | None = None
        self._lowered_at = 0.0

    def run(self) -> None:
        """Run until the supervisor closes its end."""
        poll = select.poll()
        poll.register(self._lines.fd, select.POLLIN)
        if self._saver.fd >= 0:
            poll.register(self._saver.fd, select.POLLIN)
        self._saver.save_present()
        while True:
            self._report()
            waits_s = [self._lower(time.monotonic())]
            if self._handled is not None:
                waits_s.append(self._handled.trim(time.monotonic()))
            wait_s = min((wait_s for wait_s in waits_s if wait_s is not None), default=None)
            ready = [fd for fd, _ in poll.poll(None if wait_s is None else wait_s * 1000)]
            if self._saver.fd in ready:
                self._saver.handle_events()
            if self._lines.fd in ready:
                messages = self._lines.receive()
                if messages is None:
                    return
                self._report()
                for message in messages:
                    self._obey(message)

    def _report(self) -> None:
        for path in self._saver.paths[self._reported :]:
            self._lines.send({"saved": path})
            if not have_raised(self._notes_fd):
                continue  # a script has raised the limit itself, and the core is the user's
            handled = self._handled_cores()
            if handled is not None:
                handled.add(path, time.monotonic())
        self._reported = len(self._saver.paths)

    def _handled_cores(self) -> HandledCores | None:
        """None: the file system does not respond."""
        if self._handled is None:
            with suppress(ImportError):
                from saferun.linux.handled_cores import HandledCores

                self._handled = HandledCores(
                    self._owner_pid, self._ranks, spared=self._spared, room_bytes=self._room_bytes
                )
                self._handled.hand_over(self._failed)
        return self._handled

    def _lower(self, now: float) -> float | None:
        """Lower the limits of the ranks if the next core would cost the user a file.

        Returns after how many seconds to call again; None: after the next event.
        """
        if self._saver.has_other:
            self._saver.has_other = False
            self._lower_at = max(now, self._lowered_at + _LOWER_AGAIN_S)
        if self._lower_at is None or self._lower_at > now:
            return None if self._lower_at is None else self._lower_at - now
        self._lower_at, self._lowered_at = None, now
        if have_raised(self._notes_fd):
            lower_limits(self._owner_pid, self._notes_fd, self._search.run_entry)
        return None

    def _search_below(self, within_s: float) -> None:
        """Find the cores of processes that had changed their directory."""
        handled = self._handled_cores()
        if handled is None or not have_raised(self._notes_fd):
            return
        with suppress(ImportError):
            from saferun.linux.core_files import find_cores_below

            # What is mounted there may not respond, and cores are not written to it where it is a network's.
            mounts = {point for point, _ in own_mounts()}
            directory, since, run_entry = self._search.directory, self._search.since, self._search.run_entry
            pattern = read_core_pattern()
            for core in find_cores_below(pattern, [directory], since, within_s=within_s, avoided=mounts):
                if handled.add_found(core, run_entry, time.monotonic()):
                    self._lines.send({"saved": core.path})

    def _obey(self, message: JsonObject) -> None:
        if "ranks" in message:
            self._ranks.update(message["ranks"])
            if self._handled is not None:
                self._handled.add_ranks(message["ranks"])
        if "failed" in message:
            self._failed.update(message["failed"])
            if self._handled is not None:
                self._handled.hand_over(message["failed"])
        if "end" in message:
            if self._saver.fd >= 0:
                self._saver.handle_events()
            self._report()
            if message["search_s"]:
                # First what is known: the search may not end in time.
                if self._handled is not None:
                    self._handled.sweep(time.monotonic())
                self._search_below(message["search_s"])
            if self._handled is not None:
                self._handled.sweep(time.monotonic())
            self._lines.send({"swept": True})
