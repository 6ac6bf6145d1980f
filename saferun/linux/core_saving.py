"""Finds cores as they appear, and saves them from being overwritten if the kernel gives all of them the same name.

It also notices files of the user's that the next core would replace.

With ``core_pattern`` at its default, ``core``, the kernel deletes the core that it has just written, or is writing,
before it writes the next one. Renaming the file as soon as it appears saves it; the dump continues into the renamed
file. (A second link would not do: the kernel does not dump into a file that has one.) Some cores of ranks that crash
within a fraction of a millisecond are still lost.

Sources: inotify(7); Linux, fs/coredump.c.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Collection

from saferun.errors import suppress
from saferun.linux.core_pattern import (
    RENAMED_PREFIX,
    CorePattern,
    are_together,
    read_core_pattern,
    share_a_name,
    takes_files,
)
from saferun.linux.procfs import children_of, descendants_of, is_core_dumping, read_stat, tells_core_dumping
from saferun.linux.system_call import libc

_IN_CLOSE_WRITE, _IN_MOVED_TO, _IN_CREATE, _IN_ONLYDIR, _IN_ISDIR = 0x8, 0x80, 0x100, 0x01000000, 0x40000000
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_EVENT_BYTES = 16
_READ_BYTES = 1 << 16


class CoreSaver:
    """Watches the directory in which ranks start. It may block on its file system, so it does not run in the loop.

    It does nothing if cores go elsewhere, or if the kernel has no inotify watch left.

    Args:
        directory: the directory in which the ranks start.
        owner_pid: the parent of the ranks.
        pattern: what the kernel does with cores; None: as it is now.
        since: cores that were there before are left alone, in seconds since the epoch.
        ranks: pids of ranks, of which a core may be although they have ended.
        run_entry: ``SAFERUN_RUN_ID=…``, what proves it.

    Attributes:
        fd: readable when there are events; -1: no watch.
        paths: where the cores are; those that would share a name have been renamed.
        has_other: there was something that is no core and that the next one would replace.
    """

    def __init__(
        self,
        directory: str,
        owner_pid: int,
        pattern: CorePattern | None = None,
        *,
        since: float = 0.0,
        ranks: Collection[int] = (),
        run_entry: str = "",
    ) -> None:
        self.fd = -1
        self.paths: list[str] = []
        self.has_other = False
        self._owner_pid = owner_pid
        self._since = since
        self._ranks, self._run_entry = frozenset(ranks), run_entry
        pattern = pattern or read_core_pattern()
        if not are_together(pattern):
            return
        self._renames = share_a_name(pattern)
        self._takes_files = takes_files(pattern)
        self._directory = pattern.directory(directory)
        self._is_core_name = _matcher(pattern)
        fd = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if fd < 0:
            return
        # A new file is read when it is closed only if the kernel does not tell whether it is writing a core.
        others = _IN_MOVED_TO | (0 if tells_core_dumping() else _IN_CLOSE_WRITE)
        events = _IN_CREATE | _IN_ONLYDIR | (others if self._takes_files else 0)
        if libc.inotify_add_watch(fd, os.fsencode(self._directory), events) < 0:
            os.close(fd)
            return
        self.fd = fd

    def close(self) -> None:
        """End the watch."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def save_present(self) -> None:
        """Save the cores that appeared before the watch began."""
        with suppress(OSError):
            for name in os.listdir(self._directory) if self.fd >= 0 else ():
                path = os.path.join(self._directory, name)
                if not self._is_core_name(name):
                    continue
                if os.lstat(path).st_mtime >= self._since:
                    self._save(path)
                self._note_other(path)

    def handle_events(self) -> None:
        """Save the cores that have appeared."""
        try:
            content = os.read(self.fd, _READ_BYTES)
        except OSError:
            return
        created: set[str] = set()
        others: set[str] = set()
        at = 0
        while at + _EVENT_BYTES <= len(content):
            _watch, events, _cookie, name_bytes = struct.unpack_from("=iIII", content, at)
            name = os.fsdecode(content[at + _EVENT_BYTES : at + _EVENT_BYTES + name_bytes].rstrip(b"\0"))
            at += _EVENT_BYTES + name_bytes
            if not events & _IN_ISDIR and self._is_core_name(name):
                (created if events & _IN_CREATE else others).add(os.path.join(self._directory, name))
        for path in created:
            self._save(path)
        for path in created | others:
            self._note_other(path)

    def _save(self, path: str) -> None:
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode) or not self._is_ours(path):
                return
            free = path
            if self._renames:
                free = self._free_path()
                os.rename(path, free)
            self.paths.append(free)

    def _note_other(self, path: str) -> None:
        """Note whether something that has the name of the next core, and has not been saved, is no core."""
        if not self._takes_files or os.path.basename(path).startswith(RENAMED_PREFIX):
            return
        with suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                return
            if not stat.S_ISREG(status.st_mode):
                self.has_other = True
                return
            # An empty file may be a core that is about to be written.
            if not status.st_size and (not tells_core_dumping() or self._writes_core()):
                return
            from saferun.linux.core_notes import is_core

            self.has_other |= not is_core(path)

    def _writes_core(self) -> bool:
        # The ranks first: walking the whole process tree takes longer, and the next crash may follow at once.
        children, owner_pid = children_of(self._owner_pid), self._owner_pid
        return any(map(is_core_dumping, children)) or any(map(is_core_dumping, descendants_of(owner_pid)))

    def _is_ours(self, path: str) -> bool:
        """Whether a file is a core that a descendant of the supervisor writes or has just written.

        Files called ``core`` may be something else, or of another launch.
        """
        if self._writes_core():
            return True
        from saferun.linux.core_notes import CoreError, is_core, read_core_notes

        if not is_core(path):
            return False
        try:
            notes = read_core_notes(path, whole=False)
        except CoreError:
            return False
        leader = read_stat(notes.sid)
        if notes.ppid == self._owner_pid or (leader is not None and leader.ppid == self._owner_pid):
            return True
        return leader is None and notes.sid in self._ranks and self._is_of_run(path)

    def _is_of_run(self, path: str) -> bool:
        from saferun.linux.core_notes import CoreError, open_regular, was_started_with

        try:
            fd = open_regular(path)
        except CoreError:
            return False
        try:
            return bool(self._run_entry) and was_started_with(fd, self._run_entry)
        finally:
            os.close(fd)

    def _free_path(self) -> str:
        # With a pid: several launches may share the directory.
        number = len(self.paths)
        while True:
            path = os.path.join(self._directory, f"{RENAMED_PREFIX}{self._owner_pid}.{number}")
            if not os.path.lexists(path):
                return path
            number += 1


def _matcher(pattern: CorePattern) -> Callable[[str], bool]:
    """A test for the names of cores. There is nearly always only one, for which no regular expressions are loaded."""
    if "%" not in pattern.text:
        name = os.path.basename(pattern.text)
        return lambda found: found == name
    from saferun.linux.core_files import name_pattern

    expression = name_pattern(pattern)
    return lambda found: expression.fullmatch(found) is not None
