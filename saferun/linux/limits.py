"""Resource limits of the supervisor and of the ranks."""

from __future__ import annotations

import errno
import os
import resource

from saferun.errors import suppress
from saferun.linux.descriptors import open_null

# A rank needs two streams, two files, a pidfd, and during its start the other ends of its streams.
_FILES_PER_RANK = 8
_OWN_FILES = 64
# What starting a rank needs, and what the supervisor may need while the ranks run.
_SPARE_FILES = 24
# Starting a rank without streams of its own (its input, the pipe for errors, its pidfd, a file in /proc), and as many
# for what keeps some of them open beside it.
_FILES_OF_START = 10
# A higher limit needs no check: no host has so many ranks.
_MANY_FILES = 65536


def make_room_for_files(ranks: int) -> tuple[int, int] | None:
    """Raise the soft limit on open files if this many ranks need more.

    Returns:
        The limits (soft, hard) that the ranks are to have; None if nothing was changed. Programs that use select(2)
        rely on a low soft limit, so the ranks get the original one.
    """
    needed = _OWN_FILES + _FILES_PER_RANK * ranks
    with suppress(OSError):  # a sandbox refuses prlimit(2): the limits stay as they are
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft == resource.RLIM_INFINITY or soft >= needed:
            return None
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        return soft, hard
    return None


def has_room_for_files() -> bool:
    """Whether the limit on open files has room for another rank's streams and what saferun itself may still open."""
    return _has_free_files(_FILES_PER_RANK + _SPARE_FILES)


def _has_free_files(count: int) -> bool:
    try:
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    except OSError:
        return True  # a sandbox refuses prlimit(2): nothing is known
    if soft == resource.RLIM_INFINITY or soft >= _MANY_FILES:
        return True
    try:
        # The kernel assigns the lowest free number: it is at most the count of open descriptors. Not a copy of an
        # existing one: closing that may block on its file system.
        probe = open_null()
    except OSError:
        return False
    os.close(probe)
    return probe + count <= soft


def check_spare_files() -> None:
    """Check that what saferun may do without leaves enough descriptors to verdicts, and to starting the ranks again.

    Raises:
        OSError: it had better do without.
    """
    if not _has_free_files(_FILES_OF_START):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def restore_files(limits: tuple[int, int]) -> None:
    """In a forked child: restore the limits."""
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def raise_files() -> None:
    """Raise the soft limit to the hard limit: for a process that starts no others."""
    with suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
