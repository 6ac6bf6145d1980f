"""The failure records of ranks: taken from memory, where the ranks write them, into the run directory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence

from saferun.errors import suppress
from saferun.files.trees import open_parent
from saferun.linux.ownership import open_ours
from saferun.model import JsonObject
from saferun.text.decoding import MALFORMED, measure
from saferun.text.failure_record import LONGEST_BYTES, failure_lines, failure_record_from, is_of, traceback_lines
from saferun.text.redaction import redacted_json
from saferun.text.secret_names import is_secret

# How long a shell script takes, at most, to end with the Python that it ran last, whose memory is given back first.
_ENDS_WITHIN_S = 3.0
_CLOCK_SLACK_S = 1.0


def take_failure_record(
    source: str,
    target: str,
    pid: int | None = None,
    code: int | None = None,
    ended: float = 0.0,
    printed: Sequence[object] = (),
) -> JsonObject:
    """Write a rank's failure record into its directory, without secrets.

    All Pythons of a rank write to the same file. A rank that is a shell script may have run several, and may have
    handled the failure of an earlier one.

    Args:
        source: what the rank has written; not trusted.
        target: the file in its directory; empty: none is kept.
        pid: the rank's process; None: the record is that of its end in any case.
        code: with which it exited; None: a signal ended it.
        ended: when, in seconds since the epoch.
        printed: the exception of its last traceback: the type, the file and the line where it was raised; empty: none.

    Returns:
        The ``lines`` for the report, the ``traceback`` where the rank has not printed it, and the ``uncaught_time``,
        0.0 where it is not certain that this exception ends the rank; none of them where there is no record, it is
        none, or is of an earlier failure.
    """
    record, written = None, 0.0
    with suppress(OSError):
        fd = open_ours(source, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode):
                record, written = failure_record_from(os.read(fd, LONGEST_BYTES + 1)), status.st_mtime
        finally:
            os.close(fd)
    if record is None:
        return {}
    # An exception that the script handles, and prints by sys.excepthook, is not what ends it.
    is_handled = pid is not None and record.get("uncaught") is False
    is_other = pid is not None and record.get("pid") != pid
    is_soon = -_CLOCK_SLACK_S <= ended - written <= _ENDS_WITHIN_S
    # Python exits with 1 where an exception ends it; its last act is to renew the time of the file.
    is_last = code == 1 and not is_handled and is_soon
    # The report names the exception of the last traceback, however long the rank took to end after it. With another
    # code the script has ended itself, because of that exception if it did so at once; a signal has its own cause.
    is_own_end = is_handled and not is_other and code is not None and is_soon
    is_named = (code == 1 or is_own_end) and is_of(record, printed)
    if (is_other or is_handled) and not is_last and not is_named:
        return {}
    for row in _rows(record.get("exceptions")):
        if isinstance(name := row.get("name"), str) and is_secret(name):
            row.pop("value", None)
    if target:
        with suppress(OSError):  # the report has its lines all the same
            _write(target, json.dumps(redacted_json(record), indent=1).encode() + b"\n")
    traceback = traceback_lines(record) if is_last and not is_named else ()
    # Python has handed it to sys.excepthook: after that the main thread runs no more of the script than its atexit.
    is_certain = pid is not None and not is_other and record.get("uncaught") is True and record.get("thread") == ""
    uncaught_time = _seconds(record.get("time")) if is_certain else 0.0
    return {"lines": list(failure_lines(record)), "traceback": list(traceback), "uncaught_time": uncaught_time}


def _seconds(value: object) -> float:
    try:
        return measure(value)
    except MALFORMED:
        return 0.0


def _rows(value: object) -> Iterator[JsonObject]:
    """All objects in lists and objects; the record is of bounded depth."""
    if isinstance(value, dict):
        yield value
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _rows(item)


def _write(path: str, content: bytes) -> None:
    folder, name, tree = open_parent(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        fd = tree.open_file(folder, name, flags, path) if tree is not None else open_ours(name, flags, dir_fd=folder)
        with open(fd, "wb") as file:
            file.write(content)
    finally:
        os.close(folder)
