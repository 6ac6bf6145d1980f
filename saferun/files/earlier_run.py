"""What an earlier run left in a run directory that the user has named, and names again: it is kept, out of the way.

Otherwise its report would pass for the one of the run that follows, and its logs would be overwritten one by one.
Files of the user's own that have a name of saferun's are kept as well.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable

from saferun.errors import suppress
from saferun.files.run_files import (
    EARLIER,
    RUN_JSON,
    UNHEARD_S,
    RunRecord,
    has_ended,
    host_names,
    living_records,
    names_in,
    open_below,
    read_record,
    run_records,
    unheard_s,
)
from saferun.linux.ownership import CAREFULLY, Identity, identity
from saferun.linux.process_identity import is_living
from saferun.model import Value

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
_MOST_NUMBERS = 3
_MOST_NAMES = 20_000
_OTHERS_S = 1.0  # less than the launch waits for its run directory
_TOO_LONG = f"not all of its directories could be read within {_OTHERS_S:g} s"
# What a saferun writes behind its run.json at its end comes within that.
_LAG_S = 5.0
_BLOCK_BYTES = 1 << 20

_Identity = tuple[int, int]


class SetAside(Value):
    """What became of the files of an earlier run.

    Attributes:
        name: of the new directory in the run directory that they are in now; empty: nothing had to be moved, or could.
        unheard_s: where the earlier run may still use the run directory, how long ago it wrote there; 0: its process is
            known to live; None: it has ended.
        left: why some of them are where they were although the run has ended; empty: none is.
    """

    name: str = ""
    unheard_s: float | None = None
    left: str = ""


def set_aside(fd: int, host: str, *, leads: bool, hosts: Collection[str] = ()) -> SetAside:
    """Move what an earlier run left, if it has ended. What belongs to other hosts of this run stays.

    Args:
        fd: the run directory.
        host: the name of this host's directory in it.
        leads: whether this process writes what is about the whole job.
        hosts: the names of all hosts of this run, this one among them; empty: they are not known.
    """
    deadline = time.monotonic() + _OTHERS_S
    top = read_record(fd)
    records = [top] if leads and top is not None else []
    below = open_below(fd, host)
    if below >= 0:
        try:
            records += [record._replace(host=host) for record in run_records(below)]
        finally:
            os.close(below)
    earlier = ""
    if below >= 0 and not records and not leads:
        records, earlier = _records_as_leader(fd, host, top)
    names = [host, *(_OF_THE_JOB if leads else ())]
    own = _own_files(fd) if leads else set()
    found = [name for name in names if _exists(fd, name) and (name, _identity(fd, name)) not in own]
    if not found or not records:
        return SetAside()
    living = [record for record in records if not has_ended(fd, record)]
    try:
        living = living or _others_of(fd, records, top, deadline if leads else None)
    except TimeoutError:
        return SetAside(left=_TOO_LONG)
    if living:
        return SetAside(unheard_s=min(unheard_s(fd, record) for record in living))
    if leads and read_record(fd) != top:  # a run of another host has begun here meanwhile
        return SetAside(unheard_s=0.0)
    try:
        earlier = earlier or _new_directory(fd)
    except OSError as error:
        return SetAside(left=f"no directory can be made for them: {error.strerror}")
    moved = [name for name in found if _move(fd, name, earlier)]
    is_all = True
    if hosts and top is not None:
        is_all = _move_other_hosts(fd, earlier, top, host, {host, *hosts}, deadline)
    left = "" if is_all else _TOO_LONG
    return SetAside(earlier if moved else "", None, left)


def _others_of(fd: int, records: Iterable[RunRecord], top: RunRecord | None, deadline: float | None) -> list[RunRecord]:
    """The hosts with which the run of a host that left it goes on: an elastic job.

    Args:
        fd: the run directory.
        records: those of the host, which have ended.
        top: the run.json of the whole job.
        deadline: until when all hosts are looked at, in monotonic seconds; None: only the one that leads the run is. A
            thousand hosts that begin at once would ask the file server for a thousand directories each.

    Raises:
        TimeoutError: it takes longer.
    """
    left = [record.end.time for record in records if record.end is not None and record.end.is_of_one_host]
    if not left:
        return []
    if deadline is not None:
        living = living_records(fd, until=deadline)
    else:
        living = [top] if top is not None and top.end is None and not has_ended(fd, top) else []
    return [one for one in living if one.started_at < max(left)]


def _records_as_leader(fd: int, host: str, top: RunRecord | None) -> tuple[list[RunRecord], str]:
    """The record of a host that led an earlier run: it is at the top, or the leader of this run has moved it already.

    Returns:
        The record, and the directory that it is in, into which the host's files belong; empty: there is none yet.
    """
    if top is not None and top.host == host:
        return ([top] if not has_ended(fd, top) or _is_last(fd, top, RUN_JSON) else []), ""
    for earlier in sorted((name for name in names_in(fd, _MOST_NAMES) if name.startswith(EARLIER)), reverse=True):
        path = f"{earlier}/{RUN_JSON}"
        record = read_record(fd, path)
        if record is not None and record.host == host:
            # Where that run's files of the host are there, too, those outside are a later run's.
            is_last = not _exists(fd, f"{earlier}/{host}") and _is_last(fd, record, path)
            return ([record], earlier) if is_last else ([], "")
    return [], ""


def _is_last(fd: int, record: RunRecord, path: str) -> bool:
    """Whether no run has written to the directory of a host since the one that has ended and that a run.json is of."""
    if record.end is None:
        return unheard_s(fd, record) > UNHEARD_S
    below = open_below(fd, record.host)
    if below < 0:
        return False
    try:
        with suppress(OSError):
            return _events_at(below) <= _written_at(fd, path) + _LAG_S
    finally:
        os.close(below)
    return False


def _events_at(below: int) -> float:
    """When a host wrote its last event, by the clock of the file server.

    Raises:
        OSError: a file cannot be opened.
    """
    names = (name for name in names_in(below, _MOST_NAMES) if name.startswith("events") and name.endswith(".jsonl"))
    return max((_written_at(below, name) for name in names), default=0.0)


def _written_at(fd: int, path: str) -> float:
    """When a file was written to. It is opened: then NFS asks its server, where ``stat`` may take what it knows.

    Raises:
        OSError: it cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=fd)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)


