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
from saferun.linux.ownership import CAREFULLY

# What stands beside the directories of the hosts.
_OF_THE_JOB = (
    "run.json",
    "report.json",
    "report.txt",
    "report.html",
    "on_event.log",
    "preflight.json",
    "waits.json",
)
_MOST_TRIES = 100
_BLOCK_BYTES = 1 << 20

_Identity = tuple[int, int]


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
    own = _own_files(fd)
    found = [name for name in names if _exists(fd, name) and (name, _identity(fd, name)) not in own]
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
            _link_or_copy(fd, name, f"{kept}/{name}")
            has_any = True
    return kept if has_any else ""


def _own_files(fd: int) -> set[tuple[str, _Identity | None]]:
    """The files that ``keep_own_files`` has given a further name, and that are still the user's."""
    found = set()
    with suppress(OSError):
        for folder in os.listdir(fd):
            if folder.startswith(EARLIER):
                found |= {(name, _identity(fd, f"{folder}/{name}")) for name in _OF_THE_JOB}
    return found


def _identity(fd: int, name: str) -> _Identity | None:
    """What a file and its copy have in common, and no file that has replaced it."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        return status.st_size, status.st_mtime_ns
    return None


def _link_or_copy(fd: int, name: str, kept: str) -> None:
    """Give a file a further name.

    Raises:
        OSError: neither a link nor a copy can be made.
    """
    with suppress(OSError):
        os.link(name, kept, src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        return
    # There are no hard links here, or the file is another user's.
    with open(os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=fd), "rb") as file:
        status = os.fstat(file.fileno())
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | CAREFULLY
        with open(os.open(kept, flags, stat.S_IMODE(status.st_mode), dir_fd=fd), "wb") as copy:
            while block := file.read(_BLOCK_BYTES):
                copy.write(block)
        os.utime(kept, ns=(status.st_atime_ns, status.st_mtime_ns), dir_fd=fd)


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
