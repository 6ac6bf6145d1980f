"""Processes that no signal ends, and others that are none of the ranks': left alone for as long as they live."""

from __future__ import annotations

import os

import pytest

from saferun.launch import rank_processes
from saferun.launch.orphans import Orphans
from saferun.linux.procfs import Stat
from saferun.model import ExitStatus

PID = 1 << 22  # one above the largest that Linux gives


class Numbers:
    """Processes by number, as /proc shows them: when they were started; all are the run's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started = {PID: 100}
        monkeypatch.setattr(rank_processes, "descendants_of", self.descendants)
        monkeypatch.setattr(rank_processes, "belongs_to_run", lambda _pid, _run_id: True)
        monkeypatch.setattr(rank_processes, "read_stat", self.stat)
        monkeypatch.setattr(os, "getsid", self.session)
        self.said: list[str] = []
        self.orphans = Orphans(
            "run",
            not_ours=frozenset({PID + 1}),
            exempt=set,
            on_gone=lambda _pids: None,
            report=self.said.append,
            report_wait=self.said.append,
            warn=self.said.append,
        )

    def descendants(self, _pid: int, leave_out: frozenset[int]) -> list[int]:
        return [pid for pid in self.started if pid not in leave_out]

    def stat(self, pid: int | str) -> Stat | None:
        started = self.started.get(int(pid))
        return Stat("D", 1, 0.0, 1, started) if started is not None else None

    def session(self, pid: int) -> int:
        if pid not in self.started:
            raise ProcessLookupError
        return pid


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> Numbers:
    return Numbers(monkeypatch)


def test_what_is_given_up_is_left_alone_as_long_as_it_lives(numbers: Numbers) -> None:
    numbers.orphans.give_up([PID])
    for _ in range(2):
        assert numbers.orphans.remaining() == []
        numbers.orphans.begin_attempt()


@pytest.mark.parametrize("is_seen", [True, False])
def test_its_number_may_be_that_of_one_to_be_ended(numbers: Numbers, *, is_seen: bool) -> None:
    """It was left alone with all its descendants, in every later attempt."""
    numbers.orphans.give_up([PID])
    numbers.started.clear()
    if is_seen:
        assert numbers.orphans.remaining() == []
    numbers.started[PID] = 200
    assert numbers.orphans.remaining() == [PID]


@pytest.mark.parametrize("pid", [PID, PID + 1], ids=["given up", "from before the launch"])
def test_the_number_of_one_that_has_been_reaped_is_another_s(numbers: Numbers, pid: int) -> None:
    """Even where /proc shows the same start: its ticks are of 10 ms."""
    numbers.started = {pid: 100}
    if pid == PID:
        numbers.orphans.give_up([pid])
    assert numbers.orphans.remaining() == []
    assert not numbers.orphans.on_exit(pid, ExitStatus(0, None))
    assert numbers.orphans.remaining() == [pid]
