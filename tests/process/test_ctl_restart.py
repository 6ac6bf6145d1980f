"""``saferunctl restart`` and ``stop --after-checkpoint`` on one host."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.process.control_clients import control_command, control_socket, saferunctl
from tests.process.launching import DEADLINE_S, END_AS_TOLD, STAY, running, two_lines, until

QUIET = ("--preflight", "off")
SAVES = """
from rank import *
def save(number, frame):
    tell("saving")
    await_release("saved")
    sys.exit(int(sys.argv[1 + RANK]))
if sys.argv[1 + RANK] != "deaf":
    signal.signal(signal.SIGUSR1, save)
tell("ready")
stay()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_a_restart_is_another_attempt_and_no_failure(folder: Path) -> None:
    """As often as the user wants, whatever --max-restarts is."""
    with running(folder, STAY, *QUIET, nproc=2, store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        for attempt in (1, 2):
            done = saferunctl(job, "restart", "latest")
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.splitlines()[-1].endswith(f"its ranks run again: attempt {attempt}")
            job.hear("ready", 2)
        answer = json.loads(saferunctl(job, "restart", "latest", "--json").stdout)
        assert (answer["asked"], answer["attempt"]) == ("restart", 3)
        assert json.loads(saferunctl(job, "kill", "latest", "--json").stdout)["exit_code"] == 137
        assert job.wait() == 137
        report = json.loads((job.run_dir / "report.json").read_text())
        rows = [row for row in report["decisions"] if row["next_step"] == "restart"]
        assert len(rows) == 3
        assert all("saferunctl restart by " in row["message"] for row in rows)
        assert len(report["incidents"]) == 1


@pytest.mark.slow
def test_ranks_that_ignore_sigterm_are_killed_at_the_end_of_their_grace(folder: Path) -> None:
    options = (*QUIET, "--shutdown-timeout", "1")
    with running(folder, END_AS_TOLD, *options, arguments=("stubborn",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        assert saferunctl(job, "restart", "latest").returncode == 0
        job.hear("ready")
        assert saferunctl(job, "kill", "latest").returncode == 0
        assert job.wait() == 137


@pytest.mark.slow
def test_a_restart_of_a_job_that_is_being_stopped_is_refused(folder: Path) -> None:
    options = (*QUIET, "--shutdown-timeout", "600")
    with running(folder, END_AS_TOLD, *options, arguments=("stubborn",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        assert saferunctl(job, "stop", "latest", "--no-wait").returncode == 0
        until(lambda: "SIGKILL follows in 600 s" in job.err, "it is being stopped")
        for arguments in (("restart", "latest"), ("stop", "latest", "--after-checkpoint")):
            done = saferunctl(job, *arguments)
            assert done.returncode == 1
            what, hint = two_lines(done.stderr)
            assert "the job is " in what
            assert "saferunctl status" in hint
        assert saferunctl(job, "kill", "latest").returncode == 0
        assert job.wait() == 137


def test_ranks_save_a_checkpoint_and_end_by_themselves(folder: Path) -> None:
    """The exit code is the script's, and nothing is started again."""
    with running(folder, SAVES, *QUIET, "--max-restarts", "3", nproc=2, arguments=("0", "0"), store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        with subprocess.Popen(
            control_command("stop", "latest", "--after-checkpoint"),
            cwd=folder / "job",
            env=job.environ,
            stdout=subprocess.PIPE,
            text=True,
        ) as stop:
            job.hear("saving", 2)
            job.release("saved")
            out, _ = stop.communicate(timeout=DEADLINE_S)
        assert stop.returncode == 0
        first, last = out.splitlines()
        assert "SIGUSR1 to the 2 of 2 ranks that handle it; what has not ended after 600 s is stopped" in first
        assert last.endswith("succeeded, exit code 0")
        assert job.wait() == 0


@pytest.mark.slow
def test_ranks_that_do_not_end_after_their_checkpoint_are_stopped(folder: Path) -> None:
    """One of them does not handle the signal, and does not get it: that would end it."""
    with running(folder, SAVES, *QUIET, nproc=2, arguments=("0", "deaf"), store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        job.release("saved")
        done = saferunctl(job, "stop", "latest", "--after-checkpoint", "--timeout", "1s")
        assert done.returncode == 0
        assert "SIGUSR1 to the 1 of 2 ranks" in done.stdout
        assert "exit code 143" in done.stdout
        assert job.wait() == 143


@pytest.mark.slow
def test_a_rank_that_fails_while_it_saves_has_failed(folder: Path) -> None:
    with running(folder, SAVES, *QUIET, "--max-restarts", "3", arguments=("5",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        job.release("saved")
        assert "exit code 1" in saferunctl(job, "stop", "latest", "--after-checkpoint").stdout
        assert job.wait() == 1
        assert "exit code 5" in job.err
        assert not job.said("ready"), "it was started again"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (("--signal", "USR2"), 1, "no rank of "),
        pytest.param(("--signal", "KILL"), 1, "SIGKILL does not ask for a checkpoint", marks=pytest.mark.slow),
        pytest.param(("--signal", "nonsense"), 2, "is no signal", marks=pytest.mark.slow),
        pytest.param(("--timeout", "soon"), 2, "is not a duration", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_ask_for_a_checkpoint_is_refused_and_the_job_goes_on(
    folder: Path, options: tuple[str, ...], code: int, word: str
) -> None:
    with running(folder, SAVES, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        control_socket(job)
        done = saferunctl(job, "stop", "latest", "--after-checkpoint", *options)
        assert done.returncode == code
        assert word in two_lines(done.stderr)[0]
        assert not job.said("saving")
        assert saferunctl(job, "kill", "latest").returncode == 0
        assert job.wait() == 137
