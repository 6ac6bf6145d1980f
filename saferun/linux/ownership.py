"""Whose a file is. Everything is opened relative to a directory descriptor and then checked: what is checked is used.

Paths are names, and whoever may write a directory decides what a name in it means. So a path is turned into a
descriptor once, without following a link at its end; the owner is that of the descriptor; and what lies below is
opened, made and removed relative to it.

Sources: open(2), path_resolution(7), inode(7), acl(5), user_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from saferun.errors import suppress

# Not O_NONBLOCK alone: a FIFO or a terminal that another user planted is neither waited for nor taken as ours.
CAREFULLY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
ROOT = 0
_MOST_LINKS = 8
_DEEPEST = 1000

Identity = tuple[int, int]
"""Device and inode: which file it is, whatever its name."""


class NotOursError(PermissionError):
    """Another user owns the file, or may change it. ``strerror`` says who, as a message has it."""

    def __init__(self, words: str, path: str) -> None:
        super().__init__(errno.EPERM, words, path)


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
    """A descriptor of a directory that this user owns.

    Args:
        path: the directory; a link as its last component is not followed.
        dir_fd: what a relative path is relative to; None: the current directory.
        or_root: whether it may be root's as well.
        private: whether group and others may have no access at all.
        also: a further owner that it may have.
        mapped: whether it may have the owner that its file system gives to new files of this user: ``owner_of_new``.
        links: whether a link is followed that is itself this user's, or root's.

    Returns:
        The descriptor. Closing it is the caller's.

    Raises:
        NotOursError: it belongs to another user, or others have access.
        OSError: it cannot be opened, or is no directory (ENOTDIR, for a link too).
    """
    if links:
        path = followed(path, dir_fd)
    try:
        fd = os.open(path, _DIRECTORY, dir_fd=dir_fd)
    except PermissionError:
        # Another user's is reported as such, whatever the permissions are.
        check_owner(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), path, or_root=or_root, also=also)
        raise
    try:
        status = os.fstat(fd)
        check_owner(status, path, or_root=or_root, also=also, new_in=(".", fd) if mapped else None)
        if private:
            _check_private(status, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def followed(path: str, dir_fd: int | None) -> str:
    """Where links of this user, or of root, lead to. The link that was checked is the one that is read."""
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
    """The same of a directory that is made if need be. One that is there keeps its mode.

    Raises:
        NotOursError: it belongs to another user.
        OSError: as ``open_directory``, and where it cannot be made.
    """
    # Opened first: a file system of a server may refuse to make what is there with other words than "it is there".
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
    """A descriptor of a regular file that this user owns.

    Args:
        name: the file; a link as its last component is not followed.
        flags: as of ``os.open``. With ``O_TRUNC`` the file is emptied only once it is known whose it is.
        dir_fd: the directory that it lies in.
        mode: the permissions of a file that is made.
        or_root: whether it may be root's as well.
        also: a further owner that it may have.
        mapped: whether it may have the owner that its file system gives to new files of this user: ``owner_of_new``.

    Raises:
        NotOursError: it belongs to another user.
        OSError: it cannot be opened (ELOOP: it is a link), is no regular file (EINVAL), or is to be written and has
            another name (EMLINK): a hard link is a link that another user may have planted, too.
    """
    fd = os.open(name, (flags & ~os.O_TRUNC) | CAREFULLY, mode, dir_fd=dir_fd)
    try:
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
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_named(path: str) -> int:
    """A descriptor, for reading, of a regular file that the user has named, whosever it is.

    Raises:
        OSError: it cannot be opened (ELOOP: it is a link), or is no regular file (EINVAL).
    """
    fd = os.open(path, os.O_RDONLY | CAREFULLY)
    try:
        check_regular(os.fstat(fd), path)
        os.set_blocking(fd, True)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_temporary(stem: str, *, dir_fd: int | None = None, mode: int = 0o600) -> tuple[int, str]:
    """A new file for writing, and its name: ``stem`` and a random text. ``os.replace`` gives it its final name.

    Raises:
        OSError: it cannot be made.
    """
    while True:
        name = f"{stem}.{os.urandom(6).hex()}"
        with suppress(FileExistsError):
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY, mode, dir_fd=dir_fd), name


def owner_of_new(directory: str, *, dir_fd: int | None = None) -> int:
    """The owner of a file that this user makes in a directory; -1: none can be made.

    Mostly this user. Some file systems give all files, or those that root makes, one owner: NFS with root_squash or
    all_squash, CIFS, shares of virtual machines. There an owner that is not this user is no particular user. What is
    asked is a file without a name, or with a new one.
    """
    try:
        try:
            fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
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
    """Which file a descriptor is of. For ``remove_tree``, where another process is to remove what this one made."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


