"""Anonymous files in memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error
from saferun.linux.system_call import system_call

_MFD_CLOEXEC = 0x1
_MFD_EXEC = 0x10  # Linux 6.3, where vm.memfd_noexec may require it
_TRIES = 8
_SHM = "/dev/shm"  # noqa: S108 - new files, unlinked before they are filled


def memory_file(name: str, content: bytes | memoryview, *, executable: bool = False, disks: bool = True) -> int:
    """A file with this content, as a descriptor for reading, at offset 0. It is closed by exec.

    Args:
        name: shown by tools that list a process's descriptors.
        content: the whole content.
        executable: whether it is a program or a library, to be started or loaded as /proc/self/fd/N.
        disks: whether a file on disk, whose file system may hang, will do if the system has no memory files.

    Raises:
        OSError: it cannot be made.
    """
    try:
        fd = _memfd(name, executable=executable)
    except OSError:
        return _unlinked_file(content, executable=executable, disks=disks)
    with close_on_error(fd):
        _write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
    return fd


def blank_memory_file(name: str) -> int:
    """An empty file in memory, as a descriptor for reading and writing. It is closed by exec.

    Raises:
        OSError: the system has none; use the heap instead.
    """
    return _memfd(name, executable=False)


def shared_memory_file(name: str) -> int:
    """As :func:`blank_memory_file`, or a file in /dev/shm that has no name, or had one for a moment.

    Raises:
        OSError: there is neither.
    """
    try:
        return blank_memory_file(name)
    except OSError:
        pass
    # Some Pythons lack it. To open a directory itself for writing is refused by the kernel.
    nameless = getattr(os, "O_TMPFILE", os.O_DIRECTORY)
    try:
        return os.open(_SHM, nameless | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        fd, path = _new_file(_SHM, 0o600)
        os.unlink(path)
        return fd


def _memfd(name: str, *, executable: bool) -> int:
    if executable:
        try:
            return _memfd_create(name, _MFD_CLOEXEC | _MFD_EXEC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return _memfd_create(name, _MFD_CLOEXEC)


def _memfd_create(name: str, flags: int) -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return system_call("memfd_create", os.fsencode(name), flags)


def _unlinked_file(content: bytes | memoryview, *, executable: bool, disks: bool) -> int:
    """An unlinked file in the first directory that works: memory first, disks last."""
    failure = OSError(errno.ENOENT, "no place for a temporary file")
    for directory in _directories(disks=disks):
        try:
            if executable and os.statvfs(directory).f_flag & os.ST_NOEXEC:
                continue
            return _made_in(directory, content, executable=executable)
        except OSError as error:
            failure = error
    raise failure


def _directories(*, disks: bool) -> Iterator[str]:
    yield _SHM
    if not disks:
        return
    for directory in (os.environ.get("XDG_RUNTIME_DIR"), os.environ.get("TMPDIR"), "/tmp", "/var/tmp"):  # noqa: S108
        if directory:
            yield directory


def _made_in(directory: str, content: bytes | memoryview, *, executable: bool) -> int:
    writer, path = _new_file(directory, 0o700 if executable else 0o600)
    try:
        try:
            # Opened again, since a file that is open for writing cannot be executed.
            reader = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(path)
        with close_on_error(reader):
            _write(writer, content)
    finally:
        os.close(writer)
    return reader


def _new_file(directory: str, mode: int) -> tuple[int, str]:
    """A new file, open for reading and writing, and its path, which is to be removed at once."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    for _ in range(_TRIES):
        path = os.path.join(directory, f"saferun-{os.urandom(8).hex()}")
        with suppress(FileExistsError):
            return os.open(path, flags, mode), path
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), directory)


def _write(fd: int, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(fd, rest) :]
