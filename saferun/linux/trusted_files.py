"""Files that are used without being named by the user, and secrets: only if no other user can have written them.

Paths are opened as in ``linux/ownership.py``: what is checked is what is used. Looks up groups by the name service.

Sources: open(2), path_resolution(7), inode(7), acl(5), user_namespaces(7).
"""

from __future__ import annotations

import errno
import os
import stat

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error
from saferun.linux.ownership import (
    CAREFULLY,
    ROOT,
    NotOursError,
    check_owner,
    check_regular,
    followed,
    open_ours,
    owner_text,
)

__all__ = ["is_private_group", "open_found", "open_found_directory", "open_secret"]

_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_MOST_PARENTS = 4096
_ACL = "system.posix_acl_access"


def open_secret(path: str) -> int:
    """Open a file for reading that this user or root owns and that no other user may read or write.

    A link is followed if it belongs to one of the two as well, as in volumes of Kubernetes. Permissions of a group
    whose only member is this user are allowed.

    Raises:
        NotOursError: it belongs to another user, or others may read or write it; ``strerror`` says which.
        OSError: it cannot be opened, or is not a regular file (EINVAL).
    """
    fd = open_ours(followed(path, None), os.O_RDONLY, or_root=True)
    with close_on_error(fd):
        _check_secret(fd, path)
    return fd


def _check_secret(fd: int, path: str) -> None:
    status = os.fstat(fd)
    if status.st_mode & stat.S_IRWXO:
        raise NotOursError("everyone may read or write it", path)
    if status.st_mode & stat.S_IRWXG and (not is_private_group(status.st_gid) or _has_acl(fd)):
        raise NotOursError(f"group {status.st_gid} may read or write it", path)


def open_found(path: str) -> int:
    """Open a file for reading that was found by search, only if no other user can have planted it.

    The file and its directory must belong to this user or root, and no other user may write to the file or, unless it
    is sticky, to its directory. For a link, both the link and its target must qualify. Write permission of a group
    whose only member is this user is allowed. For root all parent directories must qualify too (not in a user
    namespace, where root is like any user).

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
        with close_on_error(fd):
            _check_found(fd, shown, "it", sticky_counts=False)
            os.set_blocking(fd, True)
        return fd
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), shown)


def open_found_directory(path: str) -> int:
    """Open a directory in which no other user can plant files (``O_PATH``: only for names in it).

    Raises:
        NotOursError: another user can plant files there; ``strerror`` says how.
        OSError: it cannot be opened.
    """
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with close_on_error(fd):
        _check_found(fd, path, "its directory", sticky_counts=True)
        if _is_root_of_the_machine():
            _check_parents(fd, path)
    return fd


def _check_found(fd: int, path: str, what: str, *, sticky_counts: bool) -> None:
    status = os.fstat(fd)
    if what == "it":
        check_regular(status, path)
    if status.st_uid not in (os.geteuid(), ROOT):
        raise NotOursError(f"{what} belongs to {owner_text(status.st_uid)}", path)
    writable = status.st_mode & _WRITABLE_FOR_OTHERS
    if not writable or (sticky_counts and status.st_mode & stat.S_ISVTX):
        return
    if writable & stat.S_IWOTH:
        raise NotOursError(f"{what} is writable by everyone", path)
    if not is_private_group(status.st_gid) or _has_acl(fd):
        raise NotOursError(f"{what} is writable by group {status.st_gid}", path)


def _check_parents(fd: int, path: str) -> None:
    """Check all parent directories."""
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
    """Whether this user is the only member of a group, as at sites with umask 002, where each user has one.

    That is: it is the user's primary group, has the user's name, and lists no other user. Root's group is not one, as
    systems differ in its members. Asks the name service.
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
    """Whether there is an access control list, whose rights the mode does not show: its mask is in the group's bits."""
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
