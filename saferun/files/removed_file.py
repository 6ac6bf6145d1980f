"""Files that others remove while they are written: what is written to them from then on is nowhere."""

from __future__ import annotations

import os
import re
import time

from saferun.errors import suppress
from saferun.linux.small_files import read_link

# What NFS calls a file that its own host removes while it is open ("silly rename", fs/nfs/unlink.c): it is removed when
# it is closed. The kernel says its name without asking the server.
_REMOVED_ON_NFS = re.compile(r"\.nfs[0-9a-f]{16,}")
_CHECK_S = 1.0
QUIET_S = 10.0
"""A directory that has not changed for so long is not being removed."""


class RemovalCheck:
    """Finds out whether an open file has been removed.

    Args:
        fd: the file, which has just been opened.
    """

    def __init__(self, fd: int) -> None:
        # Not every file system counts links: only one that has counted one here can count none later.
        self._has_links = False
        with suppress(OSError):
            self._has_links = os.fstat(fd).st_nlink > 0
        self._checked_at = time.monotonic()
        self._is_written = False

    def note_written(self) -> None:
        """Something has been written."""
        self._is_written = True

    def is_removed(self, fd: int) -> bool:
        """Whether the file is in no directory any more; checked once a second at most.

        Args:
            fd: the same file.
        """
        now = time.monotonic()
        if not self._has_links or now < self._checked_at + _CHECK_S:
            return False
        self._checked_at, self._is_written = now, False
        return _is_gone(fd)

    def may_lack(self, fd: int) -> bool:
        """Whether the file is in no directory any more, and was written after it was last known to be in one."""
        return self._has_links and self._is_written and _is_gone(fd)


class QuietCheck:
    """Finds out whether a directory may be being removed: a file that is made there meanwhile makes that fail.

    Whatever the clock of its file system: changes are seen, and the time is this machine's.

    Args:
        path: the directory.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: list[tuple[int, int]] = []
        self._seen_at = 0.0

    def is_quiet(self) -> bool:
        """Whether it is there, and neither it nor a directory in it has changed since it was asked long ago."""
        now = time.monotonic()
        try:
            seen = _changes(self._path)
        except OSError:
            return False
        if seen != self._seen:
            self._seen, self._seen_at = seen, now
        return now >= self._seen_at + QUIET_S


def _changes(path: str) -> list[tuple[int, int]]:
    """When a directory and those in it, which are removed before it, have changed last."""
    with os.scandir(path) as entries:
        below = [entry.stat(follow_symlinks=False) for entry in entries if entry.is_dir(follow_symlinks=False)]
    return sorted((status.st_ino, status.st_mtime_ns) for status in (os.stat(path), *below))


def _is_gone(fd: int) -> bool:
    with suppress(OSError):  # the next write finds out
        if os.fstat(fd).st_nlink == 0:
            return True
    name = os.path.basename(read_link(f"/proc/self/fd/{fd}"))
    return _REMOVED_ON_NFS.fullmatch(name) is not None
