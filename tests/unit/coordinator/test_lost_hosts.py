"""Which silent hosts the leader gives up, by what is found out by knocking at them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from saferun.coordinator.assignments import HostRecord, TaskRecord
from saferun.coordinator.liveness import Liveness
from saferun.coordinator.liveness_probe import CUT, FROZEN, GONE, UNKNOWN, UNREACHABLE, SilenceReason

INTERVAL_S = 0.1


class Silent:
    """A monitor to whom a host has fallen silent; it heartbeats again after so many looks, or never."""

    def __init__(self, beats_again_after: int | None) -> None:
        self._beats_again_after = beats_again_after
        self._with_processes = itertools.count()
        self.was_reset = False
        self.was_lost = False
        self.is_known = False

    def heartbeat_of(self, _host: int) -> bytes:
        look = next(self._with_processes)
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


def find_out(monitor: Silent, why: str) -> list[dict[str, Any]]:
    """What the leader's supervisor is told of host 1."""
    told: list[dict[str, Any]] = []
    record = HostRecord("node2", (TaskRecord(1, "default", 1),), ("10.0.0.2",), 1)
    liveness = Liveness(
        [record, record],
        ["node1", "node2"],
        ("10.0.0.1",),
        INTERVAL_S,
        has_one_port=False,
        report=lambda op, fields: told.append({"op": op, **fields}),
        probe=lambda *_arguments, **_more: SilenceReason(why, "in words"),
    )
    stand_in: Any = monitor
    liveness.monitor = stand_in
    liveness._find_out(1)
    return told


def test_a_host_that_answers_and_beats_again_a_moment_later_is_not_lost() -> None:
    """It stood still, and goes on while it is knocked at: its answer is there before its heartbeat is."""
    monitor = Silent(beats_again_after=3)
    assert find_out(monitor, CUT) == []
    assert (monitor.was_reset, monitor.was_lost) == (True, False)


def test_a_host_whose_saferun_is_gone_is_lost() -> None:
    """Its ranks ended with it."""
    monitor = Silent(beats_again_after=None)
    assert [(told["op"], told["host"], told["why"]) for told in find_out(monitor, GONE)] == [("lost", 1, GONE)]
    assert (monitor.was_reset, monitor.was_lost) == (False, True)


@pytest.mark.parametrize("why", [CUT, UNREACHABLE, UNKNOWN, FROZEN])
def test_a_host_whose_ranks_may_be_at_work_is_not_given_up(why: str) -> None:
    """The way to it may be cut, or its saferun stopped; once it is missed, nothing found later proves its death."""
    monitor = Silent(beats_again_after=None)
    for found in (why, GONE):
        told = find_out(monitor, found)
        assert [(message["op"], message["host"], message["why"]) for message in told] == [("unheard", 1, found)]
    assert not monitor.was_lost
