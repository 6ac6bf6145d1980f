"""saferun.step and saferun.expect in real ranks: what the launch makes of what they report."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import customized, in_saferun, running, until
from tests.process.test_opens_no_file import assert_touches_no_file, traced

QUIET = ("--preflight", "off")

STEPS = """
import saferun
from rank import *
for number in range(12):
    saferun.step(number, loss=float("nan") if RANK == 1 and number >= 5 else 0.5)
tell("ready")
await_release("end")
if RANK == 0:
    raise ValueError("after the steps")
stay()
"""


def test_steps_are_in_status_metrics_and_report_and_a_loss_that_is_no_number_is_one_line(tmp_path: Path) -> None:
    options = ("--metrics", "m.prom", "--hang-timeout", "4", *QUIET)
    with running(tmp_path, STEPS, *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        until(lambda: "warning: loss is nan in step 5 of rank 1 (reported by saferun.step)" in job.err, "the line")
        status = subprocess.run(
            [sys.executable, "-m", "saferun.ctl", "status", str(job.run_dir)],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        rows = [line.split() for line in status.stdout.splitlines()]
        assert [row[-1] for row in rows if row[:1] in (["rank"], ["0"], ["1"])] == ["step", "11", "11"]
        job.release("end")
        assert job.wait() == 1
        assert job.err.count("loss is nan") == 1
        text = (job.run_dir / "report.txt").read_text()
        assert "--- last steps (saferun.step)" in text
        assert "rank 0: step 11 (loss 0.5), " in text
        assert "rank 1: step 11 (loss nan), " in text
        report = json.loads((job.run_dir / "report.json").read_text())
        assert report["incidents"][-1]["output"]["last_step"].startswith("step 11 (loss 0.5), ")
        metrics = (tmp_path / "job" / "m.prom").read_text()
        assert 'rank="1",name="loss"} NaN\n' in metrics
        assert 'rank="0"} 11\n' in metrics
        # For the timeline of the page
        noted = [entry for entry in job.events() if entry["event"] == "StepsReported"]
        steps = {rank: step for entry in noted for rank, step in zip(entry["ranks"], entry["steps"], strict=True)}
        assert steps == {0: 11, 1: 11}
        assert all(entry["time"] - 60 < time <= entry["time"] for entry in noted for time in entry["times"])


@pytest.mark.slow
def test_steps_that_cannot_be_noted_for_the_page_change_nothing_else(tmp_path: Path) -> None:
    """One line, however often they would be noted."""
    planted = (
        "from saferun.launch.step_notes import StepNotes\n"
        "    def fail(*_, **__): raise RuntimeError('a mistake')\n"
        "    StepNotes.due = fail"
    )
    environ = customized(tmp_path, in_saferun(planted))
    with running(tmp_path / "job", STEPS, "--hang-timeout", "4", *QUIET, nproc=2, environ=environ) as job:
        job.hear("ready", 2)
        until(lambda: "cannot note the steps: RuntimeError: a mistake" in job.err, "the line")
        job.release("end")
        assert job.wait() == 1
        assert job.err.count("note the steps") == 1
        assert "ValueError: after the steps" in job.err
        assert "rank 0: step 11 (loss 0.5), " in (job.run_dir / "report.txt").read_text()
        assert not job.has_happened("StepsReported")


EXPECTS = """
import saferun
from rank import *
tell("ready")
if RANK == 0:
    with saferun.expect({seconds}, "saving the checkpoint"):
        await_release("saved")
    tell("saved")
await_release("end")
"""


def test_a_phase_that_takes_longer_than_expected_is_reported_with_its_name(tmp_path: Path) -> None:
    """Nothing moves, and the hang timeout alone would report that earlier: the phase puts it off, and no further."""
    options = ("--hang-timeout", "2", "--external-wait-timeout", "0", *QUIET)
    with running(tmp_path, EXPECTS.format(seconds=6), *options, nproc=2, store=False) as job:
        job.hear("ready", 2)
        until(lambda: "saferun: the job hangs" in job.err, "the hang")
        assert "'saving the checkpoint' longer than the expected 6.0 s" in job.err
        until((job.run_dir / "report.json").exists, "the report")
        report = json.loads((job.run_dir / "report.json").read_text())
        verdict = report["incidents"][0]["verdict"]
        assert "saving the checkpoint" in verdict["overdue"]
        job.release("saved")
        job.release("end")
        assert job.wait() == 0


def test_the_supervisor_opens_no_file_on_a_disk_for_what_ranks_report(tmp_path: Path) -> None:
    """What it reads lies in memory."""
    program = """
import saferun
from rank import *
saferun.step(1, loss=0.5)
with saferun.expect(60, "waiting"):
    tell("ready")
    await_release("end")
raise ValueError("the end")
"""
    with traced(tmp_path, program, "--hang-timeout", "2", nproc=1) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        until(lambda: ".progress" in (tmp_path / "calls").read_text(errors="replace"), "it is read")
        job.release("end")
        assert job.wait() == 1
    assert_touches_no_file(job, tmp_path)


@pytest.mark.parametrize("content", slow_but(["fifo", "link", "directory", "large"], "fifo"))
def test_what_a_rank_puts_in_place_of_its_file_changes_nothing(content: str, tmp_path: Path) -> None:
    """Nothing is followed, or waited for."""
    program = f"""
import os
from rank import *
path = os.environ["SAFERUN_HEARTBEAT_FILE"].removesuffix(".heartbeat") + ".progress"
if {content!r} == "fifo":
    os.mkfifo(path)
elif {content!r} == "link":
    # To a file that would put off the verdict, which saferun never sees in its own place.
    import saferun
    os.environ["SAFERUN_HEARTBEAT_FILE"] = FOLDER + "/other.heartbeat"
    saferun.expect(86400, "x").__enter__()
    os.symlink(FOLDER + "/other.progress", path)
    assert os.stat(path).st_size == 1024
elif {content!r} == "directory":
    os.mkdir(path)
else:
    with open(path, "wb") as file:
        file.write(b"1.1\\nphase 0.0 86400.0 x\\n" * 100000)
tell("ready")
await_release("end")
"""
    options = ("--hang-timeout", "2", "--external-wait-timeout", "0", *QUIET)
    with running(tmp_path, program, *options, nproc=1, store=False) as job:
        job.hear("ready")
        until(lambda: "saferun: the job hangs" in job.err, "the hang")
        job.release("end")
        assert job.wait() == 0
