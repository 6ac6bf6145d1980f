"""A helper process beside a loop: whatever happens to it, the loop never waits for it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from saferun.linux.bare_socket import Socket, receive_fds
from saferun.linux.children import reap
from saferun.linux.helper import Helper
from saferun.linux.json_lines import JsonLines
from saferun.linux.poller import Poller


class Loop:
    """A loop with one helper."""

    def __init__(self, serve: Callable[[Socket], None], **options: Any) -> None:
        self.poller = Poller()
        self.messages: list[dict[str, Any]] = []
        self.lost = 0
        self.helper = Helper("sr-test", serve, **options)
        (self.pid,) = self.helper.pids

    def attach(self, queue_bytes: int = 1 << 20) -> None:
        self.helper.attach(self.poller, self.messages.append, self._on_lost, queue_bytes=queue_bytes)

    def _on_lost(self) -> None:
        self.lost += 1

    def until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            self.poller.wait(10.0)

    def until_reaped(self) -> None:
        while self.helper.pids:
            for pid, status in reap():
                self.helper.on_exit(pid, status)


@pytest.fixture(name="loops")
def _loops() -> Iterator[list[Loop]]:
    loops: list[Loop] = []
    yield loops
    for loop in loops:
        loop.helper.close()
        loop.until_reaped()
        loop.poller.close()


def _echo(connection: Socket) -> None:
    connection.setblocking(True)
    with socket.socket(fileno=connection.detach()) as whole, whole.makefile("rwb") as lines:
        for line in lines:
            lines.write(line)
            lines.flush()


def _never_reads(connection: Socket) -> None:
    signal.pause()
    connection.close()


def test_what_is_said_before_anybody_listens_is_answered(loops: list[Loop]) -> None:
    """The process is forked first, and listened to once there is a loop."""
    loop = Loop(_echo)
    loops.append(loop)
    assert not loop.helper.send({"too": "early"})
    loop.attach()
    assert loop.helper.send({"n": 1})
    assert loop.helper.send({"text": "x" * 500_000})
    loop.until(lambda: len(loop.messages) == 2)
    assert loop.messages[0] == {"n": 1}
    assert len(loop.messages[1]["text"]) == 500_000


def test_a_process_that_reads_nothing_holds_nobody_up(loops: list[Loop]) -> None:
    """What finds no room is refused, and the sender knows."""
    loop = Loop(_never_reads)
    loops.append(loop)
    loop.attach(queue_bytes=2 << 20)
    message = {"text": "x" * 100_000}
    sent = 0
    while loop.helper.send(message):
        sent += 1
    assert sent >= 20  # the queue, and what the socket's buffer has taken
    assert loop.helper.queued_bytes <= 2 << 20


def test_a_process_that_is_killed_is_noticed_once(loops: list[Loop]) -> None:
    """Whoever owns it decides what follows."""
    loop = Loop(_echo)
    loops.append(loop)
    loop.attach()
    os.kill(loop.pid, signal.SIGKILL)
    loop.until(lambda: loop.lost == 1)
    assert not loop.helper.is_open
    assert not loop.helper.send({"n": 1})
    loop.until_reaped()
    assert loop.lost == 1


def test_a_process_that_is_ended_on_purpose_is_not_lost(loops: list[Loop]) -> None:
    """The owner knows already."""
    loop = Loop(_echo)
    loops.append(loop)
    loop.attach()
    loop.helper.kill()
    loop.until_reaped()
    loop.poller.wait(0.0)
    assert loop.lost == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_that_is_meant_for_the_job_does_not_end_it(loops: list[Loop], signum: int) -> None:
    """A scheduler sends it to every process of the job."""

    def serve(connection: Socket) -> None:
        os.kill(os.getpid(), signum)
        _echo(connection)

    loop = Loop(serve)
    loops.append(loop)
    loop.attach()
    loop.helper.send({"n": 1})
    loop.until(lambda: bool(loop.messages or loop.lost))
    assert loop.messages == [{"n": 1}]


def test_it_keeps_no_descriptor_but_its_own_and_those_it_is_given(loops: list[Loop]) -> None:
    """A port or a pipe of a rank that a helper holds open never comes free."""

    def serve(connection: Socket) -> None:
        fds = sorted(int(name) for name in os.listdir("/proc/self/fd"))
        # The listing itself has one open while it is read.
        JsonLines(connection).send({"fds": [fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")]})

    kept, other = os.pipe()
    try:
        loop = Loop(serve, keep=(kept,))
        loops.append(loop)
        loop.attach()
        loop.until(lambda: bool(loop.messages))
        fds = loop.messages[0]["fds"]
        assert kept in fds
        assert other not in fds
        assert len(fds) == 5  # three standard streams, the line, what was given
    finally:
        os.close(kept)
        os.close(other)


def test_descriptors_travel_with_a_message(loops: list[Loop]) -> None:
    """What is opened later can be handed over too."""

    def serve(connection: Socket) -> None:
        connection.setblocking(True)
        _, fds = receive_fds(connection, 4096, 4)
        os.write(fds[0], b"here")
        signal.pause()

    loop = Loop(serve)
    loops.append(loop)
    loop.attach()
    read_end, write_end = os.pipe()
    try:
        assert loop.helper.send({"take": 1}, [write_end])
        assert os.read(read_end, 100) == b"here"
    finally:
        os.close(read_end)
        os.close(write_end)


def test_the_rest_of_the_queue_is_sent_at_the_end() -> None:
    """A goodbye that nobody hears leaves the other side waiting."""
    ours, theirs = socket.socketpair()
    poller = Poller()
    lines = JsonLines(ours, poller)
    text = "x" * 1_000_000
    lines.send({"text": text})
    assert lines.queued_bytes > 0
    pid = os.fork()
    if pid == 0:
        received = b""
        while not received.endswith(b"\n"):
            received += theirs.recv(1 << 16)
        os._exit(len(received) > len(text))
    theirs.close()
    lines.drain(60.0)
    assert lines.queued_bytes == 0
    lines.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    poller.close()