# --------------------------------------------------------------------------------------------------------------------
# Removal


def remove_tree(name: str, *, dir_fd: int | None = None, made: Identity | None = None) -> bool:
    """Remove a directory of this user with all that is in it, and nothing else.

    Everything is done relative to descriptors: a directory that is exchanged for a link, or moved, meanwhile leads
    nowhere else. Left alone are directories of other users, other file systems and bind mounts within the tree. Takes
    as few descriptors for a deep tree as for a flat one.

    Args:
        name: the directory.
        dir_fd: what a relative name is relative to; None: the current directory.
        made: which directory it has to be; None: any of this user's.

    Returns:
        Whether it is gone. What cannot be removed stays, and raises nothing.
    """
    try:
        top = open_directory(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        which = identity(top)
        if made is not None and which != made:
            return False
        _Removal(top).run()
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
    """Empties a directory, depth first, with two descriptors at a time: the way up is ``..``, if it leads back."""

    def __init__(self, top: int) -> None:
        self._device = os.fstat(top).st_dev
        self._mount = _mount_of(top)
        self._here = os.dup(top)
        # The names of the directories on the way down with what is to come back to, and what is left to do in each.
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
        """Remove all but the directories, whose names are returned."""
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
        """Go into a directory, and empty it; None: it is left alone."""
        if len(self._above) >= _DEEPEST:
            return None
        try:
            fd = open_directory(name, dir_fd=self._here)
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
    """The mount that a descriptor is of, which distinguishes bind mounts of one file system; empty: it is not known."""
    with suppress(OSError):
        info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            lines = os.read(info, 4096).split(b"\n")
        finally:
            os.close(info)
        return next((line for line in lines if line.startswith(b"mnt_id:")), b"")
    return b""


# --------------------------------------------------------------------------------------------------------------------


def owner_words(uid: int) -> str:
    """An owner in words. Without a name: that may take a name service, which is not asked here."""
    return "root" if uid == ROOT else f"user {uid}"


def check_owner(
    status: os.stat_result,
    path: str,
    *,
    or_root: bool,
    also: int = -1,
    new_in: tuple[str, int | None] | None = None,
) -> None:
    """Whether a file is this user's.

    Args:
        status: the file's.
        path: its name, for the error.
        or_root: whether it may be root's as well.
        also: a further owner that it may have.
        new_in: a directory, and what that is relative to: it may have the owner of new files there.

    Raises:
        NotOursError: it belongs to another user.
    """
    if status.st_uid in {os.geteuid(), also} or (or_root and status.st_uid == ROOT):
        return
    if new_in is None or status.st_uid != owner_of_new(new_in[0], dir_fd=new_in[1]):
        raise NotOursError(f"it belongs to {owner_words(status.st_uid)}", path)


def check_regular(status: os.stat_result, path: str) -> None:
    """Whether it is a regular file.

    Raises:
        OSError: it is none (EINVAL).
    """
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", path)


def _check_private(status: os.stat_result, path: str) -> None:
    if stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO):
        raise NotOursError("others have access to it", path)


def _check_only_name(status: os.stat_result, path: str) -> None:
    if status.st_nlink > 1:
        raise OSError(errno.EMLINK, "it has another name elsewhere", path)
