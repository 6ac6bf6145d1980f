"""Resource limits of the supervisor and of the ranks."""

from __future__ import annotations

import os
import resource

from saferun.errors import suppress

# A rank takes two streams, two files, a pidfd, and while it is started the other ends of its streams.
_FILES_PER_RANK = 8
_OWN_FILES = 64
# What starting a rank takes, and what the supervisor may need while the ranks run.
_SPARE_FILES = 24
# With a higher limit than this nobody counts: no host has so many ranks.
_MANY_FILES = 65536


def make_room_for_files(ranks: int) -> tuple[int, int] | None:
    """Raise the soft limit on open files, if this many ranks need more than it allows.

    Returns:
        The limits (soft, hard) that the ranks are to have, None where nothing was changed. A program that uses
        select(2) relies on a low soft limit, so the ranks get theirs back.
    """
    needed = _OWN_FILES + _FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return None
    raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
    return soft, hard


def has_room_for_files() -> bool:
    """Whether another rank's streams, and what saferun itself may still open, fit into the limit on open files."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= _MANY_FILES:
        return True
    try:
        # Descriptors are given out from below: the next one is the number of those that are open, or less.
        # Not a copy of one of ours: closing that may wait for the file system of the file.
        probe = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    os.close(probe)
    return probe + _FILES_PER_RANK + _SPARE_FILES <= soft


def restore_files(limits: tuple[int, int]) -> None:
    """In a forked child: the limits that it would have had."""
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def raise_files() -> None:
    """Have as many open files as this process may have: for a process that starts no others."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
