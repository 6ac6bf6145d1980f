"""A list of hosts that several launches, schedulers and people share: one name a line, each once.

A name is added by one write at the end of the file, so that no reader sees half of a line, and under a lock that is not
waited for long: without it a name may stand there twice, which does no harm.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time

from saferun.linux.ownership import CAREFULLY, check_regular

_MODE = 0o644  # whoever submits the next job is another user
_READ_BYTES = 4 << 20
_LOCK_S = 0.3
_LOCK_STEP_S = 0.02
_NAMES = re.compile(rb"[^\s,]+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")


def is_host_name(name: str) -> bool:
    """Whether a name may stand in the list: names come from other hosts, too."""
    return _NAME.fullmatch(name) is not None


def add_host(path: str, name: str) -> bool:
    """Add a host to a list, unless it is in it.

    Args:
        path: the file; it is made if need be.
        name: the host's.

    Returns:
        Whether it was added.

    Raises:
        OSError: the file cannot be read or written, is a link or no regular file, or it is not the name of a host.
    """
    if not is_host_name(name):
        raise OSError(errno.EINVAL, f"{name[:80]!r} is not the name of a host", path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | CAREFULLY, _MODE)
    try:
        check_regular(os.fstat(fd), path)
        _lock(fd)
        size = os.fstat(fd).st_size
        start = max(size - _READ_BYTES, 0)
        content = os.pread(fd, _READ_BYTES, start)
        if name.encode() in _NAMES.findall(content):
            return False
        begun = b"\n" if content and not content.endswith(b"\n") else b""
        os.write(fd, begun + name.encode() + b"\n")
        return True
    finally:
        os.close(fd)


def _lock(fd: int) -> None:
    """Lock the file, unless another process holds the lock for longer than a moment or there are no locks."""
    until = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                return
            time.sleep(_LOCK_STEP_S)
        except OSError:
            return
        else:
            return
