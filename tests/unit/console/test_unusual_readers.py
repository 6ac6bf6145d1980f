"""Readers that come back, and those that take only small messages."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saferun.console.target import Target

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
