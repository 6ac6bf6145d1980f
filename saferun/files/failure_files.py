"""The failure records of ranks: taken from memory, where the ranks write them, into the run directory."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator

from saferun.errors import suppress
from saferun.files.trees import open_parent
from saferun.linux.ownership import open_ours
from saferun.model import JsonObject
from saferun.text.failure_record import LONGEST_BYTES, failure_lines, record_from
from saferun.text.redaction import redacted_json
from saferun.text.secret_names import is_secret


def take_failure_record(source: str, target: str) -> list[str]:
    """Write a rank's failure record into its directory, without secrets.

    Args:
        source: what the rank has written; not trusted.
        target: the file in its directory; empty: none is kept.

    Returns:
        The lines for the report; none where there is no record, or it is none.
    """
    record = None
    with suppress(OSError):
        fd = open_ours(source, os.O_RDONLY | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                record = record_from(os.read(fd, LONGEST_BYTES + 1))
        finally:
            os.close(fd)
    if record is None:
        return []
    for row in _rows(record.get("exceptions")):
        if isinstance(name := row.get("name"), str) and is_secret(name):
            row.pop("value", None)
    if target:
        with suppress(OSError):  # the report has its lines all the same
            _write(target, json.dumps(redacted_json(record), indent=1).encode() + b"\n")
    return list(failure_lines(record))


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
