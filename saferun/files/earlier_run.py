"""What an earlier run left in a run directory that the user has named, and names again: it is kept, out of the way.

Otherwise its report would pass for the one of the run that follows, and its logs would be overwritten one by one.
Files of the user's own that have a name of saferun's are kept as well.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Sequence

from saferun.errors import suppress
from saferun.files.run_files import (
    EARLIER,
    EVENTS,
    RUN_JSON,
    UNHEARD_S,
    RunRecord,
    has_ended,
    host_names,
    living_records,
    mtime_of,
    names_in,
    open_below,
    read_run_record,
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
_MOST_NUMBERS = 3
_MOST_NAMES = 20_000
_MOST_SHOWN = 3
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
        left: why some of them are where they were, although the run has ended as far as is known; empty: none is.
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
    top = read_run_record(fd)
    records, led, earlier = _records_of(fd, host, top, leads=leads)
    # run.json comes first: it says whose all else is.
    names = [*(_OF_THE_JOB if leads else ()), host]
    own = _own_files(fd) if leads else set()
    found = [name for name in names if _exists(fd, name) and (name, _identity(fd, name)) not in own]
    if not found or not records:
        return SetAside()
    living = [one for one in records if not has_ended(fd, one) or (one is led and not _is_last(fd, one))]
    try:
        living = living or _others_of(fd, records, top, deadline if leads else None)
    except TimeoutError:
        return SetAside(left=_TOO_LONG)
    if living:
        return SetAside(unheard_s=min(unheard_s(fd, record) for record in living))
    try:
        earlier = earlier or _new_directory(fd)
    except OSError as error:
        return SetAside(left=f"no directory can be made for them: {error.strerror}")
    return _move_all(fd, earlier, found, top, host, {host, *hosts} if leads and hosts else (), deadline)


def _records_of(
    fd: int, host: str, top: RunRecord | None, *, leads: bool
) -> tuple[list[RunRecord], RunRecord | None, str]:
    """What there is of the earlier run's processes whose files this one would replace.

    Returns:
        The records; the one among them that does not lie with the host's files, which may be of a later run; and the
        directory in which that is already, as far as another host has moved it.
    """
    records = [top] if leads and top is not None else []
    below = open_below(fd, host)
    if below < 0:
        return records, None, ""
    try:
        records += [record._replace(host=host) for record in run_records(below)]
    finally:
        os.close(below)
    led, earlier = (None, "") if records or leads else _record_as_leader(fd, host, top)
    return records if led is None else [led], led, earlier


def _move_all(
    fd: int,
    earlier: str,
    names: Sequence[str],
    top: RunRecord | None,
    host: str,
    hosts: Collection[str],
    deadline: float,
) -> SetAside:
    """Move the files of a run that has ended.

    Args:
        fd: the run directory.
        earlier: the directory in it that they are moved into.
        names: of these files; run.json is the first of them.
        top: what that says, as far as it is known.
        host: this host.
        hosts: the hosts of this run, whose directories stay; empty: those of all other hosts do.
        deadline: until when directories are read, in monotonic seconds.
    """
    problems = list[str]()
    for name in names:
        problem = _move(fd, name, earlier)
        moved = read_run_record(fd, f"{earlier}/{name}") if name == RUN_JSON and not problem else top
        # A file system that renames by a copy changes the time.
        if moved != top and not (moved and top and moved._replace(written_at=top.written_at) == top):
            is_unreadable = moved is None and _exists(fd, f"{earlier}/{name}")
            _put_back(fd, name, earlier)  # a run of another host has begun here meanwhile, as far as is known
            return SetAside(left=f"{name}: it cannot be read") if is_unreadable else SetAside(unheard_s=0.0)
        problems += [problem] if problem else []
    _remove_if_empty(fd, earlier)
    if not _exists(fd, earlier):
        return SetAside("", None, *problems[:1])
    if hosts and top is not None and not problems:
        problems = _move_other_hosts(fd, earlier, top, host, hosts, deadline)
    return SetAside(earlier, None, *problems[:1])


def _others_of(fd: int, records: Iterable[RunRecord], top: RunRecord | None, deadline: float | None) -> list[RunRecord]:
    """The hosts with which the run of a host that left it goes on: an elastic job.

    Args:
        fd: the run directory.
        records: those of the host, which have ended.
        top: the run.json of the whole job.
        deadline: until when the records of all hosts are read, in monotonic seconds; None: only ``top`` is used. A
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


def _record_as_leader(fd: int, host: str, top: RunRecord | None) -> tuple[RunRecord | None, str]:
    """The record of a host that led an earlier run: it is at the top, or the leader of this run has moved it already.

    Returns:
        The record, and the directory that it is in, into which the host's files belong; empty: there is none yet.
    """
    if top is not None and top.host == host:
        return top, ""
    for earlier in sorted((name for name in names_in(fd, _MOST_NAMES) if name.startswith(EARLIER)), reverse=True):
        record = read_run_record(fd, f"{earlier}/{RUN_JSON}")
        if record is not None and record.host == host:
            # Where that run's files of the host are there, too, those outside are a later run's.
            return (None, "") if _exists(fd, f"{earlier}/{host}") else (record, earlier)
    return None, ""


