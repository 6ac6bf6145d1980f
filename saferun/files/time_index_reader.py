"""Reads ``output.index``: when the ranks of a host wrote what (``files.time_index`` has the format). Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

from saferun.files.time_index import BYTES, CLOCK, CUT, FILE, MORE, Cut
from saferun.model import Value

_MOST_DIGITS = 10
_LONGEST_PATH = 4096
_MOST_KNOWN = 1 << 16
# A number, and a sequence of entries about bytes.
_NUMBER = re.compile(rb"[\x80-\xff]*[\x00-\x7f]")
_GROWTH = re.compile(
    rb"(?:(?:[\x03-\x7f]|[\x80-\xff]{1,9}[\x00-\x7f])[\x80-\xff]{0,9}[\x00-\x7f][\x80-\xff]{0,9}[\x00-\x7f])*+"
)


class NamedFile(Value):
    """From here on the stream is this file, at this position."""

    stream: int
    position: int
    path: str


class CutFile(Value):
    """The stream's file has had bytes left out of it."""

    stream: int
    cut: Cut


class Growth(Value):
    """Pieces of output, in their order: when they came (milliseconds since the epoch), their streams and lengths."""

    times_ms: Sequence[int]
    streams: Sequence[int]
    lengths: Sequence[int]


Entry = NamedFile | CutFile | Growth


class _Numbers(dict[bytes, int]):
    """Numbers by their digits, of which few are used again and again."""

    def __missing__(self, digits: bytes) -> int:
        number = 0
        for index, byte in enumerate(digits):
            number |= (byte & 0x7F) << (7 * index)
        if len(self) < _MOST_KNOWN:
            self[digits] = number
        return number


class IndexReader:
    """Reads entries from an index, whose bytes come in pieces of any size. What is malformed ends it.

    Args:
        has_growth: whether it also finds what was appended, and not only the files and what was left out of them.
    """

    def __init__(self, *, has_growth: bool = True) -> None:
        self.is_broken = False
        self._has_growth = has_growth
        self._known = _Numbers()
        self._rest = b""
        self._now_ms = 0

    def feed(self, content: bytes) -> Iterator[Entry]:
        """The entries that are complete with these bytes."""
        content = self._rest + content
        at = 0
        while not self.is_broken:
            # Nearly all entries are about bytes: they are taken together.
            grown = _GROWTH.match(content, at)
            if grown is not None and grown.end() > at:
                if self._has_growth:
                    yield self._growth(content[at : grown.end()])
                at = grown.end()
            found = self._entry(content, at)
            if found is None:
                break
            entry, at = found
            if entry is not None:
                yield entry
        self._rest = content[at:]

    def _growth(self, content: bytes) -> Growth:
        numbers: Sequence[int] = content
        if not content.isascii():  # a number has more than one byte
            numbers = list(map(self._known.__getitem__, _NUMBER.findall(content)))
        _, *times_ms = accumulate(numbers[1::3], initial=self._now_ms)
        self._now_ms = times_ms[-1]
        return Growth(times_ms, [kind - BYTES for kind in numbers[::3]], numbers[2::3])

    def _entry(self, content: bytes, at: int) -> tuple[Entry | None, int] | None:
        """An entry about something else and where the next one begins; None: it is incomplete, or malformed."""
        kind, at = self._number(content, at)
        if kind == CLOCK:
            now_ms, at = self._number(content, at)
            if at < 0:
                return None
            self._now_ms = now_ms
            return None, at
        if kind == FILE:
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
        if kind == CUT:
            (stream, kept, left_out, mark), at = self._numbers(content, at, 4)
            return (CutFile(stream, Cut(kept, left_out, mark)), at) if at >= 0 else None
        self._numbers(content, at, 2)
        return None

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
            if byte < MORE:
                return number, at + digit + 1
        self.is_broken = self.is_broken or len(content) - at >= _MOST_DIGITS
        return 0, -1
