"""How long the end of a launch waits for whoever reads its output."""

from __future__ import annotations

import os
import select
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.console.target import Target
from saferun.launch import console_part
from saferun.launch.console_part import ConsolePart


class _Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


class _Screen:
    """A console with so much output left, whose reader takes one piece each so many seconds; 0: none ever."""

    def __init__(self, clock: _Clock, left: int, piece_s: float, kind: str) -> None:
        self.left = left
        self.panes = ()
        self.is_awaited = kind == "alone"
        self.awaits_file = kind == "file"
        self.unwritten_bytes = 0
        self._clock = clock
        self._piece_s = piece_s
        self._read_at = clock.now_s + piece_s

    @property
    def is_empty(self) -> bool:
        return not self.left

    def flush(self) -> bool:
        if not self._piece_s or self._clock.now_s < self._read_at or not self.left:
            return False
        self.left -= 1
        self._read_at = self._clock.now_s + self._piece_s
        return True

    def until_room_s(self) -> float:
        """How long it takes until the reader has made room."""
        return self._read_at - self._clock.now_s if self._piece_s else 1e9

    def release(self) -> None:
        """All streams have ended."""

    def enlarge(self) -> None:
        """This reader's pipe cannot have more room."""

    def finish(self) -> bool:
        """No more output will come."""
        return True

    def print_waiting(self, left_s: float) -> None:
        """This test does not look at stderr."""

    def print_unwritten(self) -> bool:
        return False

    def print_unread(self) -> bool:
        return False

    def close(self) -> None:
        """Drop the rest."""


def drained(
    monkeypatch: pytest.MonkeyPatch, *, left: int, piece_s: float, is_stopped: bool, kind: str
) -> tuple[int, float]:
    """What is left, and for how many seconds of the clock it was waited for; an endless wait fails.

    The console is a pipe of whose output files have a copy ("kept"), one without a copy ("alone"), or a "file".
    """
    clock = _Clock()
    screen = _Screen(clock, left, piece_s, kind)
    context: Any = SimpleNamespace(screen=screen, poller=None, run_dir=None)
    wakeup: Any = SimpleNamespace(is_stopped=is_stopped, fd=-1, is_hurried=lambda: False)
    monkeypatch.setattr(console_part, "time", clock)
    waits = iter(range(2000))

    def wait(_self: ConsolePart, _fd: int, timeout_s: float) -> bool:
        next(waits)
        clock.now_s += min(timeout_s, screen.until_room_s())
        return False

    monkeypatch.setattr(ConsolePart, "_wait", wait)
    ConsolePart(context).drain(wakeup)
    return screen.left, clock.now_s - 1000.0


@pytest.mark.parametrize(("kind", "waited_s"), [("kept", 2.0), ("alone", 10.0), ("file", 60.0)])
def test_after_an_order_to_stop_a_reader_that_does_not_read_gets_some_seconds(
    monkeypatch: pytest.MonkeyPatch, kind: str, waited_s: float
) -> None:
    """Schedulers kill what has not ended some seconds after it, and the exit code is theirs then.

    A file is no reader: a file system that stalls goes on, and then has the last lines and the verdict.
    """
    assert drained(monkeypatch, left=1, piece_s=0, is_stopped=True, kind=kind) == (1, waited_s)


def test_after_an_order_to_stop_a_reader_that_reads_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece that it takes shows that it reads."""
    assert drained(monkeypatch, left=5, piece_s=1.5, is_stopped=True, kind="kept") == (0, 7.5)


def test_after_an_order_to_stop_the_slowest_reader_gets_10_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that would need minutes is not worth the exit code: files have the rest."""
    left, waited_s = drained(monkeypatch, left=1000, piece_s=1.5, is_stopped=True, kind="kept")
    assert (left, waited_s) == (994, 10.0)


@pytest.mark.parametrize("kind", ["alone", "file"])
def test_after_an_order_to_stop_what_is_nowhere_else_is_waited_for_while_it_moves(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A slow line, a busy file server: the rest would be lost."""
    assert drained(monkeypatch, left=1000, piece_s=4.0, is_stopped=True, kind=kind) == (0, 4000.0)


def test_without_an_order_to_stop_a_slow_reader_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pager may show the first page for as long as its user reads it."""
    assert drained(monkeypatch, left=3, piece_s=500.0, is_stopped=False, kind="alone") == (0, 1500.0)


def test_beside_a_file_that_is_done_the_wait_for_a_full_one_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``> log 2> errors`` on a full disk, the end of the other process was seen again and again for a minute."""
    fds = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in ("log", "errors")]
    targets = [Target(fd, skipping=False, where=str, carries=True) for fd in fds]
    read_end, write_end = os.pipe()
    screen = SimpleNamespace(panes=[SimpleNamespace(target=target) for target in targets])
    context: Any = SimpleNamespace(screen=screen, poller=None, run_dir=None)
    targets[1].finish()
    done = targets[1].file
    assert done is not None
    assert select.select([done.end_fd], [], [], 60)[0]
    waits: list[float] = []

    class Poll:
        """Notes how long a wait is; one that something ends at once is 0 s."""

        def __init__(self) -> None:
            self.poll_here = select.poll()
            self.register = self.poll_here.register

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            found = self.poll_here.poll(0)
            waits.append(0.0 if found else timeout_ms)
            return found

    monkeypatch.setattr(
        console_part, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN, POLLOUT=select.POLLOUT)
    )
    assert not ConsolePart(context)._wait(read_end, time.monotonic() + 60)
    assert len(waits) == 1
    assert waits[0] > 0
    for target in targets:
        target.close()
    for fd in (*fds, read_end, write_end):
        os.close(fd)