def _move(fd: int, name: str, earlier: str) -> bool:
    with suppress(OSError):
        os.rename(name, f"{earlier}/{name}", src_dir_fd=fd, dst_dir_fd=fd)
        return True
    return False


def _move_other_hosts(
    fd: int, earlier: str, top: RunRecord, host: str, hosts: Collection[str], deadline: float
) -> bool:
    """Move the directories of hosts of the earlier run that have ended and do not belong to this run.

    The times that are compared are all of the file server's clock.

    Args:
        fd: the run directory.
        earlier: the new directory, into which this process has moved the run.json of the earlier run.
        top: what that says.
        host: this host.
        hosts: all hosts of this run.
        deadline: until when directories are read, in monotonic seconds.

    Returns:
        Whether all have been read in time.
    """
    run_json = f"{earlier}/{RUN_JSON}"
    # What a job of one host finds may be of a job beside it that has just ended (a job array).
    if (len(hosts) == 1 and top.host != host) or read_record(fd, run_json) != top:
        return True
    ended_at = 0.0
    with suppress(OSError):
        ended_at = _written_at(fd, run_json)
    names = iter(host_names(fd, deadline))
    while time.monotonic() < deadline:
        name = next(names, "")
        if not name:
            return True
        if name in hosts:
            continue
        below = open_below(fd, name) if _is_file(fd, f"{name}/{_EVENTS}") else -1
        if below < 0:
            continue
        # Each as soon as it is known to have ended: a host of another run may begin there at any moment.
        try:
            with suppress(OSError):
                now = os.stat(earlier, dir_fd=fd, follow_symlinks=False).st_mtime
                if _is_over(below, name, top, ended_at, now) and _is(fd, name, identity(below)):
                    _move(fd, name, earlier)
        finally:
            os.close(below)
    return False


def _is_over(below: int, name: str, top: RunRecord, ended_at: float, now: float) -> bool:
    """Whether a directory is that of a host of an earlier run, and of no run that has begun there since.

    Args:
        below: the directory.
        name: its name.
        top: the run.json of the earlier run.
        ended_at: when that was written last.
        now: the time.

    Raises:
        OSError: a file cannot be opened.
    """
    names = [one for one in names_in(below, _MOST_NAMES) if one.startswith("run") and one.endswith(".json")]
    found, times = [read_record(below, one) for one in names], [_written_at(below, one) for one in names]
    if top.host == name and RUN_JSON not in names:
        found, times = [*found, top], [*times, ended_at]
    elif RUN_JSON not in names:
        return False
    records = [one for one in found if one is not None and one.host == name and _job_of(one) == _job_of(top)]
    if len(records) < len(found):
        return False
    events_at = _events_at(below)
    if all(record.end is not None for record in records):
        return events_at <= max(times) + _LAG_S
    is_silent = now - max(events_at, os.fstat(below).st_mtime) > UNHEARD_S
    return is_silent and not any(record.process is not None and is_living(record.process) for record in records)


def _job_of(record: RunRecord) -> tuple[str, str]:
    """What the hosts of a job have in common."""
    return record.rendezvous_id, record.slurm_job


def keep_own_files(fd: int) -> str:
    """Give files of the user's own that the run may replace a further name: trainers write a run.json, too.

    They stay where they are as well, for a script that reads them, until saferun writes its own.

    Args:
        fd: the run directory, without the files of an earlier run.

    Returns:
        The name of the new directory in it; empty: there are no such files, or they cannot be kept.
    """
    found = [] if read_record(fd) is not None else [name for name in _OF_THE_JOB if _is_file(fd, name)]
    kept = ""
    with suppress(OSError):
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
    """A directory for what is moved, by the time; hosts that share the directory have one each.

    Raises:
        OSError: it cannot be made.
    """
    stem = f"{EARLIER}{time.strftime('%Y%m%d-%H%M%S')}"
    # Hundreds of hosts may begin within a second.
    names = [*(f"{stem}-{number}" for number in range(1, _MOST_NUMBERS + 1)), f"{stem}-{os.urandom(6).hex()}"]
    for name in names[:-1]:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=fd)
            return name
    os.mkdir(names[-1], 0o700, dir_fd=fd)
    return names[-1]
