"""A run's private temporary directories: one for its files, and one whose path is short enough for sockets.

Where TMPDIR is too long for a socket's path, is read-only or missing, other places serve. Cleaners of temporary
directories leave alone what is locked (systemd-tmpfiles does); what is deleted all the same is made again when it is
asked for next, once an attempt.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence

from saferun.errors import suppress
from saferun.linux.file_systems import is_in_memory
from saferun.linux.ownership import Identity, identity, open_directory, remove_tree

# The path of a Unix socket may have 107 bytes in all; 59 are left for the directory's name and the socket's.
_LONGEST_BASE = 48


class Scratch:
    """The private temporary directories of one run. Nothing is made before it is asked for.

    Args:
        run_id: the run's; random, and secret until a directory has it in its name.
    """

    def __init__(self, run_id: str) -> None:
        self._name = f"saferun-{run_id}"
        self._locks: dict[str, tuple[int, Identity]] = {}
        self._noted: dict[str, Identity] = {}
        self._in_memory: str | None = None  # None: nobody has looked yet; empty: there is none
        self.on_made: Callable[[str, Identity], None] = _nothing
        """Told of each directory that was made: whoever removes them if this process cannot."""

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
            self._in_memory = ""
            for base in _memory_bases():
                with suppress(OSError):
                    if is_in_memory(base):
                        self._make(os.path.join(base, self._name))
                        self._in_memory = os.path.join(base, self._name)
                        break
        if not self._in_memory:
            raise _no_place()
        self._make(self._in_memory)
        return self._in_memory

    def note(self, path: str, which: Identity) -> None:
        """Another process has made this one."""
        if self._noted.get(path) != which:
            self._noted[path] = which
            self.on_made(path, which)

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
    def made(self) -> list[tuple[str, int, int]]:
        """What has been made: paths, and which directories they were then, by device and inode."""
        known = {**self._noted, **{path: which for path, (_, which) in self._locks.items()}}
        return [(path, *which) for path, which in known.items()]

    def close(self) -> None:
        """Remove what was made."""
        remove_scratch(self.made)
        self.forget()

    def forget(self) -> None:
        """Let go of what was made: somebody else removes it."""
        for fd, _ in self._locks.values():
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
        is_new = False
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            is_new = True
        # The name is no secret for long: what is there may be anybody's, or a link.
        try:
            fd = open_directory(path, private=True)
        except OSError:
            # File systems that know no modes, or give all files one owner, have no private directories.
            if is_new:
                with suppress(OSError):
                    os.rmdir(path)
            raise
        known = self._locks.get(path)
        try:
            which = identity(fd)
            if known is not None and known[1] == which:
                os.close(fd)
                return
            # Not waited for: on a network file system a lock may take its time, or there is none.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BaseException:
            os.close(fd)
            raise
        self._locks[path] = fd, which
        if known is not None:
            os.close(known[0])
        self.on_made(path, which)


def _no_place() -> OSError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a temporary directory")


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


def remove_scratch(made: Iterable[Sequence[str | int]]) -> None:
    """Remove a run's temporary directories, and nothing else that has their names by now.

    Args:
        made: their paths, devices and inodes.
    """
    for path, device, inode in made:
        remove_tree(str(path), made=(int(device), int(inode)))


def current_directory() -> str:
    """The current directory; empty where it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _nothing(*_arguments: object) -> None:
    """Nobody wants to know."""
