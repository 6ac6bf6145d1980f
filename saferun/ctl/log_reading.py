"""The output of a run's ranks, read from the files of its hosts in the order of time, in bounded memory.

The times are those of ``output.index`` (``files.time_index``), by the clock of each host. Of files that no index
knows the times are not known: they come last, one after the other.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

from saferun.ctl.open_files import OpenFiles
from saferun.ctl.pace import Pace
from saferun.errors import suppress
from saferun.files.time_index import LARGEST_BYTES, NAME, NO_CUT, SUFFIX, Cut
from saferun.files.time_index_reader import CutFile, Growth, IndexReader, NamedFile
from saferun.model import Value

_PATH = re.compile(r"attempt_([0-9]{1,9})/rank_([0-9]{1,9})/(stdout|stderr)\.log")
_ATTEMPT = re.compile(r"attempt_[0-9]{1,9}")
_PIECE_BYTES = 64 << 10
# Of the indexes of many hosts together, and of one of them.
_ALL_PIECES_BYTES, _LEAST_PIECE_BYTES = 1 << 20, 1 << 10
# Of all files together, before it is handed on.
_MOST_READ_BYTES = 1 << 20
_NEWLINE = ord("\n")
LONGEST_LINE_BYTES = 64 << 10
# How old the names of files may be while a run is followed.
_LISTED_S = 5.0
_LARGEST_FILE = 1 << 62
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


class LogFile:
    """A file of a rank, and how far it has been read.

    Args:
        name: the file.
        is_wanted: whether it is read.
    """

    __slots__ = ("content", "content_at", "cut", "is_begun", "is_timed", "is_wanted", "name", "position", "rest")

    def __init__(self, name: LogName, *, is_wanted: bool) -> None:
        self.name = name
        self.is_wanted = is_wanted
        self.position = 0
        self.cut = NO_CUT
        self.rest = b""
        self.is_timed = self.is_begun = False
        # What has been read beyond the position: a part of the file at once, however many times it came in.
        self.content: bytes | None = None
        self.content_at = 0


Piece = tuple[LogFile, int | None, bytes]
"""Whole lines that came at one time, without the last newline.

The time is that of their end, in milliseconds since the epoch; None: not known.
"""
# In the order of time; when it came, in milliseconds; the file, and up to where it was written then.
_Step = tuple[int, int, LogFile, int]


def log_name(host: str, path: str) -> LogName | None:
    """The file of a rank that a path below a host's directory is; None: it is none."""
    found = _PATH.fullmatch(path)
    return LogName(host, int(found[1]), int(found[2]), found[3]) if found is not None else None


