"""The failure record of a rank in a whole launch: in its directory, in the reports, and whatever it has written."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.process.launching import clean_environ

DEADLINE_S = 120.0
HEAD = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
FAILS = """
def step(n, shape):
    password = 7531902
    text = "hunter2"
    if rank == 1:
        raise ValueError("wrong shape")
    time.sleep(1000)
step(3, (4, 5))
"""
LINE = "locals of step (train.py:{}): n = 3; shape = (4, 5)"


def launch(folder: Path, source: str, *options: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    """Saferun with two ranks of a script."""
    (folder / "train.py").write_text(HEAD + textwrap.dedent(source))
    directory = () if "--run-dir" in options else ("--run-dir", str(folder / "run"))
    command = [sys.executable, "-m", "saferun", "--nproc-per-node", "2", *directory, *options]
    return subprocess.run(
        [*command, script],
        cwd=folder,
        env=clean_environ(folder, "failure-records"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def records_of(folder: Path) -> dict[str, Any]:
    """The failure records in the run directory, by attempt and rank."""
    found = (folder / "run").rglob("failure.json")
    return {"/".join(path.parts[-3:-1]): json.loads(path.read_text()) for path in found}


def test_the_record_is_in_the_ranks_directory_and_its_locals_in_the_reports(tmp_path: Path) -> None:
    done = launch(tmp_path, FAILS)
    assert done.returncode == 1
    assert f"  {LINE.format(8)}" in done.stderr.splitlines()
    records = records_of(tmp_path)
    assert list(records) == ["attempt_0/rank_1"]
    assert records["attempt_0/rank_1"]["rank"] == "1"
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["incidents"][0]["output"]["failure"][0] == LINE.format(8)
    assert f"  | {LINE.format(8)}" in (tmp_path / "run" / "report.txt").read_text().splitlines()
    everything = done.stderr + "".join(
        path.read_text(errors="replace") for path in (tmp_path / "run").rglob("*") if path.is_file()
    )
    assert "7531902" not in everything
    assert "hunter2" not in everything


@pytest.mark.parametrize(
    "loses",
    slow_but(
        [
            "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)",
            "sys.stderr = open(os.devnull, 'w')",
            "sys.excepthook = lambda *_: print('sorry')",
        ],
        "os.dup2(os.open('/dev/null', os.O_WRONLY), 2)",
    ),
)
def test_an_exception_whose_traceback_is_not_printed_is_the_cause_all_the_same(loses: str, tmp_path: Path) -> None:
    done = launch(tmp_path, f"if rank == 1:\n    {loses}\n{FAILS}")
    assert done.returncode == 1
    assert "ValueError: wrong shape" in done.stderr.splitlines()[0]
    assert "no traceback" not in done.stderr
    lines = done.stderr.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  the traceback of rank 1"))
    assert lines[at] == "  the traceback of rank 1, from its failure record:"
    assert lines[at + 1] == "  | Traceback (most recent call last):"
    assert f'  |   File "{tmp_path}/train.py", line 10, in step' in lines
    incident = json.loads((tmp_path / "run" / "report.json").read_text())["incidents"][0]
    assert incident["cause"]["class"] == "python_exception"


@pytest.mark.slow
def test_each_attempt_has_its_own(tmp_path: Path) -> None:
    launch(tmp_path, FAILS, "--max-restarts", "1")
    assert sorted(records_of(tmp_path)) == ["attempt_0/rank_1", "attempt_1/rank_1"]


@pytest.mark.slow
def test_with_trace_calls_the_last_calls_are_in_it(tmp_path: Path) -> None:
    """As they were at the exception: what the interpreter calls on its way out is not the script's."""
    done = launch(tmp_path, FAILS, "--trace-calls", "train")
    assert done.returncode == 1
    calls = records_of(tmp_path)["attempt_0/rank_1"]["last_calls"]
    assert [(row["function"], Path(row["file"]).name) for row in calls if row["kind"] == "call"] == [
        ("<module>", "train.py"),
        ("step", "train.py"),
    ]
    page = (tmp_path / "run" / "report.html").read_text()
    for text in ("Failure records", "ValueError: wrong shape", "Locals of step (train.py:8)", "(4, 5)", "Last calls"):
        assert text in page
    assert "7531902" not in page


