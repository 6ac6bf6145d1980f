"""The pipe of a rank becomes larger once the rank keeps filling it, and not before."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import pytest

from saferun.console.rank_stream import RankStream
from saferun.linux import streams
from saferun.linux.streams import RankPipes

USUAL = 64 << 10


class Rank:
    """Writes to its stream."""

    def __init__(self, pipes: RankPipes | None = None, pipe_bytes: int = USUAL) -> None:
        read_end, self._write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(self._write_end, False)
        fcntl.fcntl(read_end, streams._F_SETPIPE_SZ, pipe_bytes)
        self.stream = RankStream(read_end, 0, is_stderr=False, files=(), console=None, line_filter=None, pipes=pipes)

    @property
    def pipe_bytes(self) -> int:
        return fcntl.fcntl(self.stream.fd, streams._F_GETPIPE_SZ)

    def write(self, size: int) -> int:
        return os.write(self._write_end, b"x" * size)

    def fill(self, at_once: int) -> int:
        """Write until the pipe takes no more."""
        written = 0
        while True:
            try:
                written += self.write(at_once)
            except BlockingIOError:
                return written

    def read_all(self) -> int:
        return sum(iter(lambda: max(self.stream.read(0.0), 0), 0))

    def close(self) -> None:
        os.close(self._write_end)
        self.stream.close()


@pytest.fixture
def rank() -> Iterator[Rank]:
    rank = Rank(RankPipes(4))
    yield rank
    rank.close()


@pytest.mark.parametrize("at_once", [100, 2049, 4097, 33_000, 64_000, 1 << 20])
def test_a_rank_that_fills_its_pipe_again_and_again_gets_a_larger_one(rank: Rank, at_once: int) -> None:
    """It writes faster than it is read. Writes that are no multiple of a page fill a pipe with fewer bytes."""
    written = read = 0
    for _ in range(10):
        written += rank.fill(at_once)
        read += rank.stream.read(0.0)
    assert rank.pipe_bytes == 1 << 20
    read += rank.read_all()
    assert read == written


@pytest.mark.parametrize("pipe_bytes", [16 << 10, 32 << 10])
@pytest.mark.parametrize("at_once", [100, 2100, 4097])
def test_a_pipe_that_began_small_becomes_larger_too(pipe_bytes: int, at_once: int) -> None:
    """The streams of very many ranks begin so."""
    rank = Rank(RankPipes(4), pipe_bytes)
    for _ in range(20):
        rank.fill(at_once)
        rank.stream.read(0.0)
    assert rank.pipe_bytes >= 512 << 10
    rank.close()


def test_a_pseudo_terminal_is_no_pipe() -> None:
    """It keeps its size, and is asked once."""
    pipes = RankPipes(4)
    ours, theirs = os.openpty()
    stream = RankStream(ours, 0, is_stderr=False, files=(), console=None, line_filter=None, pipes=pipes)
    assert pipes.size_of(ours) == USUAL
    for _ in range(10):
        os.write(theirs, b"x" * 4000)
        assert stream.read(0.0) > 0
    os.close(theirs)
    stream.close()


def test_a_rank_that_fills_its_pipe_now_and_then_keeps_it(rank: Rank) -> None:
    """A long traceback, a configuration: the user's other programs need the room."""
    for _ in range(20):
        rank.fill(4096)
        rank.read_all()
        rank.write(100)
        rank.read_all()
    assert rank.pipe_bytes == USUAL


def test_a_rank_that_writes_lines_keeps_its_pipe(rank: Rank) -> None:
    """However many."""
    for _ in range(200):
        rank.write(8 << 10)
        rank.read_all()
    assert rank.pipe_bytes == USUAL


def test_without_room_it_goes_on_with_the_pipe_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked for again at each read."""
    asked: list[int] = []

    def enlarge(_: RankPipes, fd: int) -> int:
        asked.append(fd)
        return USUAL

    monkeypatch.setattr(RankPipes, "enlarge", enlarge)
    rank = Rank(RankPipes(4))
    for _ in range(20):
        assert rank.fill(4096) == rank.read_all() == USUAL
    assert asked == [rank.stream.fd]
    rank.close()
