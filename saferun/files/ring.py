"""A queue of records in a piece of memory that two processes share: one puts, the other takes. No system calls.

The first words of the memory are counters. The taker sees what has been *published*; should the process that puts die,
it takes all that has been put. What finds no room waits in the memory of the process that puts, up to a bound.
"""

from __future__ import annotations

import struct
from collections import deque
from mmap import mmap

from saferun.model import Value

# What a record is about. PAD fills the end of the memory, since a record is always in one piece.
PAD, OPEN, DATA, GAP, CLOSE, ASK, END = range(7)

_HEAD, _PUBLISHED, _TAIL, _BUSY, _WANTED, _DONE = range(6)
STREAMS = 16384 - _DONE
_COUNTERS_BYTES = 16384 * 8
_RECORD = struct.Struct("=HHI")
# What waits in memory while a file system does not answer; what must be written (the last bytes of ranks that have
# ended, events, reports) may come on top of it.
_BACKLOG_BYTES = 8 << 20
_MUST_BYTES = 64 << 20
_LEAST_SHARE_BYTES = 1 << 20


class RingRecord(Value):
    """A record. ``end`` is its place in the order of all bytes; ``payload`` is valid until ``release``."""

    kind: int
    stream: int
    payload: memoryview
    end: int


class Ring:
    """The queue.

    Args:
        memory: shared by both processes, and zeros at first.
    """

    def __init__(self, memory: mmap | bytearray) -> None:
        self._view = memoryview(memory)
        self._counters = self._view[:_COUNTERS_BYTES].cast("Q")
        self._size = len(self._view) - _COUNTERS_BYTES
        self._head = self._counters[_HEAD]

    @staticmethod
    def memory_bytes(size_bytes: int) -> int:
        """How much memory a queue of this size needs."""
        return _COUNTERS_BYTES + size_bytes

    # ----------------------------------------------------------------------------------------------------------------
    # Who puts

    @property
    def head(self) -> int:
        """How many bytes have ever been put."""
        return self._head

    @property
    def tail(self) -> int:
        """How many bytes have ever been taken and dealt with."""
        return self._counters[_TAIL]

    @property
    def published(self) -> int:
        """How many bytes the taker has been shown."""
        return self._counters[_PUBLISHED]

    @property
    def is_behind(self) -> bool:
        """Whether the taker has not dealt with all that it has been shown."""
        return self._counters[_TAIL] < self._counters[_PUBLISHED]

    @property
    def busy(self) -> int:
        """The stream that the taker is at."""
        return self._counters[_BUSY]

    def put(self, kind: int, stream: int, payload: bytes | memoryview) -> bool:
        """Put a record. Returns False, and does nothing, where it finds no room."""
        need = _RECORD.size + len(payload)
        offset = self._head % self._size
        to_end = self._size - offset
        skipped = to_end if need > to_end else 0
        if self._head + skipped + need - self._counters[_TAIL] > self._size:
            return False
        if skipped:
            if to_end >= _RECORD.size:
                _RECORD.pack_into(self._view, _COUNTERS_BYTES + offset, PAD, 0, to_end - _RECORD.size)
            offset = 0
        at = _COUNTERS_BYTES + offset
        _RECORD.pack_into(self._view, at, kind, stream, len(payload))
        at += _RECORD.size
        self._view[at : at + len(payload)] = payload
        self._head += skipped + need
        self._counters[_HEAD] = self._head
        return True

    def publish(self) -> None:
        """Show the taker all that has been put."""
        self._counters[_PUBLISHED] = self._head

    def want_room(self) -> None:
        """Have the taker say so when it has taken something."""
        self._counters[_WANTED] = 1

    # ----------------------------------------------------------------------------------------------------------------
    # Who takes

    def take(self, most_bytes: int, *, everything: bool = False) -> list[RingRecord]:
        """The next records: some of DATA, or one of another kind. They count as taken when they are released.

        Args:
            most_bytes: about how much is taken at once.
            everything: also what has not been published; only where no process puts any more.
        """
        position = self._counters[_TAIL]
        end = self._counters[_HEAD if everything else _PUBLISHED]
        records: list[RingRecord] = []
        size = 0
        while position < end and size < most_bytes:
            offset = position % self._size
            to_end = self._size - offset
            if to_end < _RECORD.size:
                position += to_end
                continue
            at = _COUNTERS_BYTES + offset
            kind, stream, length = _RECORD.unpack_from(self._view, at)
            at += _RECORD.size
            if kind == PAD:
                position += _RECORD.size + length
                continue
            if kind != DATA and records:
                break
            position += _RECORD.size + length
            records.append(RingRecord(kind, stream, self._view[at : at + length], position))
            size += length
            if kind != DATA:
                break
        return records

    def begin(self, stream: int) -> None:
        """The taker begins with something that may take long."""
        self._counters[_BUSY] = stream

    def is_done(self, record: RingRecord) -> bool:
        """Whether a taker that died had dealt with it."""
        return record.end <= self._counters[_DONE + record.stream]

    def set_done(self, record: RingRecord) -> None:
        """The records of this stream up to this one have been dealt with."""
        self._counters[_DONE + record.stream] = record.end

    def release(self, last: RingRecord) -> bool:
        """All up to this record have been dealt with. Returns whether whoever puts wants to know."""
        self._counters[_TAIL] = last.end
        if self._counters[_WANTED]:
            self._counters[_WANTED] = 0
            return True
        return False


