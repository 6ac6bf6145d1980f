"""--metrics: a file for node_exporter; whatever becomes of it, the launch ends as it would without it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from saferun.report.metrics_text import METRICS
from tests.breadth import slow_but
from tests.process.launching import END_AS_TOLD, STAY, Job, customized, running, until

QUIET = ("--preflight", "off")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def values(job: Job, name: str = "saferun.prom") -> dict[str, float]:
    """The samples by name and the labels that not all have."""
    path = job.folder / "job" / name
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for line in lines:
        if not line.startswith("#"):
            label, _, value = line.rpartition(" ")
            metric, _, labels = label.partition("{")
            own = [entry for entry in labels.rstrip("}").split(",") if entry.startswith(("kind=", "class="))]
            found[" ".join([metric, *own])] = float(value)
    return found


def test_the_file_shows_a_launch_that_runs_and_how_it_ended(folder: Path) -> None:
    with running(
        folder, END_AS_TOLD, "--metrics", "saferun.prom", *QUIET, nproc=2, arguments=("0", "3"), store=False
    ) as job:
        job.hear("ready", 2)
        until(lambda: values(job).get("saferun_up") == 1, "the file")
        assert values(job)["saferun_ranks"] == 2
        assert "saferun_exit_code" not in values(job)
        assert (folder / "job" / "saferun.prom").stat().st_mode & 0o777 == 0o644
        job.release("end")
        assert job.wait() == 1
        at_end = values(job)
        assert (at_end["saferun_up"], at_end["saferun_exit_code"], at_end["saferun_ranks"]) == (0, 1, 0)
        assert at_end['saferun_incidents_total kind="failure"'] == 1
        not_in_it = {"saferun_retries_total", "saferun_step", "saferun_step_metric"}
        assert {name.partition(" ")[0] for name in at_end} == set(METRICS) - not_in_it
        assert not list((folder / "job").glob("*.tmp"))
        assert "--metrics" not in job.err


def test_output_and_restarts_are_counted_over_all_attempts(folder: Path) -> None:
    """Counters never fall: what an attempt has written counts when its streams are closed, however short it was."""
    source = "import sys; print('x' * 999); print('y' * 499, file=sys.stderr); sys.exit(5)"
    options = ("--metrics", "saferun.prom", *QUIET, "--max-restarts", "2", "--retry-always")
    with running(folder, source, *options, store=False) as job:
        assert job.wait() == 1
        assert values(job)["saferun_restarts_total"] == 2
        assert values(job)["saferun_attempt"] == 2
        assert values(job)["saferun_output_bytes_total"] == 3 * (1000 + 500)


def test_output_is_counted_at_the_end_of_a_job_that_succeeds(folder: Path) -> None:
    source = """
from rank import *
print("x" * 999, flush=True)
tell("ready")
await_release("end")
print("y" * 499, flush=True)
"""
    with running(folder, source, "--metrics", "saferun.prom", *QUIET, nproc=2, store=False) as job:
        job.hear("ready", 2)
        until(lambda: values(job).get("saferun_output_bytes_total") == 2 * 1000, "the file")
        job.release("end")
        assert job.wait() == 0
        assert values(job)["saferun_output_bytes_total"] == 2 * (1000 + 500)


@pytest.mark.parametrize("path", slow_but(["/nowhere/saferun.prom", "/dev/full/x", "/"], "/nowhere/saferun.prom"))
@pytest.mark.parametrize("code", ["0", pytest.param("3", marks=pytest.mark.slow)])
def test_a_file_that_cannot_be_written_changes_nothing(folder: Path, path: str, code: str) -> None:
    """There is one line."""
    with running(folder, END_AS_TOLD, "--metrics", path, *QUIET, arguments=(code,), store=False) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == (1 if code == "3" else 0)
        assert len([line for line in job.err.splitlines() if "--metrics" in line]) == 1


@pytest.mark.parametrize(("name", "lines"), [("saferun.prom", 0), ("saferun.txt", 1)])
def test_a_name_that_node_exporter_does_not_read_is_one_line(folder: Path, name: str, lines: int) -> None:
    with running(folder, END_AS_TOLD, "--metrics", name, *QUIET, arguments=("0",), store=False) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == 0
        said = [line for line in job.err.splitlines() if "reads only files that end in .prom" in line]
        assert len(said) == lines


def test_a_place_that_does_not_answer_holds_up_nothing(folder: Path) -> None:
    """The process that writes sleeps when it opens the file, forever; nothing is left of it."""
    folder.mkdir()
    source = """
import sys, time
def note(event, args):
    if event == "open" and "saferun.prom" in str(args[0]):
        time.sleep(1000)
if sys.orig_argv[1:3] == ["-m", "saferun"]:
    sys.addaudithook(note)
"""
    environ = customized(folder, source)
    with running(
        folder, END_AS_TOLD, "--metrics", "saferun.prom", *QUIET, arguments=("3",), environ=environ, store=False
    ) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == 1
        assert values(job) == {}
        assert (job.run_dir / "report.json").exists()


def test_it_ends_with_a_supervisor_that_is_killed(folder: Path) -> None:
    with running(folder, STAY, "--metrics", "saferun.prom", *QUIET, store=False) as job:
        job.hear("ready")
        until(lambda: values(job), "the file")
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
