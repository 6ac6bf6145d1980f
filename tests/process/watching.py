"""Somebody who exchanges files as fast as inotify tells of them being touched."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.process.somebody import start_as_user

_LIBC = ctypes.CDLL(None, use_errno=True)
ROUNDS = pytest.mark.parametrize("rounds", [20, pytest.param(200, marks=pytest.mark.slow)])
_MOST_MORE = 300
_IN_ALL_EVENTS = 0xFFF
_READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1


def rounds_until(rounds: int, acted: list[int]) -> Iterator[int]:
    """The numbers of the rounds, and of some more: on a busy machine an attacker may come too late a few times.

    Args:
        rounds: how many there are.
        acted: those in which the attacker has done something.
    """
    for number in range(rounds + _MOST_MORE):
        if number >= rounds and acted:
            return
        yield number
    assert acted, "the attacker has never been quick enough to be of any use here"


class Attacker:
    """Another user's process, for the time of a with block; it is at work when the block begins.

    Args:
        attack: what it does. It watches, says that it is ready, waits for something to happen, and acts, for as long as
            it ``goes_on``. It must not import anything.
        uid: whose process it is; this user's own by default where there is no other one.
    """

    def __init__(self, attack: Callable[[Attacker], None], uid: int | None = None) -> None:
        self._attack = attack
        self._uid = uid
        self._inotify = -1
        self._ready_read, self._ready_write = os.pipe()
        self._pid = 0
        self.goes_on = True

    def __enter__(self) -> Self:
        more = {} if self._uid is None else {"uid": self._uid}
        self._pid = start_as_user(self._run, **more)
        os.close(self._ready_write)
        assert os.read(self._ready_read, 1) == b"x", "the attacker has failed"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.kill(self._pid, signal.SIGTERM)
        _, status = os.waitpid(self._pid, 0)
        os.close(self._ready_read)
        if kind is None:
            assert os.WIFEXITED(status), status
            assert os.WEXITSTATUS(status) == 0, "the attacker has failed"

    # ---------------------------------------------------------------------------------------------- in its own process

    def _run(self) -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # It ends between two actions, and not within one.
        self._end_read, end_write = os.pipe()
        os.set_blocking(end_write, False)
        signal.set_wakeup_fd(end_write)
        signal.signal(signal.SIGTERM, lambda *_: None)
        self._inotify = _LIBC.inotify_init1(os.O_NONBLOCK)
        self._attack(self)

    def watch(self, directory: Path | str) -> None:
        """Be told of what happens in a directory."""
        assert _LIBC.inotify_add_watch(self._inotify, os.fsencode(directory), _IN_ALL_EVENTS) >= 0

    def is_ready(self) -> None:
        """It may begin."""
        os.write(self._ready_write, b"x")

    def wait(self) -> None:
        """Until somebody else does something, or the block ends."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._inotify, _READ_BYTES)  # what it has done itself
        poll = select.poll()
        poll.register(self._inotify, select.POLLIN)
        poll.register(self._end_read, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        if self._inotify in ready:
            os.read(self._inotify, _READ_BYTES)
        if self._end_read in ready:
            self.goes_on = False
