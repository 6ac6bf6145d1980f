"""Directories below which everything is this user's own: a run directory, a launch's directory in ``--log-dir``.

A file in one is reached from its top, directory by directory, each opened relative to its parent and owned by this
user: whoever else may write somewhere in it can lead nothing elsewhere. What others plant in place of a file that is
to be created is replaced.

A directory that has been there and is missing was removed, perhaps by a rank that clears what is around it: it is made
again for the next attempt only, when no rank runs.

Paths that lie in none of them are opened as torchrun opens them: the user, or a plugin of torch's, has named them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from saferun.errors import suppress
from saferun.linux.ownership import NotOursError, make_directory, open_directory, open_ours, owner_of_new

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    T = TypeVar("T")

_ALL_PARENTS = 0o777
_IN_THE_WAY = frozenset({errno.ELOOP, errno.EMLINK, errno.EINVAL, errno.EPERM, errno.EACCES, errno.ENXIO})


class Tree:
    """One such directory.

    Args:
        path: the directory.
        directory_mode: the permissions of directories that are made, the first one included.
        file_mode: the permissions of files that are made.
    """

    def __init__(self, path: str, directory_mode: int = 0o700, file_mode: int = 0o600) -> None:
        self.path = path
        self.file_mode = file_mode
        self._directory_mode = directory_mode
        self._owner = -1  # besides this user: see owner_of_new

    def open(self, folders: list[str] | tuple[str, ...] = (), *, again: bool = False) -> int:
        """A descriptor of a directory in it. What is missing is made, unless it was removed.

        Args:
            folders: the names that lead to it.
            again: whether it is made again then, too.

        Raises:
            NotOursError: one belongs to another user.
            FileNotFoundError: one was removed.
            OSError: one cannot be had.
        """
        fd = self._top(again=again)
        try:
            for number, folder in enumerate(folders):
                below = self._opened(fd, folder, os.path.join(self.path, *folders[: number + 1]), again=again)
                os.close(fd)
                fd = below
        except BaseException:
            os.close(fd)
            raise
        return fd

    def make(self) -> bool:
        """Make the directory itself, if there is none. Returns whether it is new.

        Raises:
            OSError: it cannot be made.
        """
        parent = os.path.dirname(self.path)
        if parent:
            os.makedirs(parent, _ALL_PARENTS, exist_ok=True)
        try:
            os.mkdir(self.path, self._directory_mode)
        except FileExistsError:
            return False
        return True

    def open_file(self, fd: int, name: str, flags: int, path: str) -> int:
        """A descriptor of a file. With ``O_TRUNC`` it takes the place of what is no file of this user's alone.

        Raises:
            OSError: it cannot be had.
        """
        try:
            return self._tried(fd, path, lambda: self._open_file(fd, name, flags))
        except OSError as error:
            if not flags & os.O_TRUNC or error.errno not in _IN_THE_WAY:
                raise
        os.unlink(name, dir_fd=fd)
        return os.open(
            name, (flags & ~os.O_TRUNC) | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, self.file_mode, dir_fd=fd
        )

    def _open_file(self, fd: int, name: str, flags: int) -> int:
        return open_ours(name, flags, dir_fd=fd, mode=self.file_mode, also=self._owner)

    def _top(self, *, again: bool) -> int:
        try:
            fd = open_directory(self.path, or_root=True, mapped=True, links=True)
        except FileNotFoundError:
            if self.path in _seen and not again:
                raise
            if self.path in _seen:
                # What was further above has been moved or removed since, and is not made again in its old place.
                for path in (os.path.dirname(self.path), self.path):
                    with suppress(FileExistsError):
                        os.mkdir(path, self._directory_mode)
            else:
                self.make()
            fd = open_directory(self.path, or_root=True, mapped=True, links=True)
        _seen.add(self.path)
        return fd

    def _opened(self, fd: int, name: str, path: str, *, again: bool) -> int:
        if name in {"", ".", ".."}:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if path in _seen and not again:
            return self._tried(fd, path, lambda: open_directory(name, dir_fd=fd, also=self._owner))
        below = self._tried(
            fd, path, lambda: make_directory(name, dir_fd=fd, mode=self._directory_mode, also=self._owner)
        )
        _seen.add(path)
        return below

    def _tried(self, fd: int, path: str, call: Callable[[], T]) -> T:
        try:
            try:
                return call()
            except NotOursError:
                # Only now, and once: nearly everywhere files are owned by who makes them.
                if self._owner >= 0:
                    raise
                self._owner = owner_of_new(".", dir_fd=fd)
                return call()
        except OSError as error:
            error.filename = path
            raise


_trees: dict[str, Tree] = {}
_seen: set[str] = set()
"""Directories that this process has had open."""


def add_tree(tree: Tree) -> Tree:
    """What lies below it is opened with care from now on, in this process."""
    return _trees.setdefault(tree.path, tree)


def log_tree(base: str, name: str) -> Tree:
    """A launch's directory in ``--log-dir``: files in it are as readable as torchrun makes them."""
    return Tree(os.path.join(base, name), 0o777, 0o666)


def open_parent(path: str) -> tuple[int, str, Tree | None]:
    """The directory in which a file is to be: its descriptor, the name in it, and the tree, if it is in one.

    Raises:
        FileNotFoundError: it was removed.
        OSError: it cannot be had, or made.
    """
    folder, name = os.path.split(path)
    tree = _tree_of(folder)
    if tree is not None:
        return tree.open(_folders(tree, folder)), name, tree
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC  # it need not be readable
    try:
        fd = os.open(folder or ".", flags)
    except FileNotFoundError:
        if folder in _seen:
            raise
        os.makedirs(folder, exist_ok=True)
        fd = os.open(folder, flags)
    _seen.add(folder)
    return fd, name, None


def write_gitignore(dir_fd: int) -> None:
    """Have version control pass over a directory of run directories, unless the user has said something else there.

    Raises:
        OSError: it cannot be written, or there is one already.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(".gitignore", flags, 0o600, dir_fd=dir_fd), "wb") as file:
        file.write(b"*\n")


def make_directories(path: str, *, again: bool = False) -> None:
    """Make a directory and those above it, where they are missing.

    Args:
        path: the directory.
        again: whether those that were removed are made again, too: not while ranks run.

    Raises:
        FileNotFoundError: one was removed.
        OSError: it cannot be made.
    """
    tree = _tree_of(path)
    if tree is None:
        os.makedirs(path, exist_ok=True)
    else:
        os.close(tree.open(_folders(tree, path), again=again))


def remove_file(path: str) -> None:
    """Remove a file, if there is one.

    Raises:
        OSError: it is there and cannot be removed.
    """
    with suppress(FileNotFoundError):
        fd, name, _ = open_parent(path)
        try:
            os.unlink(name, dir_fd=fd)
        finally:
            os.close(fd)


def remove_directory(path: str) -> None:
    """Remove an empty directory.

    Raises:
        OSError: it is not there, has files, or cannot be removed.
    """
    fd, name, _ = open_parent(path)
    try:
        os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)


def _tree_of(folder: str) -> Tree | None:
    while folder:
        tree = _trees.get(folder)
        if tree is not None:
            return tree
        above = os.path.dirname(folder)
        if above == folder:
            return None
        folder = above
    return None


def _folders(tree: Tree, folder: str) -> list[str]:
    below = folder[len(tree.path) :].strip("/")  # the tree may be the root directory
    return below.split("/") if below else []
