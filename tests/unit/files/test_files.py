"""Files that are written as well as it goes: the ring, what fails and is tried again, and what is noted as missing."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.files import removed_file, trees
from saferun.files.file_stream import FRESH, LAZY, WHOLE
from saferun.files.index_file import IndexFile
from saferun.files.ring import CLOSE, DATA, Ring, RingRecord
from saferun.files.sinks import FOR_ONCE, Budget, Sink, WholeFile, gap_note
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


@pytest.fixture(name="always_checked")
def _always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a file is still there is found out before each write, and not once a second."""
    monkeypatch.setattr(removed_file, "_CHECK_S", 0.0)


def told_by(told: list[tuple[str, int]], _path: str, error: OSError | None, missing: int) -> None:
    told.append(((error.strerror or "") if error is not None else "", missing))


@pytest.fixture(name="no_removal_goes_on")
def _no_removal_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory has not changed for long enough as soon as it is looked at."""
    monkeypatch.setattr(removed_file, "QUIET_S", 0.0)


@pytest.mark.usefixtures("always_checked", "no_removal_goes_on")
def test_a_file_that_is_removed_while_it_is_written_is_made_again_and_notes_what_is_missing(tmp_path: Path) -> None:
    """What is written to a removed file is nowhere, and the console leaves lines out for which it is the only copy."""
    told: list[tuple[str, int]] = []
    path = tmp_path / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"before\n")])
    path.unlink()
    sink.write([memoryview(b"after\n")])
    assert told == [("the file was removed", 0), ("", 7)]
    assert sink.retry_at is None
    sink.write([memoryview(b"later\n")])
    sink.close()
    note = b"[saferun: 7 bytes of this stream are missing here: the file was removed]\n"
    assert path.read_bytes() == note + b"after\nlater\n"
    assert len(told) == 2


@pytest.mark.usefixtures("always_checked", "no_removal_goes_on")
@pytest.mark.parametrize(
    ("name", "is_removed"),
    [(".nfs00000000012c4a9800000001", True), ("o.log.1", False), (".nfsroot", False), ("a.nfs00000000012c4a98", False)],
)
def test_a_file_that_its_own_host_removes_on_nfs_is_known_by_its_new_name(
    tmp_path: Path, name: str, *, is_removed: bool
) -> None:
    """The kernel renames one that is open, and removes it when it is closed. Others rename it to rotate logs."""
    told: list[tuple[str, int]] = []
    sink = Sink(str(tmp_path / "o.log"), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"before\n")])
    (tmp_path / "o.log").rename(tmp_path / name)
    sink.write([memoryview(b"after\n")])
    sink.write([memoryview(b"more\n")])
    sink.close()
    assert (tmp_path / "o.log").exists() == is_removed
    assert bool(told) == is_removed
    if not is_removed:
        assert (tmp_path / name).read_bytes() == b"before\nafter\nmore\n"


def test_the_end_of_a_file_says_that_it_was_removed_on_nfs(tmp_path: Path) -> None:
    """Its last bytes are lost when it is closed."""
    told: list[tuple[str, int]] = []
    sink = Sink(str(tmp_path / "o.log"), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"before\n")])
    (tmp_path / "o.log").rename(tmp_path / ".nfs00000000012c4a9800000001")
    sink.close()
    assert told == [("the file was removed", FOR_ONCE)]


@pytest.mark.usefixtures("always_checked")
def test_a_removed_file_is_written_on_while_its_directory_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that removes a directory fails if a file is made there before it has come to the directory itself."""
    told: list[tuple[str, int]] = []
    path = tmp_path / "host" / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"before\n")])
    (path.parent / "attempt_0").mkdir()
    path.unlink()
    began = now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for now in (began, began + 9, began + 18, began + 27):
        (path.parent / "attempt_0" / f"rank_{now}").mkdir()
        sink.write([memoryview(b"after\n")])
    assert [name.name for name in path.parent.iterdir()] == ["attempt_0"]
    assert told == [("the file was removed", 0)]
    assert sink.retry_at is None
    now += 11
    sink.write([memoryview(b"later\n")])
    note = b"[saferun: 31 bytes of this stream are missing here: the file was removed]\n"
    assert path.read_bytes() == note + b"later\n"
    assert told[1:] == [("", 31)]
    sink.close()


