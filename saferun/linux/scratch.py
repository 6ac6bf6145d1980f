"""A run's private temporary directories: one for its files, and one whose path is short enough for sockets.

If TMPDIR is too long for a socket's path, read-only or missing, other directories are used. Cleaners of temporary
directories skip what is locked (systemd-tmpfiles does); what is deleted nevertheless is made again when it is next
needed, once an attempt.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterable, Sequence

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error
from saferun.linux.file_systems import is_in_memory
from saferun.linux.ownership import Identity, identity, open_directory, remove_tree

# The path of a Unix socket may have 107 bytes in all; 59 are for the names of the directory and the socket.
_LONGEST_BASE = 48


class Scratch:
    """The private temporary directories of one run, each made when it is first needed.

    Args:
        run_id: the run's id; random, and secret until a directory has it in its name.
    """

    def __init__(self, run_id: str) -> None:
        self._name = f"saferun-{run_id}"
        self._locks: dict[str, tuple[int, Identity]] = {}
        self._noted: dict[str, Identity] = {}
        self._in_memory: str | None = None  # None: not determined yet; empty: there is none
        self.on_made: Callable[[str, Identity], None] = _nothing
        """Called with each directory that was made, for the process that removes them if this one cannot."""

    def path(self, names: Sequence[str] = ()) -> str:
        """The directory for large files, made if needed. It is this user's and private.

        Args:
            names: directories in it, made as well.

        Raises:
            OSError: it cannot be made anywhere, or not with these.
        """
        return self._first(scratch_bases(), names)

    def memory_path(self, names: Sequence[str] = ()) -> str:
        """The directory for small files: in memory if possible, where no disk can block.

        Args:
            names: directories in it, made as well.

        Raises:
            OSError: it cannot be made anywhere, or not with these.
        """
        return self._first(_memory_first(), names)

    def in_memory_path(self) -> str:
        """The directory for small files in memory; no disk is accessed.

        Raises:
            OSError: it cannot be made in memory.
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
        """Register a directory that another process has made."""
        if self._noted.get(path) != which:
            self._noted[path] = which
            self.on_made(path, which)

    def expected_path(self) -> str:
        """Where the directory for large files will be by default, without accessing it."""
        return os.path.join(scratch_bases()[0], self._name)

    def socket_path(self) -> str:
        """The directory for sockets, and for small files that the loop reads: the same with a short path.

        Raises:
            OSError: it cannot be made anywhere.
        """
        return self._first([base for base in _memory_first() if len(os.fsencode(base)) <= _LONGEST_BASE])

    @property
    def made(self) -> list[tuple[str, int, int]]:
        """The directories that were made: path, device and inode of each."""
        known = {**self._noted, **{path: which for path, (_, which) in self._locks.items()}}
        return [(path, *which) for path, which in known.items()]

    def close(self) -> None:
        """Remove the directories."""
        remove_scratch(self.made)
        self.forget()

    def forget(self) -> None:
        """Leave the directories to another process to remove."""
        for fd, _ in self._locks.values():
            with suppress(OSError):
                os.close(fd)
        self._locks.clear()
        self._noted.clear()

    def _first(self, bases: Sequence[str], names: Sequence[str] = ()) -> str:
        failure = _no_place()
        # Existing ones first: nothing moves because a better place has space again.
        paths = [os.path.join(base, self._name) for base in bases]
        for path in sorted(paths, key=lambda path: path not in self._locks):
            try:
                self._make(path)
                for name in names:
                    os.makedirs(os.path.join(path, name), exist_ok=True)
            except OSError as error:
                failure = error
                if path in self._locks:
                    _remove_empty(path, names)
            else:
                return path
        raise failure

    def _make(self, path: str) -> None:
        is_new = False
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            is_new = True
        # The name is not secret for long: what exists may be another user's, or a link.
        try:
            fd = open_directory(path, private=True)
        except OSError:
            # File systems without modes, or with one owner for all files, have no private directories.
            if is_new:
                with suppress(OSError):
                    os.rmdir(path)
            raise
        known = self._locks.get(path)
        with close_on_error(fd):
            which = identity(fd)
            if known is not None and known[1] == which:
                os.close(fd)
                return
            # Non-blocking: on a network file system locking may take long, or not work.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        self._locks[path] = fd, which
        if known is not None:
            os.close(known[0])
        self.on_made(path, which)


def _remove_empty(path: str, names: Sequence[str]) -> None:
    """Remove what was made of a directory that cannot be used, from the inside out."""
    inner = dict.fromkeys(os.path.dirname(name) for name in names)
    for name in (*names, *inner):
        with suppress(OSError):
            os.rmdir(os.path.join(path, name))
    with suppress(OSError):
        os.rmdir(path)


def logs_id(run_id: str) -> str:
    """What takes the place of the run's id in the name of the directory for logs: the user wants them, so they stay."""
    return f"logs-{run_id}"


def _no_place() -> OSError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "a temporary directory")


def scratch_bases() -> list[str]:
    """Candidate directories for temporary files, the best one first; they need not exist."""
    here = current_directory()
    return list(dict.fromkeys(os.path.join(here, directory) for directory in (*shared_bases(), here) if directory))


def shared_bases() -> list[str]:
    """Those of them that are for temporary files of all programs."""
    return [directory for directory in (os.environ.get("TMPDIR"), "/tmp", "/var/tmp", *_memory_bases()) if directory]  # noqa: S108 - checked when made


def _memory_first() -> list[str]:
    return sorted(scratch_bases(), key=lambda base: base not in _memory_bases())


def _memory_bases() -> list[str]:
    directories = ["/dev/shm", os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{os.geteuid()}"]  # noqa: S108 - as above
    return [directory for directory in directories if directory]


def remove_scratch(made: Iterable[Sequence[str | int]]) -> None:
    """Remove a run's temporary directories, and nothing that has replaced them.

    Args:
        made: path, device and inode of each.
    """
    for path, device, inode in made:
        remove_tree(str(path), made=(int(device), int(inode)))


def current_directory() -> str:
    """The current directory; empty if it has been deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _nothing(*_arguments: object) -> None:
    """The callback by default."""
