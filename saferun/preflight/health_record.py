"""What ``saferunctl health`` has counted last on this host, kept for its next run and for launches.

Launches read the record of root, which all users may read: it shows which interfaces have failed in the last minutes,
before the first attempt. A record that cannot be read or written costs the comparison, and no more.
"""

from __future__ import annotations

import json
import os
import time

from saferun.errors import suppress
from saferun.linux.ownership import open_temporary
from saferun.linux.trusted_files import open_found
from saferun.preflight.results import Pairs
from saferun.text.decoding import MALFORMED, loads, measure, text

HOST_RECORD = "/run/saferun/health.json"
"""Where root keeps it: in memory, and gone with the next boot."""
_LONGEST_BYTES = 1 << 20
_MOST_COUNTS = 4096
_LONGEST_NAME = 128
_LATEST_S = 1e11


def read_health_record(path: str = HOST_RECORD) -> tuple[Pairs, float]:
    """The counters, and when they were read in seconds since the epoch; nothing and 0.0 where there is no record.

    It counts only if no other user than root and this one can have written it.
    """
    try:
        fd = open_found(path)
        with open(fd, "rb") as file:
            content = loads(file.read(_LONGEST_BYTES + 1), longest=_LONGEST_BYTES)
        counts = tuple((text(name, _LONGEST_NAME), text(value, _LONGEST_NAME)) for name, value in content["counts"])
        return counts[:_MOST_COUNTS], measure(content["time"], 0.0, _LATEST_S)
    except (OSError, *MALFORMED):
        return (), 0.0


def write_health_record(counts: Pairs, path: str = HOST_RECORD) -> str:
    """Keep counters for the next time. Returns why that cannot be; empty: it is done.

    Args:
        counts: as the check of the interfaces has them in its facts.
        path: the file; its directory is made if need be.
    """
    content = json.dumps({"time": round(time.time(), 1), "counts": counts}).encode()
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o755, exist_ok=True)
        fd, temporary = open_temporary(f"{path}.new", mode=0o644)
        try:
            with open(fd, "wb") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""
