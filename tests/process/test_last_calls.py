"""``--trace-calls`` in a whole launch: what the reports show of ranks that cannot say anything any more."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.process.launching import clean_environ

DEADLINE_S = 120.0
HEAD = "import ctypes, os, signal, sys, time\nrank = int(os.environ['RANK'])\n"


def launch(folder: Path, source: str, *options: str, python: str = "") -> subprocess.CompletedProcess[str]:
    """Saferun with two ranks of a script. ``python``: the interpreter of the ranks, unless that is saferun's own."""
    (folder / "train.py").write_text(HEAD + textwrap.dedent(source))
    command = [sys.executable, "-m", "saferun", "--nproc-per-node", "2", "--run-dir", str(folder / "run"), *options]
    script = ["--no-python", python, "-u", "train.py"] if python else ["train.py"]
    return subprocess.run(
        [*command, *script],
        cwd=folder,
        env=clean_environ(folder, "last-calls"),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def incident_of(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "run" / "report.json").read_text())
    incident: dict[str, Any] = report["incidents"][0]
    return incident


def last_calls_of(incident: dict[str, Any]) -> dict[int, list[tuple[str, str]]]:
    """The events of each rank's main thread."""
    return {
        rank["rank"]: [(event["kind"], event["function"]) for event in rank["threads"][0]["events"]]
        for rank in incident["last_calls"]
    }


STEPS = """
def load(n): return n
def step(n): return load(n)
def evaluate():
    {evaluate}
for number in range(100):
    step(number)
if rank == 1:
    evaluate()
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("evaluate", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "SIGKILL"),
        pytest.param("ctypes.string_at(0)", "SIGSEGV", marks=pytest.mark.slow),
    ],
    ids=["SIGKILL", "SIGSEGV"],
)
def test_a_rank_that_was_killed_shows_its_last_calls(tmp_path: Path, evaluate: str, how: str) -> None:
    """And the other one, which lives, its own; the first call in which they differ is a finding."""
    done = launch(tmp_path, STEPS.format(evaluate=evaluate), "--trace-calls", "script", "--cores", "off")
    assert done.returncode != 0
    assert how in done.stderr
    assert "a call costs about a microsecond" in done.stderr
    # Where Python has written a traceback, that is what the console has.
    assert ("last calls of rank 1 (the last one " in done.stderr) == (how == "SIGKILL")
    incident = incident_of(tmp_path)
    calls = last_calls_of(incident)
    ends = [("call", "step"), ("call", "load"), ("return", "load"), ("return", "step")]
    assert calls[1][-5:] == [*ends, ("call", "evaluate")]
    assert calls[0][-4:] == ends
    (finding,) = [line for line in incident["findings"] if "behind" in line or "differ" in line]
    assert finding.startswith("rank 0 is behind the others: last returned from step (train.py:")
    assert finding.partition("; rank 1 then called evaluate (train.py:")[1]
    assert "--- last calls (--trace-calls)" in (tmp_path / "run" / "report.txt").read_text()


@pytest.mark.slow
def test_a_rank_that_holds_the_gil_shows_its_last_calls(tmp_path: Path) -> None:
    """In a hang nothing of it answers."""
    source = STEPS.format(evaluate="ctypes.PyDLL(None).sleep(1000)").replace("time.sleep", "ctypes.PyDLL(None).sleep")
    options = ("--hang-timeout", "2", "--on-hang", "stop", "--external-wait-timeout", "0")
    done = launch(tmp_path, source, "--trace-calls", "train", *options)
    assert done.returncode != 0
    calls = last_calls_of(incident_of(tmp_path))
    assert calls[1][-1] == ("call", "evaluate")
    assert calls[0][-1] == ("return", "step")
    (file, *_) = (tmp_path / "run").rglob("rank_1.last_calls.txt")
    assert "call    evaluate" in file.read_text()


@pytest.mark.slow
def test_lines_are_recorded_of_one_rank(tmp_path: Path) -> None:
    """The other one is not slowed by that."""
    source = STEPS.format(evaluate="os.kill(os.getpid(), signal.SIGKILL)")
    done = launch(tmp_path, source, "--trace-lines", "1", "--cores", "off")
    assert "rank 1 records lines, too" in done.stderr
    incident = incident_of(tmp_path)
    kinds = {rank["rank"]: {e["kind"] for e in rank["threads"][0]["events"]} for rank in incident["last_calls"]}
    assert ("line" in kinds[0], "line" in kinds[1]) == (False, True)


@pytest.mark.slow
def test_without_the_option_nothing_is_recorded(tmp_path: Path) -> None:
    """It is off by default, and no rank knows of it."""
    source = "print([name for name in os.environ if 'SAFERUN_TRACE' in name], sys.getprofile())\nsys.exit(rank)\n"
    done = launch(tmp_path, source)
    assert done.stdout.count("[] None") == 2
    assert incident_of(tmp_path)["last_calls"] == []
    assert "last calls" not in done.stderr


@pytest.mark.slow
def test_a_job_with_the_option_ends_as_it_does_without(tmp_path: Path) -> None:
    """Also after a restart, whose attempt has a record of its own."""
    source = """
    def step(): pass
    for _ in range(1000): step()
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = launch(tmp_path, source, "--trace-calls", ".", "--max-restarts", "1", "--cores", "off")
    assert done.returncode == 0, done.stderr
    assert 0 in last_calls_of(incident_of(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--trace-calls", "script", "--no-inject"), "--no-inject leaves the hook out"),
        (("--trace-calls", "my pkg"), "'my pkg' is no package, module or directory"),
    ],
)
def test_what_cannot_be_recorded_is_bad_input(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    """Before anything is started."""
    done = launch(tmp_path, "", *options)
    assert done.returncode == 2
    assert message in done.stderr


def test_a_rank_that_the_job_does_not_have_is_named_once(tmp_path: Path) -> None:
    """The job goes on; without the line, nobody would know why nothing is recorded or answered."""
    done = launch(tmp_path, "print('ran')\n", "--trace-lines", "2", "--attach", "9", "--max-restarts", "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ran") == 2
    assert done.stderr.count("saferun: --trace-lines 2: there is no such rank; the world size is 2\n") == 1
    assert done.stderr.count("saferun: --attach 9: there is no such rank; the world size is 2\n") == 1
