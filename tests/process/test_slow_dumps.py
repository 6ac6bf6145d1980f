"""A rank that the others wait for is named by Flight Recorders, where the user asks for it; what fails costs nothing.

The ranks are stand-ins that answer as torch's worker server does: no GPU has been asked.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.process.in_step import table_of
from tests.process.launching import customized, in_saferun, running, until
from tests.process.recorder_ranks import RECORDER_RANK

if TYPE_CHECKING:
    from pathlib import Path

SLOW = " is slow: the other ranks spent "
GIVEN_UP = "saferun: ranks are not compared by their Flight Recorders: "
OFTEN = "import saferun.cli.main as one\n    one._LEAST_DUMPS_S = 1.0"
SOON = "\n    import saferun.captures.asked_recorders as other\n    other.RANK_S = 3.0"
DUMPS = ("--slow-dumps", "1", "--slow-window", "0")


def test_a_rank_that_the_others_wait_for_is_named_by_its_recorder(tmp_path: Path) -> None:
    """On the console, in the report, in run.json and in the table."""
    environ = customized(tmp_path, in_saferun(OFTEN))
    run = tmp_path / "run"
    with running(run, RECORDER_RANK, *DUMPS, nproc=4, arguments=["2", "nothing"], environ=environ, store=False) as job:
        until(lambda: SLOW in job.err, "it is named")
        until(lambda: table_of(job).get("slow") == [2], "it is in the table")
        status = subprocess.run(
            [sys.executable, "-m", "saferun.ctl", "status", str(job.run_dir)],
            capture_output=True,
            text=True,
            check=True,
        )
        job.release("end")
        assert job.wait() == 0
        assert ", by Flight Recorders:" in status.stdout
        assert "  slow: the others wait for it" in status.stdout
    assert job.err.count(" is slow") == 1
    assert "  by Flight Recorders of the last " in job.err
    report = json.loads((job.run_dir / "report.json").read_text())
    (row,) = report["slow_ranks"]
    assert (row["ranks"], row["by"]) == ([2], "durations")
    (told,) = json.loads((job.run_dir / "run.json").read_text())["slow_ranks"]
    assert (told["ranks"], told["host"]) == ([2], row["host"])


@pytest.mark.slow
def test_even_ranks_are_not_named_by_their_recorders(tmp_path: Path) -> None:
    environ = customized(tmp_path, in_saferun(OFTEN))
    run = tmp_path / "run"
    with running(run, RECORDER_RANK, *DUMPS, nproc=4, arguments=["-1", "nothing"], environ=environ, store=False) as job:
        until(lambda: job.out.count("asked") >= 4 * 6, "they are asked six times")
        until(lambda: len(table_of(job).get("ranks", [])) == 4, "they are compared")
        job.release("end")
        assert job.wait() == 0
    assert " slow" not in job.err
    assert "slow_ranks" in json.loads((job.run_dir / "run.json").read_text())


def test_by_default_no_rank_is_asked(tmp_path: Path) -> None:
    """A healthy job pays nothing for what it has not asked for."""
    environ = customized(tmp_path, in_saferun(OFTEN))
    run = tmp_path / "run"
    options = ("--slow-window", "1", "--hang-timeout", "600")
    with running(
        run, RECORDER_RANK, *options, nproc=2, arguments=["1", "nothing"], environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        until(lambda: len({row["time"] for row in [table_of(job)] if row}) > 0, "the ranks are compared")
        job.release("end")
        assert job.wait() == 0
    assert "asked" not in job.out


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("silent", "rank 1: it does not answer"),
        pytest.param("status", "rank 1: it answers with status 500", marks=pytest.mark.slow),
        pytest.param("garbage", "rank 1: its answer is not JSON", marks=pytest.mark.slow),
        ("no recorder", "rank 0: its torch has no Flight Recorder that can be asked"),
    ],
)
def test_where_ranks_do_not_answer_it_is_given_up_with_one_line(tmp_path: Path, fault: str, why: str) -> None:
    """For good, after the second time; and no rank behind the one that fails is asked."""
    environ = customized(tmp_path, in_saferun(OFTEN + SOON))
    run = tmp_path / "run"
    with running(run, RECORDER_RANK, *DUMPS, nproc=3, arguments=["1", fault], environ=environ, store=False) as job:
        until(lambda: GIVEN_UP in job.err, "it is given up")

        def is_settled() -> bool:
            count = job.out.count("asked")
            time.sleep(0.5)
            return job.out.count("asked") == count

        # What the ranks wrote before is on another stream, and may come later.
        until(is_settled, "no rank is asked any more")
        asked = job.out.count("asked")
        job.release("end")
        assert job.wait() == 0
        assert job.out.count("asked") == asked
    assert job.err.count(GIVEN_UP) == 1
    assert GIVEN_UP + why in job.err
    assert SLOW not in job.err
