"""How a job has ended that saferunctl had end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from saferun import ctl
from saferun.ctl import stop
from saferun.ctl.live_run import LiveRun
from saferun.files.run_files import RunRecord
from saferun.linux.bare_socket import socketpair
from tests.unit.described_runs import GONE, HERE, make_run

if TYPE_CHECKING:
    from pathlib import Path

    from saferun.linux.process_identity import ProcessIdentity

NAME = "20260101-120000-abcdef"
STOPPING = {"ranks": 2, "grace_s": 30}


def ended(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], said: bytes, *words: str
) -> tuple[int, str]:
    """What ``saferunctl stop`` returns, and prints, if saferun says this before it closes the connection."""
    monkeypatch.setattr(stop, "_END_WRITTEN_S", 0.0)
    ours, theirs = socketpair()
    theirs.sendall(said)
    theirs.close()
    record = RunRecord("abcdef0123456789", (), "node1", HERE, 0.0, NAME, None)
    monkeypatch.setattr(stop, "ask_living", lambda *_, **__: (LiveRun(path, ours, record), STOPPING))
    exit_code = ctl.main(["stop", str(path), *words])
    return exit_code, capsys.readouterr().out


@pytest.mark.parametrize("process", [GONE, HERE], ids=["gone", "here"])
def test_an_end_that_is_not_in_the_files_is_the_one_that_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process: ProcessIdentity
) -> None:
    """Files that could not be written have it running, or lost."""
    path = make_run(tmp_path, NAME, process=process, end=None, age_s=5.0)
    said = b'{"outcome":"stopped","exit_code":143}\n'
    exit_code, out = ended(path, monkeypatch, capsys, said)
    assert (exit_code, out.splitlines()[-1].partition(": ")[2]) == (0, "it has ended: stopped, exit code 143")
    exit_code, out = ended(path, monkeypatch, capsys, said, "--json")
    assert (exit_code, json.loads(out)["state"], json.loads(out)["exit_code"]) == (0, "stopped", 143)


@pytest.mark.parametrize("process", [GONE, HERE], ids=["gone", "here"])
def test_an_end_that_is_not_known_is_not_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], process: ProcessIdentity
) -> None:
    path = make_run(tmp_path, NAME, process=process, end=None, age_s=5.0)
    exit_code, out = ended(path, monkeypatch, capsys, b"")
    assert (exit_code, "has ended" in out) == (1, False)
    assert "without saying how it ended" in out
    exit_code, out = ended(path, monkeypatch, capsys, b"", "--json")
    assert (exit_code, json.loads(out)["state"], json.loads(out)["exit_code"]) == (1, None, None)


def test_the_end_in_the_files_counts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_run(tmp_path, NAME, end=(137, "stopped"))
    exit_code, out = ended(path, monkeypatch, capsys, b"")
    assert (exit_code, out.splitlines()[-1].partition(": ")[2]) == (0, "it has ended: stopped, exit code 137")


def test_the_end_is_that_of_the_saferun_that_was_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run.json of the run may be that of a host that has left the job before."""
    path = make_run(tmp_path, NAME, end=(1, "stopped"))
    exit_code, out = ended(path, monkeypatch, capsys, b'{"outcome":"succeeded","exit_code":0}\n')
    assert (exit_code, out.splitlines()[-1].partition(": ")[2]) == (0, "it has ended: succeeded, exit code 0")
