"""What a run directory says of its run: who runs it, whether it still runs, how it ended. Nothing in it is trusted.

A run lives as long as a saferun of it does, on any host. On this host the process is looked up. Elsewhere its writer
process sets the time of its events.jsonl once a minute; whoever decides about deletion waits two weeks.
"""

from __future__ import annotations

import math
import os
import stat
import time
from itertools import islice

from saferun.errors import suppress
from saferun.files.housekeeping import BEAT_S
from saferun.linux.ownership import CAREFULLY, check_regular
from saferun.linux.process_identity import ProcessIdentity, is_living
from saferun.model import JsonObject, Value
from saferun.text.decoding import MALFORMED, display_text, loads, measure, number, text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUN_JSON = "run.json"
EVENTS = "events.jsonl"
"""A file that each host has in its directory, and that no run directory has itself."""
EARLIER = "earlier-"
"""Directories in which an earlier run lies that used the same run directory begin so."""
UNHEARD_S = 5 * BEAT_S
"""A saferun whose files have not changed for so long has ended, as far as is known."""
# A job may be suspended over a holiday, its writer process may have been given up or have no access to the file system
# any more (credentials that have expired), and clocks differ.
_SURELY_UNHEARD_S = 14 * 24 * 3600.0
# How long after the first hosts of a job were stopped the last ones may write that were stopped with them, until they
# are killed. Slurm's KillWait is 30 s.
_STOPPING_S = 35.0
# A host that lives writes at each beat; one beat may be missed, and clocks differ.
_SILENT_S = 2 * BEAT_S + 10.0
_LONGEST_JSON = 16 << 20
_LONGEST_NAME = 200
_LONGEST_TEXT = 1000
_MOST_ARGUMENTS = 1000
_MOST_HOSTS = 20_000
_MOST_FILES = 100_000
_LATEST_TIME = 1e11
_OUTCOMES = ("succeeded", "failed", "stopped", "left")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RunEnd(Value):
    """How a launch ended: ``succeeded``, ``failed``, ``stopped`` or ``left``. ``time``: seconds since the epoch."""

    time: float
    exit_code: int
    outcome: str
    headline: str

    @property
    def is_of_one_host(self) -> bool:
        """Whether the job may go on without this host, which has left it, perhaps because of a signal."""
        return self.outcome in {"left", "stopped"}


class RunRecord(Value):
    """What run.json says, as far as it is used.

    Attributes:
        run_id: the run's.
        command: saferun's arguments.
        host: the name of its host's directory.
        process: its saferun; None: not known.
        started_at: seconds since the epoch; 0: not known.
        directory: the name that saferun gave to the directory; empty: the user chose it.
        control_socket: where its saferun answers; empty: nowhere.
        end: None while it runs, or it was killed.
        slurm_job: the id of the job of Slurm that it belongs to; empty: of none.
        rendezvous_id: the id of the rendezvous, the same on all hosts of a job; jobs may share it.
        written_at: when it was written, by the clock of the file server.
    """

    run_id: str
    command: tuple[str, ...]
    host: str
    process: ProcessIdentity | None
    started_at: float
    directory: str
    end: RunEnd | None
    control_socket: str = ""
    slurm_job: str = ""
    rendezvous_id: str = ""
    written_at: float = 0.0


class RunState(Value):
    """A run.

    Attributes:
        name: ``running``, ``hung``, ``succeeded``, ``failed``, ``stopped``, ``left`` (the job can go on without its
            host), ``lost`` (killed, or its host is gone) or ``unknown``.
        headline: what went wrong last, if something did.
        record: what run.json says; None: there is none that can be read.
    """

    name: str
    headline: str = ""
    record: RunRecord | None = None

    @property
    def is_living(self) -> bool:
        """Whether it runs."""
        return self.name in {"running", "hung"}


