"""A command that nothing can end costs little, and holds up no other one for long."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch import event_commands
from saferun.launch.event_commands import CommandLimits, EventCommands

END_S = 32.0  # SIGTERM after 30 s, SIGKILL 2 s later


class Stuck:
    """A command that ignores all signals, as a process does that waits for a disk; and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.scans = 0
        self.answers: list[dict[str, Any]] = []
        connection: Any = SimpleNamespace(sendall=lambda line: self.answers.append(json.loads(line)))
        monkeypatch.setattr(event_commands, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.commands = EventCommands(connection, ("sleep", "1000"), dict(os.environ), CommandLimits())
        self.commands._start({"number": 7, "event": {"kind": "end"}})
        (self.pid,) = self.commands._running
        while os.getsid(self.pid) != self.pid:
            os.sched_yield()  # real time has to pass for it
        monkeypatch.setattr(event_commands, "living_processes", self._scan)
        for name in ("kill", "killpg"):
            monkeypatch.setattr(os, name, lambda *_: None)

    def _scan(self) -> list[int]:
        self.scans += 1
        return [self.pid]

    def wait(self, until_s: float) -> None:
        """Check every 50 ms, as the process does."""
        while self.now < until_s:
            self.now += 0.05
            self.commands._check()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        stuck = Stuck(monkeypatch)
        yield stuck
    os.kill(stuck.pid, signal.SIGKILL)
    os.waitpid(stuck.pid, 0)


def test_what_cannot_be_killed_is_tried_again_less_and_less_often(stuck: Stuck) -> None:
    """Each try reads all of /proc."""
    stuck.wait(END_S + 0.5)
    assert stuck.scans == 2, "one for what is there, and one for what that has started meanwhile"
    stuck.wait(END_S + 1.5)
    assert stuck.scans == 3
    stuck.wait(END_S + 290)
    assert stuck.scans <= 12
    assert stuck.answers == []


def test_what_cannot_be_killed_is_given_up(stuck: Stuck) -> None:
    """Its place is another command's then."""
    stuck.wait(END_S + 301)
    (answer,) = stuck.answers
    assert (answer["number"], answer["is_late"], answer["is_stuck"]) == (7, True, True)
    assert answer["returncode"] == -signal.SIGKILL
    assert not stuck.commands._running
    scans = stuck.scans
    stuck.wait(END_S + 400)
    assert (stuck.scans, len(stuck.answers)) == (scans, 1)
