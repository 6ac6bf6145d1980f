"""What programs read of a report: typed, tolerant of what is new, and with a hint where there is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import saferun
from saferun.api.report import Report
from saferun.errors import SaferunError

ROOT = Path(__file__).parents[3]
CAUSE = {"class": "exception", "message": "ValueError: bad batch", "ranks": [1], "proof": "", "advice": "", "new": 1}
FAILURE = {
    "kind": "failure",
    "attempt": 0,
    "time": 2.0,
    "host": "node1",
    "headline": "rank 1 failed first",
    "hint": "look at the data",
    "outcome": "ended",
    "cause": CAUSE,
    "first_failure": {"rank": 1, "exit_code": 1, "signal": None, "something": "new"},
    "victims": [0],
    "stopped": [],
    "new": {"deep": [1]},
}
CONTENT = {
    "schema": "saferun.report/1",
    "saferun_version": "0.1.0",
    "run": {"run_id": "5f2c1a", "exit_code": 1, "outcome": "failed", "command": ["saferun"], "new": 1},
    "preflight": None,
    "decisions": [{"attempt": 0, "next_step": "finish", "class": "exception"}],
    "incidents": [{**FAILURE, "kind": "hang", "cause": None, "outcome": "recovered"}, FAILURE],
    "slow_ranks": [],
    "new": True,
}


def read(folder: Path, content: object) -> Report:
    (folder / "report.json").write_text(json.dumps(content))
    return saferun.read_report(folder)


def test_a_report_is_read_from_its_run_directory_and_by_its_path(tmp_path: Path) -> None:
    report = read(tmp_path, CONTENT)
    assert report == saferun.read_report(str(tmp_path / "report.json"))
    assert report.run.outcome == "failed"
    assert report.failure is not None
    assert report.failure.cause is not None
    assert (report.failure.cause.class_name, report.failure.cause.ranks) == ("exception", (1,))
    assert report.failure.first_failure is not None
    assert report.failure.first_failure.rank == 1
    assert report.incidents[0].kind == "hang"
    assert report.decisions[0].class_name == "exception"
    assert report.raw["new"] is True


def test_a_job_that_went_on_has_no_failure(tmp_path: Path) -> None:
    restarted = {**CONTENT, "incidents": [{**FAILURE, "outcome": "restarted"}]}
    assert read(tmp_path, restarted).failure is None


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        {},
        {**CONTENT, "schema": "saferun.report/2"},
        {**CONTENT, "incidents": [1]},
        {**CONTENT, "incidents": 3},
        {**CONTENT, "run": "x"},
        {**CONTENT, "run": {"exit_code": "1"}},
        {**CONTENT, "raw": "x" * (9 << 20)},
    ],
)
def test_what_is_no_report_is_an_error_with_a_hint(tmp_path: Path, content: object) -> None:
    with pytest.raises(SaferunError, match=r"is no report[^\n]*\nhint: "):
        read(tmp_path, content)


def test_where_there_is_none_the_hint_says_when_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(SaferunError, match=r"there is no [^\n]*report.json\nhint: [^\n]*--report-html always"):
        saferun.read_report(tmp_path)


@pytest.mark.parametrize("name", ["nope", "nope/report.json"])
def test_where_the_path_is_wrong_the_hint_is_about_the_path(tmp_path: Path, name: str) -> None:
    """No option of a launch makes a directory that was misspelled."""
    with pytest.raises(SaferunError, match=rf"there is no [^\n]*{name}\nhint: check the path: [^\n]*run directory"):
        saferun.read_report(tmp_path / name)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "report.json")
    with pytest.raises(SaferunError, match="not a regular file"):
        saferun.read_report(tmp_path)


def test_the_errors_that_the_documents_name_are_where_they_say() -> None:
    """An ``except`` with a name that is nowhere hides the failure behind an AttributeError."""
    pages = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("programs.md", "script.md")}
    found = {
        name: set(re.findall(r"\b[\w.]*(?:SaferunError|RanksMissingError)\b", text)) for name, text in pages.items()
    }
    assert found == {"programs.md": {"saferun.SaferunError"}, "script.md": {"saferun.debug.RanksMissingError"}}
    assert saferun.SaferunError is SaferunError
    error = saferun.debug.RanksMissingError("rank 3 did not come", [3])
    assert isinstance(error, TimeoutError)
    assert error.ranks == (3,)


def test_an_error_can_be_caught_by_its_public_name() -> None:
    """In a fresh interpreter, where nothing else has imported it."""
    program = (
        "import saferun\ntry: saferun.read_report('/nowhere')\nexcept saferun.SaferunError as error: print(error.hint)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("check the path")


def test_completion_shows_all_public_names() -> None:
    """In a fresh interpreter: what is asked for once is there in any case."""
    program = "import saferun; print(*dir(saferun))"
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert {*saferun.__all__, "__version__"} <= {*done.stdout.split()}


def test_the_import_of_the_package_loads_nothing_more() -> None:
    """Scripts import it for ``heartbeat``."""
    program = (
        "import os, sys, __future__; before = set(sys.modules); import saferun; print(*(set(sys.modules) - before))"
    )
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["saferun"]
