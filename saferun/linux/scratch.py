"""A run's private temporary directories: one for its files, and one whose path is short enough for sockets.

Where TMPDIR is too long for a socket's path, is read-only or missing, other places serve. Cleaners of temporary
directories leave alone what is locked (systemd-tmpfiles does); what is deleted all the same is made again when it is
asked for next, once an attempt.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence

from saferun.errors import suppress
from saferun.linux.file_systems import is_in_memory

# The path of a Unix socket may have 107 bytes in all; 59 are left for the directory's name and the socket's.
_LONGEST_BASE = 48


class Scratch:
    """The private temporary directories of one run. Nothing is made before it is asked for.

    Args:
        run_id: the run's; random, and secret until a directory has it in its name.
    """

    def __init__(self, run_id: str) -> None:
        self._name = f"saferun-{run_id}"
        self._locks: dict[str, int] = {}
        self._noted: list[str] = []
        self._in_memory: str | None = None  # None: nobody has looked yet; empty: there is none

    def path(self) -> str:
        """The directory for large files. It is there, and nobody else's, when this returns.

        Raises:
            OSError: there is no place for it.
        """
        return self._first(scratch_bases())

    def memory_path(self) -> str:
        """The directory for small files: in memory if it can be, where no disk that hangs keeps anybody waiting.

        Raises:
            OSError: there is no place for it.
        """
        return self._first(_memory_first())

    def in_memory_path(self) -> str:
        """The directory for small files where that is in memory: nothing else is looked at, on any disk.

        Raises:
            OSError: no memory takes it.
        """
        if self._in_memory is None:
            bases = [base for base in _memory_bases() if is_in_memory(base)]
            self._in_memory = ""
            self._in_memory = self._first(bases)
        if not self._in_memory:
            raise _no_place()
        self._make(self._in_memory)
        return self._in_memory

    def note(self, path: str) -> None:
        """Another process has made this one."""
        if path not in self._noted:
            self._noted.append(path)

    def expected_path(self) -> str:
        """Where the directory for large files will be if nothing is in the way. It is not looked at."""
        return os.path.join(scratch_bases()[0], self._name)

    def socket_path(self) -> str:
        """The directory for sockets, and for small files that the loop reads: the same with a short path.

        Raises:
            OSError: there is no place for it.
        """
        return self._first([base for base in _memory_first() if len(os.fsencode(base)) <= _LONGEST_BASE])

    @property
    def paths(self) -> list[str]:
        """What has been made."""
        return list(dict.fromkeys([*self._locks, *self._noted]))

    def close(self) -> None:
        """Remove what was made."""
        remove_scratch(self.paths)
        self.forget()

    def forget(self) -> None:
        """Let go of what was made: somebody else removes it."""
        for fd in self._locks.values():
            with suppress(OSError):
                os.close(fd)
        self._locks.clear()
        self._noted.clear()

    def _first(self, bases: Sequence[str]) -> str:
        failure = _no_place()
        # What is there already comes first: nothing moves because a better place has room again.
        paths = [os.path.join(base, self._name) for base in bases]
        for path in sorted(paths, key=lambda path: path not in self._locks):
            try:
                self._make(path)
            except OSError as error:
                failure = error
            else:
                return path
        raise failure

    def _make(self, path: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        known = self._locks.get(path)
        try:
            status = os.fstat(fd)
            _check_owner(path, status)
            if known is not None and os.path.samestat(os.fstat(known), status):
                os.close(fd)
                return
            # Not waited for: on a network file system a lock may take its time, or there is none.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        self._locks[path] = fd
        if known is not None:
            os.close(known)


def _no_place() -> OSError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a temporary directory")


def _check_owner(path: str, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "somebody else's directory", path)


def scratch_bases() -> list[str]:
    """Directories in which temporary files may lie, the best one first; they need not exist."""
    here = current_directory()
    places = [os.environ.get("TMPDIR"), "/tmp", "/var/tmp", *_memory_bases(), here]  # noqa: S108 - checked when made
    return list(dict.fromkeys(os.path.join(here, place) for place in places if place))


def _memory_first() -> list[str]:
    return sorted(scratch_bases(), key=lambda base: base not in _memory_bases())


def _memory_bases() -> list[str]:
    places = ["/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.geteuid()}"]  # noqa: S108 - as above
    return [place for place in places if place]


def scratch_paths(run_id: str) -> list[str]:
    """Where a run's temporary files may lie."""
    return [os.path.join(base, f"saferun-{run_id}") for base in scratch_bases()]


def remove_scratch(paths: Sequence[str]) -> None:
    """Remove a run's temporary files, if there are any. ``paths``: where they may lie."""
    for path in paths:
        _remove(path)


def _remove(path: str) -> None:
    # shutil, which can do this, takes longer to import than most launches take to end.
    with suppress(OSError):
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    _remove(entry.path)
                else:
                    with suppress(OSError):
                        os.unlink(entry.path)
        os.rmdir(path)


def current_directory() -> str:
    """The current directory; empty where it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""
