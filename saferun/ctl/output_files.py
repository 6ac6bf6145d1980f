"""Files that saferunctl writes where the user says."""

from __future__ import annotations

import os
import re
import stat
import sys

from saferun.errors import SaferunError, suppress
from saferun.linux.ownership import ROOT, NotOursError, check_owner, followed, open_temporary

_DESCRIPTOR = re.compile(r"/dev/(stdout|stderr)|/(?:dev|proc/self)/fd/([0-9]{1,6})")
_STANDARD = {"stdout": 1, "stderr": 2}
_STDOUT = 1
_PERMISSIONS = stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO


def is_stdout(path: str) -> bool:
    """Whether a path means standard output: ``-``, ``/dev/stdout`` and the like."""
    return path == "-" or _descriptor(path) == _STDOUT


def write_output(path: str, content: bytes, *, owner: int = -1) -> None:
    """Write a file as a whole: another process sees the old one or the new one.

    A new file is for this user only, an own one keeps its permissions. A link of this user or root is followed, and
    another user's, who may have planted it, is replaced. What is no regular file (a device, a FIFO) is written to.

    Args:
        path: the file; ``/dev/stdout`` and ``/dev/fd/N`` are descriptors of this process.
        content: what is written.
        owner: root gives the file to this user if its directory is that user's.

    Raises:
        SaferunError: it cannot be written; with a hint at ``--output``.
    """
    try:
        descriptor = _descriptor(path)
        if descriptor >= 0:
            if sys.stdout is not None:
                sys.stdout.flush()
            _write(os.dup(descriptor), content)
            return
        target = os.path.abspath(path)
        with suppress(NotOursError):
            target = followed(target, None)
        fd = _open_special(target)
        if fd >= 0:
            _write(fd, content)
        else:
            _replace(target, content, owner)
    except OSError as error:
        raise SaferunError(f"{path}: {error.strerror}", "write elsewhere with --output") from None


def _descriptor(path: str) -> int:
    """The descriptor of this process that a path means; -1: it means a file."""
    found = _DESCRIPTOR.fullmatch(path)
    if found is None:
        return -1
    return _STANDARD[found[1]] if found[1] else int(found[2])


def _write(fd: int, content: bytes) -> None:
    with open(fd, "wb") as file:
        file.write(content)


def _open_special(path: str) -> int:
    """Open what is no regular file; -1: it is one, a link of another user, or missing.

    Raises:
        OSError: it is not to be written to: a directory, a disk, another user's FIFO.
    """
    try:
        status = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return -1
    mode = status.st_mode
    if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
        return -1
    if not stat.S_ISCHR(mode):  # those only root can make
        check_owner(status, path, or_root=True)
    if stat.S_ISBLK(mode):
        raise OSError(0, "it is a disk", path)
    return os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC)


def _replace(path: str, content: bytes, owner: int) -> None:
    folder, name = os.path.split(path)
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd, temporary = open_temporary(f".{name}", dir_fd=folder_fd)
        try:
            with open(fd, "wb") as file:
                _set_access(fd, name, folder_fd, owner)
                file.write(content)
            os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder_fd)
            raise
    finally:
        os.close(folder_fd)


def _set_access(fd: int, name: str, folder_fd: int, owner: int) -> None:
    """Give the new file to its owner, with the permissions that it has had, as far as that goes."""
    with suppress(OSError):
        folder = os.fstat(folder_fd)
        if os.geteuid() == ROOT and owner == folder.st_uid:
            os.fchown(fd, owner, folder.st_gid)
        before = os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
        if stat.S_ISREG(before.st_mode) and before.st_uid == os.fstat(fd).st_uid:
            os.fchmod(fd, before.st_mode & _PERMISSIONS)
