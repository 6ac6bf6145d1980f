"""What an earlier run left in a run directory that the user has named, and names again: it is kept, out of the way.

Otherwise its report would pass for the one of the run that follows, and its logs would be overwritten one by one.
Files of the user's own that have a name of saferun's are kept as well.
"""

from __future__ import annotations

import os
import stat
import time

from saferun.errors import suppress
from saferun.files.run_files import EARLIER, has_ended, open_below, read_record, run_records

# What stands beside the directories of the hosts.
_OF_THE_JOB = ("run.json", "report.json", "report.txt", "report.html", "on_event.log", "preflight.json")
_MOST_TRIES = 100


def set_aside(fd: int, host: str, *, leads: bool) -> tuple[str, bool]:
    """Move what an earlier run left, if it has ended. What belongs to other hosts of this run stays.

    Args:
        fd: the run directory.
        host: the name of this host's directory in it.
        leads: whether this process writes what is about the whole job.

    Returns:
        The name of the new directory in it; empty: nothing had to be moved, or could be. And whether the earlier run
        still uses the directory.
    """
    records = [record for record in (read_record(fd),) if record is not None] if leads else []
    below = open_below(fd, host)
    if below >= 0:
        try:
            records += run_records(below, host)
        finally:
            os.close(below)
    names = [host, *(_OF_THE_JOB if leads else ())]
    found = [name for name in names if _exists(fd, name)]
    if not found or not records:
        return "", False
    if not all(has_ended(fd, record) for record in records):
        return "", True
    earlier = _new_directory(fd)
    moved = False
    for name in found if earlier else ():
        with suppress(OSError):
            os.rename(name, f"{earlier}/{name}", src_dir_fd=fd, dst_dir_fd=fd)
            moved = True
    return (earlier if moved else ""), False


def keep_own_files(fd: int) -> str:
    """Give files of the user's own that the run may replace a further name: trainers write a run.json, too.

    They stay where they are as well, for a script that reads them, until saferun writes its own.

    Args:
        fd: the run directory, without the files of an earlier run.

    Returns:
        The name of the new directory in it; empty: there are no such files, or they cannot be kept.
    """
    found = [] if read_record(fd) is not None else [name for name in _OF_THE_JOB if _is_file(fd, name)]
    kept = _new_directory(fd) if found else ""
    has_any = False
    for name in found if kept else ():
        with suppress(OSError):
            try:
                os.link(name, f"{kept}/{name}", src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
            except OSError:  # there are no hard links here
                os.rename(name, f"{kept}/{name}", src_dir_fd=fd, dst_dir_fd=fd)
            has_any = True
    return kept if has_any else ""


def _is_file(fd: int, name: str) -> bool:
    with suppress(OSError):
        return not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    return False


def _exists(fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return True


def _new_directory(fd: int) -> str:
    """A directory for what is moved, by the time; hosts that share the directory have one each."""
    stem = f"{EARLIER}{time.strftime('%Y%m%d-%H%M%S')}"
    for number in range(1, _MOST_TRIES):
        name = f"{stem}-{number}"
        try:
            os.mkdir(name, 0o700, dir_fd=fd)
        except FileExistsError:
            continue
        except OSError:
            return ""
        return name
    return ""
