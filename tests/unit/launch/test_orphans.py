"""Orphaned processes: those that wait for a disk, so that whose they are cannot be read now, and those that live on."""

from __future__ import annotations

import os

import pytest

from saferun.launch import orphans
from saferun.launch.orphans import Orphans
from saferun.linux import connections
from saferun.watchdog import wait_sampler

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
    processes.orphans.begin(0.0, 0.1, ends_all=True)
    processes.belongs = None
    for now in (1.0, 3.0, 30.0):
        processes.orphans.sweep(now)
    assert processes.gone == []


def named() -> str:
    """How a process without anything is called."""
    return f"a process without a command line (pid {PID})"


class Detached(Processes):
    """Processes with the environment of a rank; ``killed`` are those that have got a signal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.belongs = True
        self.pids = [PID]
        self.run_id = "run"
        self.gpu_users: set[int] = set()
        self.listeners: set[int] = set()
        self.killed: list[int] = []
        self.session_of: dict[int, int] = {}
        monkeypatch.setattr(orphans, "descendants_of", lambda _pid, _leave_out: list(self.pids))
        monkeypatch.setattr(orphans, "read_environ_entry", self.variable)
        monkeypatch.setattr(wait_sampler, "uses_gpu", self.gpu_users.__contains__)
        monkeypatch.setattr(connections, "listens_on", self.listens_on)
        monkeypatch.setattr(os, "kill", self.kill)
        monkeypatch.setattr(os, "getsid", lambda pid: self.session_of.get(pid, pid))
        monkeypatch.setattr(orphans, "living_processes", lambda: list(self.pids))

    def variable(self, _pid: int, name: str) -> str:
        return {"SAFERUN_RUN_ID": self.run_id, "MASTER_PORT": "29500", "RANK": "3"}[name]

    def listens_on(self, pid: int, port: str) -> bool:
        return pid in self.listeners and port == "29500"

    def kill(self, pid: int, _signum: int) -> None:
        self.killed.append(pid)

    def sweep_s(self, seconds: float, *, begin: float = 0.0) -> None:
        """Sweep after a failure for so long."""
        for tick in range(int(seconds / 0.1) + 1):
            if not self.gone:
                self.orphans.sweep(begin + tick * 0.1)


@pytest.fixture
def detached(monkeypatch: pytest.MonkeyPatch) -> Detached:
    return Detached(monkeypatch)


def test_after_a_failure_one_in_a_session_of_its_own_is_left(detached: Detached) -> None:
    """An upload of a checkpoint, from which the next attempt resumes; torchrun leaves it alone."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    assert (detached.gone, detached.killed) == ([()], [])
    assert detached.said == [f"rank 3 left 1 process in a session of its own: {named()}; it is not ended"]
    assert detached.orphans.is_left


def test_a_helper_that_ends_by_itself_is_not_reported(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.orphans.sweep(0.1)
    assert detached.gone == []
    detached.pids.clear()
    detached.orphans.sweep(0.2)
    assert (detached.gone, detached.said) == ([()], [])
    assert not detached.orphans.is_left


@pytest.mark.parametrize("why", ["gpu", "port", "option", "another launcher's", "a rank's session"])
def test_what_is_in_the_way_of_the_next_attempt_is_ended(detached: Detached, why: str) -> None:
    if why == "gpu":
        detached.gpu_users.add(PID)
    elif why == "port":
        detached.listeners.add(PID)
    elif why == "another launcher's":
        detached.run_id = "inner"
    elif why == "a rank's session":
        detached.session_of[PID] = PID + 1
        detached.orphans.note_rank(PID + 1, 3)
    detached.orphans.begin(0.0, 2.0, ends_all=why == "option")
    detached.sweep_s(3.0)
    assert PID in detached.killed
    assert detached.said == [f"ending 1 process of rank 3: {named()}"]


def test_one_that_is_being_ended_is_not_left(detached: Detached) -> None:
    """It was idle after ranks that ended well, and a signal has come since."""
    detached.orphans.begin(0.0, 2.0, wait_s=600.0, idle_s=0.0)
    assert detached.killed == [PID]
    detached.orphans.begin(1.0, 2.0)
    detached.sweep_s(3.0, begin=1.0)
    assert len(detached.killed) > 1
    assert not any("session" in line for line in detached.said)


def test_one_that_waits_for_a_disk_for_a_moment_is_left_all_the_same(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.belongs, detached.run_id = None, ""
    detached.orphans.sweep(0.1)
    detached.belongs, detached.run_id = True, "run"
    detached.sweep_s(1.0, begin=0.2)
    assert (detached.gone, detached.killed) == ([()], [])


def test_what_an_attempt_has_left_is_none_of_the_next_one_s(detached: Detached) -> None:
    """Nor are its descendants; at the end of the launch it lives on."""
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.orphans.begin_attempt()
    assert detached.orphans.remaining() == []
    detached.session_of[PID + 1] = PID
    detached.pids.append(PID + 1)
    assert detached.orphans.remaining() == []
    detached.orphans.close()
    assert detached.killed == []


def test_a_rank_may_get_the_number_of_a_session_that_was_left(detached: Detached) -> None:
    detached.orphans.begin(0.0, 2.0)
    detached.sweep_s(1.0)
    detached.pids.clear()
    detached.orphans.begin_attempt()
    assert not detached.orphans.is_left
    detached.pids.append(PID)
    detached.orphans.note_rank(PID, 3)
    assert detached.orphans.remaining() == [PID]
