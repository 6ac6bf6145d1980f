"""When the ranks of a host wrote what: ``output.index``, beside the files with their raw bytes. Pure.

The writer process appends to it after it has appended to the files: the time, and how many bytes of which file came,
in the order in which the supervisor read them, to 0.02 s. It is small (four bytes a piece of output), and what is
missing or wrong in it costs nothing but the order of lines in ``saferunctl logs``.

The index is a sequence of whole numbers (LEB128, little-endian groups of seven bits). The first one of an entry says
what follows:

    0  TIME                       the time from here on, in milliseconds since the epoch
    1  STREAM OFFSET LENGTH PATH  the stream is the file at this path (UTF-8), and is there at this offset
    2  STREAM KEPT LEFT_OUT MARK  the file keeps so many bytes of its beginning; then as many bytes as it says are left
                                  out, and a mark of so many bytes is in their place (``--keep-output``)
    3+STREAM MILLISECONDS BYTES   so many milliseconds later, so many bytes were appended to the stream

Offsets count all bytes that have ever been written to the file, also those that were left out later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

NAME = "output"
SUFFIX = ".index"
LARGEST_BYTES = 64 << 20
"""An index that is so large ends there."""
_CLOCK, _FILE, _CUT, _BYTES = range(4)
_MOST_DIGITS = 10
_MORE = 0x80
_LONGEST_PATH = 4096


class Cut(Value):
    """Bytes that a file has no more: ``left_out_bytes`` of them after the first ``kept_bytes``; a mark is there."""

    kept_bytes: int
    left_out_bytes: int
    mark_bytes: int

    def offset_in_file(self, position: int) -> int:
        """Where in the file the byte is that was written at this position; one that is gone: where the mark begins."""
        if position < self.kept_bytes:
            return position
        if position < self.kept_bytes + self.left_out_bytes:
            return self.kept_bytes
        return position - self.left_out_bytes + self.mark_bytes


NO_CUT = Cut(1 << 62, 0, 0)


class Growing(Protocol):
    """A file that grows, as the index sees it."""

    path: str
    position: int
    """How many bytes have been written to it, with those that were left out later."""
    cut: Cut
    """What was left out of it."""


class IndexWriter:
    """Makes the entries.

    Args:
        folder: paths below it are written relative to it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._now_ms: int | None = None
        self._named: dict[int, tuple[int, Cut]] = {}

    def forget(self, stream: int | None = None) -> None:
        """Name a stream again before its next bytes, because it is another file now. None: all, and the time."""
        if stream is None:
            self._named.clear()
            self._now_ms = None
        else:
            self._named.pop(stream, None)

    def entries(self, pieces: Sequence[tuple[int, int]], files: dict[int, Growing], now_ms: int) -> bytes:
        """The entries for what has just been appended.

        Args:
            pieces: streams and how many bytes came, in their order.
            files: the files by stream, as they are now.
            now_ms: the time.
        """
        out = bytearray()
        totals: dict[int, int] = {}
        for stream, length in pieces:
            totals[stream] = totals.get(stream, 0) + length
        whole = set()
        for stream, total in totals.items():
            file, (position, cut) = files[stream], self._named.get(stream, (-1, NO_CUT))
            if position < 0:
                self._name(out, stream, file, max(file.position - total, 0))
                position = max(file.position - total, 0)
            if file.cut != cut:
                _put(out, _CUT, stream, file.cut.kept_bytes, file.cut.left_out_bytes, file.cut.mark_bytes)
            if position + total == file.position:
                whole.add(stream)
            else:  # it could not be written, or a note stands in it
                self._name(out, stream, file, file.position)
            self._named[stream] = file.position, file.cut
        if self._now_ms is None or now_ms < self._now_ms:
            _put(out, _CLOCK, now_ms)
            self._now_ms = now_ms
        last, length = -1, 0
        for stream, count in (*pieces, (-1, 0)):
            if stream == last:
                length += count
                continue
            if last in whole and length:
                _put(out, _BYTES + last, now_ms - self._now_ms, length)
                self._now_ms = now_ms
            last, length = stream, count
        return bytes(out)

    def _name(self, out: bytearray, stream: int, file: Growing, offset: int) -> None:
        path = file.path.removeprefix(f"{self._folder}/").encode(errors="surrogateescape")
        _put(out, _FILE, stream, offset, len(path))
        out += path


class NamedFile(Value):
    """From here on the stream is this file, at this position."""

    stream: int
    position: int
    path: str


class CutFile(Value):
    """The stream's file has had bytes left out of it."""

    stream: int
    cut: Cut


class Bytes(Value):
    """So many bytes came. ``time`` is in seconds since the epoch."""

    time: float
    stream: int
    length: int


Entry = NamedFile | CutFile | Bytes


class IndexReader:
    """Reads entries from an index, whose bytes come in pieces of any size. What is malformed ends it."""

    def __init__(self) -> None:
        self.is_broken = False
        self._rest = b""
        self._now_ms = 0

    def feed(self, content: bytes) -> Iterator[Entry]:
        """The entries that are complete with these bytes."""
        content = self._rest + content
        at, last = 0, len(content) - 2
        while not self.is_broken:
            # Nearly all entries are about bytes, and their numbers have one byte each.
            if at < last and _CUT < content[at] < _MORE > content[at + 1] and content[at + 2] < _MORE:
                self._now_ms += content[at + 1]
                yield Bytes(self._now_ms / 1000, content[at] - _BYTES, content[at + 2])
                at += 3
                continue
            found = self._entry(content, at)
            if found is None:
                break
            entry, at = found
            if entry is not None:
                yield entry
        self._rest = content[at:]

    def _entry(self, content: bytes, at: int) -> tuple[Entry | None, int] | None:
        """An entry and where the next one begins; None: it is incomplete, or malformed."""
        kind, at = self._number(content, at)
        if kind == _CLOCK:
            now_ms, at = self._number(content, at)
            if at < 0:
                return None
            self._now_ms = now_ms
            return None, at
        if kind == _FILE:
            (stream, position, length), at = self._numbers(content, at, 3)
            if at < 0:
                return None
            if length > _LONGEST_PATH:
                self.is_broken = True
                return None
            if at + length > len(content):
                return None
            path = content[at : at + length].decode(errors="surrogateescape")
            return NamedFile(stream, position, path), at + length
        if kind == _CUT:
            (stream, kept, left_out, mark), at = self._numbers(content, at, 4)
            return (CutFile(stream, Cut(kept, left_out, mark)), at) if at >= 0 else None
        (later_ms, length), at = self._numbers(content, at, 2)
        if at < 0:
            return None
        self._now_ms += later_ms
        return Bytes(self._now_ms / 1000, kind - _BYTES, length), at

    def _numbers(self, content: bytes, at: int, count: int) -> tuple[list[int], int]:
        numbers = []
        for _ in range(count):
            number, at = self._number(content, at)
            numbers.append(number)
        return numbers, at

    def _number(self, content: bytes, at: int) -> tuple[int, int]:
        """A number and what is behind it; that is -1 where it is incomplete."""
        if at < 0:
            return 0, -1
        number = 0
        for digit, byte in enumerate(content[at : at + _MOST_DIGITS]):
            number |= (byte & 0x7F) << (7 * digit)
            if byte < _MORE:
                return number, at + digit + 1
        self.is_broken = self.is_broken or len(content) - at >= _MOST_DIGITS
        return 0, -1


def _put(out: bytearray, *numbers: int) -> None:
    for number in numbers:
        rest = number
        while rest >= _MORE:
            out.append(rest & 0x7F | _MORE)
            rest >>= 7
        out.append(rest)
