"""Handlers that fail, and one that is called although there is nothing to be read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.errors import suppress
from saferun.launch.guarded_poller import GuardedPoller
from saferun.launch.passed_signals import PassedSignals
from saferun.linux.poller import Poller


class Watched:
    """A pipe that has something to be read, and the pollers."""

    def __init__(self) -> None:
        self.fd, self.write_end = os.pipe()
        os.write(self.write_end, b"x")
        self.poller = Poller()
        self.guarded_poller = GuardedPoller(self.poller, self._succeeds)

    def _succeeds(self, handler: Callable[[], None]) -> bool:
        with suppress(RuntimeError):
            handler()
            return True
        return False

    def close(self) -> None:
        self.poller.close()
        os.close(self.fd)
        os.close(self.write_end)


@pytest.fixture
def watched() -> Iterator[Watched]:
    one = Watched()
    yield one
    one.close()


def fail() -> None:
    raise RuntimeError("a mistake")


def test_a_handler_that_fails_is_not_called_again(watched: Watched) -> None:
    """What it has not read would wake the loop all the time."""
    watched.guarded_poller.watch(watched.fd, fail)
    watched.poller.wait(0)
    assert not watched.poller.is_watched(watched.fd)


def test_one_that_has_given_its_number_away_before_takes_it_from_nobody(watched: Watched) -> None:
    """A rank's pipe that was opened by then was not read any more, and the rank waited for ever."""
    read = list[int]()

    def replace() -> None:
        watched.guarded_poller.unwatch(watched.fd)
        watched.poller.watch(watched.fd, lambda: read.append(1))
        fail()

    watched.guarded_poller.watch(watched.fd, replace)
    watched.poller.wait(0)
    watched.poller.wait(0)
    assert read == [1]


def test_a_witness_that_has_said_nothing_is_not_gone(watched: Watched) -> None:
    """Without it no signal is passed on any more."""
    context: Any = SimpleNamespace(guarded_poller=watched.guarded_poller)
    passed = PassedSignals(context, 0, os.dup(watched.fd))
    passed._watch_witness()
    passed._on_witness()
    passed._on_witness()
    assert passed._witness_fd >= 0
    os.close(watched.write_end)
    watched.write_end = os.dup(watched.fd)
    passed._on_witness()
    assert passed._witness_fd < 0
