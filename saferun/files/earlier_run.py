"""What an earlier run left in a run directory that the user has named, and names again: it is kept, out of the way.

Otherwise its report would pass for the one of the run that follows, and its logs would be overwritten one by one.
Files of the user's own that have a name of saferun's are kept as well.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from itertools import chain, islice

from saferun.errors import suppress
from saferun.files.run_files import (
    EARLIER,
    RUN_JSON,
    RunRecord,
    has_ended,
    living_records,
    names_in,
    open_below,
    read_record,
    run_records,
    unheard_s,
)
from saferun.linux.ownership import CAREFULLY, Identity, identity

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
_EVENTS = "events.jsonl"  # which each host has, and no run directory
_MOST_TRIES = 100
_MOST_NAMES = 20_000
_OTHERS_S = 1.0  # less than the launch waits for its run directory
_BLOCK_BYTES = 1 << 20

_Identity = tuple[int, int]


def set_aside(fd: int, host: str, *, leads: bool, hosts: Collection[str] = ()) -> tuple[str, float | None]:
    """Move what an earlier run left, if it has ended. What belongs to other hosts of this run stays.

    Args:
        fd: the run directory.
        host: the name of this host's directory in it.
        leads: whether this process writes what is about the whole job.
        hosts: the names of all hosts of this run, this one among them; empty: they are not known.

    Returns:
        The name of the new directory in it; empty: nothing had to be moved, or could be. And where the earlier run may
        still use the directory, how long ago it wrote there; 0: its process is known to live; None: it has ended.
    """
    top = read_record(fd)
    records = [top] if leads and top is not None else []
    below = open_below(fd, host)
    if below >= 0:
        try:
            records += run_records(below, host)
        finally:
            os.close(below)
    earlier = ""
    if below >= 0 and not records and not leads:
        records, earlier = _records_as_leader(fd, host, top)
    names = [host, *(_OF_THE_JOB if leads else ())]
    own = _own_files(fd)
    found = [name for name in names if _exists(fd, name) and (name, _identity(fd, name)) not in own]
    if not found or not records:
        return "", None
    if living := [record for record in records if not has_ended(fd, record)]:
        return "", min(unheard_s(fd, record) for record in living)
    if _goes_on(fd, records):
        return "", None
    earlier = earlier or _new_directory(fd)
    # Each as soon as it is known to have ended: a host of another run may begin there at any moment.
    others = _other_hosts(fd, top, {host, *hosts}) if leads and hosts else ()
    moved = False
    for name in chain(found, others) if earlier else ():
        with suppress(OSError):
            os.rename(name, f"{earlier}/{name}", src_dir_fd=fd, dst_dir_fd=fd)
            moved = True
    return (earlier if moved else ""), None


def _goes_on(fd: int, records: Iterable[RunRecord]) -> bool:
    """Whether the run of a host that left it goes on with others, which it may join again: an elastic job."""
    left = [record.end.time for record in records if record.end is not None and record.end.outcome == "left"]
    return bool(left) and any(record.started_at < max(left) for record in living_records(fd))


def _records_as_leader(fd: int, host: str, top: RunRecord | None) -> tuple[list[RunRecord], str]:
    """The record of a host that led an earlier run: it is at the top, or the leader of this run has moved it already.

    Returns:
        The record, and the directory that it is in, into which the host's files belong; empty: there is none yet.
    """
    if top is not None and top.host == host:
        return [top], ""
    for earlier in sorted((name for name in names_in(fd, _MOST_NAMES) if name.startswith(EARLIER)), reverse=True):
        record = read_record(fd, f"{earlier}/{RUN_JSON}")
        if record is not None and record.host == host:
            # Where that run's files of the host are there, too, those outside are a later run's.
            return ([], "") if _exists(fd, f"{earlier}/{host}") else ([record], earlier)
    return [], ""


def _other_hosts(fd: int, top: RunRecord | None, hosts: Collection[str]) -> Iterator[str]:
    """The directories of hosts that have ended and do not belong to this run; all that are found in time.

    Args:
        fd: the run directory.
        top: the record of the earlier run, which has ended.
        hosts: those of this run.
    """
    names: list[str] = []
    with suppress(OSError), os.scandir(fd) as entries:
        names += [entry.name for entry in islice(entries, _MOST_NAMES) if entry.is_dir(follow_symlinks=False)]
    deadline = time.monotonic() + _OTHERS_S
    for name in names:
        if time.monotonic() > deadline:
            return
        if name in hosts or name.startswith(EARLIER) or not _is_file(fd, f"{name}/{_EVENTS}"):
            continue
        below = open_below(fd, name)
        if below < 0:
            continue
        try:
            which = identity(below)
            records = run_records(below, name)
            described = read_record(below)
        finally:
            os.close(below)
        if described is None and top is not None:  # of the host that led
            described, records = top, [*records, top]
        has_all_ended = all(has_ended(fd, record) for record in records)
        if described is not None and described.host == name and has_all_ended and _is(fd, name, which):
            yield name


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


def _is(fd: int, name: str, which: Identity) -> bool:
    """Whether a directory is still the one that was read."""
    with suppress(OSError):
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        return (status.st_dev, status.st_ino) == which
    return False


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
