"""The file that keeps the story of a launch: when it is written, and what is not in it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from saferun.launch.event_log import StoryFile
from saferun.supervisor.events import Diagnosed, LaunchRequested, StartFailed
from saferun.supervisor.machine import Limits, Supervisor
from saferun.supervisor.policy import AttemptPolicy
from tests.unit.supervisor.fake_world import DIAGNOSIS

TOKEN = "hf_" + "aB3dE5gH" * 4


class Launch:
    """A context whose files and lines are kept here."""

    def __init__(self) -> None:
        self.supervisor = Supervisor(AttemptPolicy(), Limits())
        self.files: list[tuple[str, str, bool]] = []
        self.warnings: list[str] = []
        self.run_dir = SimpleNamespace(write_text=self._write_text)
        self.story_file = StoryFile(self)  # type: ignore[arg-type]

    def _write_text(self, name: str, content: str, *, of_host: bool) -> None:
        self.files.append((name, content, of_host))

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def fail(self) -> None:
        """The launch cannot be, and the reason has a secret in it."""
        self.supervisor.handle(LaunchRequested(1.0, 0))
        self.supervisor.handle(StartFailed(2.0, 0, f"cannot log in with HF_TOKEN={TOKEN}", "look", 1))
        self.supervisor.handle(Diagnosed(3.0, 0, DIAGNOSIS))


def test_the_story_is_written_once_when_something_has_gone_wrong_and_without_secrets() -> None:
    launch = Launch()
    deadlines = [launch.story_file.deadline]
    launch.fail()
    assert [*deadlines, launch.story_file.deadline] == [None, 0.0]
    for _ in range(2):
        launch.story_file.tick(4.0)
    launch.story_file.close()
    [(name, content, of_host)] = launch.files
    entries: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
    assert (name, of_host, entries[-1]["event"]["name"]) == ("story.jsonl", True, "Diagnosed")
    assert "cannot log in with" in content
    assert TOKEN not in content


def test_what_happens_before_the_end_is_written_at_the_end() -> None:
    """The loop does not wake up any more."""
    launch = Launch()
    launch.fail()
    launch.story_file.close()
    assert len(launch.files) == 1


def test_a_file_that_cannot_be_written_costs_one_line() -> None:
    launch = Launch()
    launch.run_dir.write_text = None
    launch.fail()
    launch.story_file.tick(4.0)
    launch.story_file.close()
    assert len(launch.warnings) == 1
    assert launch.warnings[0].startswith("the story of the launch cannot be written: TypeError")