class RunLogs:
    """The output of a run.

    Args:
        path: the run directory.
        is_wanted: whether a file is to be read.
        since: seconds since the epoch: earlier output is left out; 0: all of it.
    """

    def __init__(self, path: str, is_wanted: Callable[[LogName], bool], since: float = 0.0) -> None:
        self._files = OpenFiles(path)
        self._is_wanted = is_wanted
        self._since = since
        self._logs: dict[LogName, LogFile] = {}
        self._indexes: dict[str, _Index] = {}
        self._found: Sequence[LogName] = ()
        self._listing = Pace(_LISTED_S)
        self._kept_bytes = 0
        self._sizes: dict[LogName, int] | None = None
        self.find_indexes()

    @property
    def has_times(self) -> bool:
        """Whether the times of what follows will be known."""
        return bool(self._indexes) and not any(index.is_full for index in self._indexes.values())

    def has_files(self) -> bool:
        """Whether there is the directory of a rank, wanted or not, or an index of output."""
        return bool(self._indexes) or any(True for _ in self._all_names())

    def hosts(self) -> list[str]:
        """The hosts that have files here, whether or not a rank of theirs has written anything; sorted."""
        return self._files.hosts()

    def attempts(self) -> set[int]:
        """The attempts that have a directory, wanted or not."""
        names = (name for host in self._files.hosts() for name in self._files.names_below(host))
        return {int(name.removeprefix("attempt_")) for name in names if _ATTEMPT.fullmatch(name)}

    def ranks(self) -> set[int]:
        """The ranks that have a directory, wanted or not: those that have written nothing may have none."""
        return {name.rank for name in self._all_names()}

    def close(self) -> None:
        """Nothing more is read."""
        self._files.close()

    @property
    def failures(self) -> Mapping[str, str]:
        """What could not be read, by its path in the run directory, and why."""
        return self._files.failures

    def find_indexes(self) -> None:
        """Find the indexes of hosts, which may have joined meanwhile."""
        for host in self._files.hosts():
            for name in self._files.names_below(host):
                path = f"{host}/{name}"
                if not (name.startswith(NAME) and name.endswith(SUFFIX)) or path in self._indexes:
                    continue
                if self._files.is_readable(path):
                    self._indexes[path] = _Index(host, path, self._files)

    def read_timed(self) -> Iterator[list[Piece]]:
        """The lines that have come since, as far as their times are known."""
        for index in self._indexes.values():
            index.learn_cuts(self._file)
        most = max(_LEAST_PIECE_BYTES, min(_PIECE_BYTES, _ALL_PIECES_BYTES // max(len(self._indexes), 1)))
        for steps in _merged([index.steps(self._file, most) for index in self._indexes.values()]):
            yield from self._timed(steps)

    def note_sizes(self) -> None:
        """``read_rest`` reads no further than the files go now: what comes meanwhile would have no times yet."""
        self._sizes = {name: self._files.size(name.path) for name in self._names()}

    def has_rest(self) -> bool:
        """Whether there is something to be read by it, once sizes have been noted."""
        return any(self._end_of(self._file(name)) > self._file(name).position for name in self._sizes or ())

    def _end_of(self, file: LogFile) -> int:
        return file.cut.position_at((self._sizes or {}).get(file.name, 0))

    def read_rest(self, *, known: bool = False) -> Iterator[list[Piece]]:
        """What is in the files beyond that. ``known``: those that were found some seconds ago are enough."""
        for name in self._names(known=known) if self._sizes is None else self._sizes:
            file = self._file(name)
            if self._since and not file.is_timed and self._files.changed_at(name.path) < self._since:
                continue
            has_end = self._sizes is not None and file.position <= _LARGEST_FILE
            yield from self._read(file, self._end_of(file) if has_end else None, None)

    def finish(self) -> Iterator[list[Piece]]:
        """The last lines, which no newline ends."""
        for file in self._logs.values():
            if file.rest:
                rest, file.rest = file.rest, b""
                yield [(file, None, rest)]

    def _file(self, name: LogName) -> LogFile:
        file = self._logs.get(name)
        if file is None:
            file = self._logs[name] = LogFile(name, is_wanted=self._is_wanted(name))
        return file

    def _timed(self, steps: list[_Step]) -> Iterator[list[Piece]]:
        """The lines that came in these steps: each file is read once, unless that is much."""
        lasts = {file: upto for _, _, file, upto in steps}
        for file in lasts:
            file.is_timed = True
        if self._since or not all(file.is_wanted for file in lasts):
            steps = [step for step in steps if step[2].is_wanted and not (self._since and self._is_skipped(step))]
            lasts = {file: upto for _, _, file, upto in steps}
        size_bytes = sum(max(upto - file.position, 0) for file, upto in lasts.items())
        if size_bytes > _MOST_READ_BYTES and len(steps) > 1:
            half = len(steps) // 2
            yield from self._timed(steps[:half])
            yield from self._timed(steps[half:])
            return
        for file, upto in lasts.items():
            self._read_ahead(file, upto)
        yield from self._cut(steps)
        for file in lasts:
            file.content = None

    def _cut(self, steps: list[_Step]) -> Iterator[list[Piece]]:
        """The lines of these steps, from what was read ahead where that is possible."""
        pieces: list[Piece] = []
        for _, time_ms, file, upto in steps:
            start = file.position
            if upto <= start:
                continue
            content_at = file.content_at
            text = file.content[start - content_at : upto - content_at] if file.content is not None else b""
            if len(text) != upto - start:  # of an index that is damaged positions may go back
                if pieces:
                    yield pieces
                    pieces = []
                yield from self._read(file, upto, time_ms)
                continue
            file.position = upto
            if file.rest or text[-1] != _NEWLINE or len(text) > LONGEST_LINE_BYTES:
                pieces += self._whole_lines(file, text, time_ms)
            else:
                pieces.append((file, time_ms, text[:-1]))
        if pieces:
            yield pieces

    def _is_skipped(self, step: _Step) -> bool:
        """Whether what came then is too old. Not where the clock goes back: the file has been read beyond that."""
        _, time_ms, file, upto = step
        if time_ms >= self._since * 1000:
            file.is_begun = True
            return False
        if not file.is_begun:
            file.position = max(upto, file.position)
        return not file.is_begun

    def _read_ahead(self, file: LogFile, upto: int) -> None:
        """Read what the steps are about, if it is in the file in one piece and not too much."""
        count, at = upto - file.position, file.position
        cut = file.cut
        if at >= cut.kept_bytes + cut.left_out_bytes:
            at = cut.offset_in_file(at)
        elif upto > cut.kept_bytes:
            return
        if not 0 < count <= _MOST_READ_BYTES:
            return
        with suppress(OSError):
            content = self._files.read(file.name.path, count, at)
            if len(content) == count:
                file.content, file.content_at = content, file.position

    def _names(self, *, known: bool = False) -> Sequence[LogName]:
        """All files that are wanted, in the order of attempts, hosts and ranks. ``known``: as of ``read_rest``."""
        if not known or self._listing.is_due():
            began_at = time.monotonic()
            found = [name for name in self._all_names() if self._is_wanted(name)]
            found.sort(key=lambda name: (name.attempt, name.host, name.rank, name.stream != "stdout"))
            self._found = found
            self._listing.took(time.monotonic() - began_at)
        return self._found

    def _all_names(self) -> Iterator[LogName]:
        for host in self._files.hosts():
            for attempt in self._files.names_below(host):
                if not _ATTEMPT.fullmatch(attempt):
                    continue
                for rank in self._files.names_below(f"{host}/{attempt}"):
                    for stream in ("stdout", "stderr"):
                        name = log_name(host, f"{attempt}/{rank}/{stream}.log")
                        if name is not None:
                            yield name

    def _read(self, file: LogFile, upto: int | None, time_ms: int | None) -> Iterator[list[Piece]]:
        """The lines up to a position; None: up to the end of the file."""
        path = file.name.path
        with suppress(OSError):
            while upto is None or file.position < upto:
                count = _PIECE_BYTES if upto is None else min(upto - file.position, _PIECE_BYTES)
                cut = file.cut
                gap_end = cut.kept_bytes + cut.left_out_bytes
                if file.position < cut.kept_bytes:
                    content = self._files.read(path, min(count, cut.kept_bytes - file.position), file.position)
                elif file.position < gap_end:
                    # The mark stands for all that is left out, whenever that was written.
                    yield self._whole_lines(file, self._files.read(path, cut.mark_bytes, cut.kept_bytes), time_ms)
                    file.position = gap_end
                    continue
                else:
                    content = self._files.read(path, count, cut.offset_in_file(file.position))
                if not content:
                    return
                file.position += len(content)
                yield self._whole_lines(file, content, time_ms)

    def _whole_lines(self, file: LogFile, content: bytes, time_ms: int | None) -> list[Piece]:
        """The lines that end in a part of the file. What follows them is kept."""
        self._kept_bytes -= len(file.rest)
        lines, newline, rest = (file.rest + content).rpartition(b"\n")
        pieces: list[Piece] = []
        if newline and len(lines) <= LONGEST_LINE_BYTES:
            pieces.append((file, time_ms, lines))
        elif newline:
            pieces += [(file, time_ms, part) for line in lines.split(b"\n") for part in _parts(line)]
        is_much = self._kept_bytes + len(rest) > _MOST_KEPT_BYTES
        while len(rest) > LONGEST_LINE_BYTES or (is_much and rest):
            pieces.append((file, time_ms, rest[:LONGEST_LINE_BYTES]))
            rest = rest[LONGEST_LINE_BYTES:]
        file.rest = rest
        self._kept_bytes += len(rest)
        return pieces


class _Index:
    """An index, as far as it has been read."""

    def __init__(self, host: str, path: str, files: OpenFiles) -> None:
        self._host = host
        self._path = path
        self._files = files
        self._entries = IndexReader()
        self._cuts = IndexReader(has_growth=False)
        self._offset = 0
        self._cuts_offset = 0
        self._streams: dict[int, LogFile] = {}
        self._cut_streams: dict[int, LogName] = {}
        self._claimed: dict[int, int] = {}
        self._time_ms = self._latest_ms = 0

    @property
    def is_full(self) -> bool:
        """Whether nothing more comes."""
        return self._offset > LARGEST_BYTES - _PIECE_BYTES or self._entries.is_broken

    def learn_cuts(self, file_of: Callable[[LogName], LogFile]) -> None:
        """Read ahead what was left out of files, since earlier offsets are in the file as it is now."""
        while content := self._next(self._cuts_offset, _PIECE_BYTES):
            self._cuts_offset += len(content)
            for entry in self._cuts.feed(content):
                if isinstance(entry, NamedFile):
                    name = log_name(self._host, entry.path)
                    if name is not None:
                        self._cut_streams[entry.stream] = name
                elif isinstance(entry, CutFile) and entry.stream in self._cut_streams and _is_possible(entry.cut):
                    file_of(self._cut_streams[entry.stream]).cut = entry.cut

    def steps(self, file_of: Callable[[LogName], LogFile], most_bytes: int) -> Iterator[list[_Step]]:
        """How the files grew, from so many bytes of the index at once."""
        while self._offset < self._cuts_offset and (content := self._next(self._offset, most_bytes)):
            self._offset += len(content)
            steps: list[_Step] = []
            for entry in self._entries.feed(content):
                if isinstance(entry, NamedFile):
                    name = log_name(self._host, entry.path)
                    if name is None:
                        self._streams.pop(entry.stream, None)
                        continue
                    file = self._streams[entry.stream] = file_of(name)
                    self._claimed[entry.stream] = entry.position
                    if self._time_ms:  # what came before that is not noted
                        steps.append((self._latest_ms, self._time_ms, file, entry.position))
                elif isinstance(entry, Growth):
                    steps += self._growth(entry)
            if steps:
                yield steps

    def _growth(self, growth: Growth) -> list[_Step]:
        streams, claimed, times_ms = self._streams, self._claimed, growth.times_ms
        order: Iterable[int] = times_ms
        if times_ms[0] < self._latest_ms:  # a clock that went back changes the times that are shown, and not the order
            latest_ms = self._latest_ms
            order = [max(latest_ms, time_ms) for time_ms in times_ms]
        self._time_ms = times_ms[-1]
        self._latest_ms = max(self._latest_ms, self._time_ms)
        steps = []
        for order_ms, time_ms, stream, length in zip(order, *growth, strict=True):
            file = streams.get(stream)
            if file is not None:
                claimed[stream] = upto = claimed[stream] + length
                steps.append((order_ms, time_ms, file, upto))
        return steps

    def _next(self, offset: int, most_bytes: int) -> bytes:
        try:
            return self._files.read(self._path, most_bytes, offset)
        except OSError:
            return b""


class _Source:
    """An index whose steps are merged with those of others."""

    def __init__(self, batches: Iterator[list[_Step]]) -> None:
        self._batches = batches
        self.steps: list[_Step] = []
        self.at = 0

    def has_more(self) -> bool:
        """Whether there is a step; the next ones are read where that is needed."""
        if self.at == len(self.steps):
            self.steps, self.at = next(self._batches, []), 0
        return bool(self.steps)


def _is_possible(cut: Cut) -> bool:
    """Whether a file may have had this left out: the index may be damaged."""
    return cut.kept_bytes + cut.left_out_bytes < _LARGEST_FILE and cut.mark_bytes <= LONGEST_LINE_BYTES


def _merged(indexes: list[Iterator[list[_Step]]]) -> Iterator[list[_Step]]:
    """The steps of several indexes in the order of time, those of one in their own."""
    if len(indexes) == 1:
        yield from indexes[0]
        return
    sources = [_Source(steps) for steps in indexes]
    while sources := [source for source in sources if source.has_more()]:
        # Up to the earliest time after which an index has to be read on.
        until = min(source.steps[-1][0] for source in sources)
        steps = []
        for source in sources:
            end = bisect_right(source.steps, until, source.at, key=itemgetter(0))
            steps += source.steps[source.at : end]
            source.at = end
        steps.sort(key=itemgetter(0))
        yield steps


def _parts(line: bytes) -> Iterator[bytes]:
    if len(line) <= LONGEST_LINE_BYTES:
        yield line
        return
    for start in range(0, len(line), LONGEST_LINE_BYTES):
        yield line[start : start + LONGEST_LINE_BYTES]
