"""The output of a run's ranks, read from the files of its hosts in the order of time, in bounded memory.

The times are those of ``output.index`` (``files.time_index``), by the clock of each host. Of files that no index
knows the times are not known: they come last, one after the other.
"""

from __future__ import annotations

import heapq
import os
import re
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from saferun.errors import suppress
from saferun.files.run_files import host_names, names_in, open_run
from saferun.files.time_index import LARGEST_BYTES, NAME, NO_CUT, SUFFIX, Bytes, CutFile, IndexReader, NamedFile
from saferun.linux.ownership import CAREFULLY
from saferun.model import Value

_PATH = re.compile(r"attempt_([0-9]{1,9})/rank_([0-9]{1,9})/(stdout|stderr)\.log")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_PIECE_BYTES = 64 << 10
LONGEST_LINE_BYTES = 64 << 10
_MOST_OPEN = 200
_MOST_NAMES = 100_000
# Of unfinished lines of all files together.
_MOST_KEPT_BYTES = 64 << 20


class LogName(Value):
    """A file of a rank."""

    host: str
    attempt: int
    rank: int
    stream: str

    @property
    def path(self) -> str:
        """Where it is in the run directory."""
        return f"{self.host}/attempt_{self.attempt}/rank_{self.rank}/{self.stream}.log"


class Line(Value):
    """A line, without its newline. ``time`` is that of its end, in seconds since the epoch; None: not known."""

    name: LogName
    time: float | None
    text: bytes


def log_name(host: str, path: str) -> LogName | None:
    """The file of a rank that a path below a host's directory is; None: it is none."""
    found = _PATH.fullmatch(path)
    return LogName(host, int(found[1]), int(found[2]), found[3]) if found is not None else None


class _LogFile:
    """How far a file has been read."""

    def __init__(self, name: LogName) -> None:
        self.name = name
        self.position = 0
        self.cut = NO_CUT
        self.rest = b""
        self.is_timed = False


