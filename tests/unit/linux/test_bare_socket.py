"""Sockets without the module ``socket``: the same descriptors arrive, and no more than were asked for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from saferun.linux import bare_socket
from saferun.linux.bare_socket import (
    AF_INET6,
    AF_UNIX,
    MSG_DONTWAIT,
    MSG_PEEK,
    SOCK_SEQPACKET,
    Socket,
    dual_stack_socket,
    receive_fds,
    send_fds,
    socketpair,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(name="pair")
def _pair() -> Iterator[tuple[Socket, Socket]]:
    ours, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_descriptors_arrive_in_their_order_and_no_program_inherits_them(pair: tuple[Socket, Socket]) -> None:
    """A descriptor that a rank inherits by mistake keeps a pipe open forever."""
    pipes = [os.pipe() for _ in range(3)]
    assert send_fds(pair[0], b"content", [write_end for _, write_end in pipes]) == len(b"content")
    content, fds = receive_fds(pair[1], 100, 3)
    assert content == b"content"
    for fd, (read_end, write_end) in zip(fds, pipes, strict=True):
        assert not os.get_inheritable(fd)
        os.write(fd, str(read_end).encode())
        assert os.read(read_end, 100) == str(read_end).encode()
        for one in (fd, read_end, write_end):
            os.close(one)


def test_a_message_that_is_peeked_at_stays(pair: tuple[Socket, Socket]) -> None:
    """A writer that dies over a file leaves it to the next one; ``socket.recv_fds`` ignores such flags."""
    send_fds(pair[0], b"file", [0])
    for flags in (MSG_PEEK | MSG_DONTWAIT, MSG_DONTWAIT):
        content, fds = receive_fds(pair[1], 100, 1, flags)
        assert content == b"file"
        assert len(fds) == 1
        os.close(fds[0])
    with pytest.raises(BlockingIOError):
        receive_fds(pair[1], 100, 1, MSG_DONTWAIT)


def test_the_end_of_the_line_is_an_empty_message(pair: tuple[Socket, Socket]) -> None:
    """A preforked process that is not needed ends by it."""
    pair[0].close()
    assert receive_fds(pair[1], 100, 1) == (b"", [])


def test_a_host_without_ipv6_gets_a_socket_for_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such hosts have no sockets of the other family at all."""
    monkeypatch.setattr(bare_socket, "has_ipv6", False)
    sock = dual_stack_socket()
    try:
        assert sock.family != AF_INET6
        sock.bind(("127.0.0.1", 0))
    finally:
        sock.close()
