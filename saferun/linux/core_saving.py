"""Finds cores as they appear, and saves them from being overwritten if the kernel gives all of them the same name.

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
from collections.abc import Callable

from saferun.errors import suppress
from saferun.linux.core_pattern import RENAMED_PREFIX, CorePattern, are_together, read_core_pattern, share_a_name
from saferun.linux.procfs import children_of, descendants_of, is_core_dumping, read_stat
from saferun.linux.system_call import libc

_IN_CREATE, _IN_ONLYDIR, _IN_ISDIR = 0x100, 0x01000000, 0x40000000
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

    Attributes:
        fd: readable when there are events; -1: no watch.
        paths: where the cores are; those that would share a name have been renamed.
    """

    def __init__(
        self, directory: str, owner_pid: int, pattern: CorePattern | None = None, *, since: float = 0.0
    ) -> None:
        self.fd = -1
        self.paths: list[str] = []
        self._owner_pid = owner_pid
        self._since = since
        pattern = pattern or read_core_pattern()
        if not are_together(pattern):
            return
        self._renames = share_a_name(pattern)
        self._directory = pattern.directory(directory)
        self._is_core_name = _matcher(pattern)
        fd = libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if fd < 0:
            return
        if libc.inotify_add_watch(fd, os.fsencode(self._directory), _IN_CREATE | _IN_ONLYDIR) < 0:
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
                if self._is_core_name(name) and os.lstat(path).st_mtime >= self._since:
                    self._save(path)

    def handle_events(self) -> None:
        """Save the cores that have appeared."""
        try:
            content = os.read(self.fd, _READ_BYTES)
        except OSError:
            return
        names = set()
        at = 0
        while at + _EVENT_BYTES <= len(content):
            _watch, events, _cookie, name_bytes = struct.unpack_from("=iIII", content, at)
            name = os.fsdecode(content[at + _EVENT_BYTES : at + _EVENT_BYTES + name_bytes].rstrip(b"\0"))
            at += _EVENT_BYTES + name_bytes
            if events & _IN_CREATE and not events & _IN_ISDIR:
                names.add(name)
        for name in names:
            if self._is_core_name(name):
                self._save(os.path.join(self._directory, name))

    def _save(self, path: str) -> None:
        with suppress(OSError):
            if not stat.S_ISREG(os.lstat(path).st_mode) or not _is_ours(path, self._owner_pid):
                return
            free = path
            if self._renames:
                free = self._free_path()
                os.rename(path, free)
            self.paths.append(free)

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


def _is_ours(path: str, owner_pid: int) -> bool:
    """Whether a file is a core that a descendant of the process writes or has just written.

    Files called ``core`` may be something else, or of another launch.
    """
    # The ranks first: walking the whole process tree takes longer, and the next crash may follow at once.
    if any(map(is_core_dumping, children_of(owner_pid))) or any(map(is_core_dumping, descendants_of(owner_pid))):
        return True
    from saferun.linux.core_notes import CoreError, is_core, read_core_notes

    if not is_core(path):
        return False
    try:
        notes = read_core_notes(path, whole=False)
    except CoreError:
        return False
    leader = read_stat(notes.sid)
    return notes.ppid == owner_pid or (leader is not None and leader.ppid == owner_pid)
