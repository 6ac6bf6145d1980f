"""Files that are written as well as it goes: the ring, what fails and is tried again, and what is noted as missing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.files.file_stream import FRESH, LAZY, WHOLE
from saferun.files.ring import CLOSE, DATA, Ring
from saferun.files.sinks import Budget, Sink, WholeFile
from tests.direct_files import DirectFiles

FAILURES = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE]


def ring_of(size_bytes: int) -> Ring:
    return Ring(bytearray(Ring.memory_bytes(size_bytes)))


@given(st.lists(st.binary(max_size=90), max_size=60), st.integers(128, 400))
def test_what_is_put_into_the_ring_is_taken_in_order(chunks: list[bytes], size_bytes: int) -> None:
    """However records and the end of the memory meet; what finds no room is refused, and changes nothing."""
    ring = ring_of(size_bytes)
    taken: list[bytes] = []
    for chunk in chunks:
        while not ring.put(DATA, 3, chunk):
            ring.publish()
            records = ring.take(50)
            assert records, "an empty ring takes every record"
            taken += [bytes(record.payload) for record in records]
            ring.release(records[-1])
    while records := ring.take(50, everything=True):
        taken += [bytes(record.payload) for record in records]
        ring.release(records[-1])
    assert taken == chunks
    assert ring.head == ring.tail


def test_only_what_is_published_is_taken_and_other_kinds_come_alone() -> None:
    ring = ring_of(1000)
    ring.put(DATA, 1, b"a")
    ring.put(DATA, 2, b"b")
    ring.put(CLOSE, 1, b"")
    assert ring.take(100) == []
    ring.publish()
    assert [record.kind for record in ring.take(100)] == [DATA, DATA]
    ring.release(ring.take(100)[-1])
    assert [record.kind for record in ring.take(100)] == [CLOSE]


def test_what_a_writer_that_died_had_written_is_known() -> None:
    """Its successor begins where the dead one had not yet released, and repeats nothing."""
    ring = ring_of(1000)
    for stream in (1, 2):
        ring.put(DATA, stream, b"x")
    ring.publish()
    first, second = ring.take(100)
    ring.set_done(first)
    again = ring.take(100)
    assert [ring.is_done(record) for record in again] == [True, False]
    assert second.stream == 2


class Faults:
    """Calls of the operating system that fail as often as they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failing: dict[str, list[int]] = {}
        self.closed: list[int] = []
        for name in ("open", "write", "writev", "close", "replace", "makedirs"):
            monkeypatch.setattr(f"saferun.files.sinks.os.{name}", self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Any) -> Any:
        def wrapped(*arguments: Any, **more: Any) -> Any:
            if name == "close":
                assert arguments[0] not in self.closed, "a descriptor is closed twice"
                self.closed.append(arguments[0])
            if name == "open":
                found = call(*arguments, **more) if not self.failing.get(name) else None
                if found is not None:
                    self.closed = [fd for fd in self.closed if fd != found]
                    return found
            if self.failing.get(name) and not (name == "close" and os.path.isdir(f"/proc/self/fd/{arguments[0]}")):
                if name == "close":
                    call(*arguments)  # as close(2): the descriptor is gone all the same
                number = self.failing[name].pop(0)
                raise OSError(number, os.strerror(number))
            return call(*arguments, **more)

        return wrapped


@pytest.mark.parametrize("number", FAILURES)
@pytest.mark.parametrize("name", ["open", "writev", "close"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_file_that_fails_is_tried_again_and_nothing_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int
) -> None:
    told: list[tuple[OSError | None, int]] = []
    sink = Sink(
        str(tmp_path / "log"),
        fresh=True,
        budget=Budget(),
        report=lambda _, error, missing: told.append((error, missing)),
    )
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        faults.failing[name] = [number] * times
        sink.write([memoryview(b"one\n")])
        sink.write([memoryview(b"two\n")])
        for _ in range(times):
            sink.retry(0.0, at_once=True)
        sink.write([memoryview(b"three\n")])
        sink.close()
        sink.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\nthree\n"
    assert sink.unwritten_bytes == 0
    assert [error.errno for error, _ in told if error is not None][:1] == [number]
    if name != "close":
        assert told[-1] == (None, 0)


def test_what_does_not_fit_into_memory_is_one_gap_which_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line before it is ended, so that the note stands alone."""
    sink = Sink(str(tmp_path / "log"), fresh=True, budget=Budget(4), report=lambda *_: None)
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        faults.failing["writev"] = [errno.ENOSPC]
        sink.write([memoryview(b"kept and "), memoryview(b"lost\n")])
        sink.write([memoryview(b"lost\n")])
    sink.retry(0.0, at_once=True)
    sink.write([memoryview(b"after\n")])
    sink.close()
    lines = (tmp_path / "log").read_bytes().split(b"\n")
    assert lines[0] == b"kept"
    assert lines[1].startswith(b"[saferun: 15 bytes of this stream are missing here: No space left on device for ")
    assert lines[2:] == [b"after", b""]


@pytest.mark.parametrize("number", FAILURES)
@pytest.mark.parametrize("name", ["open", "write", "close", "replace"])
def test_a_report_is_there_as_a_whole_or_not_at_all_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    file = WholeFile(str(path), report=lambda *_: None)
    file.write([memoryview(b"new")])
    with monkeypatch.context() as patch:
        faults = Faults(patch)
        faults.failing[name] = [number]
        file.close()
        assert path.read_text() == "old"
        file.retry(0.0, at_once=True)
    assert path.read_text() == "new"
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]


def test_a_directory_that_is_not_there_is_made(tmp_path: Path) -> None:
    """Whoever had to make it may not have been able to."""
    files = DirectFiles()
    for name, how in (("a", FRESH), ("b", LAZY), ("c", WHOLE)):
        stream = files.open(str(tmp_path / name / "file"), how)
        stream.write(b"text")
        stream.close()
        assert (tmp_path / name / "file").read_bytes() == b"text"


def test_a_lazy_file_is_made_at_its_first_byte(tmp_path: Path) -> None:
    files = DirectFiles()
    stream = files.open(str(tmp_path / "file"), LAZY)
    assert not (tmp_path / "file").exists()
    stream.write(b"x")
    assert (tmp_path / "file").exists()
    stream.close()
