"""Files that count although the user did not name them, and secrets: only if no other user can have written them.

Paths are opened as in ``linux/ownership.py``: what is checked is what is used. Asks the name service for groups.

Sources: open(2), path_resolution(7), inode(7), acl(5), user_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import stat

from saferun.errors import suppress
from saferun.linux.ownership import (
    CAREFULLY,
    ROOT,
    NotOursError,
    check_owner,
    check_regular,
    followed,
    open_ours,
    owner_words,
)

__all__ = ["is_private_group", "open_found", "open_found_directory", "open_secret"]

_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_PARENTS = 4096
_ACL = "system.posix_acl_access"


def open_secret(path: str) -> int:
    """A descriptor, for reading, of a file that this user or root owns and that no other user may read or write.

    A link is followed where it belongs to one of the two as well, as volumes of Kubernetes have them. The permissions
    of a group that only this user is in are no one else's.

    Raises:
        NotOursError: it belongs to another user, or others may read or write it; ``strerror`` says which.
        OSError: it cannot be opened, or is no regular file (EINVAL).
    """
    fd = open_ours(followed(path, None), os.O_RDONLY, or_root=True)
    try:
        _check_secret(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_secret(fd: int, path: str) -> None:
    status = os.fstat(fd)
    if status.st_mode & stat.S_IRWXO:
        raise NotOursError("everyone may read or write it", path)
    if status.st_mode & stat.S_IRWXG and (not is_private_group(status.st_gid) or _has_acl(fd)):
        raise NotOursError(f"group {status.st_gid} may read or write it", path)


def open_found(path: str) -> int:
    """A descriptor, for reading, of a file that was found and not named: only if no other user can have planted it.

    That is so where the file and its directory belong to this user or root, and no other user may write the file or,
    but for a sticky directory, its directory. A link counts where both the link and what it leads to do. The write
    permission of a group that only this user is in is no one else's. As root all directories above count too (not in
    a user namespace, where this root is as mighty as any user).

    Raises:
        NotOursError: another user can have planted it; ``strerror`` says how.
        OSError: it cannot be opened.
    """
    shown = path
    for _ in range(2):
        parent, name = os.path.split(path)
        directory = open_found_directory(parent or ".")
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            check_owner(status, shown, or_root=True)
            if stat.S_ISLNK(status.st_mode):
                path = os.path.realpath(path)
                continue
            fd = os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=directory)
        finally:
            os.close(directory)
        try:
            _check_found(fd, shown, "it", sticky_counts=False)
            os.set_blocking(fd, True)
        except BaseException:
            os.close(fd)
            raise
        return fd
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown)


def open_found_directory(path: str) -> int:
    """A descriptor of a directory in which no other user can plant anything; for names in it alone (``O_PATH``).

    Raises:
        NotOursError: another user can plant files there; ``strerror`` says how.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_found(fd, path, "its directory", sticky_counts=True)
        if _is_root_of_the_machine():
            _check_parents(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_found(fd: int, path: str, what: str, *, sticky_counts: bool) -> None:
    status = os.fstat(fd)
    if what == "it":
        check_regular(status, path)
    if status.st_uid not in (os.geteuid(), ROOT):
        raise NotOursError(f"{what} belongs to {owner_words(status.st_uid)}", path)
    writable = status.st_mode & _WRITABLE_FOR_OTHERS
    if not writable or (sticky_counts and status.st_mode & stat.S_ISVTX):
        return
    if writable & stat.S_IWOTH:
        raise NotOursError(f"{what} is writable by everyone", path)
    if not is_private_group(status.st_gid) or _has_acl(fd):
        raise NotOursError(f"{what} is writable by group {status.st_gid}", path)


def _check_parents(fd: int, path: str) -> None:
    """The directories above one, up to the root directory."""
    here = os.dup(fd)
    try:
        for _ in range(_MOST_PARENTS):
            above = os.open("..", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=here)
            same = os.path.samestat(os.fstat(above), os.fstat(here))
            os.close(here)
            here = above
            if same:
                return
            _check_found(here, path, "a directory above it", sticky_counts=True)
    finally:
        os.close(here)


def is_private_group(gid: int) -> bool:
    """Whether a group has this user for its only member, as sites with umask 002 give one to each user.

    That is: it is the user's first group, named like the user, and lists no other user. Root's group is not: who else
    is in it is for every system to say. Asks the name service.
    """
    uid = os.geteuid()
    if uid == ROOT:
        return False
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except (KeyError, OSError):
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def _has_acl(fd: int) -> bool:
    """Whether an access control list gives rights that the mode does not show: its mask stands in the group's bits."""
    try:
        os.getxattr(f"/proc/self/fd/{fd}", _ACL)
    except OSError as error:
        return error.errno not in {errno.ENODATA, errno.ENOTSUP}
    return True


def _is_root_of_the_machine() -> bool:
    if os.geteuid() != ROOT:
        return False
    with suppress(OSError, ValueError), open("/proc/self/uid_map", "rb") as file:
        first, outside, count = file.read(256).split()[:3]
        return (int(first), int(outside)) == (0, 0) and int(count) >= 1 << 16
    return True
