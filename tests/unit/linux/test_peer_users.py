"""Whose process is at the other end of a Unix socket, also where user ids are large."""

from __future__ import annotations

import os
import socket
import struct

import pytest

from saferun.linux import control_socket, task_sockets
from saferun.linux.bare_socket import Socket

# Directory services (SSSD, winbind) give such ids, as do user namespaces. As a signed number it is negative.
LARGE = 3_000_000_000


class Peer:
    """A connection of which the kernel says who is at its other end."""

    def getsockopt(self, _level: int, option: int, size: int) -> bytes:
        assert option == socket.SO_PEERCRED
        return struct.pack("=III", 4711, LARGE, LARGE)[:size]


@pytest.mark.parametrize(
    "user", [task_sockets.peer_of, lambda peer: control_socket.peer_of(peer).uid], ids=["tasks", "saferunctl"]
)
def test_a_large_user_id_is_no_other_user(user: object) -> None:
    """The tasks of a host waited for each other for ever, and saferunctl refused its own launch."""
    assert callable(user)
    assert user(Peer()) == LARGE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_so_the_kernel_says_it() -> None:
    pid = os.fork()
    if not pid:
        try:
            os.setuid(LARGE)
            one, _other = socket.socketpair()
            os._exit(0 if task_sockets.peer_of(one) == os.getuid() == LARGE else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_strangers_that_connect_again_and_again_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the name is abstract, processes of every user can connect to a head that gives up."""
    ours, theirs = socket.socketpair()
    theirs.sendall(b"x")  # the listener is always readable
    accepted: list[Socket] = []

    def accept(_: Socket) -> Socket:
        accepted.append(Socket(socket.AF_UNIX))
        assert len(accepted) < 10_000
        return accepted[-1]

    monkeypatch.setattr(task_sockets, "accept_connection", accept)
    monkeypatch.setattr(task_sockets, "peer_of", lambda _: os.getuid() + 1)
    listener = Socket(fileno=ours.detach())
    task_sockets.answer_tasks(listener, {"op": "join_failed"}, 1, 0.0)
    assert accepted
    accepted.clear()
    task_sockets.answer_tasks(listener, {"op": "join_failed"}, 0, 60.0)
    assert not accepted, "no task is to be answered"
    listener.close()
    theirs.close()
