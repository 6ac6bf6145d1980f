"""The files below a run directory as ``saferunctl logs`` reads them: the last ones are open, and failures are kept."""

from __future__ import annotations

import errno
import os
import resource
from collections import OrderedDict
from itertools import islice

from saferun.files.run_files import host_names, open_run
from saferun.linux.descriptors import close_on_error
from saferun.linux.ownership import CAREFULLY, check_regular

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_OPEN = 2000
# Of the process's own descriptors, and those that are open for a moment.
_SPARE_FILES = 64
_MOST_NAMES = 100_000


class OpenFiles:
    """The files below a directory. No link is followed.

    Args:
        path: the directory.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._fd = open_run(path)
        self._open: OrderedDict[str, int] = OrderedDict()
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        has_limit = soft != resource.RLIM_INFINITY
        self._most_open = max(min(_MOST_OPEN, soft - _SPARE_FILES), 1) if has_limit else _MOST_OPEN
        self.failures: dict[str, str] = {}
        """Why a file or a directory could not be read, the last time; one that is gone is none of them."""

    def close(self) -> None:
        """Close all files."""
        for fd in (*self._open.values(), self._fd):
            os.close(fd)

    def hosts(self) -> list[str]:
        """The names of the hosts that have files here, sorted."""
        return host_names(self._fd)

    def names_below(self, path: str) -> list[str]:
        """The names in a directory; none if it cannot be read."""
        try:
            fd = self._open_folder(path)
            try:
                with os.scandir(fd) as entries:
                    names = [entry.name for entry in islice(entries, _MOST_NAMES)]
            finally:
                os.close(fd)
        except OSError as error:
            self._note(path, error)
            return []
        self.failures.pop(path, None)
        return names

    def is_readable(self, path: str) -> bool:
        """Whether a file can be opened."""
        try:
            self._opened(path)
        except OSError as error:
            self._note(path, error)
            return False
        return True

    def changed_at(self, path: str) -> float:
        """When a file was last written to, in seconds since the epoch; 0: it cannot be opened."""
        try:
            return os.fstat(self._opened(path)).st_mtime
        except OSError as error:
            self._note(path, error)
            return 0.0

    def size(self, path: str) -> int:
        """How many bytes a file has; 0: it cannot be opened."""
        try:
            return os.fstat(self._opened(path)).st_size
        except OSError as error:
            self._note(path, error)
            return 0

    def read(self, path: str, count: int, at: int) -> bytes:
        """So many bytes of a file, or fewer at its end.

        Raises:
            OSError: it cannot be read.
        """
        try:
            content = os.pread(self._opened(path), count, at)
        except OverflowError:
            error = OSError(errno.EOVERFLOW, os.strerror(errno.EOVERFLOW), path)
            self._note(path, error)
            raise error from None
        except OSError as error:
            self._note(path, error)
            raise
        self.failures.pop(path, None)
        return content

    def _note(self, path: str, error: OSError) -> None:
        if error.errno != errno.ENOENT:
            self.failures[path] = error.strerror or str(error)

    def _opened(self, path: str) -> int:
        fd = self._open.get(path)
        if fd is not None:
            self._open.move_to_end(path)
            return fd
        while len(self._open) >= self._most_open:
            os.close(self._open.popitem(last=False)[1])
        folder, _, name = path.rpartition("/")
        parent = self._open_folder(folder)
        try:
            fd = os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=parent)
        finally:
            os.close(parent)
        with close_on_error(fd):
            check_regular(os.fstat(fd), path)
        self._open[path] = fd
        return fd

    def _open_folder(self, path: str) -> int:
        fd = os.dup(self._fd)
        for name in path.split("/"):
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd
