"""Flight Recorders that ranks wrote into files before they ended."""

from __future__ import annotations

import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest

from saferun.captures import recorder_dumps
from saferun.captures.recorder_dumps import read_dumps
from saferun.captures.wire import RecorderFile
from saferun.evidence.job_evidence import CaptureNote, Frame, RankCollectives


def content(**other: Any) -> bytes:
    """As torch 2.13's watchdog writes it: with the Python lines of each call."""
    frames = [
        {"name": "all_reduce", "filename": "/site-packages/torch/distributed/distributed_c10d.py", "line": 3252},
        {"name": "step", "filename": "/job/train.py", "line": 52},
    ]
    entry = {
        "frames": frames,
        "record_id": 6,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": 7,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4]],
        "output_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "time_created_ns": 1,
    }
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return pickle.dumps({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": [entry]} | other, 2)


def read(path: Path, rank: int = 3, since: float = 0.0) -> tuple[list[RankCollectives], list[CaptureNote]]:
    found = list(read_dumps((RecorderFile(rank, 77, str(path)),), since, time.monotonic() + 30))
    return (
        [one for one in found if isinstance(one, RankCollectives)],
        [one for one in found if isinstance(one, CaptureNote)],
    )


def test_the_recorder_of_a_dead_rank_is_read_with_its_python_lines(tmp_path: Path) -> None:
    (tmp_path / "flight_recorder_3").write_bytes(content())
    (recorder,), (note,) = read(tmp_path / "flight_recorder_3")
    (group,) = recorder.groups
    (call,) = group.calls
    assert (recorder.rank, group.ranks, group.enqueued, group.completed) == (3, (0, 1), 7, 6)
    assert (call.failed, call.frames[1]) == (True, Frame("step", "/job/train.py", 52))
    assert (note.capture, note.rank, note.path, note.failure) == (
        "flight_recorder",
        3,
        str(tmp_path / "flight_recorder_3"),
        "",
    )


def test_where_it_wrote_none_or_another_job_did_there_is_none(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_bytes(content())
    os.utime(old, (1000, 1000))
    assert read(tmp_path / "missing") == ([], [])
    assert read(old, since=time.time()) == ([], [])


class Program:
    """What a pickle of somebody's would call."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    ("raw", "failure"),
    [
        (b"", "it is malformed, or breaks off"),
        (pickle.dumps(Program()), "it does more than hold plain values"),
        (content()[:-40], "it is malformed, or breaks off"),
        (pickle.dumps(["x" * 5000]), "it is longer than"),
    ],
)
def test_a_file_that_holds_something_else_costs_a_note(
    raw: bytes, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_dumps, "LONGEST_BYTES", 4000)
    (tmp_path / "file").write_bytes(raw)
    recorders, (note,) = read(tmp_path / "file")
    assert recorders == []
    assert note.failure.startswith("the file that it wrote cannot be read: ")
    assert failure in note.failure


def test_a_link_a_fifo_and_a_directory_are_not_followed_waited_for_or_read(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(content())
    (tmp_path / "link").symlink_to("real")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name in ("link", "fifo", "folder"):
        recorders, (note,) = read(tmp_path / name)
        assert recorders == [], name
        assert note.failure, name


def test_a_file_system_that_does_not_answer_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(recorder_dumps, "responds", lambda path, _: asked.append(path))
    files = tuple(RecorderFile(rank, 70 + rank, f"{tmp_path}/flight_recorder_{rank}") for rank in range(3))
    found = list(read_dumps(files, 0.0, time.monotonic() + 30))
    assert len(asked) == 1
    assert [type(one) for one in found] == [CaptureNote]
