"""Checks of file owners, on open descriptors, so that what was checked is what is used.

Any user who may write to a directory decides what a name in it refers to. So a path is resolved to a descriptor once,
without following a link as its last component; the descriptor's owner is checked; and what is below is opened, made and
removed relative to it.

Sources: open(2), path_resolution(7), inode(7), acl(5), user_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error

# With these, a FIFO or a terminal that another user planted neither blocks nor becomes the controlling terminal.
CAREFULLY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ROOT = 0
_MOST_LINKS = 8
_DEEPEST = 1000

Identity = tuple[int, int]
"""Device and inode: they identify a file, whatever its name."""


class NotOursError(PermissionError):
    """Another user owns the file, or may change it. ``strerror`` says which, for messages."""

    def __init__(self, message: str, path: str) -> None:
        super().__init__(errno.EPERM, message, path)


# --------------------------------------------------------------------------------------------------------------------
# Directories and files of ours


def open_directory(
    path: str,
    *,
    dir_fd: int | None = None,
    or_root: bool = False,
    private: bool = False,
    also: int = -1,
    mapped: bool = False,
    links: bool = False,
) -> int:
    """Open a directory that this user owns.

    Args:
        path: the directory; a link as its last component is not followed.
        dir_fd: the directory for a relative path; None: the current directory.
        or_root: whether it may be root's as well.
        private: whether group and others must have no access.
        also: a further permitted owner.
        mapped: whether the owner that the file system gives to this user's new files is permitted: ``owner_of_new``.
        links: whether to follow links that are owned by this user or root.

    Returns:
        The descriptor, which the caller closes.

    Raises:
        NotOursError: it belongs to another user, or others have access.
        OSError: it cannot be opened, or is not a directory (ENOTDIR, for a link too).
    """
    if links:
        path = followed(path, dir_fd)
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    except PermissionError:
        # That it is another user's is the better message.
        check_owner(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), path, or_root=or_root, also=also)
        raise
    with close_on_error(fd):
        status = os.fstat(fd)
        check_owner(status, path, or_root=or_root, also=also, new_in=(".", fd) if mapped else None)
        if private:
            _check_private(status, path)
    return fd


def followed(path: str, dir_fd: int | None) -> str:
    """Resolve links of this user or root. The link that was checked is the one that is read."""
    for _ in range(_MOST_LINKS):
        try:
            link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)
        except FileNotFoundError:
            return path
        try:
            status = os.fstat(link)
            if not stat.S_ISLNK(status.st_mode):
                return path
            check_owner(status, path, or_root=True, new_in=(os.path.dirname(path) or ".", dir_fd))
            path = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=link))
        finally:
            os.close(link)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def make_directory(name: str, *, dir_fd: int | None = None, mode: int = 0o700, also: int = -1) -> int:
    """Open a directory that this user owns, and make it if needed. An existing one keeps its mode.

    Raises:
        NotOursError: it belongs to another user.
        OSError: as ``open_directory``, or it cannot be made.
    """
    # Open first: a network file system may refuse to make an existing directory with another error than EEXIST.
    with suppress(FileNotFoundError):
        return open_directory(name, dir_fd=dir_fd, also=also)
    with suppress(FileExistsError):
        os.mkdir(name, mode, dir_fd=dir_fd)
    return open_directory(name, dir_fd=dir_fd, also=also)


def open_ours(
    name: str,
    flags: int,
    *,
    dir_fd: int | None = None,
    mode: int = 0o600,
    or_root: bool = False,
    also: int = -1,
    mapped: bool = False,
) -> int:
    """Open a regular file that this user owns.

    Args:
        name: the file; a link as its last component is not followed.
        flags: as of ``os.open``. With ``O_TRUNC`` the file is truncated only after its owner was checked.
        dir_fd: the directory for a relative name.
        mode: the permissions of a new file.
        or_root: whether it may be root's as well.
        also: a further permitted owner.
        mapped: whether the owner that the file system gives to this user's new files is permitted: ``owner_of_new``.

    Raises:
        NotOursError: it belongs to another user.
        OSError: it cannot be opened (ELOOP: it is a link), is not a regular file (EINVAL), or is to be written and has
            another name (EMLINK): another user may have planted a hard link.
    """
    fd = os.open(name, (flags & ~os.O_TRUNC) | CAREFULLY, mode, dir_fd=dir_fd)
    with close_on_error(fd):
        status = os.fstat(fd)
        check_regular(status, name)
        beside = (os.path.dirname(name) or ".", dir_fd)
        check_owner(status, name, or_root=or_root, also=also, new_in=beside if mapped else None)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            _check_only_name(status, name)
        if flags & os.O_TRUNC:
            os.ftruncate(fd, 0)
        if not flags & os.O_NONBLOCK:
            os.set_blocking(fd, True)
    return fd


def open_named(path: str) -> int:
    """Open a regular file that the user has named for reading, whoever owns it.

    Raises:
        OSError: it cannot be opened (ELOOP: it is a link), or is not a regular file (EINVAL).
    """
    fd = os.open(path, os.O_RDONLY | CAREFULLY)
    with close_on_error(fd):
        check_regular(os.fstat(fd), path)
        os.set_blocking(fd, True)
    return fd


def open_temporary(stem: str, *, dir_fd: int | None = None, mode: int = 0o600) -> tuple[int, str]:
    """Make a new file for writing. Its name is ``stem`` and a random suffix; ``os.replace`` gives it its final name.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        name = f"{stem}.{os.urandom(6).hex()}"
        with suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, mode, dir_fd=dir_fd), name


