"""Bytes that pass unchanged (``--prefix none``), and files that take nothing for a while."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.console.console_stream import ConsoleStream
from saferun.console.raw_pane import RawPane
from saferun.console.screen import Screen
from saferun.console.target import MOST_WAITING_BYTES, Target

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Whose bytes they are can be seen, and where lines and pieces end.
PIECES = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["x", "xx\n", "\n", "x\nx", "xx\nx\nxx\n"])), max_size=40
)


class Console:
    """A screen that passes everything unchanged, and the file that it goes to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self.screen = Screen(self._fd, self._fd, skipping=True, where=lambda: "", raw=True)
        self.streams = [ConsoleStream(self.screen.out, b"") for _ in range(3)]

    def feed(self, rank: int, text: str, now: float = 0.0) -> None:
        self.streams[rank].feed(text.encode(), now)

    @property
    def text(self) -> str:
        self.screen.flush()
        return self._path.read_bytes().decode()

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    one = Console(tmp_path / "out")
    yield one
    one.close()


@given(pieces=PIECES)
def test_nothing_is_added_left_out_or_put_into_a_line_of_another_rank(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[tuple[int, str]]
) -> None:
    """In whatever pieces lines come; at the end each rank's bytes are there in their order."""
    console = Console(tmp_path_factory.mktemp("raw") / "out")
    said = ["", "", ""]
    for rank, shape in pieces:
        text = shape.replace("x", str(rank))
        said[rank] += text
        console.feed(rank, text)
    before = console.text
    for stream in console.streams:
        stream.close()
    console.screen.release()
    text = console.text
    assert text.startswith(before)
    assert len(text) == sum(map(len, said))
    for rank in range(3):
        assert text.count(str(rank)) == said[rank].count(str(rank))
    # While all was well no line has the bytes of two ranks.
    for line in before.split("\n"):
        assert len(set(line)) <= 1, before
    console.close()


def test_an_open_line_is_shown_at_once_and_waited_for(console: Console) -> None:
    """A prompt is of use only where it is seen; the line of another rank comes behind its end."""
    console.feed(0, "half ")
    assert console.text == "half "
    console.feed(1, "other\n")
    assert console.text == "half "
    assert console.screen.deadline() == 5.0
    console.feed(0, "whole\nnext", now=1.0)
    assert console.text == "half whole\nother\nnext"
    assert console.screen.deadline() is None


def test_nobody_waits_for_ever_for_a_line(console: Console) -> None:
    """A rank that has left a line open and says nothing more; then the ranks themselves have made it one line."""
    console.feed(0, "open")
    console.feed(1, "a\n", now=1.0)
    console.screen.tick(4.9)
    assert console.text == "open"
    console.screen.tick(5.0)
    assert console.text == "opena\n"


def test_nobody_waits_for_ever_for_a_line_that_grows(console: Console) -> None:
    """A dot a second never ends."""
    for second in range(12):
        console.feed(0, ".", now=float(second))
        if second == 1:
            console.feed(1, "a\n", now=1.0)
        console.screen.tick(float(second))
    assert console.text == "." * 12 + "a\n"
    assert console.screen.deadline() is None


def test_nobody_waits_for_a_bar(console: Console) -> None:
    """It is one line for hours."""
    console.feed(0, "\r10%")
    console.feed(1, "a\n")
    console.feed(0, "\r20%")
    assert console.text == "\r10%a\n\r20%"


def test_no_more_waits_for_a_line_than_memory_may_hold(console: Console) -> None:
    console.feed(0, "open")
    console.feed(1, "x" * (MOST_WAITING_BYTES - 2) + "\n")
    assert console.text == "open"
    console.feed(1, "y\n")
    assert console.text.endswith("x\ny\n")


def test_saferuns_own_words_begin_a_line_and_break_none(console: Console) -> None:
    """They are the only ones that bring a line feed with them, and only for themselves."""
    console.feed(0, '{"a": ')
    console.screen.print_message("saferun: hello")
    console.feed(0, "1}\n")
    assert console.text == '{"a": 1}\nsaferun: hello\n'
    console.feed(0, "open")
    console.screen.print_message("saferun: the end")
    console.streams[0].close()
    assert console.text == '{"a": 1}\nsaferun: hello\nopen\nsaferun: the end\n'


def test_what_passes_unchanged_has_no_holes(console: Console) -> None:
    """Its ranks wait for a slow reader, as they would without a launcher."""
    console.screen.allow_skipping(True)
    console.feed(0, "x" * (MOST_WAITING_BYTES + 1))
    assert isinstance(console.screen.out, RawPane)
    assert console.streams[0].is_full
    console.text  # noqa: B018 - the reader has caught up
    assert not console.streams[0].is_full


# --------------------------------------------------------------------------------------------------------------- files


class Disk:
    """A disk that is full when it is told so. Takes the place of ``os.write``, and of the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = 1 << 30
        self.now = 100.0
        self.error = errno.ENOSPC
        self._write = os.write
        monkeypatch.setattr(Target, "_write_plainly", lambda target, blocks: self.write(target.fd, b"".join(blocks)))
        monkeypatch.setattr("saferun.console.target.time.monotonic", lambda: self.now)

    def write(self, fd: int, block: bytes) -> int:
        if not self.room:
            raise OSError(self.error, "not now")
        count = self._write(fd, block[: self.room])
        self.room -= count
        return count


def assert_retries_at(target: Target, at: float | None) -> None:
    assert target.retry_at == at


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EFBIG])
def test_a_file_that_takes_nothing_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    """One error never silences it for good, and nothing of what came meanwhile is lost."""
    disk = Disk(monkeypatch)
    disk.error, disk.room = error, 7
    with (tmp_path / "log").open("wb") as file:
        target = Target(file.fileno(), skipping=True, where=lambda: "it is elsewhere")
        target.put(b"first line\n")
        assert target.flush()
        target.put(b"second line\n")
        assert not target.flush()
        assert_retries_at(target, 101.0)
        disk.room = 1 << 20
        assert not target.flush()
        disk.now = 101.0
        assert target.flush()
        assert target.is_empty
        assert_retries_at(target, None)
    assert (tmp_path / "log").read_bytes() == b"first line\nsecond line\n"


@pytest.mark.parametrize("skipping", [False, True])
def test_a_file_that_takes_nothing_for_long_costs_lines_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, skipping: bool
) -> None:
    """Also where no other copy exists: the ranks do not wait for a disk that nobody may ever clear."""
    disk = Disk(monkeypatch)
    disk.room = 0
    with (tmp_path / "log").open("wb") as file:
        target = Target(file.fileno(), skipping=skipping, where=lambda: "there is no other copy")
        target.put(b"x" * MOST_WAITING_BYTES + b"\n")
        target.flush()
        disk.now += 4.9
        assert target.is_full is not skipping
        disk.now += 0.1
        assert not target.is_full
        assert not target.has_room(10)
        target.skip(3)
        disk.room = 1 << 30
        disk.now += 1.0
        assert target.flush()
        assert target.is_empty
    note = b"saferun: this file could not be written for a while: 3 lines skipped here; there is no other copy\n"
    assert (tmp_path / "log").read_bytes().endswith(b"x\n" + note)


def test_a_reader_that_is_gone_stays_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    disk.room, disk.error = 0, errno.EPIPE
    with (tmp_path / "log").open("wb") as file:
        target = Target(file.fileno(), skipping=True, where=lambda: "")
        target.put(b"words\n")
        target.flush()
        assert target.is_broken
        assert target.is_empty
