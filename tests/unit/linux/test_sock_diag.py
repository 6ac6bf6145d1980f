"""What the kernel says of sockets, and what is made of an answer that is none."""

from __future__ import annotations

import os
import socket
import struct
import time

import pytest

from saferun.linux import sock_diag
from saferun.linux.sock_diag import tcp_counters, unix_peers
from saferun.linux.sockets import tcp_sockets


def inode_of(one: socket.socket) -> int:
    return os.fstat(one.fileno()).st_ino


@pytest.fixture
def ends() -> tuple[socket.socket, socket.socket, socket.socket]:
    """A listening socket, one that has connected, and one that was accepted."""
    listener = socket.create_server(("127.0.0.1", 0))
    connected = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    return listener, connected, accepted


def test_bytes_count_when_they_have_been_read(ends: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    """What waits in the kernel for a rank that hangs is no progress of its."""
    listener, connected, accepted = ends
    with listener, connected, accepted:
        connected.sendall(bytes(1000))
        assert len(accepted.recv(300)) == 300
        deadline = time.monotonic() + 30
        while True:
            found = tcp_counters()
            assert found is not None
            if found[inode_of(connected)].sent_bytes >= 1000:
                break
            assert time.monotonic() < deadline
        assert found[inode_of(accepted)].taken_bytes == 300
        assert found[inode_of(accepted)].remote == found[inode_of(connected)].local
        assert [found[inode_of(one)].is_listening for one in ends] == [True, False, False]


def test_how_long_a_connection_has_been_quiet(ends: tuple[socket.socket, socket.socket, socket.socket]) -> None:
    listener, connected, accepted = ends
    with listener, connected, accepted:
        time.sleep(0.3)
        found = tcp_counters()
        assert found is not None
        assert found[inode_of(connected)].quiet_s >= 0.2
        assert found[inode_of(connected)].waiting_bytes == 0
        sent_at = time.monotonic()
        connected.sendall(b"x")
        found = tcp_counters()
        since_s = time.monotonic() - sent_at
        assert found is not None
        assert max(found[inode_of(one)].quiet_s for one in (connected, accepted)) <= since_s + 0.1


def test_an_ipv4_address_is_the_same_in_an_ipv6_socket() -> None:
    """Else the two ends of a connection would not be known to be one."""
    with socket.socket(socket.AF_INET6) as listener:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("::", 0))
        except OSError:
            pytest.skip("there is no IPv6 here")
        listener.listen()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connected, listener.accept()[0] as accepted:
            found = tcp_counters()
            assert found is not None
            assert found[inode_of(accepted)].remote == found[inode_of(connected)].local
            assert found[inode_of(accepted)].local == found[inode_of(connected)].remote


def test_without_socket_diagnosis_there_are_no_counters(
    monkeypatch: pytest.MonkeyPatch, ends: tuple[socket.socket, socket.socket, socket.socket]
) -> None:
    """Seccomp may deny it; the tables in /proc still tell who is connected to whom."""
    monkeypatch.setattr(sock_diag, "_NETLINK_SOCK_DIAG", 31)  # there is no such protocol
    listener, connected, accepted = ends
    with listener, connected, accepted:
        assert tcp_counters() is None
        assert unix_peers() == {}
        found = tcp_sockets()
        assert found[inode_of(accepted)].remote == found[inode_of(connected)].local
        assert [found[inode_of(one)].is_listening for one in ends] == [True, False, False]


@pytest.mark.parametrize(
    ("content", "is_over"),
    [
        (struct.pack("=IHHIIi", 20, 2, 0, 1, 0, -2), False),  # NLMSG_ERROR
        (struct.pack("=IHHIIi", 20, 3, 0, 1, 0, 0), True),  # NLMSG_DONE
        (struct.pack("=IHHIIi", 1 << 20, 20, 0, 1, 0, 0), False),  # longer than it is
        (struct.pack("=IHHIIi", 20, 20, 0, 1, 0, 0), False),  # too short for a socket
        (b"", None),
        (bytes(5), None),
    ],
)
def test_an_answer_that_is_none_ends_it(content: bytes, is_over: bool | None) -> None:
    assert sock_diag._take_datagram(content, 72, lambda *_: pytest.fail("there is no socket")) is is_over
