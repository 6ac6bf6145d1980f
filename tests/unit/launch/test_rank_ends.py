"""The end of a rank, as its pidfd tells of it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.launch import rank_actions
from saferun.launch.rank_actions import RankActions
from saferun.launch.rank_terminals import RankTerminals
from saferun.linux.children import Child
from saferun.linux.poller import Poller


class Launch:
    """A launch with one rank, which ends as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_reaped: bool) -> None:
        self.fd, self.write_end = os.pipe()
        self.rank: Any = SimpleNamespace(child=Child(77, self.fd), end=None, pid=77, assignment=SimpleNamespace(rank=3))
        self.said: list[str] = []
        self.poller = Poller()
        self.reaped = 0
        self.is_reaped = is_reaped
        self.actions = RankActions.__new__(RankActions)
        context = SimpleNamespace(poller=self.poller, loop=SimpleNamespace(reap=self.reap), warn=self.said.append)
        self.actions.__dict__["_context"] = context
        monkeypatch.setattr(rank_actions, "read_pairs", lambda _path: {"TracerPid": "99"})
        self.actions._watch_end(cast("Any", self.rank))
        os.write(self.write_end, b"x")

    def reap(self) -> None:
        self.reaped += 1
        if self.is_reaped:
            self.poller.unwatch(self.fd)
            self.rank.end = object()

    def close(self) -> None:
        self.poller.close()
        os.close(self.fd)
        os.close(self.write_end)


def test_one_that_a_debugger_holds_is_said_and_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pidfd stays ready: the loop took a whole processor until the debugger let go."""
    launch = Launch(monkeypatch, is_reaped=False)
    for _ in range(3):
        launch.poller.wait(0)
    assert launch.reaped == 1
    (line,) = launch.said
    assert line.startswith("rank 3 (pid 77) has ended, but process 99 traces it")
    launch.close()


def test_one_that_is_reaped_is_not_spoken_of(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = Launch(monkeypatch, is_reaped=True)
    launch.poller.wait(0)
    assert (launch.reaped, launch.said) == (1, [])
    launch.close()


def test_where_no_rank_has_a_terminal_any_more_the_keyboard_wakes_nobody() -> None:
    """What was due was never done, and due all the time: Enter, and ranks that ended at that moment."""
    output, watch = SimpleNamespace(attach=""), SimpleNamespace(pdb=False, pdb_timeout_s=0.0)
    context: Any = SimpleNamespace(config=SimpleNamespace(output=output, watch=watch))
    terminals = RankTerminals(context)
    terminals._watch_at = terminals._announce_at = 1.0
    assert terminals.deadline is None
