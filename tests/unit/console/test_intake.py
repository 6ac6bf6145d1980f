"""When ranks' streams are read: at once at rest, in large pieces in bulk, and not at all while there is no room."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from saferun.console.intake import Intake
from saferun.console.rank_stream import RankStream
from saferun.linux.poller import Poller

if TYPE_CHECKING:
    from collections.abc import Iterator


class Stream(RankStream):
    """A stream whose reader may have no room."""

    __slots__ = ("full", "reads")

    def __init__(self, fd: int) -> None:
        super().__init__(fd, 0, is_stderr=False, files=(), console=None, line_filter=None)
        self.full = False
        self.reads: list[int] = []

    @property
    def is_full(self) -> bool:
        return self.full

    def read(self, now: float, *, is_last: bool = False) -> int:
        self.reads.append(super().read(now, is_last=is_last))
        return self.reads[-1]


class Bench:
    """A pipe, its stream, and a clock that only moves when it is told to."""

    def __init__(self) -> None:
        read_end, self.rank = os.pipe()
        os.set_blocking(read_end, False)
        self.now = 100.0
        self.poller = Poller()
        self.intake = Intake(self.poller, lambda: self.now)
        self.stream = Stream(read_end)
        self.intake.add(self.stream)

    def write(self, size: int = 10) -> None:
        os.write(self.rank, b"x" * size)

    def turn(self, after_s: float = 0.0) -> None:
        """One turn of the loop."""
        self.now += after_s
        self.poller.wait(0)
        self.intake.tick(self.now)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.intake.close()
    bench.poller.close()
    os.close(bench.rank)
    os.close(bench.stream.fd)


def test_what_is_said_now_and_then_is_read_at_once(bench: Bench) -> None:
    """A line at rest waits for nothing."""
    for count in range(1, 4):
        bench.write()
        bench.turn(0.005)
        assert bench.stream.reads == [10] * count
        assert bench.intake.deadline is None


def test_what_follows_at_once_gathers_for_two_milliseconds(bench: Bench) -> None:
    """Not every write of a rank is worth a turn of the loop."""
    bench.write()
    bench.turn()
    bench.write()
    bench.turn(0.0005)
    assert bench.stream.reads == [10, 10]
    bench.write()
    bench.write()
    bench.turn(0.0005)
    assert bench.stream.reads == [10, 10]
    assert bench.intake.deadline == pytest.approx(100.0025)
    bench.turn(0.002)
    assert bench.stream.reads == [10, 10, 20]


def test_a_large_piece_is_followed_by_larger_ones(bench: Bench) -> None:
    """Bulk output costs few reads."""
    os.set_blocking(bench.rank, False)
    bench.write(65536)
    bench.turn()
    bench.write(65536)
    bench.turn(0.001)
    assert bench.stream.reads == [65536]
    bench.turn(0.002)
    assert bench.stream.reads == [65536, 65536]


def test_a_stream_that_has_gathered_nothing_is_waited_for_again(bench: Bench) -> None:
    """Its next line comes as any other."""
    bench.write(40000)
    bench.turn()
    bench.turn(0.003)
    assert bench.stream.reads == [40000, -1]
    assert bench.intake.deadline is None
    assert bench.poller.is_watched(bench.stream.fd)
    bench.write()
    bench.turn(0.003)
    assert bench.stream.reads == [40000, -1, 10]


def test_a_stream_without_room_is_read_when_there_is_some(bench: Bench) -> None:
    """And keeps no loop busy meanwhile; the room may come in any turn, so it is asked before each wait."""
    bench.stream.full = True
    bench.write()
    for _ in range(3):
        bench.turn(1.0)
        assert bench.intake.deadline is None
        assert not bench.poller.is_watched(bench.stream.fd)
    bench.stream.full = False
    assert bench.intake.deadline == 0.0
    bench.turn()
    assert bench.stream.reads == [10]


@pytest.mark.parametrize("gathers", [False, True])
def test_the_end_of_a_stream_is_the_end_of_its_watch(bench: Bench, *, gathers: bool) -> None:
    """The descriptor is closed by its rank."""
    rank = os.dup(bench.rank)
    os.dup2(bench.stream.fd, bench.rank)  # nobody can write any more
    if gathers:
        os.write(rank, b"x" * 40000)
        bench.turn()
    os.close(rank)
    bench.turn(0.01)
    bench.turn(0.01)
    assert bench.stream.reads[-1] == 0
    assert not bench.poller.is_watched(bench.stream.fd)
    assert bench.intake.deadline is None


def test_a_stream_that_is_taken_out_is_read_no_more(bench: Bench) -> None:
    """Whatever it was waiting for."""
    bench.write(40000)
    bench.turn()
    bench.intake.remove(bench.stream)
    bench.intake.remove(bench.stream)
    bench.write()
    bench.turn(0.01)
    assert bench.stream.reads == [40000]
