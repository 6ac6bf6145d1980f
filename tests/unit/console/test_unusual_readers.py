"""Readers that come back, and those that take only small messages."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.console.screen import Screen
from saferun.console.target import Target
from saferun.launch.console_part import ConsolePart

_F_SETPIPE_SZ = 1031

WHERE = "all of it is in /runs/1"


@contextmanager
def reading(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize("skipping", [True, False])
def test_a_named_pipe_whose_reader_is_started_again_goes_on(
    tmp_path: Path, moment: list[float], *, skipping: bool
) -> None:
    """A log collector that is updated: the job was silent for good."""
    path = tmp_path / "log"
    os.mkfifo(path)
    with reading(path) as reader:
        fd = os.open(path, os.O_WRONLY)
        target = Target(fd, skipping=skipping, where=lambda: WHERE)
        target.put(b"one\n")
        target.flush()
        assert os.read(reader, 100) == b"one\n"
    target.put(b"two\n")
    assert not target.flush()
    assert not target.is_broken
    for _ in range(2):
        assert not target.has_room(5)
        target.skip(1)
        target.put(b"saferun: a message\n")
        # Nothing waits meanwhile: neither the ranks, nor the end of the launch.
        assert not target.is_full
        assert not target.is_awaited
        assert target.is_empty
        assert not target.waits_for_room
        assert target.retry_at is not None
        moment[0] = target.retry_at
        assert not target.flush()
    assert target.unread_text == f"5 lines are missing there; {WHERE}"
    with reading(path) as reader:
        assert target.retry_at is not None
        moment[0] = target.retry_at
        assert target.flush()
        assert target.has_room(6)
        target.put(b"three\n")
        assert target.flush()
        note = f"saferun: this pipe had no reader for a while: 5 lines skipped here; {WHERE}\n"
        assert os.read(reader, 1000).decode() == f"{note}three\n"
        assert target.is_empty
        assert not target.is_away
    os.close(target.fd)
    os.close(fd)


LINE = b"x" * 99 + b"\n"
NOTE = re.compile(rb"saferun: this pipe had no reader for a while: (\d+) lines skipped here; all of it is in /runs/1\n")


@pytest.mark.parametrize("returns", [1, 3])
def test_a_reader_that_comes_back_in_the_middle_of_a_line_gets_whole_lines_and_the_right_count(
    tmp_path: Path, moment: list[float], returns: int
) -> None:
    """A named pipe keeps what has not been read: the first half of a line, with which the note was one line."""
    path = tmp_path / "log"
    os.mkfifo(path)
    with reading(path):
        fd = os.open(path, os.O_WRONLY)
        fcntl.fcntl(fd, _F_SETPIPE_SZ, 4096)
        target = Target(fd, skipping=True, where=lambda: WHERE)
        target.put(LINE * 100)
        assert target.flush()
    assert not target.flush()
    for _ in range(returns - 1):
        # It goes again before it has read anything: the note has no room.
        with reading(path):
            moment[0] += 10.0
            target.flush()
            assert target.retry_at is None
        target.flush()
        target.put(b"one more\n")
    assert target.unread_text == f"{100 - 40 + returns - 1} lines are missing there; {WHERE}"
    with reading(path) as reader:
        got = b""
        moment[0] += 10.0
        while target.flush() or not target.is_empty:
            got += os.read(reader, 1 << 16)
    *shown, half, note = got.splitlines(keepends=True)
    assert shown == [LINE] * 40
    assert half == LINE[: 4096 % 100] + b"\n"
    found = NOTE.fullmatch(note)
    assert found is not None
    assert int(found[1]) == 100 - 40 + returns - 1
    os.close(target.fd)
    os.close(fd)


def test_unchanged_output_has_no_gap_though_its_pipe_has_a_name(tmp_path: Path) -> None:
    """What follows a gap, and a line of saferun in it, would be taken for the ranks' own."""
    path = tmp_path / "log"
    os.mkfifo(path)
    with reading(path):
        fd = os.open(path, os.O_WRONLY)
        target = Screen(fd, fd, skipping=True, where=lambda: WHERE, raw=True).out.target
    target.put(b"two\n")
    assert not target.flush()
    assert target.is_broken
    os.close(target.fd)
    os.close(fd)


def drained(tmp_path: Path, *, is_back: bool) -> tuple[bytes, str]:
    """What a reader of stdout, gone while the ranks wrote, and the file that is stderr, have at a launch's end."""
    path = tmp_path / "log"
    os.mkfifo(path)
    with reading(path):
        fd = os.open(path, os.O_WRONLY)
        err = os.open(tmp_path / "err", os.O_WRONLY | os.O_CREAT)
        screen = Screen(fd, err, skipping=True, where=lambda: WHERE, carries=True)
        screen.print_message("saferun: rank 0 failed first")
        screen.flush()
        while screen.unwritten_bytes:
            os.sched_yield()  # its process has the reader's descriptor for a moment
    target = screen.out.target
    target.put(b"two\nthree\n")
    screen.flush()
    wake, other = os.pipe()
    wakeup: Any = SimpleNamespace(is_stopped=False, fd=wake, is_hurried=lambda: False)
    context: Any = SimpleNamespace(screen=screen, poller=None, run_dir=None)
    got = b""
    if is_back:
        with reading(path) as reader:
            ConsolePart(context).drain(wakeup)
            with suppress(BlockingIOError):
                got = os.read(reader, 1000)
    else:
        ConsolePart(context).drain(wakeup)
    for one in {wake, other, target.fd, fd, err}:
        os.close(one)
    return got, (tmp_path / "err").read_text()


def test_a_reader_that_is_back_at_the_end_is_told_what_it_has_missed(tmp_path: Path) -> None:
    """It would have been found within three seconds, and the launch ended at once."""
    note = f"saferun: this pipe had no reader for a while: 2 lines skipped here; {WHERE}\n"
    assert drained(tmp_path, is_back=True) == (note.encode(), "saferun: rank 0 failed first\n")


def test_what_a_reader_that_has_gone_has_missed_is_told_at_the_end(tmp_path: Path) -> None:
    """The process that writes stderr must not have ended before that."""
    unread = f"saferun: stdout was not read to its end: 2 lines are missing there; {WHERE}\n"
    assert drained(tmp_path, is_back=False) == (b"", f"saferun: rank 0 failed first\n{unread}")


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the target's own copy lives as long as the process
@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_socket_of_messages_gets_small_ones(kind: socket.SocketKind) -> None:
    """One that is larger than the socket's buffer is an error, which looked as if the reader had gone."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
    with ours, theirs:
        theirs.setblocking(False)
        target = Target(ours.fileno(), skipping=False, where=str)
        text = b"".join(b"line %d\n" % number for number in range(100_000))
        target.put(text)
        target.put(b"last\n")
        got = b""
        while not target.is_empty:
            assert target.flush()
            assert not target.is_broken
            while True:
                try:
                    got += theirs.recv(1 << 20)
                except BlockingIOError:
                    break
        assert got == text + b"last\n"
