"""The story of a launch: written when something goes wrong, and nothing depends on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.launching import END_AS_TOLD, REPOSITORY, Job, customized, in_saferun, running

# The first attempt fails, the second one does not.
FAIL_ONCE = "from rank import *\nsys.exit(3 if ATTEMPT == 0 else 0)"


def story_of(job: Job) -> list[dict[str, Any]]:
    (path,) = job.run_dir.glob("*/story.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def end_well(job: Job) -> None:
    """Let its ranks end, and see that the launch ends with them."""
    job.hear("ready")
    job.release("end")
    assert job.wait() == 0


def test_a_failure_leaves_its_story_and_saferunctl_prints_it(tmp_path: Path) -> None:
    """From the first event to the end, through all attempts."""
    with running(tmp_path / "run", FAIL_ONCE, "--max-restarts", "1", store=False) as job:
        assert job.wait() == 0
    entries = story_of(job)
    states = [entry["after"] for entry in entries]
    assert entries[0]["event"]["name"] == "LaunchRequested"
    assert {"checking", "running", "stopping", "diagnosing", "backoff"} <= set(states)
    (exit_entry,) = [entry for entry in entries if entry["event"]["name"] == "RankExited" and entry["attempt"] == 0]
    assert exit_entry["event"]["status"]["code"] == 3
    printed = subprocess.run(
        [sys.executable, "-m", "saferun.ctl", "story", str(job.run_dir)],
        env={**job.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "RankExited(local_rank=0" in printed.stdout


def test_a_launch_that_goes_well_has_no_story(tmp_path: Path) -> None:
    """Nothing is written that nobody will read."""
    with running(tmp_path / "run", END_AS_TOLD, store=False, arguments=("0",)) as job:
        end_well(job)
    assert job.run_dir.is_dir()
    assert not [*job.run_dir.glob("*/story.jsonl")]


def test_a_story_that_cannot_be_written_costs_one_line_and_the_job_goes_on(tmp_path: Path) -> None:
    """The restart comes, and the job ends well."""
    source = (
        "import saferun.supervisor.story as story\n"
        "    def entries(self, clock_s):\n"
        "        raise ValueError('no such story')\n"
        "    story.Story.entries = entries"
    )
    environ = customized(tmp_path, in_saferun(source))
    with running(tmp_path / "run", FAIL_ONCE, "--max-restarts", "1", store=False, environ=environ) as job:
        assert job.wait() == 0
    assert job.err.count("the story of the launch cannot be written: ValueError: no such story") == 1
    assert "failed first" in job.err


def test_an_event_that_the_table_of_transitions_lacks_ends_no_job_but_its_test(tmp_path: Path) -> None:
    """It is ignored and noted, and every test that starts a launch looks for such notes."""
    source = (
        "import saferun.supervisor.machine as machine\n"
        "    del machine.TRANSITIONS[machine.State.STARTING][machine.RanksStarted]"
    )
    environ = customized(tmp_path, in_saferun(source))
    launch = running(tmp_path / "run", END_AS_TOLD, store=False, environ=environ, arguments=("0",))
    with pytest.raises(AssertionError, match=r"the table of transitions lacks .*RanksStarted"), launch as job:
        end_well(job)


def test_an_error_of_saferun_itself_leaves_the_story_that_led_to_it(tmp_path: Path) -> None:
    """It is what one wants to know then."""
    source = (
        "import saferun.supervisor.machine as machine\n"
        "    plain = machine.Supervisor.handle\n"
        "    def handle(self, event):\n"
        "        if type(event).__name__ == 'RankExited':\n"
        "            raise RuntimeError('a defect')\n"
        "        return plain(self, event)\n"
        "    machine.Supervisor.handle = handle"
    )
    environ = customized(tmp_path, in_saferun(source))
    with running(tmp_path / "run", END_AS_TOLD, store=False, environ=environ, arguments=("0",), sweeps=False) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() != 0
    assert [entry["after"] for entry in story_of(job)][-1] == "running"
