"""What a suspected hang looks like: one line on the console, and all of it in the report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import STAY, kill, running, until


@pytest.mark.parametrize("has_files", slow_but([True, False], "True"))
def test_a_suspected_hang_is_one_line_with_what_to_do(tmp_path: Path, *, has_files: bool) -> None:
    """Nothing may be wrong. Without files the console is the only place for the stacks."""
    options = ["--env-profile", "minimal", "--hang-timeout", "60", *([] if has_files else ["--run-dir", "none"])]
    with running(tmp_path / "run", STAY, *options, nproc=2, store=False) as job:
        ranks = {rank.rank: rank.pid for rank in job.hear("ready", 2)}
        kill(ranks[1], signal.SIGSTOP)
        until(lambda: "job left running" in job.err, "it is reported")
        kill(ranks[1], signal.SIGCONT)
        until(lambda: "job resumed" in job.err, "it is over")
        job.process.terminate()
        job.wait()
        lines = job.err.splitlines()
        first = next(line for line in lines if "may hang" in line)
        assert ("; job left running, stacks in" in first) is has_files, job.err
        assert any(line.startswith("  suspected: rank 1 in state T") for line in lines) is not has_files, job.err
        if has_files:
            report = next(job.run_dir.rglob("report.txt")).read_text()
            assert "suspected: rank 1 in state T" in report
            incident = json.loads(next(job.run_dir.rglob("report.json")).read_text())["incidents"][0]
            assert incident["verdict"]["certain"] is False
