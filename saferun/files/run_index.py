"""The index of this user's runs: a directory of links, so that saferunctl finds a run from any directory.

``$XDG_STATE_HOME/saferun/runs``, or ``~/.local/state/saferun/runs``. Each entry is a link whose name has the time and
the run's id, and whose target is the run directory. It is a convenience: what cannot be written is left out, entries
are checked when they are used, and old ones are removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from itertools import islice

from saferun.errors import suppress
from saferun.linux.ownership import make_directory, open_directory
from saferun.model import Value

MOST_ENTRIES = 1000
# Not one at a time: each removal goes through all of them.
_KEPT_ENTRIES = 900
_MOST_READ = 5000
_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-([0-9a-f]{16})")


class Entry(Value):
    """An entry: its name, the run's id, and the path of its directory."""

    name: str
    run_id: str
    path: str


def index_path(environ: Mapping[str, str]) -> str:
    """Where the index is; empty: this user has no place for it."""
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):
        home = environ.get("HOME", "")
        base = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    return os.path.join(base, "saferun", "runs") if base else ""


def note_run(index: str, run_id: str, path: str) -> None:
    """Add a run, and remove the oldest entries where there are too many.

    Args:
        index: the index.
        run_id: the run's.
        path: its directory.

    Raises:
        OSError: there is no room, or the directory is another user's.
    """
    base = os.path.dirname(os.path.dirname(index))
    os.makedirs(base, 0o700, exist_ok=True)
    fd = os.open(base, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in ("saferun", "runs"):
        try:
            below = make_directory(name, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    try:
        os.symlink(path, f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}", dir_fd=fd)
        names = sorted(_names(fd))
        if len(names) > MOST_ENTRIES:
            for name in names[:-_KEPT_ENTRIES]:
                with suppress(OSError):
                    os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)


def read_index(index: str) -> list[Entry]:
    """The entries, the newest first; none where there is no index, or it is another user's."""
    found: list[Entry] = []
    with suppress(OSError):
        fd = open_directory(index) if index else -1
        if fd < 0:
            return found
        try:
            for name in sorted(_names(fd), reverse=True):
                with suppress(OSError):
                    path = os.readlink(name, dir_fd=fd)
                    if os.path.isabs(path):
                        found.append(Entry(name, name[-16:], path))
        finally:
            os.close(fd)
    return found


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in islice(entries, _MOST_READ) if _NAME.fullmatch(entry.name)]
