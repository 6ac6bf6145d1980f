"""What a rank runs where a function is launched: it calls the function, and leaves what it returned for the launch.

``python -m saferun.api.rank_function DIRECTORY``. The directory has to be this user's own and private: what is in it is
unpickled.
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
from functools import partial

CALL_NAME = "call"
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def result_name(rank: int) -> str:
    """The file with what a rank returned."""
    return f"result_{rank}"


def failure_name(rank: int) -> str:
    """The file that says why what a rank returned cannot be handed on."""
    return f"failure_{rank}"


def name_of(function: object) -> str:
    """For messages. Not its representation: that of a ``functools.partial`` has the arguments in it."""
    while isinstance(function, partial):
        function = function.func
    try:
        name = getattr(function, "__qualname__", None)
    except Exception:  # code of the program's
        name = None
    return name if isinstance(name, str) else type(function).__qualname__


def open_private(path: str) -> int:
    """A descriptor of a directory that is this user's, and closed to all others.

    Raises:
        OSError: it is not.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(fd)
        raise PermissionError(1, "not a private directory of this user", path)
    return fd


def read_private(name: str, dir_fd: int) -> bytes:
    """The content of a file there that is this user's own.

    Raises:
        OSError: there is none, or it is another user's, or no regular file.
    """
    fd = os.open(name, _READ, dir_fd=dir_fd)
    with open(fd, "rb") as stream:
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or not stat.S_ISREG(status.st_mode):
            raise PermissionError(1, "not a file of this user", name)
        return stream.read()


def write_private(name: str, content: bytes, dir_fd: int) -> None:
    """Write a file there, as a whole or not at all."""
    part = f".{name}.{os.getpid()}"
    with open(os.open(part, _WRITE, 0o600, dir_fd=dir_fd), "wb") as stream:
        stream.write(content)
    os.rename(part, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def main(path: str) -> None:
    """Call the function, and leave what it returns."""
    fd = open_private(path)
    search_path, call = pickle.loads(read_private(CALL_NAME, fd))  # noqa: S301 - written by this user's own call
    # In the order of the program that has made the call: a module of its own may have the name of an installed one.
    sys.path[:] = [*search_path, *(entry for entry in sys.path if entry not in search_path)]
    function, args = pickle.loads(call)  # noqa: S301 - likewise
    rank = int(os.environ["RANK"])
    # Of a rank that leaves by sys.exit(0), and in place of what it returned in an attempt before.
    write_private(result_name(rank), pickle.dumps(None), fd)
    try:
        os.unlink(failure_name(rank), dir_fd=fd)
    except FileNotFoundError:
        pass
    value = function(*args)
    try:
        content = pickle.dumps(value)
    except Exception as error:
        # The rank has done its work, and others may still be at theirs: nothing has failed that would stop them.
        text = f"rank {rank}: what {name_of(function)} returned cannot be pickled: {type(error).__name__}: {error}"
        write_private(failure_name(rank), text.encode(errors="replace"), fd)
    else:
        write_private(result_name(rank), content, fd)


if __name__ == "__main__":
    main(sys.argv[1])