def _is_last(fd: int, record: RunRecord) -> bool:
    """Whether no run has written to the directory of a host since the one that has ended and whose record this is."""
    below = open_below(fd, record.host) if record.end is not None else -1
    if below >= 0:
        try:
            with suppress(OSError):
                if _events_at(below) <= record.written_at + _LAG_S:
                    return True
        finally:
            os.close(below)
    return unheard_s(fd, record) > UNHEARD_S


def _events_at(below: int) -> float:
    """When a host wrote its last event, by the clock of the file server.

    Raises:
        OSError: a file cannot be opened.
    """
    names = (name for name in names_in(below, _MOST_NAMES) if name.startswith("events") and name.endswith(".jsonl"))
    return max((mtime_of(below, name) for name in names), default=0.0)


def _move(fd: int, name: str, earlier: str) -> str:
    """Move something, if it is still there. Returns why it cannot be; empty: it is gone from where it was."""
    try:
        os.rename(name, f"{earlier}/{name}", src_dir_fd=fd, dst_dir_fd=fd)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{name}: {error.strerror}"
    return ""


def _put_back(fd: int, name: str, earlier: str) -> None:
    """Put a file back that has been moved, if there is no other one by now."""
    with suppress(OSError):
        _link_or_copy(fd, f"{earlier}/{name}", name)
        os.unlink(f"{earlier}/{name}", dir_fd=fd)
    _remove_if_empty(fd, earlier)


def _remove_if_empty(fd: int, name: str) -> None:
    with suppress(OSError):
        os.rmdir(name, dir_fd=fd)


def _move_other_hosts(
    fd: int, earlier: str, top: RunRecord, host: str, hosts: Collection[str], deadline: float
) -> list[str]:
    """Move the directories of hosts of the earlier run that have ended and do not belong to this run.

    Args:
        fd: the run directory.
        earlier: the new directory, into which this process has moved the run.json of the earlier run.
        top: what that says.
        host: this host.
        hosts: all hosts of this run.
        deadline: until when directories are read, in monotonic seconds.

    Returns:
        Why some of them stay.
    """
    # What a job of one host finds may be of a job beside it that has just ended (a job array).
    if len(hosts) == 1 and top.host != host:
        return []
    staying = list[str]()
    names = iter(host_names(fd, deadline))
    while time.monotonic() < deadline:
        name = next(names, "")
        if not name:
            more = f" and {len(staying) - _MOST_SHOWN} more" if len(staying) > _MOST_SHOWN else ""
            return [f"{', '.join(staying[:_MOST_SHOWN])}{more} may not have ended"] if staying else []
        if name not in hosts and _is_file(fd, f"{name}/{EVENTS}") and not _move_host(fd, name, earlier, top):
            staying.append(name)
    return [_TOO_LONG]


def _move_host(fd: int, name: str, earlier: str, top: RunRecord) -> bool:
    """Move a directory if it is that of a host of the earlier run, which has ended.

    Each as soon as that is known: a host of another run may begin there at any moment. The times that are compared are
    all of the file server's clock.

    Returns:
        Whether it is not that run's any more.
    """
    below = open_below(fd, name)
    if below < 0:
        return True
    try:
        records = _records_of_run(below, name, top)
        if not records:
            return True
        now = os.stat(earlier, dir_fd=fd, follow_symlinks=False).st_mtime
        return _is_over(below, records, now) and not (_is(fd, name, identity(below)) and _move(fd, name, earlier))
    except OSError:
        return False
    finally:
        os.close(below)


def _records_of_run(below: int, name: str, top: RunRecord) -> list[RunRecord]:
    """The records of a host of a run; none where the directory is not one of its hosts', or another run's as well.

    Args:
        below: the directory.
        name: its name.
        top: the run.json of the run.
    """
    names = [one for one in names_in(below, _MOST_NAMES) if one.startswith("run") and one.endswith(".json")]
    found = [read_run_record(below, one) for one in names]
    if RUN_JSON not in names:
        found.append(top)
    records = [one for one in found if one is not None and one.host == name and _job_of(one) == _job_of(top)]
    return records if len(records) == len(found) else []


def _is_over(below: int, records: Collection[RunRecord], now: float) -> bool:
    """Whether a host of an earlier run has ended, and no other run has begun in its directory since.

    Args:
        below: the directory.
        records: of the host.
        now: the time.

    Raises:
        OSError: a file cannot be opened.
    """
    events_at = _events_at(below)
    has_ended = all(record.end is not None for record in records)
    if has_ended and events_at <= max(record.written_at for record in records) + _LAG_S:
        return True
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
    found = [] if read_run_record(fd) is not None else [name for name in _OF_THE_JOB if _is_file(fd, name)]
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
            below = open_below(fd, folder) if folder.startswith(EARLIER) else -1
            if below >= 0:
                # Each is listed once: a job of a thousand hosts leaves a thousand of them each time it runs.
                names = set(names_in(below, _MOST_NAMES)).intersection(_OF_THE_JOB)
                found |= {(name, _identity(below, name)) for name in names}
                os.close(below)
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