@pytest.mark.usefixtures("always_checked", "no_removal_goes_on")
@pytest.mark.parametrize("in_tree", [True, False])
def test_a_removed_directory_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_tree: bool
) -> None:
    """A rank that clears its output directory, with the log files in it, must find it empty."""
    top = tmp_path / "logs" / "launch"
    monkeypatch.setattr(trees, "_trees", {str(top): trees.Tree(str(top))} if in_tree else {})
    told: list[tuple[str, int]] = []
    path = top / "attempt_0" / "0" / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=partial(told_by, told))
    index = IndexFile(str(path.parent / "output.index"), fresh=True)
    assert index.add(1, sink)
    lines = [memoryview(b"line\n")]
    for number in range(3):
        sink.write(lines)
        index.note([RingRecord(DATA, 1, lines[0], number)])
        if not number:
            shutil.rmtree(tmp_path / "logs")
    whole = WholeFile(str(path.parent / "report.txt"), report=partial(told_by, told))
    whole.write(lines)
    whole.close()
    for file in (sink, whole):
        file.retry(0.0, at_once=True)
        file.close()
    index.close()
    if in_tree:
        with suppress(FileNotFoundError):
            trees.remove_directory(str(path.parent))
    assert list(tmp_path.iterdir()) == []
    assert told == [("the file was removed", 0), ("No such file or directory", 0)]
    if in_tree:
        (tmp_path / "logs").mkdir()
    trees.make_directories(str(path.parent), again=True)
    assert path.parent.is_dir()


@pytest.mark.usefixtures("always_checked")
def test_a_file_that_another_host_removes_is_not_made_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS its handle is stale then, and a rank there may not have come to the directory yet."""
    told: list[tuple[str, int]] = []
    path = tmp_path / "stdout.log"
    sink = Sink(str(path), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"before\n")])
    path.unlink()

    def stale(*_arguments: object) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with monkeypatch.context() as patch:
        patch.setattr("saferun.files.sinks.os.writev", stale)
        patch.setattr(removed_file, "_CHECK_S", 1000.0)
        sink.write([memoryview(b"after\n")])
    sink.retry(0.0, at_once=True)
    assert not path.exists()
    monkeypatch.setattr(removed_file, "QUIET_S", 0.0)
    sink.retry(0.0, at_once=True)
    note = b"[saferun: 7 bytes of this stream are missing here: the file was removed]\n"
    assert path.read_bytes() == note + b"after\n"
    assert told == [(os.strerror(errno.ESTALE), 0), ("", 7)]
    sink.close()


@pytest.mark.usefixtures("always_checked", "no_removal_goes_on")
def test_no_note_stands_among_lines_of_json(tmp_path: Path) -> None:
    """Each line of events.jsonl is read as a value."""
    path = tmp_path / "events.jsonl"
    sink = Sink(str(path), fresh=False, budget=Budget(), report=lambda *_: None)
    sink.write([memoryview(b"{}\n")])
    path.unlink()
    sink.write([memoryview(b"[]\n")])
    sink.close()
    assert path.read_bytes() == b"[]\n"


@pytest.mark.usefixtures("always_checked")
def test_a_file_system_that_does_not_count_links_has_not_removed_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some FUSE file systems have 0 for every file."""
    monkeypatch.setattr(
        "saferun.files.removed_file.os.fstat", lambda _fd: os.stat_result((0o100600, 1, 1, 0, *range(6)))
    )
    told: list[tuple[str, int]] = []
    sink = Sink(str(tmp_path / "log"), fresh=True, budget=Budget(), report=partial(told_by, told))
    for text in (b"one\n", b"two\n"):
        sink.write([memoryview(text)])
    sink.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"
    assert told == []


def test_a_file_that_is_removed_after_its_last_bytes_is_not_made_again(tmp_path: Path) -> None:
    """Those who remove it at the end of a job want it gone; but the last bytes may have come after that."""
    told: list[tuple[str, int]] = []
    sink = Sink(str(tmp_path / "log"), fresh=True, budget=Budget(), report=partial(told_by, told))
    sink.write([memoryview(b"last\n")])
    (tmp_path / "log").unlink()
    sink.close()
    sink.close()
    assert told == [("the file was removed", FOR_ONCE)]
    assert not (tmp_path / "log").exists()


@pytest.mark.usefixtures("always_checked", "no_removal_goes_on")
def test_an_index_that_is_removed_begins_again(tmp_path: Path) -> None:
    """With the run directory the index goes, and later output is merged by a new one."""
    path = tmp_path / "output.index"
    index = IndexFile(str(path), fresh=True)
    sink = Sink(str(tmp_path / "rank_0"), fresh=True, budget=Budget(), report=lambda *_: None)
    assert index.add(1, sink)
    for text in (b"one\n", b"two\n"):
        sink.write([memoryview(text)])
        index.note([RingRecord(DATA, 1, memoryview(text), 0)])
        content = path.read_bytes()
        assert b"rank_0" in content
        path.unlink()
    index.close()
    sink.close()


def test_what_is_missing_is_counted_in_bytes() -> None:
    assert gap_note(1, "no room") == b"[saferun: 1 byte of this stream is missing here: no room]\n"
    assert gap_note(2, "no room", 3.0) == b"[saferun: 2 bytes of this stream are missing here: no room for 3 s]\n"
