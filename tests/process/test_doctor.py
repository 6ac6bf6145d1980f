"""``saferunctl doctor`` as a process: this host is looked at, nothing is started, and nothing is left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.process.launching import REPOSITORY

SCHEMA = REPOSITORY / "saferun" / "report" / "schema" / "preflight.schema.json"

# Until the file is there that the argument names.
UNTIL_IT_IS_THERE = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def ask(folder: Path, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place with a script that would leave a trace."""
    (tmp_path / "train.py").write_text("open('has_run', 'w').close()\n", encoding="utf-8")
    return tmp_path


def test_a_healthy_host_is_told_in_a_table(folder: Path) -> None:
    """On stdout, with the sum at the end; the script is not run, and there is no run directory."""
    done = ask(folder, "saferun.ctl", "doctor", "train.py")
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    (versions,) = [line for line in lines if line.split()[:2] == ["ok", "versions"]]
    assert "python 3." in versions
    assert "torch 2." in versions
    for check in ("ptrace", "tools"):
        assert any(line.split()[:2] == ["ok", check] for line in lines)
    assert "py-spy" in done.stdout
    assert lines[-1].endswith(" ok")
    assert "fail" not in done.stdout
    assert os.listdir(folder) == ["train.py"]


def test_programs_get_the_content_of_preflight_json(folder: Path) -> None:
    """Nothing else stands on stdout."""
    done = ask(folder, "saferun.ctl", "doctor", "--json", "train.py")
    assert done.returncode == 0, done
    content = json.loads(done.stdout)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8"))).validate(content)
    assert content["verdict"] == "ok"
    assert {"names", "shared_memory", "versions"} <= {result["check"] for result in content["results"]}


@pytest.mark.slow
def test_files_are_left_where_they_are_asked_for(folder: Path) -> None:
    """Of a look at the hosts, and of a launch whose ranks are there until the checks beside them are over."""
    (folder / "train.py").write_text(f"{(folder / 'train.py').read_text()}{UNTIL_IT_IS_THERE}", encoding="utf-8")
    look = ask(folder, "saferun.ctl", "doctor", "--run-dir", "look", "train.py")
    # It ends before the answer about its directory comes, and everything is written after that.
    assert (look.returncode, "the process that writes files" in look.stderr) == (0, False)
    assert ask(folder, "saferun", "--run-dir", "run", "train.py", "run/preflight.json").returncode == 0
    looked, launched = (json.loads((folder / name / "preflight.json").read_text()) for name in ("look", "run"))
    found = [result["check"] for result in looked["results"] if result["check"] not in {"ptrace", "tools"}]
    assert found == [result["check"] for result in launched["results"]]
    assert not (folder / "run" / "report.json").exists()
    assert (folder / "has_run").exists()
