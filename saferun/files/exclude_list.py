"""A list of hosts that several launches, schedulers and people share: one name a line, each once.

A name is added by one write at the end of the file, so that no reader sees half of a line, and under a lock that is not
waited for long: without it a name may stand there twice, which does no harm.

The list lies where all hosts of a site see it, and the files of the run may lie elsewhere. So it is written by a
process of its own: a server that does not answer costs the list, and not what the writer process has to write.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.child_output import run_forked
from saferun.linux.ownership import CAREFULLY, check_regular

_MODE = 0o644  # whoever submits the next job is another user
_READ_BYTES = 4 << 20
_LOCK_S = 0.3
_LOCK_STEP_S = 0.02
# Shorter than the patience of whoever asks the writer process for something.
_APART_S = 1.5
# What fits into the answer of that process.
_MOST_ANSWERED = 200
_NAMES = re.compile(rb"[^\s,]+")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_silent: set[str] = set()  # lists that have not answered: they are not waited for again


def is_host_name(name: str) -> bool:
    """Whether a name may stand in the list: names come from other hosts, too."""
    return _NAME.fullmatch(name) is not None


def add_hosts(path: str, names: Sequence[str]) -> list[str]:
    """Add hosts to a list in a process of its own, which may be lost.

    Args:
        path: the file; it is made if need be.
        names: of the hosts.

    Returns:
        Those that were not in it; of very many the first ones.

    Raises:
        OSError: the file cannot be read or written, or is a link or no regular file; it is not the name of a host; the
            file system does not answer; or there can be no process.
    """

    def add(fd: int) -> None:
        os.write(fd, json.dumps(_added(path, names)).encode())

    if path not in _silent:
        output, status = run_forked(add, _APART_S, "sr-exclude")
        with suppress(ValueError):
            added, why = json.loads(output)
            if why:
                raise OSError(*why, path)
            return list(added)
        if status is None:
            _silent.add(path)
    raise OSError(errno.ETIMEDOUT, "the file system does not answer", path)


def _added(path: str, names: Sequence[str]) -> tuple[list[str], tuple[int, str] | None]:
    """The names that were added, and why they could not be."""
    try:
        return add_here(path, names)[:_MOST_ANSWERED], None
    except OSError as error:
        return [], (error.errno or errno.EIO, error.strerror or str(error))


def add_here(path: str, names: Sequence[str]) -> list[str]:
    """The same in this process, which hangs with the file system."""
    known = list(filter(is_host_name, names))
    if not known:
        raise OSError(errno.EINVAL, f"{names[0][:80]!r} is not the name of a host", path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | CAREFULLY, _MODE)
    try:
        check_regular(os.fstat(fd), path)
        _lock(fd)
        size = os.fstat(fd).st_size
        content = os.pread(fd, _READ_BYTES, max(size - _READ_BYTES, 0))
        there = {*_NAMES.findall(content)}
        added = [name for name in dict.fromkeys(known) if name.encode() not in there]
        begun = "\n" if content and not content.endswith(b"\n") else ""
        lines = (begun + "".join(f"{name}\n" for name in added)).encode() if added else b""
        if lines and os.write(fd, lines) < len(lines):
            # The disk is full, and the beginning of a name may be the name of another host.
            os.ftruncate(fd, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return added
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
