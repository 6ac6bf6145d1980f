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

from collections.abc import Sequence

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
CLOCK, FILE, CUT, BYTES = range(4)
"""What an entry is about."""
MORE = 0x80
"""A byte of a number that another one follows."""


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

    def position_at(self, offset: int) -> int:
        """At which position the byte was written that is here in the file; of the mark: where what is left out ends."""
        if offset < self.kept_bytes:
            return offset
        return self.left_out_bytes + max(offset - self.mark_bytes, self.kept_bytes)


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
                _put(out, CUT, stream, file.cut.kept_bytes, file.cut.left_out_bytes, file.cut.mark_bytes)
            if position + total == file.position:
                whole.add(stream)
            else:  # it could not be written, or a note stands in it
                self._name(out, stream, file, file.position)
            self._named[stream] = file.position, file.cut
        if self._now_ms is None or now_ms < self._now_ms:
            _put(out, CLOCK, now_ms)
            self._now_ms = now_ms
        last, length = -1, 0
        for stream, count in (*pieces, (-1, 0)):
            if stream == last:
                length += count
                continue
            if last in whole and length:
                _put(out, BYTES + last, now_ms - self._now_ms, length)
                self._now_ms = now_ms
            last, length = stream, count
        return bytes(out)

    def _name(self, out: bytearray, stream: int, file: Growing, offset: int) -> None:
        path = file.path.removeprefix(f"{self._folder}/").encode(errors="surrogateescape")
        _put(out, FILE, stream, offset, len(path))
        out += path


def _put(out: bytearray, *numbers: int) -> None:
    for number in numbers:
        rest = number
        while rest >= MORE:
            out.append(rest & 0x7F | MORE)
            rest >>= 7
        out.append(rest)
