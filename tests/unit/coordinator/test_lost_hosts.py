"""Which silent hosts the leader gives up, by what is found out by knocking at them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.coordinator import attempt
from saferun.coordinator.attempt import Attempt
from saferun.coordinator.knock import CUT, FROZEN, GONE, UNKNOWN, UNREACHABLE, Finding

INTERVAL_S = 0.1


class Silent:
    """A monitor to whom a host has fallen silent; it beats again after so many looks, or never."""

    def __init__(self, beats_again_after: int | None) -> None:
        self._beats_again_after = beats_again_after
        self._looks = itertools.count()
        self.was_reset = False
        self.was_lost = False
        self.is_known = False

    def beats_of(self, _host: int) -> bytes:
        look = next(self._looks)
        return b"8" if self._beats_again_after is not None and look > self._beats_again_after else b"7"

    def reset(self, _host: int) -> None:
        self.was_reset = True

    def lose(self, _host: int) -> None:
        self.was_lost = True

    def miss(self, _host: int) -> bool:
        is_news, self.is_known = not self.is_known, True
        return is_news

    def is_missed(self, _host: int) -> bool:
        return self.is_known


def find_out(monkeypatch: pytest.MonkeyPatch, monitor: Silent, why: str) -> list[dict[str, Any]]:
    """What the leader's supervisor is told of host 1."""
    told: list[dict[str, Any]] = []
    leader = Attempt.__new__(Attempt)
    record = SimpleNamespace(addresses=("10.0.0.2",), port=1, tasks=())
    stand_ins: dict[str, Any] = {
        "_monitor": monitor,
        "_labels": ["node1", "node2"],
        "_records": [None, record],
        "_own": SimpleNamespace(addresses=("10.0.0.1",)),
        "_interval_s": INTERVAL_S,
        "_closed": False,
        "_has_one_port": False,
        "_tasks": SimpleNamespace(head=SimpleNamespace(send=told.append)),
        "log": SimpleNamespace(has=lambda _kind: False),
        "number": 0,
    }
    for name, value in stand_ins.items():
        setattr(leader, name, value)
    monkeypatch.setattr(attempt, "knock", lambda *_arguments, **_more: Finding(why, "in words"))
    leader._find_out(1)
    return told


def test_a_host_that_answers_and_beats_again_a_moment_later_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still, and goes on while it is knocked at: its answer is there before its beat is."""
    monitor = Silent(beats_again_after=3)
    assert find_out(monkeypatch, monitor, CUT) == []
    assert (monitor.was_reset, monitor.was_lost) == (True, False)


def test_a_host_whose_saferun_is_gone_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks ended with it."""
    monitor = Silent(beats_again_after=None)
    assert [(told["op"], told["host"], told["why"]) for told in find_out(monkeypatch, monitor, GONE)] == [
        ("lost", 1, GONE)
    ]
    assert (monitor.was_reset, monitor.was_lost) == (False, True)


@pytest.mark.parametrize("why", [CUT, UNREACHABLE, UNKNOWN, FROZEN])
def test_a_host_whose_ranks_may_be_at_work_is_not_given_up(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """The way to it may be cut, or its saferun stopped; once it is missed, nothing found later proves its death."""
    monitor = Silent(beats_again_after=None)
    for found in (why, GONE):
        told = find_out(monkeypatch, monitor, found)
        assert [(message["op"], message["host"], message["why"]) for message in told] == [("unheard", 1, found)]
    assert not monitor.was_lost
