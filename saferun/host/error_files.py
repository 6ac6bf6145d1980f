"""The JSON files that ``torch.distributed.elastic``'s ``@record`` writes, and the launcher's own."""

from __future__ import annotations

import json
import os
import stat
import time

from saferun.errors import suppress
from saferun.model import JsonObject, Value

_LARGEST_BYTES = 4 << 20


class RecordedError(Value):
    """What an error file holds: a message, when it was raised (seconds since the epoch), and the file's content."""

    message: str
    time: float
    content: JsonObject


def read_error_file(path: str) -> RecordedError | None:
    """Read a rank's error file; None where there is none or it makes no sense. The rank may write what it likes."""
    try:
        content = json.loads(_read(path))
        message = content["message"]
        if isinstance(message, dict):
            return RecordedError(str(message["message"]), float(message["extraInfo"]["timestamp"]), content)
        return RecordedError(str(message), float(content.get("timestamp", 0)), content)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _read(path: str) -> bytes:
    # Non-blocking, because a rank may have put a FIFO there, and opening that would wait for a writer.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        return file.read(_LARGEST_BYTES) if stat.S_ISREG(os.fstat(fd).st_mode) else b""


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


def _replace(path: str, content: JsonObject) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
