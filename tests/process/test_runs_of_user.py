"""The runs of a user: noted in an index, found from any directory, living or dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, REPOSITORY, STAY, in_mounts, kill, running, until
from tests.unit.described_runs import make_run

QUICK = "print('done')"


def listed(cwd: Path, state: Path, *arguments: str) -> list[dict[str, Any]]:
    """What ``saferunctl list`` finds below ``state``'s directory: launches of other tests may live at the same time."""
    done = subprocess.run(
        [sys.executable, "-m", "saferun.ctl", "list", "--json", *arguments],
        cwd=cwd,
        env={**os.environ, "XDG_STATE_HOME": str(state), "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        timeout=DEADLINE_S,
        check=True,
    )
    runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
    return [run for run in runs if Path(run["path"]).is_relative_to(state.parent)]


def test_a_run_is_listed_from_anywhere_while_it_lives_and_after(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(tmp_path, STAY, environ={"XDG_STATE_HOME": str(state)}, store=False) as job:
        job.hear("ready")
        (run,) = until(lambda: listed(tmp_path, state), "the index has the run")
        assert (run["state"], run["path"]) == ("running", str(job.run_dir.resolve()))
        job.send(signal.SIGTERM)
        job.wait()
        (run,) = listed(tmp_path, state)
        assert run["state"] == "stopped"


@pytest.mark.slow
def test_a_short_run_is_noted_too(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with running(tmp_path, "raise SystemExit(3)", environ={"XDG_STATE_HOME": str(state)}, store=False) as job:
        assert job.wait() == 1
        (run,) = listed(tmp_path, state)
        assert (run["state"], run["exit_code"]) == ("failed", 1)
        assert "exit code 3" in run["headline"]


def test_a_run_whose_saferun_was_killed_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, STAY, store=False) as job:
        job.hear("ready")
        until((job.run_dir / "run.json").exists, "the run is described, which is after the ranks have begun")
        kill(job.process.pid, signal.SIGKILL)
        job.wait()
        (run,) = listed(tmp_path / "job", tmp_path / "no state")
        assert (run["state"], run["exit_code"]) == ("lost", None)


@pytest.mark.parametrize("place", slow_but(["missing", "full", "a file", "none"], "full"))
def test_without_room_for_the_index_nothing_else_is_missing(tmp_path: Path, place: str) -> None:
    """It is a convenience."""
    full, file = tmp_path / "mount", tmp_path / "file"
    full.mkdir()
    file.touch()
    state = {"missing": "/proc/state", "full": str(full), "a file": str(file), "none": ""}[place]
    before = in_mounts((str(full), "size=4k,nr_inodes=1"))
    environ = {"XDG_STATE_HOME": state, "HOME": "" if place == "none" else "/proc/home"}
    with running(tmp_path, QUICK, environ=environ, before=before, store=False) as job:
        assert job.wait() == 0
        assert job.out.count("done") == 1
        assert job.err == ""


def test_many_runs_are_one_line_at_the_end(tmp_path: Path) -> None:
    """It names the command that removes old ones."""
    base = tmp_path / "job" / "saferun-runs"
    before = ["sh", "-c", f'for i in $(seq -w 200); do mkdir -p "{base}/20200101-000000-000$i"; done; exec "$@"', "sh"]
    with running(tmp_path, QUICK, before=before, store=False) as job:
        assert job.wait() == 0
        (line,) = job.err.splitlines()
        assert line.startswith("saferun: 201 runs are kept")
        assert "saferunctl clean" in line


def test_old_runs_are_removed_if_asked_for_and_none_that_lives(tmp_path: Path) -> None:
    """At the end of a short launch, by the writer process."""
    base = tmp_path / "job" / "saferun-runs"
    with running(tmp_path, STAY, store=False) as living:
        living.hear("ready")
        until((living.run_dir / "run.json").exists, "the run is described")
        for number in range(3):
            make_run(base, f"2020010{number}-000000-abcdef", age_s=9 * 86400.0)
        again = subprocess.run(
            [sys.executable, "-m", "saferun", "--keep-runs", "1", "--no-python", "true"],
            cwd=tmp_path / "job",
            env=living.environ,
            capture_output=True,
            timeout=DEADLINE_S,
            check=True,
        )
        assert again.stderr == b""
        runs = [path for path in base.iterdir() if path.is_dir() and not path.is_symlink()]
        assert len(runs) == 2
        assert not list(base.glob("2020*"))
        kill(living.process.pid, signal.SIGTERM)