def open_run(path: str) -> int:
    """A descriptor of a run directory; the caller closes it.

    Raises:
        OSError: there is none.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def read_state(fd: int, now: float | None = None) -> RunState:
    """The state of the run whose directory this is. ``now``: seconds since the epoch."""
    now = time.time() if now is None else now
    records = [record for record in (read_run_record(fd),) if record is not None]
    if not records:
        # Of a job of several hosts whose directories are not shared, this is one of the others.
        records = [record for host in host_names(fd) for record in _parts(fd, host)]
    if not records:
        return RunState("unknown")
    record = records[0]
    end = record.end
    if end is not None and end.is_of_one_host and (living := living_records(fd, now)):
        # Another host leads now: what it wrote before is below its name.
        records, record, end = living, living[0], None
    if end is not None:
        return RunState(end.outcome, end.headline, record)
    if not any(_lives(fd, one, now, UNHEARD_S) for one in records):
        return RunState("lost", "", record)
    hang = _current_hang(fd)
    return RunState("hung" if hang else "running", hang, record)


def living_records(fd: int, now: float | None = None, until: float = math.inf) -> list[RunRecord]:
    """The saferuns of a run that live, as far as is known, the one that leads the job first.

    Where its leader was stopped, a host that is silent from then on has ended: all hosts of a job are stopped together.

    Args:
        fd: its directory.
        now: seconds since the epoch.
        until: how long it may take, in monotonic seconds. A thousand hosts may have been stopped with the
            leader: of those, only the time of events.jsonl is read then.

    Raises:
        TimeoutError: it has taken longer.
    """
    now = time.time() if now is None else now
    record = read_run_record(fd)
    living: list[RunRecord] = []
    records = [record] if record is not None else []
    end = record.end if record is not None else None
    stopped_at = record.written_at if record is not None and end is not None and end.outcome == "stopped" else 0.0
    for host in (None, *host_names(fd, until)):
        if host is None or until == math.inf or not stopped_at or not _was_stopped(fd, host, now, stopped_at):
            found = _parts(fd, host) if host is not None else records
            living += [one for one in found if one.end is None and _lives(fd, one, now, UNHEARD_S, stopped_at)]
        if time.monotonic() > until:
            raise TimeoutError
    return living


def may_live(fd: int, now: float | None = None) -> bool:
    """Whether a saferun of this run may still live, on any host. In doubt it does."""
    now = time.time() if now is None else now
    record = read_run_record(fd)
    records = [record] if record is not None else []
    for host in host_names(fd):
        records += _parts(fd, host, is_any=True)
    return not records or any(_lives(fd, one, now, _SURELY_UNHEARD_S) for one in records)


def _lives(fd: int, record: RunRecord, now: float, unheard_s: float, stopped_at: float = 0.0) -> bool:
    living = is_living(record.process) if record.process is not None else None
    if living is not None or record.end is not None:
        return bool(living)
    heard_at = _heard_at(fd, record.host)
    return not _is_silent(heard_at, now, stopped_at) and now - heard_at < unheard_s


def _was_stopped(fd: int, host: str, now: float, stopped_at: float) -> bool:
    with suppress(OSError):
        return _is_silent(mtime_of(fd, f"{host}/{EVENTS}"), now, stopped_at)
    return False


def _is_silent(heard_at: float, now: float, stopped_at: float) -> bool:
    """Whether a host was stopped with its leader: one that goes on writes after that, a beat later at the latest."""
    return heard_at <= stopped_at + _STOPPING_S < now - BEAT_S and now - heard_at > _SILENT_S


def _heard_at(fd: int, host: str) -> float:
    """When the files of a host were last written to, or its writer process last set their time."""
    times = [0.0]
    with suppress(OSError):
        below = os.open(host, _DIRECTORY, dir_fd=fd)
        try:
            times.append(os.fstat(below).st_mtime)
            for name in names_in(below, _MOST_FILES):
                if name.startswith("events") and name.endswith(".jsonl"):
                    with suppress(OSError):
                        times.append(_changed_at(below, name))
        finally:
            os.close(below)
    return max(times)


def _changed_at(fd: int, name: str) -> float:
    with suppress(OSError):
        return mtime_of(fd, name)
    return os.stat(name, dir_fd=fd, follow_symlinks=False).st_mtime


def mtime_of(fd: int, path: str) -> float:
    """When a file was written to. It is opened: then NFS asks its server, where ``stat`` may take what it knows.

    Raises:
        OSError: it cannot be opened.
    """
    file = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=fd)
    try:
        return os.fstat(file).st_mtime
    finally:
        os.close(file)


def host_names(fd: int, until: float = math.inf) -> list[str]:
    """The names of the hosts that have files here, sorted: all that are found ``until`` then, in monotonic seconds."""
    names = []
    with suppress(OSError), os.scandir(fd) as entries:
        for entry in islice(entries, _MOST_HOSTS):
            if time.monotonic() > until:
                break
            with suppress(OSError):  # of one alone: the others may live
                if not entry.name.startswith(EARLIER) and entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
    return sorted(names)


def open_below(fd: int, host: str) -> int:
    """A descriptor of the directory of a host; -1: there is none."""
    try:
        return os.open(host, _DIRECTORY, dir_fd=fd)
    except OSError:
        return -1


def run_records(below: int) -> list[RunRecord]:
    """The run.json files of the saferun processes of a host that do not lead the job. ``below``: its directory."""
    names = [name for name in names_in(below, _MOST_FILES) if name.startswith("run") and name.endswith(".json")]
    return [record for name in names if (record := read_run_record(below, name)) is not None]


def has_ended(fd: int, record: RunRecord) -> bool:
    """Whether a saferun that used a run directory has ended, or has written nothing for long."""
    return record.end is not None or not _lives(fd, record, time.time(), UNHEARD_S)


def unheard_s(fd: int, record: RunRecord) -> float:
    """How long ago the files of a saferun that has not ended were written to; 0: its process is known to live."""
    if record.process is not None and is_living(record.process):
        return 0.0
    return max(time.time() - _heard_at(fd, record.host), 1.0)


def _parts(fd: int, name: str, *, is_any: bool = False) -> list[RunRecord]:
    """The records of a host. ``is_any``: also of another run whose directory this is."""
    below = open_below(fd, name)
    if below < 0:
        return []
    try:
        records = run_records(below)
    finally:
        os.close(below)
    return [record._replace(host=name) for record in records if is_any or record.host in {"", name}]


def read_run_record(fd: int, name: str = RUN_JSON) -> RunRecord | None:
    """What a run.json says; None: there is none, or it is malformed."""
    try:
        content, written_at = _read_json(fd, name, _LONGEST_JSON)
        return _record(content, written_at)
    except (OSError, *MALFORMED):
        return None


def read_json(fd: int, path: str, longest: int = _LONGEST_JSON) -> Any:  # noqa: ANN401 - JSON
    """The content of a file below a directory.

    Raises:
        OSError: it cannot be read, or is no regular file.
        One of ``MALFORMED``: it is not JSON, or too long.
    """
    return _read_json(fd, path, longest)[0]


def _read_json(fd: int, path: str, longest: int) -> tuple[Any, float]:
    # It is opened: then NFS asks its server for the time, where ``stat`` may take what it knows.
    file = os.open(path, os.O_RDONLY | CAREFULLY, dir_fd=fd)
    with open(file, "rb") as stream:
        status = os.fstat(file)
        check_regular(status, path)
        return loads(stream.read(longest + 1), longest=longest), status.st_mtime


def _record(content: JsonObject, written_at: float) -> RunRecord:
    process, end = content.get("process"), content.get("end")
    return RunRecord(
        run_id=display_text(content["run_id"], _LONGEST_NAME),
        command=tuple(display_text(word, _LONGEST_TEXT) for word in content["command"][:_MOST_ARGUMENTS]),
        host=_file_name(content.get("host", "")),
        process=_process(process) if process is not None else None,
        started_at=measure(content.get("started_at", 0.0), 0.0, _LATEST_TIME),
        directory=_file_name(content.get("directory", "")),
        end=_end(end) if end is not None else None,
        control_socket=text(content.get("control_socket", ""), _LONGEST_NAME),
        slurm_job=_digits(content.get("slurm_job", "")),
        rendezvous_id=display_text(content.get("rendezvous_id", ""), _LONGEST_TEXT),
        written_at=written_at,
    )


def _file_name(value: object) -> str:
    name = text(value, _LONGEST_NAME)
    if "/" in name or name in {".", ".."}:
        raise ValueError("not a name")
    return name


def _digits(value: object) -> str:
    is_number = isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < _LONGEST_NAME
    return str(value) if is_number else ""


def _process(content: JsonObject) -> ProcessIdentity:
    names = text(content["boot_id"], _LONGEST_NAME), text(content["pid_namespace"], _LONGEST_NAME)
    return ProcessIdentity(number(content["pid"], 1, 1 << 30), number(content["start_ticks"]), *names)


def _end(content: JsonObject) -> RunEnd:
    outcome = content["outcome"]
    if outcome not in _OUTCOMES:
        raise ValueError("not an outcome")
    ended_at, exit_code = measure(content["time"], 0.0, _LATEST_TIME), number(content["exit_code"], -(1 << 31))
    return RunEnd(ended_at, exit_code, outcome, display_text(content["headline"], _LONGEST_TEXT))


def _current_hang(fd: int) -> str:
    """The headline of the hang that the job is in, as its report has it; empty: it is in none."""
    try:
        report = read_json(fd, "report.json")
        last = report["incidents"][-1]
        if report["run"]["outcome"] == "running" and (last["kind"], last["outcome"]) == ("hang", "continued"):
            return display_text(last["headline"], _LONGEST_TEXT)
    except (OSError, *MALFORMED):
        pass
    return ""


def size_bytes(fd: int, until: float) -> tuple[int, bool]:
    """How much room a directory takes on the disk, and whether that is all of it.

    Args:
        fd: the directory.
        until: when to stop, in monotonic seconds.
    """
    total, left = os.fstat(fd).st_blocks * 512, _MOST_FILES
    waiting = [os.dup(fd)]
    try:
        while waiting:
            here = waiting.pop()
            try:
                for name in names_in(here, left + 1):
                    left -= 1
                    if left < 0 or time.monotonic() > until:
                        return total, False
                    status = os.stat(name, dir_fd=here, follow_symlinks=False)
                    total += status.st_blocks * 512
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append(os.open(name, _DIRECTORY, dir_fd=here))
            except OSError:  # it is being written to
                continue
            finally:
                os.close(here)
    finally:
        for one in waiting:
            os.close(one)
    return total, True


def names_in(fd: int, most: int) -> list[str]:
    """The names in a directory, at most so many; none if it cannot be read."""
    try:
        with os.scandir(fd) as entries:
            return [entry.name for entry in islice(entries, most)]
    except OSError:
        return []
