"""``saferunctl story``: what it prints of a run, and what it makes of files that are no stories."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from saferun import ctl
from saferun.ctl import story

ENTRY: dict[str, Any] = {
    "time": 1_700_000_000.25,
    "attempt": 0,
    "before": "running",
    "event": {"name": "RankExited", "local_rank": 1, "status": {"code": 3}},
    "actions": [{"name": "CaptureEvidence", "local_ranks": [0], "budget_s": 20.0}],
    "after": "capturing",
}
IGNORED: dict[str, Any] = {
    **ENTRY,
    "event": {"name": "StoreServed"},
    "actions": [],
    "after": "running",
    "remark": "ignored",
}


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two hosts."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saferun-runs" / "20260101-120000-abcdef"
    for host in ("node1", "node2"):
        (folder / host).mkdir(parents=True)
    (tmp_path / "saferun-runs" / "latest").symlink_to(folder)
    return folder


def test_each_event_is_printed_with_what_followed_from_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line an event, one for each action, host by host; the newest run where none is named."""
    (run_dir / "node1" / "story.jsonl").write_text(f"{json.dumps(IGNORED)}\n{json.dumps(ENTRY)}\n")
    (run_dir / "node2" / "story.task_1.jsonl").write_text(f"{json.dumps(ENTRY)}\n")
    clock = time.strftime("%H:%M:%S", time.localtime(ENTRY["time"])) + ".250"
    assert ctl.main(["story"]) == 0
    lines = capsys.readouterr().out.splitlines()
    exited = f'{clock}  attempt 0  running -> capturing: RankExited(local_rank=1, status={{"code": 3}})'
    captured = "              CaptureEvidence(local_ranks=[0], budget_s=20.0)"
    assert lines == [
        "saferun-runs/20260101-120000-abcdef/node1/story.jsonl:",
        f"{clock}  attempt 0  running: StoreServed()  (ignored)",
        exited,
        captured,
        "",
        "saferun-runs/20260101-120000-abcdef/node2/story.task_1.jsonl:",
        exited,
        captured,
    ]


@pytest.mark.parametrize("line", ["{", "[]", "3", '{"time": 1}', '{"time": 1e999}', "\x00", "[" * 100_000])
def test_a_line_that_is_none_costs_only_itself(run_dir: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    (run_dir / "node1" / "story.jsonl").write_text(f"{line}\n{json.dumps(ENTRY)}\n")
    assert ctl.main(["story", "20260101-120000-abcdef"]) == 0
    out = capsys.readouterr().out
    assert "(a line that cannot be read)" in out
    assert "RankExited" in out


def test_control_characters_do_not_reach_the_terminal(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What another host reported is in it."""
    bad = {**ENTRY, "before": "\x1b[2J", "event": {"name": "JobAborted", "message": "\x1b]0;title\x07"}}
    (run_dir / "node1" / "story.jsonl").write_text(json.dumps(bad))
    assert ctl.main(["story", str(run_dir)]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"), [(["story"], "there is no story in"), (["story", "nowhere"], "there is no run nowhere")]
)
def test_where_there_is_no_story_the_answer_says_when_there_is_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run_dir.is_dir()
    assert ctl.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_what_is_no_regular_file_is_not_read(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A FIFO would not end, and a link may lead anywhere; of what is too large only the beginning is read."""
    os.mkfifo(run_dir / "node1" / "story.jsonl")
    (tmp_path / "secret.jsonl").write_text(json.dumps({**ENTRY, "before": "secret"}))
    (run_dir / "node1" / "story.link.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (run_dir / "node2" / "story.jsonl").write_text(f"{json.dumps(ENTRY)}\n" * 1000)
    monkeypatch.setattr(story, "_MOST_BYTES", 3 * len(json.dumps(ENTRY)))
    assert ctl.main(["story", str(run_dir)]) == 0
    out = capsys.readouterr().out
    assert "cannot be read: not a regular file" in out
    assert "cannot be read: Too many levels of symbolic links" in out
    assert "secret" not in out.replace("secret.jsonl", "")
    assert out.count("RankExited") == 3
    assert ctl.main(["story", str(run_dir), "--json"]) == 0
    fifo, link, large = json.loads(capsys.readouterr().out)["stories"]
    assert (fifo["entries"], link["entries"], len(large["entries"])) == ([], [], 3)
