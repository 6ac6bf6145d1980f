"""What a host answers at its ports when its coordinator is gone."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from saferun.cluster import end_answers as end_answers_module
from saferun.cluster.end_answers import EndAnswers
from saferun.coordinator.liveness_probe import how_it_ended
from saferun.linux.bare_socket import Socket
from saferun.linux.poller import Poller


def test_who_connects_learns_the_signal_until_another_coordinator_answers() -> None:
    """Also whoever sends something first, as a client of the store does, and is gone before it reads."""
    listener = Socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    port = listener.getsockname()[1]
    poller = Poller()
    answers = EndAnswers([listener], 9, poller)
    with socket.create_connection(("127.0.0.1", port)) as hasty:
        hasty.sendall(b"GET / HTTP/1.1\r\n")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(how_it_ended, "node1", ["127.0.0.1"], port)
        while not asked.done():
            poller.wait(0.01)
    reason = asked.result()
    assert reason is not None
    assert reason.message == "the coordinator of node1 ended (killed by SIGKILL)"
    answers.close()
    with socket.create_connection(("127.0.0.1", port)) as waiting:
        poller.wait(0.0)
        waiting.setblocking(False)
        with pytest.raises(BlockingIOError):
            waiting.recv(1)
    listener.close()
    poller.close()


def test_where_no_descriptor_is_left_the_loop_does_not_try_again_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that cannot be taken is ready again at once."""
    listener = Socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    poller = Poller()
    tries: list[int] = []

    def refuse(_listener: Socket) -> Socket:
        tries.append(1)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(end_answers_module, "accept_connection", refuse)
    answers = EndAnswers([listener], 9, poller)
    with socket.create_connection(listener.getsockname()):
        for _ in range(5):
            poller.wait(0.01)
    assert tries == [1]
    answers.close()
    listener.close()
    poller.close()
