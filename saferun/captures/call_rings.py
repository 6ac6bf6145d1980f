"""The file in which ``inject/saferun_calls.py`` records a rank's last calls, decoded. Pure.

The process writes while it is read, may have been killed at any point of it, and may have overwritten all of it.
Whatever it holds, decoding takes bounded time and memory, and yields values within bounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from saferun.evidence.call_evidence import CalledFunction, CallEvent, RankCalls, ThreadCalls

MAGIC = int.from_bytes(b"SRCALLS1", sys.byteorder)
MOST_THREADS, ENTRIES = 64, 256
THREADS_BYTES, NAMES_BYTES, RINGS_BYTES = 4096, 8192, 131072
"""Where the table of threads, the names and the rings begin."""
SIZE_BYTES = RINGS_BYTES + (MOST_THREADS + 1) * ENTRIES * 16

_THREAD_BYTES = 64
_KINDS = {1: "call", 2: "return", 3: "raise", 4: "line"}
_LONGEST_NAME, _LONGEST_FILE = 1024, 2048
_HIGHEST_LINE = 10_000_000
_HIGHEST_TID = 1 << 22
_HIGHEST_COUNT = 1 << 62
_LONGEST_S = 1e8
_OTHER_THREADS, _OTHER_EVENTS = 12, 16
_NOTES = {
    2: "the recording ended early by a mistake of saferun's own",
    3: "the recording has ended: a profiler or a debugger has taken over the hook for calls",
    4: "the recursion limit was reached, and later calls of that thread may be missing",
}
_RINGLESS = "{} threads had no room"


def decode_calls(
    content: bytes, threads_afterwards: bytes, *, rank: int, pid: int, at_ns: int, is_dead: bool = False
) -> RankCalls:
    """The last calls of a process.

    Args:
        content: the file.
        threads_afterwards: its table of threads, read once more after the file: what has been overwritten meanwhile
            is left out.
        rank: whose it is.
        pid: likewise.
        at_ns: the capture, or the death of the process, in nanoseconds of the monotonic clock.
        is_dead: which of them.
    """
    if len(content) != SIZE_BYTES or len(threads_afterwards) != NAMES_BYTES - THREADS_BYTES:
        return RankCalls(rank, pid, is_dead=is_dead, failure="its file has another size")
    return _Decoding(content, threads_afterwards, at_ns).calls(rank, pid, is_dead=is_dead)


class _Decoding:
    def __init__(self, content: bytes, threads_afterwards: bytes, at_ns: int) -> None:
        self._content = content
        self._view = memoryview(content).cast("Q")
        self._afterwards = memoryview(threads_afterwards).cast("Q")
        self._at_ns = at_ns
        self._indexes: dict[int, int] = {}  # in the names -> in the functions
        self._functions: list[CalledFunction] = []

    def calls(self, rank: int, pid: int, *, is_dead: bool) -> RankCalls:
        if self._view[0] != MAGIC:
            return RankCalls(rank, pid, is_dead=is_dead, failure="its file is not complete")
        threads = [thread for slot in range(MOST_THREADS) if (thread := self._thread(slot)) is not None]
        main = [thread for thread in threads if thread.is_main]
        others = sorted((thread for thread in threads if not thread.is_main), key=lambda one: one.events[-1].before_s)
        notes = [_NOTES.get(self._view[3], "")]
        if 0 < self._view[6] < _HIGHEST_TID:
            notes.append(_RINGLESS.format(self._view[6]))
        note = "; ".join(filter(None, notes))
        kept = (*main, *others[:_OTHER_THREADS])
        return RankCalls(rank, pid, tuple(self._functions), kept, is_dead, note)

    def _thread(self, slot: int) -> ThreadCalls | None:
        first = (THREADS_BYTES + slot * _THREAD_BYTES) >> 3
        tid, count, lines = self._view[first : first + 3]
        later_tid, later_count = self._afterwards[slot * _THREAD_BYTES >> 3 : (slot * _THREAD_BYTES >> 3) + 2]
        if not (0 < tid <= _HIGHEST_TID and 0 < count < _HIGHEST_COUNT and lines <= count) or later_tid != tid:
            return None
        is_main = slot == 0
        # An entry that is being written is the oldest one of the ring.
        oldest = max(count - ENTRIES, later_count - ENTRIES, -1) + 1
        events: list[CallEvent] = []
        for number in range(count - 1, oldest - 1, -1):
            event = self._event(slot, number)
            if event is None or len(events) >= (ENTRIES if is_main else _OTHER_EVENTS):
                break
            events.append(event)
        return ThreadCalls(tid, is_main, count - lines, tuple(events[::-1])) if events else None

    def _event(self, slot: int, number: int) -> CallEvent | None:
        at = (RINGS_BYTES >> 3) + (slot * ENTRIES + number % ENTRIES) * 2
        time_ns, word = self._view[at : at + 2]
        kind = _KINDS.get(word & 15)
        if kind is None or not time_ns:
            return None
        before_s = min(max(0.0, (self._at_ns - time_ns) / 1e9), _LONGEST_S)
        line = word >> 24 if kind == "line" and word >> 24 <= _HIGHEST_LINE else 0
        return CallEvent(kind, self._function(word >> 4 & 0xFFFFF), round(before_s, 6), line)

    def _function(self, index: int) -> int:
        known = self._indexes.get(index)
        if known is None:
            found = self._read(index, _LONGEST_NAME)
            known = -1
            if found is not None:
                name, line, file_index = found
                file = self._read(file_index, _LONGEST_FILE)
                known = len(self._functions)
                self._functions.append(CalledFunction(name, file[0] if file is not None else "", line))
            self._indexes[index] = known
        return known

    def _read(self, index: int, longest: int) -> tuple[str, int, int] | None:
        """A name, its line and the index of its file's name; None where there is none."""
        begin = NAMES_BYTES + index * 8
        if not index or begin + 12 > RINGS_BYTES:
            return None
        length, line, file = self._numbers(begin)
        if not 0 < length <= longest or begin + 12 + length > RINGS_BYTES:
            return None
        text = self._content[begin + 12 : begin + 12 + length].decode(errors="replace")
        return text, min(line, _HIGHEST_LINE), file

    def _numbers(self, begin: int) -> Iterator[int]:
        return (int.from_bytes(self._content[at : at + 4], sys.byteorder) for at in range(begin, begin + 12, 4))
