"""Reads the files of a run directory that a page is made of. No link in it is followed, and all reading is bounded."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

from saferun.errors import suppress
from saferun.linux.ownership import CAREFULLY, ROOT, followed
from saferun.model import JsonObject
from saferun.report.page.contents import LONGEST_FILE, ReportPart, decode_preflight, decode_report
from saferun.report.page.run_contents import (
    EventLine,
    FailureRecord,
    HostEvents,
    HostGpus,
    RankTail,
    RunFiles,
    decode_events,
    decode_run_json,
)
from saferun.text.decoding import MALFORMED, loads
from saferun.text.failure_record import failure_record_from

_MOST_HOSTS = 16_384
_EVENTS_BYTES = 48 << 20
"""Of all hosts; each has an equal share, of which a quarter is for the beginning of its file."""
_LONGEST_EVENTS = 8 << 20
_OUTPUT_BYTES = 6 << 20
_MOST_OUTPUT, _LEAST_OUTPUT = 96 << 10, 1 << 10
_MOST_RANKS = 4096
_MOST_RECORDS, _MOST_TRIED = 8, 256
_LONGEST_RECORD = 1 << 20
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_GPU_HOSTS, _MOST_CAPTURES = 1024, 4
_LONGEST_GPUS = 256 << 10
_CAPTURE = re.compile(r"(?:failure|hang)_([0-9]{1,6})\Z")
_GPU_FILES = ("gpu_nvidia.json", "gpu_amd.json")
_RANK = re.compile(r"rank_([0-9]{1,8})\Z")
_STREAMS = ("stderr", "stdout")


def read_run(path: str, *, patience_s: float = 20.0) -> RunFiles:
    """Read a run directory.

    Args:
        path: the directory.
        patience_s: after so long no further file of events or output is opened.

    Raises:
        OSError: it cannot be opened.
    """
    give_up_at = time.monotonic() + patience_s
    fd = os.open(followed(path, None), _DIRECTORY)
    try:
        directory = _Directory(fd, give_up_at)
        report = decode_report(directory.whole("report.json"))
        preflight = decode_preflight(directory.whole("preflight.json"))
        run = decode_run_json(directory.whole("run.json"))
        names = directory.hosts()
        hosts = directory.events(names)
        attempt, culprits = _wanted(report, hosts)
        tails = directory.tails(names, attempt, culprits)
        gpus = directory.gpus(names, attempt)
        records, notes = directory.records, directory.notes
        earlier = directory.earlier_failure_records(names, _earlier(report))
    finally:
        os.close(fd)
    name = os.path.basename(os.path.realpath(path))
    return RunFiles(
        name,
        report,
        preflight,
        run,
        tuple(hosts),
        tuple(tails),
        tuple(records),
        tuple(earlier),
        tuple(gpus),
        tuple(notes),
        directory.owner,
    )


def _wanted(report: ReportPart | None, hosts: Iterable[HostEvents]) -> tuple[int, frozenset[int]]:
    """The attempt whose output is shown, and the ranks of which most of it is."""
    if report is not None and report.incidents:
        last = report.incidents[-1]
        return last.attempt, last.culprits
    return max((event.attempt for host in hosts for event in host.events), default=0), frozenset()


def _earlier(report: ReportPart | None) -> dict[int, frozenset[int]]:
    """The attempts before the one that is shown, the newest first, with the ranks that were the cause of their ends."""
    incidents = report.incidents if report is not None else ()
    found: dict[int, frozenset[int]] = {}
    for one in reversed(incidents):
        if one.attempt != incidents[-1].attempt:
            found[one.attempt] = found.get(one.attempt, frozenset()) | one.culprits
    return found


@contextmanager
def _opened(name: str, dir_fd: int) -> Iterator[int]:
    """A directory below another one, while it is read.

    Raises:
        OSError: there is none, or it is a link.
    """
    fd = os.open(name, _DIRECTORY, dir_fd=dir_fd)
    try:
        yield fd
    finally:
        os.close(fd)


class _Directory:
    """An open run directory."""

    def __init__(self, fd: int, give_up_at: float) -> None:
        self.notes: list[str] = []
        self.records: list[FailureRecord] = []
        self._fd = fd
        self.owner = os.fstat(fd).st_uid
        # A page that root makes is the owner's: it shows no file of root's that has been moved or linked there.
        self._owners = {self.owner} if os.geteuid() == ROOT else {self.owner, os.geteuid()}
        self._give_up_at = give_up_at

    def whole(self, name: str) -> bytes:
        """A file of the run; empty where there is none, or it is too large."""
        content, omitted_bytes = self._read(self._fd, name, LONGEST_FILE)
        if omitted_bytes:
            self.notes.append(f"{name} is too large")
            return b""
        return content

    def hosts(self) -> list[str]:
        """The names of the hosts' directories."""
        names = []
        with suppress(OSError), os.scandir(self._fd) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
                if len(names) >= _MOST_HOSTS:
                    break
        return sorted(names)

    def events(self, names: Sequence[str]) -> list[HostEvents]:
        """The events of each host; of a host with several processes those of all of them."""
        hosts = []
        share = min(_LONGEST_EVENTS, _EVENTS_BYTES // max(len(names), 1))
        for name in names:
            if self._is_late("events"):
                break
            with suppress(OSError):
                with _opened(name, self._fd) as fd:
                    files = [file for file in os.listdir(fd) if re.fullmatch(r"events(\.task_[0-9]+)?\.jsonl", file)]
                    found = [event for file in sorted(files)[:256] for event in self._events_of(fd, file, share)]
                if found:
                    hosts.append(HostEvents(name, tuple(sorted(found, key=lambda event: event.time))))
        return hosts

    def _events_of(self, fd: int, name: str, share: int) -> list[EventLine]:
        tail, omitted_bytes = self._read(fd, name, share)
        if not omitted_bytes:
            return decode_events(tail)
        # The ranks' numbers are at the beginning.
        head, _ = self._read(fd, name, share // 4, from_start=True)
        return decode_events(head.rpartition(b"\n")[0] + b"\n" + tail.partition(b"\n")[2])

    def tails(self, names: Sequence[str], attempt: int, culprits: frozenset[int]) -> list[RankTail]:
        """The end of the output of each rank in an attempt; that of ``culprits`` first.

        The first failure records that are there become ``records``.
        """
        candidates: list[tuple[str, int]] = []
        for name in names:
            with suppress(OSError):
                with _opened(f"{name}/attempt_{attempt}", self._fd) as fd:
                    matches = [match for entry in os.listdir(fd) if (match := _RANK.match(entry))]
                candidates.extend((name, int(match[1])) for match in matches)
        candidates.sort(key=lambda candidate: (candidate[1] not in culprits, candidate[1]))
        share = min(max(_OUTPUT_BYTES // max(2 * len(candidates), 1), _LEAST_OUTPUT), _MOST_OUTPUT)
        found = []
        for number, (host, rank) in enumerate(candidates[:_MOST_RANKS]):
            if self._is_late("output"):
                break
            with suppress(OSError), _opened(f"{host}/attempt_{attempt}/rank_{rank}", self._fd) as fd:
                if number < _MOST_TRIED and len(self.records) < _MOST_RECORDS:
                    known = self._record(fd)
                    if known is not None:
                        self.records.append(FailureRecord(host, attempt, rank, known))
                for stream in _STREAMS:
                    size = _MOST_OUTPUT if rank in culprits else share
                    content, omitted_bytes = self._read(fd, f"{stream}.log", size)
                    if content:
                        found.append(RankTail(host, attempt, rank, stream, content, omitted_bytes))
        return found

    def gpus(self, names: Sequence[str], attempt: int) -> list[HostGpus]:
        """The state of each host's GPUs, of the newest capture of an attempt that has it."""
        found: list[HostGpus] = []
        for name in names[:_MOST_GPU_HOSTS]:
            if self._is_late("captures of GPUs"):
                break
            with suppress(OSError):
                with _opened(f"{name}/attempt_{attempt}", self._fd) as fd:
                    content = self._gpus_below(fd)
                if content:
                    found.append(HostGpus(name, content))
        return found

    def _gpus_below(self, fd: int) -> JsonObject:
        captures = [(int(match[1]), entry) for entry in os.listdir(fd) if (match := _CAPTURE.match(entry))]
        for _, entry in sorted(captures, reverse=True)[:_MOST_CAPTURES]:
            with suppress(OSError), _opened(entry, fd) as inner:
                for name in _GPU_FILES:
                    content, omitted_bytes = self._read(inner, name, _LONGEST_GPUS)
                    with suppress(*MALFORMED):
                        decoded = loads(content) if content and not omitted_bytes else None
                        if isinstance(decoded, dict) and decoded.get("gpus"):
                            return decoded
        return {}

    def earlier_failure_records(
        self, names: Sequence[str], attempts: Mapping[int, frozenset[int]]
    ) -> list[FailureRecord]:
        """The failure records of some ranks of other attempts. A few are looked for: any rank may be on any host."""
        candidates = (
            (host, attempt, rank) for attempt, ranks in attempts.items() for rank in sorted(ranks) for host in names
        )
        found: list[FailureRecord] = []
        for host, attempt, rank in islice(candidates, _MOST_TRIED):
            if len(found) >= _MOST_RECORDS or self._is_late("failure records"):
                break
            with suppress(OSError):
                with _opened(f"{host}/attempt_{attempt}/rank_{rank}", self._fd) as fd:
                    record = self._record(fd)
                if record is not None:
                    found.append(FailureRecord(host, attempt, rank, record))
        return found

    def _record(self, fd: int) -> JsonObject | None:
        record, omitted_bytes = self._read(fd, "failure.json", _LONGEST_RECORD)
        return failure_record_from(record, longest=_LONGEST_RECORD) if record and not omitted_bytes else None

    def _is_late(self, what: str) -> bool:
        if time.monotonic() < self._give_up_at:
            return False
        note = f"not all {what} could be read in time"
        if note not in self.notes:
            self.notes.append(note)
        return True

    def _read(self, dir_fd: int, name: str, size_bytes: int, *, from_start: bool = False) -> tuple[bytes, int]:
        """The last bytes of a file, or the first ones, and how many there are besides."""
        try:
            fd = os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=dir_fd)
        except FileNotFoundError:
            return b"", 0
        except OSError as error:
            self.notes.append(f"{name} cannot be read: {error.strerror}")
            return b"", 0
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid not in self._owners:
                self.notes.append(f"{name} is not a file of this run")
                return b"", 0
            omitted_bytes = max(status.st_size - size_bytes, 0)
            content = b""
            at = 0 if from_start else omitted_bytes
            while len(content) < size_bytes and (block := os.pread(fd, size_bytes - len(content), at + len(content))):
                content += block
            return content, omitted_bytes
        finally:
            os.close(fd)
