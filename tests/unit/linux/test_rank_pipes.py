"""What the pipes of a launch take of what a user may have in pipes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saferun.linux import streams
from saferun.linux.streams import RankPipes

PAGE = os.sysconf("SC_PAGE_SIZE")
USUAL = 64 << 20


@pytest.fixture(autouse=True)
def limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the limit of a user, in pages."""
    path = tmp_path / "pipe-user-pages-soft"
    path.write_text(f"{USUAL // PAGE}\n")
    monkeypatch.setattr(streams, "_USER_LIMIT", str(path))
    return path


@contextmanager
def opened(pipes: RankPipes, count: int) -> Iterator[list[int]]:
    fds: list[int] = []
    try:
        for _ in range(count):
            fds += pipes.open()
        yield fds[::2]
    finally:
        for fd in fds:
            os.close(fd)


def size_of(pipe: int) -> int:
    return fcntl.fcntl(pipe, streams._F_GETPIPE_SZ)


def test_a_pipe_is_opened_as_any_program_opens_one() -> None:
    """A few launches that enlarged theirs would leave 8 KiB for each new pipe of the user."""
    read_end, write_end = os.pipe()
    usual = size_of(read_end)
    os.close(read_end)
    os.close(write_end)
    with opened(RankPipes(32), 32) as pipes:
        assert {size_of(pipe) for pipe in pipes} == {usual}
        assert not any(os.get_blocking(pipe) for pipe in pipes)


@pytest.mark.parametrize(("limit_bytes", "most_growth"), [(USUAL, 8 << 20), (16 * USUAL, 8 << 20), (8 << 20, 1 << 20)])
def test_all_loud_ranks_together_take_a_small_share(limit: Path, limit_bytes: int, most_growth: int) -> None:
    """However often they ask; each of the first of them gets a pipe that is large enough for a good speed."""
    limit.write_text(f"{limit_bytes // PAGE}\n")
    ours = RankPipes(32)
    with opened(ours, 32) as pipes:
        before = sum(map(size_of, pipes))
        for _ in range(4):
            for pipe in pipes:
                assert ours.enlarge(pipe) == size_of(pipe)
        grown = sum(map(size_of, pipes)) - before
        assert most_growth - (768 << 10) < grown <= most_growth  # less than another step
        assert min(size_of(pipe) for pipe in pipes[:2]) >= 256 << 10


def test_a_loud_rank_gets_a_large_pipe_in_two_steps() -> None:
    """A moderate one is satisfied with the first."""
    ours = RankPipes(4)
    with opened(ours, 1) as [pipe]:
        assert [ours.enlarge(pipe) for _ in range(3)] == [256 << 10, 1 << 20, 1 << 20]


def test_very_many_ranks_get_smaller_pipes() -> None:
    """512 ranks on one host would take all of it."""
    with opened(RankPipes(1024), 1) as [pipe]:
        assert size_of(pipe) == 16 << 10
    with opened(RankPipes(100_000), 1) as [pipe]:
        assert size_of(pipe) == 16 << 10
    with opened(RankPipes(600), 1) as [pipe]:
        assert size_of(pipe) == 16 << 10
    with opened(RankPipes(300), 1) as [pipe]:
        assert size_of(pipe) == 32 << 10


@pytest.mark.parametrize("content", ["0\n", "", "unlimited\n", None])
def test_where_there_is_no_limit_or_it_cannot_be_read_the_usual_one_is_kept(limit: Path, content: str | None) -> None:
    """Another user of the host may have one."""
    if content is None:
        limit.unlink()
    else:
        limit.write_text(content)
    assert RankPipes(4)._growth_bytes == 8 << 20


def test_what_the_kernel_refuses_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has reached the limit: the pipe stays as it is, and nothing fails."""
    real = fcntl.fcntl

    def refused(fd: int, command: int, argument: int = 0) -> int:
        if command == streams._F_SETPIPE_SZ:
            raise PermissionError
        return real(fd, command, argument)

    ours = RankPipes(2000)
    monkeypatch.setattr(fcntl, "fcntl", refused)
    with opened(ours, 1) as [pipe]:
        before = size_of(pipe)
        assert ours.enlarge(pipe) == size_of(pipe) == before
        assert ours._growth_bytes == 8 << 20


def test_a_terminal_is_no_pipe() -> None:
    """It has no size that could be changed."""
    master, slave = os.openpty()
    assert RankPipes(2).enlarge(master) == 0
    os.close(master)
    os.close(slave)
