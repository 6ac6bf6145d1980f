"""The Flight Recorders that ranks wrote into files before they ended: the only evidence of ranks that are dead.

torch's watchdog writes the file when a call times out or fails, where the environment names a place for it, as the
profile ``production`` does. It is a pickle with the Python lines of each call, and is read as plain values only.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator

from saferun.captures.plain_pickle import LONGEST_BYTES, read_pickle
from saferun.captures.recorder_content import read_groups
from saferun.captures.tools import responds
from saferun.captures.wire import DEAD_FILE_SYSTEM, RecorderFile
from saferun.evidence.job_evidence import CaptureNote, RankCollectives
from saferun.linux.ownership import CAREFULLY

READING_BYTES = 1 << 30
"""How much address space the reading may take: values take many times their pickle."""
_MOST_FILES = 64
_ANSWER_S = 1.5
# File systems round times.
_CLOCK_S = 2.0


def read_dumps(
    files: tuple[RecorderFile, ...], since: float, deadline: float
) -> Iterator[RankCollectives | CaptureNote]:
    """The recorders of ranks that have ended, with a note for each file that is there.

    Args:
        files: where they may be.
        since: seconds since the epoch; older files are another job's.
        deadline: in monotonic seconds.
    """
    silent: set[str] = set()
    for file in files[:_MOST_FILES]:
        started_at = time.monotonic()
        folder = os.path.dirname(file.path)
        if started_at >= deadline or folder in silent:
            continue
        failure = ""
        try:
            if responds(file.path, min(_ANSWER_S, deadline - started_at)):
                groups = read_groups(read_pickle(_content(file.path, since)), "dump_nccl_trace_pickle")
                yield RankCollectives(file.rank, groups)
            else:
                silent.add(folder)
                failure = f"{DEAD_FILE_SYSTEM}{folder} does not answer"
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            failure = f"the file that it wrote cannot be read: {getattr(error, 'strerror', None) or error}"
        except MemoryError:
            failure = "the file that it wrote takes too much memory"
        elapsed_s = round(time.monotonic() - started_at, 3)
        yield CaptureNote("flight_recorder", file.rank, file.pid, "" if failure else file.path, elapsed_s, failure)


def _content(path: str, since: float) -> bytes:
    fd = os.open(path, os.O_RDONLY | CAREFULLY)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in {os.geteuid(), 0}:
            raise ValueError("it is not a file of this user")
        if status.st_size > LONGEST_BYTES:
            raise ValueError(f"it is longer than {LONGEST_BYTES >> 20} MiB")
        if status.st_mtime < since - _CLOCK_S:
            raise FileNotFoundError
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read(LONGEST_BYTES + 1)
    finally:
        os.close(fd)
