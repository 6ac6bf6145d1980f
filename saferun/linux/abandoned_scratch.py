"""Private directories of runs that were killed together with their reapers, so that no process has removed them."""

from __future__ import annotations

import fcntl
import os
import re
import time

from saferun.errors import suppress
from saferun.linux.file_systems import is_on_network
from saferun.linux.ownership import open_directory, remove_tree
from saferun.linux.scratch import shared_bases

__all__ = ["remove_abandoned"]

_NAME = re.compile(r"saferun-[0-9a-f]{16}")
_MOST_LISTED = 10_000
# A directory is locked right after it was made.
_YOUNG_S = 60.0


def remove_abandoned() -> list[str]:
    """Remove those of this user; nothing is raised.

    A run that lives holds a lock on each of its directories, in whatever container it is.

    Returns:
        The directories that were removed.
    """
    removed = []
    for base in dict.fromkeys(shared_bases()):
        names: list[str] = []
        if is_on_network(base):
            continue  # where locks are each host's own, a run that lives on another one has none here
        with suppress(OSError):
            names = [name for name in os.listdir(base)[:_MOST_LISTED] if _NAME.fullmatch(name)]
        for name in names:
            path = os.path.join(base, name)
            with suppress(OSError):
                if _is_abandoned(path) and remove_tree(path):
                    removed.append(path)
    return removed


def _is_abandoned(path: str) -> bool:
    """Whether a directory is this user's and private, and no process has a lock on it."""
    fd = open_directory(path, private=True)
    try:
        if time.time() - os.fstat(fd).st_mtime < _YOUNG_S:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # it is in use, or there are no locks here
    else:
        return True
    finally:
        os.close(fd)
