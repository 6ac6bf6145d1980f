"""The JSON files that ``torch.distributed.elastic``'s ``@record`` writes, and the launcher's own."""

from __future__ import annotations

import errno
import json
import os
import stat
import time

from saferun.errors import suppress
from saferun.linux.descriptors import close_on_error
from saferun.linux.ownership import CAREFULLY, NotOursError, check_regular, open_ours, owner_text
from saferun.model import JsonObject, Value

# @record writes a message with its traceback: a few kilobytes. A larger file is not parsed, but copied as it is.
_LARGEST_BYTES = 256 << 10
_LATEST_TIME = 1e12
_LARGEST_COPIED_BYTES = 4 << 20
_ROOT = 0
# Why a file cannot be removed: it is a mount point, or in a directory that this user may not write to.
_STAYS = frozenset({errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS})


class RecordedError(Value):
    """An error file: its message, when it was raised (seconds since the epoch), and the whole content."""

    message: str
    time: float
    content: JsonObject


def read_error_file(path: str) -> RecordedError | None:
    """Read a rank's error file; None if there is none or it is malformed. Its content is untrusted."""
    try:
        content = json.loads(_read(path), parse_constant=_refuse)
        message = content["message"]
        if isinstance(message, dict):
            return RecordedError(str(message["message"]), _seconds(message["extraInfo"]["timestamp"]), content)
        return RecordedError(str(message), _seconds(content.get("timestamp", 0)), content)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _refuse(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _seconds(raw: str | float) -> float:
    """Seconds since the epoch, which ``@record`` writes as text."""
    seconds = float(raw)
    if not -_LATEST_TIME < seconds < _LATEST_TIME:  # NaN neither
        raise ValueError("no time")
    return seconds


def _read(path: str) -> bytes:
    fd = _open(path)
    with open(fd, "rb") as file:
        return file.read(_LARGEST_BYTES) if os.fstat(fd).st_size <= _LARGEST_BYTES else b""


def _open(path: str) -> int:
    # It may be a FIFO, whose opening would wait for a writer, or another user's file if its directory is not private.
    return open_ours(path, os.O_RDONLY, or_root=True, mapped=True)


def copy_large(source: str, path: str) -> None:
    """Copy a rank's error file to the launcher's own error file as it is, if it is too large to be parsed.

    Raises:
        OSError: the file cannot be written.
    """
    content = b""
    with suppress(OSError), open(_open(source), "rb") as file:
        if _LARGEST_BYTES < os.fstat(file.fileno()).st_size <= _LARGEST_COPIED_BYTES:
            content = file.read(_LARGEST_COPIED_BYTES)
    if content:
        _write(path, content)


def copy_root_cause(error: RecordedError, returncode: int, path: str) -> None:
    """Write a rank's error to the launcher's own error file, with the exit code that only the launcher knows.

    Raises:
        OSError: the file cannot be written.
    """
    content = dict(error.content)
    if returncode and isinstance(content.get("message"), dict):
        content["message"] = {**content["message"], "errorCode": returncode}
    _replace(path, content)


def write_launcher_error(message: str, path: str) -> None:
    """Write an error of the launcher itself in the form of ``@record``.

    Raises:
        OSError: the file cannot be written.
    """
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    _replace(path, {"message": {"message": message, "extraInfo": extra}})


def was_written_since(path: str, since: float) -> bool:
    """Whether there is a file with content, which was written since then, in seconds since the epoch."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size > 0 and status.st_mtime >= since


def _replace(path: str, content: JsonObject) -> None:
    _write(path, json.dumps(content).encode())


def _write(path: str, content: bytes) -> None:
    fd = _open_device(path)
    with open(fd if fd >= 0 else _open_file(path), "wb") as file:
        file.write(content)


def _open_file(path: str) -> int:
    """Replace a file by an empty one; where it cannot be replaced, empty it."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(path)
    except OSError as error:
        if error.errno not in _STAYS:
            raise
        try:
            return _open_in_place(path, is_mounted=error.errno == errno.EBUSY)
        except FileNotFoundError:
            raise error from None
    # As readable as torchrun's: the parent process of this launcher reads it.
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _open_in_place(path: str, *, is_mounted: bool) -> int:
    if not is_mounted:
        return open_ours(path, os.O_WRONLY | os.O_TRUNC, or_root=True, mapped=True)
    # Whoever may mount a file (/dev/termination-log in a pod) is not kept from anything, whoever owns the file.
    fd = os.open(path, os.O_WRONLY | CAREFULLY)
    with close_on_error(fd):
        check_regular(os.fstat(fd), path)
        os.ftruncate(fd, 0)
    return fd


def _open_device(path: str) -> int:
    """Open ``/dev/null``, ``/dev/stderr`` and the like, which are not replaced, as under torchrun; -1: it is no device.

    A link must be this user's or root's: another user's may lead to a disk.
    """
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        entry = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        status = os.fstat(entry)
        if not stat.S_ISLNK(status.st_mode):
            target, flags = path, flags | os.O_NOFOLLOW
        elif status.st_uid in {os.geteuid(), _ROOT}:
            target = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=entry))
        else:
            return -1
    finally:
        os.close(entry)
    try:
        if stat.S_ISREG(os.stat(target).st_mode):
            return -1
    except FileNotFoundError:
        return -1
    fd = os.open(target, flags)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) and status.st_uid in {os.geteuid(), _ROOT}:
        return fd
    os.close(fd)
    if stat.S_ISREG(status.st_mode):  # by now
        return -1
    raise NotOursError(f"it belongs to {owner_text(status.st_uid)}", path)
