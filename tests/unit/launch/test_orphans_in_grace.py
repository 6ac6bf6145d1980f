"""Orphaned processes that handle the signal which ends the job: they have what is left of their rank's grace."""

from __future__ import annotations

import os
import signal

import pytest

from saferun.launch import orphans
from saferun.launch.orphans import Grace
from saferun.linux.procfs import Stat
from tests.unit.launch.test_orphans import PID, Detached

RANK = PID + 100  # has ended
OTHER_RANK = PID + 200
TERM_S, GRACE_S = 2.0, 28.0
TERM, INT, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGKILL


class Stopped(Detached):
    """What a rank has left that a signal has ended: one process in its session, which handles SIGTERM."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.signals: list[tuple[int, int]] = []  # pid and number of each that was sent
        self.caught: dict[int, set[int]] = {PID: {TERM}}
        self.group_of: dict[int, int] = {}
        self.stopped: set[int] = set()
        self.session_of = {PID: RANK, PID + 1: RANK}
        monkeypatch.setattr(orphans, "caught_signals", lambda pid: frozenset(self.caught.get(pid, ())))
        monkeypatch.setattr(os, "getpgid", lambda pid: self.group_of.get(pid, self.session_of.get(pid, pid)))

    def stat(self, pid: int | str) -> Stat | None:
        stat = super().stat(pid)
        return stat._replace(state="T") if stat is not None and pid in self.stopped else stat

    def kill(self, pid: int, signum: int) -> None:
        if signum:
            self.signals.append((pid, signum))

    def begin(self, signum: int = TERM, ranks: tuple[int, ...] = (RANK,)) -> None:
        self.orphans.begin(0.0, TERM_S, grace=Grace(signum, frozenset(ranks), GRACE_S))

    def run(self, begin: float, end: float) -> None:
        """Let the loop sweep whenever that is due."""
        for tick in range(int((end - begin) / 0.05)):
            self.orphans.tick(begin + tick * 0.05)


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    return Stopped(monkeypatch)


def test_training_that_saves_a_checkpoint_gets_no_second_signal_and_has_the_grace(stopped: Stopped) -> None:
    """Its rank is a shell, which ends at once of the signal that both have had. It had two seconds."""
    stopped.begin()
    stopped.run(0.0, GRACE_S - 1.0)
    assert (stopped.signals, stopped.gone) == ([], [])
    stopped.pids = []
    stopped.run(GRACE_S - 1.0, GRACE_S)
    assert stopped.gone == [()]  # nothing had to be ended


def test_sigkill_follows_when_the_grace_is_over(stopped: Stopped) -> None:
    """And no SIGTERM before it: it has had its signal."""
    stopped.begin()
    stopped.run(0.0, GRACE_S)
    stopped.orphans.tick(GRACE_S)
    assert stopped.signals == [(PID, KILL)]
    assert stopped.said[-1].endswith(", which had not ended in time")
    stopped.pids = []
    stopped.run(GRACE_S, GRACE_S + 1.0)
    assert stopped.gone == [(PID,)]


def test_it_is_reported_once_with_the_time_that_is_left(stopped: Stopped) -> None:
    """Helper processes that end by themselves when their rank is gone are not."""
    stopped.begin()
    stopped.run(0.0, 0.9)
    assert stopped.said == []
    stopped.run(0.9, GRACE_S - 0.1)
    name = f"a process without a command line (pid {PID})"
    assert stopped.said == [f"waiting for 1 process of rank 3: {name}; SIGKILL follows in 27 s, or at Ctrl-C"]


def test_one_that_does_not_handle_the_signal_is_ended_as_after_a_failure(stopped: Stopped) -> None:
    """A helper process that ignores SIGTERM would take all of the grace for nothing."""
    stopped.caught = {PID: {INT}}
    stopped.begin()
    assert stopped.signals == [(PID, TERM)]
    stopped.run(0.0, TERM_S + 0.2)
    assert stopped.signals[1] == (PID, KILL)


def test_at_ctrl_c_one_that_handles_sigint_is_not_sent_sigterm(stopped: Stopped) -> None:
    """`conda run` ends at Ctrl-C before the script below it, whose handler is for SIGINT: SIGTERM ended it at once."""
    stopped.caught = {PID: {INT}}
    stopped.begin(INT)
    stopped.run(0.0, GRACE_S - 0.1)
    assert stopped.signals == []


def test_what_a_rank_left_that_ended_before_the_signal_has_not_had_it(stopped: Stopped) -> None:
    """Only ranks that are there are signalled."""
    stopped.begin(ranks=(OTHER_RANK,))
    assert stopped.signals == [(PID, TERM)]


def test_without_a_grace_there_is_none(stopped: Stopped) -> None:
    """After a failure the next attempt needs the GPUs."""
    stopped.orphans.begin(0.0, TERM_S)
    assert stopped.signals == [(PID, TERM)]


def test_one_in_a_process_group_of_its_own_has_not_had_the_signal_and_gets_it_once(stopped: Stopped) -> None:
    """timeout(1) makes one within the session, so the rank's signal did not reach the training below it."""
    stopped.group_of[PID] = PID
    stopped.begin()
    stopped.run(0.0, GRACE_S - 0.1)
    assert stopped.signals == [(PID, TERM)]


def test_a_process_that_is_stopped_goes_on_to_handle_its_signal(stopped: Stopped) -> None:
    stopped.stopped = {PID}
    stopped.begin()
    assert stopped.signals == [(PID, signal.SIGCONT)]


def test_what_it_has_started_is_left_to_it(stopped: Stopped) -> None:
    """A process that holds what it saves may ignore the signal, or have a session of its own, as a rank's may."""
    stopped.pids = [PID, PID + 1, PID + 2]
    stopped.parents = {PID + 1: PID, PID + 2: PID + 1}
    stopped.begin()
    stopped.run(0.0, 5.0)
    assert stopped.signals == []
    assert stopped.said[0].startswith("waiting for 1 process of rank 3: ")
    stopped.pids = [PID + 1]
    stopped.parents = {}
    stopped.run(5.0, 5.6)
    assert stopped.signals == [(PID + 1, TERM)]


def test_others_are_ended_beside_it(stopped: Stopped) -> None:
    stopped.pids = [PID, PID + 1]
    stopped.begin()
    stopped.run(0.0, TERM_S + 0.2)
    assert set(stopped.signals) == {(PID + 1, TERM), (PID + 1, KILL)}
    assert stopped.gone == []


def test_one_that_no_longer_handles_the_signal_keeps_the_grace(stopped: Stopped) -> None:
    """A script may restore the default when it begins to save."""
    stopped.begin()
    stopped.caught = {}
    stopped.run(0.0, GRACE_S - 0.1)
    assert stopped.signals == []


def test_ctrl_c_ends_the_grace(stopped: Stopped) -> None:
    stopped.begin()
    stopped.run(0.0, 1.5)
    stopped.orphans.begin(1.5, 0.0)
    assert stopped.signals == [(PID, KILL)]
    assert stopped.said[-1].startswith("ending 1 process of rank 3: ")


def test_the_next_attempt_knows_nothing_of_it(stopped: Stopped) -> None:
    stopped.begin()
    stopped.orphans.begin_attempt()
    stopped.orphans.note_rank(RANK, 3, {})
    stopped.orphans.begin(5.0, TERM_S)
    assert stopped.signals == [(PID, TERM)]
