"""Room in a pipe for what its reader has yet to read."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest

from saferun.linux import streams
from saferun.linux.streams import enlarge_pipe

BEFORE = 64 << 10


@pytest.fixture
def pipe() -> Iterator[int]:
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, streams._F_SETPIPE_SZ, BEFORE)
    yield write_end
    os.close(read_end)
    os.close(write_end)


def size_of(pipe: int) -> int:
    return fcntl.fcntl(pipe, streams._F_GETPIPE_SZ)


@pytest.mark.parametrize(("more", "after"), [(0, BEFORE), (1000, 2 * BEFORE), (100 << 20, 1 << 20)])
def test_it_gets_the_room_that_is_needed_up_to_a_limit(pipe: int, more: int, after: int) -> None:
    enlarge_pipe(pipe, more)
    assert size_of(pipe) == after


def test_where_the_kernel_refuses_it_gets_less_or_stays_as_it_is(pipe: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user may have so many bytes in pipes."""
    real, most = fcntl.fcntl, 256 << 10

    def limited(fd: int, command: int, argument: int = 0) -> int:
        if command == streams._F_SETPIPE_SZ and argument > most:
            raise PermissionError
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", limited)
    enlarge_pipe(pipe, 100 << 20)
    assert size_of(pipe) == most
    most = 0
    enlarge_pipe(pipe, 100 << 20)
    assert size_of(pipe) == 256 << 10


def test_what_is_no_pipe_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        enlarge_pipe(ours.fileno(), 1000)
