"""The processes of this host, as saferunctl reads them."""

from __future__ import annotations

import os

import psutil
import pytest

from saferun.ctl import live_stacks


def test_the_environment_of_a_process_in_uninterruptible_sleep_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads it may wait as long as that process, and no signal ends that."""
    stuck = os.getppid()
    read: list[int] = []

    def environ(self: psutil.Process) -> dict[str, str]:
        read.append(self.pid)
        return {"RANK": "3"}

    monkeypatch.setattr(psutil.Process, "environ", environ)
    monkeypatch.setattr(live_stacks, "waits_uninterruptibly", lambda pid: pid == stuck)
    found = live_stacks.read_processes()
    assert stuck not in read
    assert (found[stuck].rank, found[stuck].is_readable) == (-1, False)
    assert all(found[pid].rank == 3 for pid in read)
