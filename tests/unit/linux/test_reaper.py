"""What a reaper that takes the place of another one knows of the ranks."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from saferun.linux import reaper as module
from saferun.linux.reaper import Reaper
from saferun.linux.sessions import Sessions

if TYPE_CHECKING:
    from collections.abc import Callable

EARLIER, EMPTY, LEFT, RUNNING = 11, 12, 13, 14


def test_another_one_knows_at_once_the_ranks_that_run_and_those_that_left_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor may be killed the moment it is there.

    A number may be that of a stranger's session by now, whose processes it would kill.
    """
    known: list[Any] = []

    def wait_for_the_end(*arguments: Any, **_: Any) -> None:
        known.append(module._Known(*arguments[-2:]))

    def forked(run: Callable[[], None]) -> int:
        run()
        return 1

    monkeypatch.setattr(module, "_wait_for_the_end", wait_for_the_end)
    monkeypatch.setattr(module, "fork", forked)
    monkeypatch.setattr(module, "living_processes", lambda: [100])
    # Only one of the ranks that were reaped has left a process.
    monkeypatch.setattr(Sessions, "session_of", lambda sessions, _pid: LEFT if sessions else None)
    reaper = Reaper("run")
    reaper.note_made("/dev/shm/run", (5, 6))
    reaper.note_started(EARLIER, 1)
    reaper.note_ended(EARLIER)
    reaper.begin_attempt()
    for pid in (EMPTY, LEFT, RUNNING):
        reaper.note_started(pid, pid * 10)
    for pid in (EMPTY, LEFT):
        reaper.note_ended(pid)
    os.close(reaper.witness_fd)
    reaper.replace()
    os.close(reaper.witness_fd)
    os.close(reaper._write_end)
    first, another = known
    assert (first.sessions._leaders, first.made, first.check_s) == ({}, {}, None)
    assert another.sessions._leaders == {LEFT: LEFT * 10, RUNNING: RUNNING * 10}
    assert another.made == {"/dev/shm/run": (5, 6)}
    assert another.check_s is not None  # for when what is left has ended
