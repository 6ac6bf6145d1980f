"""The file of a rank's last calls, decoded: what a process writes, and whatever else may stand in it."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.call_rings import (
    ENTRIES,
    MAGIC,
    MOST_THREADS,
    NAMES_BYTES,
    RINGS_BYTES,
    SIZE_BYTES,
    THREADS_BYTES,
    decode_calls,
)
from saferun.captures.wire import CaptureReader, encode
from saferun.evidence.call_evidence import CalledFunction, CallEvent, RankCalls

AT_NS = 10_000_000_000
CALL, RETURN, LINE = 1, 2, 4


class Written:
    """A file as a process writes it."""

    def __init__(self) -> None:
        self.content = bytearray(SIZE_BYTES)
        self.word(0, MAGIC)
        self.word(8, 4711)
        self._used = 8

    def word(self, at: int, value: int) -> None:
        self.content[at : at + 8] = value.to_bytes(8, sys.byteorder)

    def name(self, text: str, line: int = 0, file: int = 0) -> int:
        """Its index."""
        content, start = text.encode(), self._used
        at = NAMES_BYTES + start
        numbers = b"".join(number.to_bytes(4, sys.byteorder) for number in (len(content), line, file))
        self.content[at : at + 12 + len(content)] = numbers + content
        self._used += (12 + len(content) + 7) // 8 * 8
        return start >> 3

    def thread(self, slot: int, tid: int, total: int, lines: int = 0) -> None:
        for index, value in enumerate((tid, total, lines)):
            self.word(THREADS_BYTES + slot * 64 + index * 8, value)

    def event(self, slot: int, number: int, kind: int, index: int, at_ns: int, line: int = 0) -> None:
        at = RINGS_BYTES + (slot * ENTRIES + number % ENTRIES) * 16
        self.word(at, at_ns)
        self.word(at + 8, kind | index << 4 | line << 24)

    @property
    def table(self) -> bytes:
        return bytes(self.content[THREADS_BYTES:NAMES_BYTES])

    def decoded(self, afterwards: bytes | None = None) -> RankCalls:
        after = afterwards if afterwards is not None else self.table
        return decode_calls(bytes(self.content), after, rank=3, pid=4711, at_ns=AT_NS)


def test_what_was_written_is_read() -> None:
    """Function, file, line, time before the capture; the main thread first."""
    written = Written()
    file = written.name("/job/train.py")
    step, work = written.name("Trainer.step", 12, file), written.name("work", 40, file)
    written.thread(0, 4711, 3, lines=1)
    written.event(0, 0, CALL, step, AT_NS - 3_000_000_000)
    written.event(0, 1, LINE, step, AT_NS - 2_000_000_000, line=14)
    written.event(0, 2, CALL, work, AT_NS - 1_500_000_000)
    written.thread(5, 4712, 1)
    written.event(5, 0, RETURN, work, AT_NS - 10)
    calls = written.decoded()
    assert calls.functions[0] == CalledFunction("work", "/job/train.py", 40)
    main, other = calls.threads
    assert (main.tid, main.is_main, main.total) == (4711, True, 2)
    assert main.events == (
        CallEvent("call", 1, 3.0),
        CallEvent("line", 1, 2.0, 14),
        CallEvent("call", 0, 1.5),
    )
    assert calls.function(main.events[0]) == CalledFunction("Trainer.step", "/job/train.py", 12)
    assert (other.tid, other.is_main, other.events) == (4712, False, (CallEvent("return", 0, 0.0),))


def test_what_is_overwritten_while_it_is_read_is_left_out() -> None:
    """The process goes on while its file is copied."""
    written = Written()
    index = written.name("step", 1, written.name("/job/train.py"))
    written.thread(0, 4711, 300)
    for number in range(300):
        written.event(0, number, CALL, index, 1000 + number)
    (thread,) = written.decoded().threads
    assert len(thread.events) == ENTRIES - 1, "the oldest one may be half written"
    later = Written()
    later.thread(0, 4711, 400)
    (thread,) = written.decoded(later.table).threads
    assert len(thread.events) == ENTRIES - 1 - 100
    later.thread(0, 4711, 300 + ENTRIES)
    assert written.decoded(later.table).threads == ()
    later.thread(0, 9999, 300)
    assert written.decoded(later.table).threads == (), "another thread has its ring now"


def test_events_are_without_gaps() -> None:
    """Where one is no event, the older ones have no number any more."""
    written = Written()
    index = written.name("step", 1, written.name("/job/train.py"))
    written.thread(0, 4711, 10)
    for number in range(10):
        written.event(0, number, CALL if number != 6 else 9, index, 1000 + number)
    (thread,) = written.decoded().threads
    assert (thread.total, len(thread.events)) == (10, 3)


@pytest.mark.parametrize(
    ("content", "failure"),
    [(b"", "its file has another size"), (bytes(SIZE_BYTES), "its file is not complete")],
)
def test_a_file_that_is_none_is_a_failure(content: bytes, failure: str) -> None:
    """A process may die while it makes it."""
    calls = decode_calls(content, bytes(NAMES_BYTES - THREADS_BYTES), rank=0, pid=1, at_ns=AT_NS)
    assert (calls.failure, calls.threads) == (failure, ())


@pytest.mark.parametrize(("state", "word"), [(2, "mistake"), (3, "profiler"), (4, "recursion"), (77, "")])
def test_why_nothing_more_is_recorded_is_said(state: int, word: str) -> None:
    """Then the time since the last call means nothing."""
    written = Written()
    written.word(24, state)
    note = written.decoded().note
    assert word in note
    assert bool(note) == bool(word)


WORDS = st.one_of(
    st.integers(0, (1 << 64) - 1), st.integers(0, 1 << 12), st.sampled_from([1, 255, 256, 257, (1 << 62) - 1, 1 << 63])
)
INDEXES = st.integers(0, (SIZE_BYTES >> 3) - 1)


@given(
    changes=st.dictionaries(INDEXES, WORDS, max_size=60),
    table=st.dictionaries(st.integers(0, MOST_THREADS * 8 - 1), WORDS, max_size=60),
    names=st.dictionaries(st.integers(0, 200), WORDS, max_size=30),
    events=st.dictionaries(st.integers(0, 600), WORDS, max_size=60),
    is_valid=st.booleans(),
)
def test_whatever_a_file_holds_is_bounded(
    changes: dict[int, int],
    table: dict[int, int],
    names: dict[int, int],
    events: dict[int, int],
    is_valid: bool,
) -> None:
    """A process that is out of its mind may have written all over it; what comes of it fits into a message."""
    written = Written()
    for at, value in changes.items():
        written.word(at * 8, value)
    for at, value in table.items():
        written.word(THREADS_BYTES + at * 8, value)
    for at, value in names.items():
        written.word(NAMES_BYTES + at * 8, value)
    for at, value in events.items():
        written.word(RINGS_BYTES + at * 8, value)
    if is_valid:
        written.word(0, MAGIC)
        written.thread(0, 4711, 300, 7)
    calls = written.decoded()
    assert len(calls.threads) <= 1 + 12
    assert sum(len(thread.events) for thread in calls.threads) <= ENTRIES + 12 * 16
    for thread in calls.threads:
        assert thread.events
        for event in thread.events:
            assert event.before_s >= 0
            function = calls.function(event)
            assert (function is None) == (event.function == -1)
    assert all(len(function.name) <= 1024 and len(function.file) <= 2048 for function in calls.functions)
    reader = CaptureReader()
    reader.feed(encode("calls", calls))
    assert reader.capture.calls == (calls,)


@given(st.binary(max_size=4096), st.integers(0, SIZE_BYTES - 4096))
def test_bytes_anywhere_are_no_exception(content: bytes, at: int) -> None:
    """Names may be torn."""
    written = Written()
    written.thread(0, 4711, 300)
    for number in range(300):
        written.event(0, number, CALL, number, 1000)
    written.content[at : at + len(content)] = content
    reader = CaptureReader()
    calls = written.decoded()
    reader.feed(encode("calls", calls))
    assert reader.capture.calls == (calls,)