@pytest.mark.slow
def test_without_a_run_directory_the_console_has_the_locals(tmp_path: Path) -> None:
    done = launch(tmp_path, FAILS, "--run-dir", "none")
    assert f"  {LINE.format(8)}" in done.stderr.splitlines()


@pytest.mark.parametrize(
    "last",
    slow_but(["{python} -c 'import sys; sys.exit(3)'", "kill -9 $$", "sleep 5; exit 1"], "kill -9 $$"),
)
def test_a_failure_that_a_shell_script_has_handled_is_not_shown(last: str, tmp_path: Path) -> None:
    """A probe for a cache that is not there, for instance."""
    done = launch_shell(tmp_path, "{python} train.py 2> /dev/null || echo building; " + last)
    assert done.returncode == 1
    assert "locals of" not in done.stderr
    assert not records_of(tmp_path)


def test_a_failure_that_ends_a_shell_script_is_shown(tmp_path: Path) -> None:
    """However long the script's own end takes."""
    done = launch_shell(tmp_path, "{python} train.py")
    assert done.returncode == 1
    assert LINE.format(9) in done.stderr
    assert list(records_of(tmp_path)) == ["attempt_0/rank_1"]


@pytest.mark.slow
@pytest.mark.parametrize("last", ["code=$?; sleep 5; exit $code"])
def test_a_failure_that_the_report_names_is_shown_however_late_its_shell_script_ends(last: str, tmp_path: Path) -> None:
    """It may copy the log files elsewhere first."""
    done = launch_shell(tmp_path, "{python} train.py; " + last)
    assert done.returncode == 1
    assert LINE.format(9) in done.stderr
    assert list(records_of(tmp_path)) == ["attempt_0/rank_1"]


def launch_shell(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """As :func:`launch`, with a shell script that runs ``train.py`` among others."""
    script = script.format(python=sys.executable)
    (folder / "train.sh").write_text(
        f"#!/bin/sh\nif [ $RANK = 0 ]; then exec sleep 1000; fi\n{script}\ncode=$?; exit $code\n"
    )
    (folder / "train.sh").chmod(0o700)
    late = "import atexit; atexit.register(time.sleep, 4)\n"
    return launch(folder, late + textwrap.dedent(FAILS), "--no-python", script="./train.sh")


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--no-inject",)])
def test_without_the_hook_there_is_no_record(options: tuple[str, ...], tmp_path: Path) -> None:
    done = launch(tmp_path, FAILS, *options)
    assert done.returncode == 1
    assert "ValueError: wrong shape" in done.stderr
    assert "locals of" not in done.stderr
    assert not records_of(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("b'x' * (1 << 26)", marks=pytest.mark.slow),
        pytest.param("bytes(range(256)) * 100", marks=pytest.mark.slow),
        'b\'{"version": 1, "exceptions": [[7, null], {"frames": 3}]}\'',
    ],
    ids=["huge", "binary", "types"],
)
def test_whatever_a_rank_writes_in_its_place_changes_nothing_else(content: str, tmp_path: Path) -> None:
    """It is not believed; the failure is reported as ever."""
    source = f"""
    heartbeat = os.environ["SAFERUN_HEARTBEAT_FILE"]
    with open(heartbeat.removesuffix(".heartbeat") + ".failure", "wb") as file:
        file.write({content})
    sys.stderr.write("ValueError: as ever\\n")
    os._exit(3)
    """
    done = launch(tmp_path, source)
    assert done.returncode == 1
    assert "exit code 3" in done.stderr
    assert "locals of" not in done.stderr


def test_the_error_file_of_torchs_record_is_as_ever(tmp_path: Path) -> None:
    """Both are written; the message is torch's."""
    source = """
    import json
    # The first of them to fail must not have the other one stopped before that has written its own.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open(f"ready{rank}", "w").close()
    while not os.path.exists(f"ready{1 - rank}"):
        time.sleep(0.01)
    def step(n):
        raise ValueError("wrong shape")
    try:
        step(3)
    except ValueError:
        message = {"message": "ValueError: wrong shape", "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
            json.dump({"message": message}, file)
        raise
    """
    done = launch(tmp_path, source)
    assert done.returncode == 1
    assert sorted(records_of(tmp_path)) == ["attempt_0/rank_0", "attempt_0/rank_1"]
    errors = list((tmp_path / "run").rglob("error.json"))
    assert len(errors) == 2
    assert all(json.loads(path.read_text())["message"]["message"] == "ValueError: wrong shape" for path in errors)
