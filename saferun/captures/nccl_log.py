"""NCCL's warnings in the log files that the env profile has it write: ``nccl.<host>.<pid>.log``."""

from __future__ import annotations

import os
import stat

from saferun.captures.tools import responds
from saferun.captures.wire import DeadProcess, LibraryLog
from saferun.linux.ownership import CAREFULLY
from saferun.linux.small_files import list_directory
from saferun.text.redaction import redacted_text

_WARNING = "NCCL WARN"
_ANSWER_S = 1.5
_MOST_FILES = 8
_MOST_BYTES = 1 << 16  # of the end of each
_MOST_LINES = 10
_LONGEST = 1000


def nccl_warnings(dead: tuple[DeadProcess, ...]) -> list[LibraryLog]:
    """The last warnings of each rank that has any. None where the file system does not answer."""
    found = []
    for rank in dead:
        if not rank.directory:
            continue
        if not responds(rank.directory, _ANSWER_S):
            break
        names = [name for name in list_directory(rank.directory) if name.startswith("nccl.") and name.endswith(".log")]
        lines = [
            redacted_text(line[:_LONGEST])
            for name in names[:_MOST_FILES]
            for line in _end_of(os.path.join(rank.directory, name)).splitlines()
            if _WARNING in line
        ]
        if lines:
            found.append(LibraryLog(rank.rank, tuple(lines[-_MOST_LINES:])))
    return found


def _end_of(path: str) -> str:
    """The end of a regular file, which a rank may have replaced by anything."""
    try:
        fd = os.open(path, os.O_RDONLY | CAREFULLY)
    except OSError:
        return ""
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return ""
        return os.pread(fd, _MOST_BYTES, max(0, status.st_size - _MOST_BYTES)).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
