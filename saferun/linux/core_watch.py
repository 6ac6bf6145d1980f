"""Saves cores from each other where the kernel gives all of them the same name.

With ``core_pattern`` at its default, ``core``, the kernel deletes the core that it has just written, or is writing, for
the sake of the next one. Renaming the file as soon as it appears saves it; the dump goes on into the renamed file. (A
second link would not do: the kernel does not dump into a file that has one.) Of ranks that crash within the same
fraction of a millisecond some are lost all the same.

Sources: inotify(7); Linux, fs/coredump.c.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Callable

from saferun.errors import suppress
from saferun.linux.core_pattern import RENAMED_PREFIX, CorePattern, read_core_pattern, share_a_name
from saferun.linux.procfs import children_of, descendants_of, is_core_dumping, read_stat

_IN_CREATE, _IN_ONLYDIR, _IN_ISDIR = 0x100, 0x01000000, 0x40000000
_IN_NONBLOCK, _IN_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_EVENT_BYTES = 16
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


class CoreSaver:
    """Watches the directory in which ranks start. It waits for its file system, so it is no part of a loop.

    It does nothing where cores have names of their own or go elsewhere, and where the kernel has no watch to give.

    Args:
        directory: the directory that the ranks start in.
        owner_pid: whose children the ranks are.
        pattern: what the kernel does with cores; None: as it is now.

    Attributes:
        fd: is readable when there is something to be taken in; -1: there never is.
        renamed: where cores were moved to.
    """

    def __init__(self, directory: str, owner_pid: int, pattern: CorePattern | None = None) -> None:
        self.fd = -1
        self.renamed: list[str] = []
        self._owner_pid = owner_pid
        pattern = pattern or read_core_pattern()
        if not share_a_name(pattern):
            return
        self._directory = pattern.directory(directory)
        self._is_core_name = _matcher(pattern)
        fd = _libc.inotify_init1(_IN_NONBLOCK | _IN_CLOEXEC)
        if fd < 0:
            return
        if _libc.inotify_add_watch(fd, os.fsencode(self._directory), _IN_CREATE | _IN_ONLYDIR) < 0:
            os.close(fd)
            return
        self.fd = fd

    def close(self) -> None:
        """Watch no longer."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def save_present(self) -> None:
        """Save what is there already: it may have come before the watch began."""
        with suppress(OSError):
            for name in os.listdir(self._directory) if self.fd >= 0 else ():
                if self._is_core_name(name):
                    self._save(os.path.join(self._directory, name))

    def take_in(self) -> None:
        """Save what has come."""
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
            free = self._free_path()
            os.rename(path, free)
            self.renamed.append(free)

    def _free_path(self) -> str:
        # With the pid: several launches may share the directory.
        number = len(self.renamed)
        while True:
            path = os.path.join(self._directory, f"{RENAMED_PREFIX}{self._owner_pid}.{number}")
            if not os.path.lexists(path):
                return path
            number += 1


def _matcher(pattern: CorePattern) -> Callable[[str], bool]:
    """Tells the names of cores. Nearly always there is only one, and a start does not pay for regular expressions."""
    if "%" not in pattern.text:
        name = os.path.basename(pattern.text)
        return lambda found: found == name
    from saferun.linux.core_files import name_pattern

    expression = name_pattern(pattern)
    return lambda found: expression.fullmatch(found) is not None


def _is_ours(path: str, owner_pid: int) -> bool:
    """Whether a file is a core that a descendant of a process writes or has just written.

    Programs make files called ``core`` for other reasons, and other people's programs crash too.
    """
    # The ranks first: walking the whole family takes longer, and the next crash may come at once.
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
