"""What a reaper that takes the place of another one learns of the ranks."""

from __future__ import annotations

import os

import pytest

from saferun.linux import reaper as module
from saferun.linux.reaper import Reaper
from saferun.linux.sessions import Sessions

EARLIER, EMPTY, LEFT, RUNNING = 11, 12, 13, 14


@pytest.fixture
def reaper(monkeypatch: pytest.MonkeyPatch) -> Reaper:
    """One that is never forked: its records stay in a pipe. Only one of the ranks that were reaped left a process."""
    monkeypatch.setattr(module, "fork", lambda _run: 1)
    monkeypatch.setattr(module, "living_processes", lambda: [100])
    monkeypatch.setattr(Sessions, "session_of", lambda sessions, _pid: LEFT if sessions else None)
    return Reaper("run")


def test_another_one_hears_of_ranks_that_run_and_of_those_that_left_processes(
    reaper: Reaper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number may be that of a stranger's session by now, whose processes it would kill if saferun were killed."""
    reaper.note_started(EARLIER, 1)
    reaper.note_ended(EARLIER)
    reaper.begin_attempt()
    for pid in (EMPTY, LEFT, RUNNING):
        reaper.note_started(pid, pid * 10)
    for pid in (EMPTY, LEFT):
        reaper.note_ended(pid)
    written: list[tuple[bytes, int, int]] = []

    def note(what: bytes, first: int = 0, _second: int = 0, *, pid: int = 0, **_: object) -> None:
        written.append((what, pid, first))

    monkeypatch.setattr(reaper, "_write", note)
    os.close(reaper.witness_fd)
    reaper.replace()
    os.close(reaper.witness_fd)
    os.close(reaper._write_end)
    assert written == [(b"s", LEFT, LEFT * 10), (b"e", LEFT, 0), (b"s", RUNNING, RUNNING * 10)]