class RecordQueue:
    """The ring, and a bounded backlog of what finds no room there.

    Args:
        size_bytes: the ring's size.
    """

    def __init__(self, size_bytes: int) -> None:
        self.ring = Ring(mmap(-1, Ring.memory_bytes(size_bytes)))
        self.backlog_bytes = 0
        self._backlog: deque[tuple[int, int, bytes | memoryview]] = deque()
        self._waiting: dict[int, int] = {}  # stream -> its bytes in the backlog

    def __bool__(self) -> bool:
        """Whether something waits for room in the ring."""
        return bool(self._backlog)

    def put(self, kind: int, stream: int, payload: bytes | memoryview, *, must: bool, streams: int) -> bool:
        """Queue a record. Returns whether it has found room.

        Args:
            kind: what it is about.
            stream: whose it is.
            payload: what it holds.
            must: whether it may exceed the bound of the backlog.
            streams: how many share the backlog.
        """
        if self._backlog:
            self.pump()
        if not self._backlog and self.ring.put(kind, stream, payload):
            return True
        size = _weight(payload)
        fits = self.has_room(stream, size, streams=streams)
        if not fits and not (must and self.backlog_bytes + size <= _MUST_BYTES):
            return False
        self.ring.want_room()
        self._backlog.append((kind, stream, payload))
        self.backlog_bytes += size
        self._waiting[stream] = self._waiting.get(stream, 0) + size
        return True

    def has_room(self, stream: int, size_bytes: int, *, streams: int) -> bool:
        """Whether a stream can still put so much: none takes the room of the others."""
        share = max(_BACKLOG_BYTES // 2 // max(streams, 1), _LEAST_SHARE_BYTES)
        is_full = self.backlog_bytes + size_bytes > _BACKLOG_BYTES
        return not is_full and self._waiting.get(stream, 0) + size_bytes <= share

    def pump(self) -> None:
        """Put into the ring what waits, as far as there is room."""
        while self._backlog and self.ring.put(*self._backlog[0]):
            _, stream, payload = self._backlog.popleft()
            self.backlog_bytes -= _weight(payload)
            self._waiting[stream] -= _weight(payload)
            if not self._waiting[stream]:
                del self._waiting[stream]
        if self._backlog:
            self.ring.want_room()

    def clear(self) -> None:
        """No one will write what waits."""
        self._backlog.clear()


def _weight(payload: bytes | memoryview) -> int:
    """What a record costs in memory, roughly; never nothing."""
    return len(payload) + 128
