"""Orphaned processes that wait for a disk, so that whose they are cannot be read now."""

from __future__ import annotations

import pytest

from saferun.launch import orphans
from saferun.launch.orphans import Orphans

PID = 1 << 22  # one above the largest that Linux gives


class Processes:
    """One process that a rank has left, in a session of its own, and what is said of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.belongs: bool | None = None
        self.gone: list[tuple[int, ...]] = []
        self.said: list[str] = []
        monkeypatch.setattr(orphans, "descendants_of", lambda _pid, _leave_out: [PID])
        monkeypatch.setattr(orphans, "belongs_to_run", lambda _pid, _run_id: self.belongs)
        self.orphans = Orphans(
            "run",
            not_ours=frozenset(),
            exempt=set,
            on_gone=self.gone.append,
            report=self.said.append,
            warn=self.said.append,
        )


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_one_that_waits_for_a_disk_is_at_work(processes: Processes) -> None:
    """An upload of what the rank has written is in state D most of the time: it is waited for like any other."""
    processes.orphans.begin(0.0, 0.1, wait_s=600.0, idle_s=30.0)
    for now in (1.0, 60.0, 599.0):
        processes.orphans.sweep(now)
    assert processes.gone == []
    processes.orphans.sweep(601.0)
    processes.orphans.sweep(604.0)
    assert processes.gone == [()]
    assert processes.said == ["may be left behind, asleep in the kernel (state D): 1 process: " + named()]


def test_one_whose_state_never_changes_is_left_after_a_failure(processes: Processes) -> None:
    """The next attempt does not wait for it."""
    processes.orphans.begin(0.0, 0.1)
    processes.orphans.sweep(1.0)
    assert processes.gone == []
    processes.orphans.sweep(3.0)
    assert processes.gone == [()]


def test_one_that_has_been_known_stays_so(processes: Processes) -> None:
    """What it is called and whose it is was read once, while it did not wait."""
    processes.belongs = True
    processes.orphans.begin(0.0, 0.1)
    processes.belongs = None
    for now in (1.0, 3.0, 30.0):
        processes.orphans.sweep(now)
    assert processes.gone == []


def named() -> str:
    """How a process without anything is called."""
    return f"a process without a command line (pid {PID})"