def owner_of_new(directory: str, *, dir_fd: int | None = None) -> int:
    """The owner of files that this user makes in a directory; -1: none can be made.

    Usually this user. Some file systems give all files, or those of root, one owner: NFS with root_squash or
    all_squash, CIFS, shares of virtual machines. That owner stands for no particular user. The test is a file without a
    name, or with a new one.
    """
    try:
        try:
            # Some Pythons lack it. To open a directory itself for writing is refused by the kernel.
            nameless = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
            fd = os.open(directory, nameless | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
        except OSError:
            within = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dir_fd)
            try:
                fd, name = open_temporary(".saferun", dir_fd=within)
                os.unlink(name, dir_fd=within)
            finally:
                os.close(within)
        try:
            return os.fstat(fd).st_uid
        finally:
            os.close(fd)
    except OSError:
        return -1


def identity(fd: int) -> Identity:
    """The identity of an open file. For ``remove_tree`` in another process than the one that made it."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


# --------------------------------------------------------------------------------------------------------------------
# Removal


def remove_tree(name: str, *, dir_fd: int | None = None, made: Identity | None = None, also: int = -1) -> bool:
    """Remove a directory of this user with its contents, and nothing else.

    All operations are relative to descriptors: replacing a directory by a link meanwhile, or moving it, has no effect.
    Directories of other users, other file systems and bind mounts within the tree are kept. A deep tree takes as few
    descriptors as a flat one.

    Args:
        name: the directory.
        dir_fd: the directory for a relative name; None: the current directory.
        made: the directory's identity; None: any of this user's.
        also: a further permitted owner, of directories within the tree, too.

    Returns:
        Whether it is gone. What cannot be removed stays; nothing is raised.
    """
    try:
        top = open_directory(name, dir_fd=dir_fd, also=also)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        which = identity(top)
        if made is not None and which != made:
            return False
        _Removal(top, also).run()
    except OSError:
        return False
    finally:
        os.close(top)
    with suppress(OSError):
        status = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        if (status.st_dev, status.st_ino) == which:
            os.rmdir(name, dir_fd=dir_fd)
            return True
    return False


class _Removal:
    """Empties a directory, depth first, with two descriptors at a time: it goes up by ``..``, if that leads back."""

    def __init__(self, top: int, also: int) -> None:
        self._also = also
        self._device = os.fstat(top).st_dev
        self._mount = _mount_of(top)
        self._here = os.dup(top)
        # For each directory above: its identity, the name of the one below, and the directories left to do.
        self._above: list[tuple[Identity, str, Iterator[str]]] = []

    def run(self) -> None:
        try:
            directories = self._empty()
            while True:
                name = next(directories, None)
                if name is not None:
                    below = self._descend(name, directories)
                    directories = directories if below is None else below
                elif self._above:
                    directories = self._ascend()
                else:
                    return
        finally:
            os.close(self._here)

    def _empty(self) -> Iterator[str]:
        """Remove all but the directories, and return their names."""
        directories: list[str] = []
        with suppress(OSError), os.scandir(self._here) as entries:
            for entry in entries:
                with suppress(OSError):
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.name)
                    else:
                        os.unlink(entry.name, dir_fd=self._here)
        return iter(directories)

    def _descend(self, name: str, rest: Iterator[str]) -> Iterator[str] | None:
        """Enter a directory and empty it; None: it is kept."""
        if len(self._above) >= _DEEPEST:
            return None
        try:
            fd = open_directory(name, dir_fd=self._here, also=self._also)
        except OSError:
            return None
        if os.fstat(fd).st_dev != self._device or _mount_of(fd) != self._mount:
            os.close(fd)
            return None
        self._above.append((identity(self._here), name, rest))
        os.close(self._here)
        self._here = fd
        return self._empty()

    def _ascend(self) -> Iterator[str]:
        which, name, rest = self._above.pop()
        fd = os.open("..", _DIRECTORY, dir_fd=self._here)
        if identity(fd) != which:
            os.close(fd)
            raise OSError(errno.ESTALE, "a directory was moved while it was removed")
        os.close(self._here)
        self._here = fd
        with suppress(OSError):
            os.rmdir(name, dir_fd=fd)
        return rest


def _mount_of(fd: int) -> bytes:
    """The mount of a descriptor, which distinguishes bind mounts of one file system; empty: unknown."""
    with suppress(OSError):
        info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.read(info, 4096).split(b"\n")
        finally:
            os.close(info)
        return next((line for line in lines if line.startswith(b"mnt_id:")), b"")
    return b""


# --------------------------------------------------------------------------------------------------------------------


def owner_text(uid: int) -> str:
    """An owner, for messages. Without the name, which may need a name service."""
    return "root" if uid == ROOT else f"user {uid}"


def check_owner(
    status: os.stat_result,
    path: str,
    *,
    or_root: bool,
    also: int = -1,
    new_in: tuple[str, int | None] | None = None,
) -> None:
    """Check that a file is this user's.

    Args:
        status: the file's status.
        path: its name, for the error.
        or_root: whether it may be root's as well.
        also: a further owner that it may have.
        new_in: a directory, and the descriptor it is relative to: the owner of new files there is permitted.

    Raises:
        NotOursError: it belongs to another user.
    """
    if status.st_uid in {os.geteuid(), also} or (or_root and status.st_uid == ROOT):
        return
    if new_in is None or status.st_uid != owner_of_new(new_in[0], dir_fd=new_in[1]):
        raise NotOursError(f"it belongs to {owner_text(status.st_uid)}", path)


def check_regular(status: os.stat_result, path: str) -> None:
    """Check that it is a regular file.

    Raises:
        OSError: it is not (EINVAL).
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _check_private(status: os.stat_result, path: str) -> None:
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotOursError("others have access to it", path)


def _check_only_name(status: os.stat_result, path: str) -> None:
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "it has another name elsewhere", path)
