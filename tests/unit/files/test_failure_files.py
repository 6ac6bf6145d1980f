"""The writer takes a rank's failure record from memory into the run directory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from saferun.files.failure_files import take_failure_record

RECORD = {
    "version": 1,
    "exceptions": [
        {
            "type": "ValueError",
            "message": "token=hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
            "frames": [
                {"function": "f", "file": "t.py", "line": 1, "locals": [{"name": "n", "type": "int", "value": "3"}]}
            ],
        }
    ],
}


def lines_of(*arguments: Any) -> list[str]:
    """What it returns for the report."""
    lines: list[str] = take_failure_record(*arguments).get("lines", [])
    return lines


def test_a_record_is_copied_without_secrets_and_its_lines_returned(tmp_path: Path) -> None:
    """Messages of exceptions may quote anything."""
    (tmp_path / "a").write_text(json.dumps(RECORD))
    target = tmp_path / "b"
    assert lines_of(str(tmp_path / "a"), str(target)) == ["locals of f (t.py:1): n = 3"]
    assert "hf_abc" not in target.read_text()
    assert json.loads(target.read_text())["exceptions"][0]["type"] == "ValueError"
    assert target.stat().st_mode & 0o777 == 0o600


def test_without_a_run_directory_there_are_the_lines(tmp_path: Path) -> None:
    """``--run-dir none``."""
    (tmp_path / "a").write_text(json.dumps(RECORD))
    assert lines_of(str(tmp_path / "a"), "") == ["locals of f (t.py:1): n = 3"]


@pytest.mark.parametrize(
    ("pid", "code", "ended", "is_taken"),
    [
        (71, 3, 90.0, True),  # the rank itself: whatever it does after the exception
        (71, None, 90.0, True),
        (70, 1, 0.5, True),  # a shell script that ends with its last command
        (70, 1, 2.5, True),
        (70, 3, 0.5, False),
        (70, None, 0.5, False),
        (70, 1, 10.0, False),
        (70, 1, -10.0, False),
    ],
)
def test_a_failure_that_the_rank_handled_before_it_ended_is_not_that_of_its_end(
    tmp_path: Path, pid: int, code: int | None, ended: float, is_taken: bool
) -> None:
    """``python probe.py || echo "no cache"; python train.py``: locals of the probe say nothing about the training."""
    source = tmp_path / "a"
    source.write_text(json.dumps({**RECORD, "pid": 71}))
    lines = lines_of(str(source), str(tmp_path / "b"), pid, code, source.stat().st_mtime + ended)
    assert lines == (["locals of f (t.py:1): n = 3"] if is_taken else [])
    assert (tmp_path / "b").exists() is is_taken


@pytest.mark.parametrize(
    ("code", "printed", "is_taken"),
    [
        (1, ["ValueError", "/home/me/t.py", 1], True),
        (1, ["ValueError", "t.py", 2], False),
        (1, ["ValueError", "other.py", 1], False),
        (1, ["KeyError", "t.py", 1], False),
        (1, [], False),
        (3, ["ValueError", "t.py", 1], False),
        (None, ["ValueError", "t.py", 1], False),
    ],
)
def test_a_failure_that_the_report_names_is_shown_however_late_the_rank_ends(
    tmp_path: Path, code: int | None, printed: list[object], is_taken: bool
) -> None:
    """``python train.py; code=$?; upload logs; exit $code``."""
    source = tmp_path / "a"
    source.write_text(json.dumps({**RECORD, "pid": 71}))
    ended = source.stat().st_mtime + 90.0
    lines = lines_of(str(source), str(tmp_path / "b"), 70, code, ended, printed)
    assert lines == (["locals of f (t.py:1): n = 3"] if is_taken else [])


@pytest.mark.parametrize(
    ("uncaught", "code", "printed", "ended", "is_taken"),
    [
        (False, 3, [], 0.0, False),
        (False, None, [], 0.0, False),
        (False, 1, [], 0.0, False),
        (False, 1, ["KeyError", "t.py", 1], 0.0, False),
        (False, 1, ["ValueError", "t.py", 1], 90.0, True),  # printed at the end
        (False, 3, ["KeyError", "t.py", 1], 0.0, False),
        (False, 3, ["ValueError", "t.py", 1], 1.0, True),  # the same, and the script chooses the exit code
        (False, 3, ["ValueError", "t.py", 1], 90.0, False),  # it went on
        (False, None, ["ValueError", "t.py", 1], 1.0, False),  # the signal may have come from anywhere
        (True, 3, [], 0.0, True),
        (None, 3, [], 0.0, True),  # not known: of saferun.record, or of an earlier release
        ("no", 3, [], 0.0, True),
    ],
)
def test_a_failure_that_the_script_itself_has_printed_counts_where_the_report_names_it(
    tmp_path: Path, uncaught: object, code: int | None, printed: list[object], ended: float, *, is_taken: bool
) -> None:
    """``sys.excepthook(*sys.exc_info())``: a probe that is handled. What ends the rank later is something else."""
    source = tmp_path / "a"
    source.write_text(json.dumps({**RECORD, "pid": 71, "uncaught": uncaught}))
    lines = lines_of(str(source), str(tmp_path / "b"), 71, code, source.stat().st_mtime + ended, printed)
    assert lines == (["locals of f (t.py:1): n = 3"] if is_taken else [])


@pytest.mark.parametrize("exceptions", [[], [7], [{"type": "ValueError", "frames": [3]}], [{"frames": 3}], [{}]])
def test_a_record_without_a_place_is_of_no_failure_that_was_printed(tmp_path: Path, exceptions: list[object]) -> None:
    (tmp_path / "a").write_text(json.dumps({"version": 1, "pid": 71, "exceptions": exceptions}))
    assert lines_of(str(tmp_path / "a"), str(tmp_path / "b"), 70, 1, 0.0, ["ValueError", "t.py", 1]) == []
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("kind", ["missing", "directory", "fifo", "link", "binary", "huge"])
def test_what_is_no_record_is_left_alone(kind: str, tmp_path: Path) -> None:
    """Whatever a rank has put in its place; nothing is waited for."""
    source = tmp_path / "a"
    if kind == "directory":
        source.mkdir()
    elif kind == "fifo":
        os.mkfifo(source)
    elif kind == "link":
        (tmp_path / "other").write_text(json.dumps(RECORD))
        source.symlink_to("other")
    elif kind == "binary":
        source.write_bytes(bytes(range(256)) * 10)
    elif kind == "huge":
        with source.open("wb") as file:
            file.truncate(1 << 40)
    assert lines_of(str(source), str(tmp_path / "b")) == []
    assert not (tmp_path / "b").exists()


def test_where_the_file_cannot_be_written_there_are_the_lines(tmp_path: Path) -> None:
    """A full or read-only file system costs the file only."""
    (tmp_path / "a").write_text(json.dumps(RECORD))
    (tmp_path / "b").mkdir()
    assert lines_of(str(tmp_path / "a"), str(tmp_path / "b")) == ["locals of f (t.py:1): n = 3"]


def test_a_number_of_a_secrets_name_is_dropped_here_too(tmp_path: Path) -> None:
    """The rank knows fewer names; and it may have written anything."""
    named = {"type": "int", "value": "7531902"}
    rows: list[dict[str, object]] = [
        {"name": "github_pat", **named},
        {"name": "num_tokens", "type": "int", "value": "12"},
    ]
    rows.append({"name": "batch", "items": [{"name": "api_key", **named}]})
    frame = {"function": "f", "file": "t.py", "line": 1, "locals": rows}
    record = {"version": 1, "exceptions": [{"type": "E", "message": "", "frames": [frame]}]}
    (tmp_path / "a").write_text(json.dumps(record))
    (line,) = lines_of(str(tmp_path / "a"), str(tmp_path / "b"))
    assert "num_tokens = 12" in line
    assert "7531902" not in line + (tmp_path / "b").read_text()


@pytest.mark.parametrize(
    ("code", "printed", "after_s", "is_needed"),
    [(1, [], 1.0, True), (1, ["ValueError", "t.py", 1], 1.0, False), (3, [], 1.0, False), (1, [], 60.0, False)],
)
def test_a_traceback_that_the_rank_has_not_printed_is_returned_as_well(
    tmp_path: Path, code: int, printed: list[object], after_s: float, *, is_needed: bool
) -> None:
    """With another exit code, or where it ends later, the rank went on after the exception."""
    source = tmp_path / "a"
    source.write_text(json.dumps({**RECORD, "pid": 70}))
    found = take_failure_record(str(source), "", 70, code, source.stat().st_mtime + after_s, printed)["traceback"]
    assert found[:2] == (["Traceback (most recent call last):", '  File "t.py", line 1, in f'] if is_needed else [])
    assert "hf_abc" not in " ".join(found)


@pytest.mark.parametrize(
    ("fields", "pid", "uncaught_time"),
    [
        ({}, 71, 5.5),
        ({}, 70, 0.0),  # of a process below the rank
        ({}, None, 0.0),
        ({"uncaught": False}, 71, 0.0),  # printed by a script that handles it
        ({"uncaught": None}, 71, 0.0),
        ({"thread": "Thread-1"}, 71, 0.0),
        ({"time": "5.5"}, 71, 0.0),
    ],
)
def test_only_what_nothing_handled_in_the_main_thread_has_a_time(
    tmp_path: Path, fields: dict[str, object], pid: int | None, uncaught_time: float
) -> None:
    """The order of failures goes by it, also of ranks that had not ended by then."""
    record = {**RECORD, "pid": 71, "uncaught": True, "thread": "", "time": 5.5, **fields}
    source = tmp_path / "a"
    source.write_text(json.dumps(record))
    found = take_failure_record(str(source), "", pid, 1, source.stat().st_mtime)
    assert found.get("uncaught_time", 0.0) == uncaught_time
