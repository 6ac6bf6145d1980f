"""A small file that processes of this user on other hosts read, where they share a directory, and no other user.

It lies in a directory of its own, 0700. Other hosts get names and never a path: each looks in the directory that
it knows by itself, so that whoever can change a message cannot lead it to a file system of theirs.

Any of these calls may wait for a file system forever.
"""

from __future__ import annotations

import errno
import os
import re
import stat

from saferun.errors import suppress
from saferun.files.trees import Tree, write_gitignore
from saferun.linux.ownership import Identity, NotOursError, identity, open_directory, open_ours, remove_tree
from saferun.model import Value

_NAME = re.compile(r"\.private-[0-9a-f]{32}")
_FILE = "content"
_MODE = 0o600
_FOR_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def new_name() -> str:
    """A name that cannot be guessed."""
    return f".private-{os.urandom(16).hex()}"


class Made(Value):
    """The directory that was made."""

    path: str
    which: Identity


def write_private(base: str, name: str, content: bytes) -> Made:
    """Write a file for processes of this user that know its name.

    Args:
        base: the directory in which it is to be; it is made if need be, as one of run directories is.
        name: of ``new_name``.
        content: what is in it.

    Raises:
        NotOursError: the directory is another user's.
        OSError: the file cannot be made.
    """
    tree = Tree(base)
    is_new = tree.make()
    above = open_directory(base, links=True)
    try:
        if is_new:
            with suppress(OSError):
                write_gitignore(above)
        os.mkdir(name, 0o700, dir_fd=above)
        fd = open_directory(name, dir_fd=above, private=True)
    finally:
        os.close(above)
    try:
        # Under another name until it is whole.
        file = os.open(".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=fd)
        with open(file, "wb") as stream:
            stream.write(content)  # network file systems show it to other hosts once it has been closed
        os.rename(".new", _FILE, src_dir_fd=fd, dst_dir_fd=fd)
        return Made(os.path.join(base, name), identity(fd))
    except BaseException:
        remove_private(base, name)
        raise
    finally:
        os.close(fd)


def read_private(base: str, name: str, longest: int) -> bytes:
    """What a process of this user has written by ``write_private``, perhaps on another host.

    Args:
        base: the directory in which it is.
        name: as another host says.
        longest: how many bytes it may have.

    Raises:
        NotOursError: another user has made it, or could have.
        OSError: it is not there or cannot be read; EINVAL: the name is none, or the file is no such file.
    """
    if _NAME.fullmatch(name) is None:
        raise OSError(errno.EINVAL, "not the name of a private directory", "")
    above = open_directory(base, links=True)
    try:
        folder = open_directory(name, dir_fd=above, private=True)
    finally:
        os.close(above)
    try:
        fd = open_ours(_FILE, os.O_RDONLY, dir_fd=folder)
    finally:
        os.close(folder)
    try:
        status = os.fstat(fd)
        if status.st_nlink != 1 or stat.S_IMODE(status.st_mode) & _FOR_OTHERS:
            raise NotOursError("others have access to it", name)
        if status.st_size > longest:
            raise OSError(errno.EINVAL, "it is too long", name)
        return os.read(fd, longest)
    finally:
        os.close(fd)


def remove_private(base: str, name: str) -> bool:
    """Remove what ``write_private`` has made. Returns whether it is gone."""
    try:
        above = open_directory(base, links=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        return remove_tree(name, dir_fd=above)
    finally:
        os.close(above)