class RunLogs:
    """The output of a run.

    Args:
        path: the run directory.
        is_wanted: whether a file is to be read.
        since: seconds since the epoch: earlier output is left out; 0: all of it.
    """

    def __init__(self, path: str, is_wanted: Callable[[LogName], bool], since: float = 0.0) -> None:
        self._fd = open_run(path)
        self._is_wanted = is_wanted
        self._since = since
        self._files: dict[LogName, _LogFile] = {}
        self._open: OrderedDict[LogName, int] = OrderedDict()
        self._indexes: dict[tuple[str, str], _Index] = {}
        self._kept_bytes = 0
        self.find_indexes()

    @property
    def has_times(self) -> bool:
        """Whether the times of what follows will be known."""
        return bool(self._indexes) and not any(index.is_full for index in self._indexes.values())

    def close(self) -> None:
        """Nothing more is read."""
        for fd in (*self._open.values(), self._fd):
            os.close(fd)
        for index in self._indexes.values():
            index.close()

    def find_indexes(self) -> None:
        """Find the indexes of hosts, which may have joined meanwhile."""
        for host in host_names(self._fd):
            with suppress(OSError):
                folder = os.open(host, _DIRECTORY, dir_fd=self._fd)
                try:
                    for name in names_in(folder, _MOST_NAMES):
                        if name.startswith(NAME) and name.endswith(SUFFIX) and (host, name) not in self._indexes:
                            self._indexes[host, name] = _Index(
                                host, os.open(name, os.O_RDONLY | CAREFULLY, dir_fd=folder)
                            )
                finally:
                    os.close(folder)

    def read_timed(self) -> Iterator[Line]:
        """The lines that have come since, as far as their times are known."""
        for index in self._indexes.values():
            index.learn_cuts(self._file)
        sources = [index.pieces(self._file) for index in self._indexes.values()]
        for time, file, upto in heapq.merge(*sources, key=lambda piece: piece[0]):
            file.is_timed = True
            if time < self._since or not self._is_wanted(file.name):
                file.position, file.rest = max(upto, file.position), b""
                continue
            yield from self._read(file, upto, time)

    def read_rest(self) -> Iterator[Line]:
        """What is in the files beyond that."""
        for name in self._names():
            file = self._file(name)
            if self._since and not file.is_timed and self._changed_at(name) < self._since:
                continue
            yield from self._read(file, None, None)

    def finish(self) -> Iterator[Line]:
        """The last lines, which no newline ends."""
        for file in self._files.values():
            if file.rest:
                rest, file.rest = file.rest, b""
                yield Line(file.name, None, rest)

    def _file(self, name: LogName) -> _LogFile:
        return self._files.setdefault(name, _LogFile(name))

    def _names(self) -> Iterable[LogName]:
        """All files that are wanted, in the order of attempts, hosts and ranks."""
        found = []
        for host in host_names(self._fd):
            for attempt in self._below(host):
                for rank in self._below(f"{host}/{attempt}"):
                    for stream in ("stdout", "stderr"):
                        name = log_name(host, f"{attempt}/{rank}/{stream}.log")
                        if name is not None and self._is_wanted(name):
                            found.append(name)
        return sorted(found, key=lambda name: (name.attempt, name.host, name.rank, name.stream != "stdout"))

    def _below(self, path: str) -> list[str]:
        try:
            fd = self._open_folder(path)
        except OSError:
            return []
        try:
            return names_in(fd, _MOST_NAMES)
        finally:
            os.close(fd)

    def _open_folder(self, path: str) -> int:
        fd = os.dup(self._fd)
        for name in path.split("/"):
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            finally:
                os.close(fd)
            fd = below
        return fd

    def _changed_at(self, name: LogName) -> float:
        try:
            return os.fstat(self._opened(name)).st_mtime
        except OSError:
            return 0.0

    def _opened(self, name: LogName) -> int:
        fd = self._open.get(name)
        if fd is not None:
            self._open.move_to_end(name)
            return fd
        folder, _, file = name.path.rpartition("/")
        parent = self._open_folder(folder)
        try:
            fd = os.open(file, os.O_RDONLY | CAREFULLY, dir_fd=parent)
        finally:
            os.close(parent)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError("not a regular file")
        while len(self._open) >= _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])
        self._open[name] = fd
        return fd

    def _read(self, file: _LogFile, upto: int | None, time: float | None) -> Iterator[Line]:
        """The lines up to a position; None: up to the end of the file."""
        try:
            fd = self._opened(file.name)
            while upto is None or file.position < upto:
                count = _PIECE_BYTES if upto is None else min(upto - file.position, _PIECE_BYTES)
                cut = file.cut
                gap_end = cut.kept_bytes + cut.left_out_bytes
                if file.position < cut.kept_bytes:
                    content = os.pread(fd, min(count, cut.kept_bytes - file.position), file.position)
                elif file.position < gap_end:
                    # The mark stands for all that is left out, whenever that was written.
                    yield from self._lines(file, os.pread(fd, cut.mark_bytes, cut.kept_bytes), time)
                    file.position = gap_end
                    continue
                else:
                    content = os.pread(fd, count, cut.offset_in_file(file.position))
                if not content:
                    return
                file.position += len(content)
                yield from self._lines(file, content, time)
        except OSError:
            return

    def _lines(self, file: _LogFile, content: bytes, time: float | None) -> Iterator[Line]:
        self._kept_bytes -= len(file.rest)
        *lines, rest = (file.rest + content).split(b"\n")
        for line in lines:
            yield from (Line(file.name, time, piece) for piece in _pieces(line))
        is_much = self._kept_bytes + len(rest) > _MOST_KEPT_BYTES
        while len(rest) > LONGEST_LINE_BYTES or (is_much and rest):
            yield Line(file.name, time, rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        file.rest = rest
        self._kept_bytes += len(rest)


class _Index:
    """An index, as far as it has been read."""

    def __init__(self, host: str, fd: int) -> None:
        self._host = host
        self._fd = fd
        self._entries = IndexReader()
        self._cuts = IndexReader()
        self._offset = 0
        self._cuts_offset = 0
        self._streams: dict[int, _LogFile] = {}
        self._cut_streams: dict[int, LogName] = {}
        self._claimed: dict[int, int] = {}

    def close(self) -> None:
        os.close(self._fd)

    @property
    def is_full(self) -> bool:
        """Whether nothing more comes."""
        return self._offset > LARGEST_BYTES - _PIECE_BYTES or self._entries.is_broken

    def learn_cuts(self, file_of: Callable[[LogName], _LogFile]) -> None:
        """Read ahead what was left out of files, since earlier offsets are in the file as it is now."""
        while content := self._next(self._cuts_offset):
            self._cuts_offset += len(content)
            for entry in self._cuts.feed(content):
                if isinstance(entry, NamedFile):
                    name = log_name(self._host, entry.path)
                    if name is not None:
                        self._cut_streams[entry.stream] = name
                elif isinstance(entry, CutFile) and entry.stream in self._cut_streams:
                    file_of(self._cut_streams[entry.stream]).cut = entry.cut

    def pieces(self, file_of: Callable[[LogName], _LogFile]) -> Iterator[tuple[float, _LogFile, int]]:
        """Times, files, and up to where they were written then."""
        time = 0.0
        while self._offset < self._cuts_offset and (content := self._next(self._offset)):
            self._offset += len(content)
            for entry in self._entries.feed(content):
                if isinstance(entry, NamedFile):
                    name = log_name(self._host, entry.path)
                    if name is None:
                        self._streams.pop(entry.stream, None)
                        continue
                    file = self._streams[entry.stream] = file_of(name)
                    self._claimed[entry.stream] = entry.position
                    if entry.position > file.position and time:
                        yield time, file, entry.position
                elif isinstance(entry, Bytes):
                    time = entry.time
                    known = self._streams.get(entry.stream)
                    if known is not None:
                        self._claimed[entry.stream] += entry.length
                        yield time, known, self._claimed[entry.stream]

    def _next(self, offset: int) -> bytes:
        try:
            return os.pread(self._fd, _PIECE_BYTES, offset)
        except OSError:
            return b""


def _pieces(line: bytes) -> Iterator[bytes]:
    if len(line) <= LONGEST_LINE_BYTES:
        yield line
        return
    for start in range(0, len(line), LONGEST_LINE_BYTES):
        yield line[start : start + LONGEST_LINE_BYTES]
