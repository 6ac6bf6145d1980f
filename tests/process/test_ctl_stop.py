"""``saferunctl stop`` and ``kill`` on one host."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.process.control_clients import control_command, control_socket, described, saferunctl
from tests.process.launching import DEADLINE_S, END_AS_TOLD, STAY, running, two_lines, until

QUIET = ("--preflight", "off")
SAVES = """
from rank import *
def save(number, frame):
    tell("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("ready")
stay()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_stop_gives_the_ranks_sigterm_and_waits_for_the_end(folder: Path) -> None:
    """They can save what they have; nothing is started again, and the exit code and the report say who asked."""
    with running(folder, SAVES, *QUIET, "--max-restarts", "3", nproc=2, store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        done = saferunctl(job, "stop", "latest")
        assert (done.returncode, done.stderr) == (0, "")
        first, last = done.stdout.splitlines()
        assert "stopping 2 ranks: SIGTERM, and SIGKILL after 30 s" in first
        assert last.endswith("it has ended: stopped, exit code 143")
        assert job.wait() == 128 + signal.SIGTERM
        job.hear("saved", 2)
        assert "stopped by saferunctl stop by " in job.err
        report = json.loads((job.run_dir / "report.json").read_text())
        assert (report["run"]["outcome"], report["run"]["exit_code"]) == ("stopped", 143)
        (incident,) = report["incidents"]
        assert incident["headline"].startswith("stopped by saferunctl stop by ")
        assert described(job)["end"]["outcome"] == "stopped"


def test_kill_does_not_wait_for_ranks_that_ignore_sigterm(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, nproc=2, arguments=("stubborn", "stubborn"), store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        done = saferunctl(job, "kill", described(job)["run_id"][:6], "--json")
        assert (done.returncode, done.stderr) == (0, "")
        answer = json.loads(done.stdout)
        assert (answer["asked"], answer["state"], answer["exit_code"]) == ("kill", "stopped", 137)
        assert job.wait() == 128 + signal.SIGKILL
        assert "killing 2 ranks" in job.err


@pytest.mark.slow
def test_kill_ends_the_grace_of_a_stop_that_somebody_waits_for(folder: Path) -> None:
    options = (*QUIET, "--shutdown-timeout", "600")
    with running(folder, END_AS_TOLD, *options, nproc=2, arguments=("stubborn", "stubborn"), store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        with subprocess.Popen(
            control_command("stop", "latest"), cwd=folder / "job", env=job.environ, stdout=subprocess.PIPE, text=True
        ) as stop:
            until(lambda: "SIGKILL follows in 600 s" in job.err, "it is being stopped")
            assert saferunctl(job, "stop", "latest", "--no-wait").returncode == 0
            assert saferunctl(job, "kill", "latest").returncode == 0
            out, _ = stop.communicate(timeout=DEADLINE_S)
        assert stop.returncode == 0
        assert "exit code 137" in out
        assert job.wait() == 137
        (incident,) = json.loads((job.run_dir / "report.json").read_text())["incidents"]
        headline = incident["headline"]
        assert re.fullmatch(r"stopped by saferunctl stop by [^,]+, then saferunctl kill by [^,]+", headline)
        assert headline in job.err
        assert described(job)["end"]["headline"] == headline


@pytest.mark.slow
def test_a_client_that_is_ended_ends_nothing(folder: Path) -> None:
    """The request has been made; the job ends by it, and no connection is needed for that."""
    with running(folder, END_AS_TOLD, *QUIET, "--shutdown-timeout", "600", arguments=("stubborn",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        with subprocess.Popen(
            control_command("stop", "latest"), cwd=folder / "job", env=job.environ, stdout=subprocess.DEVNULL
        ) as stop:
            until(lambda: "SIGKILL follows in 600 s" in job.err, "it is being stopped")
            stop.kill()
        assert job.process.poll() is None
        assert saferunctl(job, "kill", "latest", "--no-wait").returncode == 0
        assert job.wait() == 137


@pytest.mark.parametrize("verb", ["stop", "kill"])
def test_a_run_that_has_ended_is_refused_in_two_lines(folder: Path, verb: str) -> None:
    with running(folder, "print('x')", *QUIET, store=False) as job:
        assert job.wait() == 0
        done = saferunctl(job, verb, "latest")
        assert (done.returncode, done.stdout) == (1, "")
        assert two_lines(done.stderr)[0].endswith("has ended: succeeded")
        assert saferunctl(job, verb).returncode == 2, "which run is not chosen for the user"


def test_a_run_that_was_killed_is_refused_in_two_lines(folder: Path) -> None:
    with running(folder, STAY, *QUIET, store=False) as job:
        job.hear("ready")
        control_socket(job)
        job.send(signal.SIGKILL)
        job.wait()
        done = saferunctl(job, "stop", "latest")
        assert done.returncode == 1
        assert "was killed" in two_lines(done.stderr)[0]
