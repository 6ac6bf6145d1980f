"""Removal of run directories that are not needed any more, by directory descriptors. No link is followed.

Only what is provably a run directory of saferun's is removed: a directory of this user, below the directory of runs,
whose run.json says that saferun gave it this name. A run that may still live stays.
"""

from __future__ import annotations

import os
import re
import stat
import time

from saferun.errors import suppress
from saferun.files.run_files import RUN_JSON, RunState, may_live, names_in, read_json, read_state, size_bytes
from saferun.linux.ownership import identity, open_directory, remove_tree
from saferun.model import Value
from saferun.text.decoding import MALFORMED

RUN_NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
"""What saferun calls a run directory, unless the user chooses a name. The names sort by time."""
MOST_RUNS = 100_000
RECENT_FAILURE_S = 7 * 24 * 3600.0
"""``--keep-runs`` keeps a run that did not end well for so long."""
_KEPT = frozenset({"failed", "stopped", "lost", "hung", "unknown"})


class OldRun(Value):
    """A run that could be removed. ``ended_at`` is in seconds since the epoch."""

    name: str
    state: RunState
    ended_at: float


def open_base(path: str) -> int:
    """A descriptor of a directory of runs; the caller closes it.

    Raises:
        NotOursError: it belongs to another user.
        OSError: it cannot be opened.
    """
    return open_directory(path, mapped=True, links=True)


def run_names(base_fd: int) -> list[str]:
    """The names of what may be run directories, the newest first."""
    return sorted((name for name in names_in(base_fd, MOST_RUNS) if RUN_NAME.fullmatch(name)), reverse=True)


def old_run(base_fd: int, name: str) -> OldRun | None:
    """A run that has ended; None: it may live, or is not provably a run directory of this user."""
    try:
        fd = open_directory(name, dir_fd=base_fd, mapped=True)
    except OSError:
        return None
    try:
        return _old_run(fd, name)
    finally:
        os.close(fd)


def _old_run(fd: int, name: str) -> OldRun | None:
    try:
        state = read_state(fd)
        record = state.record
        if record is None or record.directory != name or may_live(fd):
            return None
        ended_at = max(record.started_at, record.end.time if record.end is not None else 0.0)
        # Of a run that was killed there is no end.
        with suppress(OSError):
            ended_at = max(ended_at, os.stat(RUN_JSON, dir_fd=fd, follow_symlinks=False).st_mtime)
        return OldRun(name, state, ended_at)
    except OSError:
        return None


def has_recent_failure(base_fd: int, run: OldRun, now: float) -> bool:
    """Whether something went wrong in a run, or it was stopped, not long ago."""
    if now - run.ended_at > RECENT_FAILURE_S:
        return False
    if run.state.name in _KEPT:
        return True
    try:  # a hang that passed, an attempt that was restarted
        fd = open_directory(run.name, dir_fd=base_fd, mapped=True)
        try:
            return bool(read_json(fd, "report.json")["incidents"])
        finally:
            os.close(fd)
    except FileNotFoundError:
        return False
    except (OSError, *MALFORMED):
        return True


def remove_run(base_fd: int, name: str) -> bool:
    """Remove a run directory, its run.json last: until then what is left is still known as a run directory.

    Returns:
        Whether it is gone.
    """
    try:
        fd = open_directory(name, dir_fd=base_fd, mapped=True)
    except OSError:
        return False
    try:
        if _old_run(fd, name) is None:
            return False
        # The file system may give another owner to what this user makes: the same for what is below.
        which, owner = identity(fd), os.fstat(fd).st_uid
        names = set(names_in(fd, MOST_RUNS)) - {RUN_JSON}
        files = [below for below in names if not remove_tree(below, dir_fd=fd, also=owner)]
        if any(_is_directory(below, fd) for below in files):
            return False  # the reports explain the output that is left
        for below in files:
            with suppress(OSError):
                os.unlink(below, dir_fd=fd)
        left = set(names_in(fd, MOST_RUNS)) - {RUN_JSON}
    finally:
        os.close(fd)
    return not left and remove_tree(name, dir_fd=base_fd, made=which, also=owner)


def _is_directory(name: str, fd: int) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except OSError:
        return False


def size_of(base_fd: int, name: str, until: float) -> int:
    """How much room a run directory takes on the disk; as much as was counted until then (monotonic seconds)."""
    try:
        fd = open_directory(name, dir_fd=base_fd, mapped=True)
    except OSError:
        return 0
    try:
        return size_bytes(fd, until)[0]
    finally:
        os.close(fd)


def keep_newest(base_fd: int, keep: int) -> int:
    """Remove the runs beyond the newest ones, but none that may live, and none of the last week that did not end well.

    Args:
        base_fd: the directory of runs.
        keep: how many are kept.

    Returns:
        How many are gone.
    """
    gone, now = 0, time.time()
    for name in run_names(base_fd)[keep:]:
        run = old_run(base_fd, name)
        if run is not None and not has_recent_failure(base_fd, run, now):
            gone += remove_run(base_fd, name)
    return gone
