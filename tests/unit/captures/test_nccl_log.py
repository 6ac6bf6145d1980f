"""NCCL's warnings are read from its log files of each rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saferun.captures import nccl_log
from saferun.captures.nccl_log import nccl_warnings
from saferun.captures.wire import CaptureReader, DeadProcess, LibraryLog, encode

WARNING = "n1:7:99 [0] misc/ibvwrap.cc:270 NCCL WARN Call to ibv_reg_mr failed: Cannot allocate memory"


def rank(directory: Path, number: int = 0) -> DeadProcess:
    return DeadProcess(number, 7, 0, directory=str(directory))


def test_warnings_of_each_rank_are_read(tmp_path: Path) -> None:
    (tmp_path / "nccl.n1.7.log").write_text(f"NCCL version 2.28.3\n{WARNING}\nn1:7:99 [0] NCCL INFO ->2\n")
    (tmp_path / "torch_logs.txt").write_text(f"{WARNING}\n")
    (other := tmp_path / "rank_1").mkdir()
    assert nccl_warnings((rank(tmp_path), rank(other, 1))) == [LibraryLog(0, (WARNING,))]


def test_the_last_ones_of_many_are_kept(tmp_path: Path) -> None:
    (tmp_path / "nccl.n1.7.log").write_text("".join(f"NCCL WARN {number}\n" for number in range(100_000)))
    (log,) = nccl_warnings((rank(tmp_path),))
    assert log.lines == tuple(f"NCCL WARN {number}" for number in range(99_990, 100_000))


def test_what_is_no_file_is_passed_over(tmp_path: Path) -> None:
    """A rank may put anything there."""
    os.mkfifo(tmp_path / "nccl.pipe.log")
    (tmp_path / "nccl.folder.log").mkdir()
    (tmp_path / "theirs").write_text("NCCL WARN theirs\n")
    (tmp_path / "nccl.link.log").symlink_to("theirs")
    assert nccl_warnings((rank(tmp_path), rank(tmp_path / "none"), DeadProcess(0, 7, 0))) == []


def test_secrets_are_redacted(tmp_path: Path) -> None:
    (tmp_path / "nccl.n1.7.log").write_text("NCCL WARN bad value of API_TOKEN=hunter2hunter2\n")
    (log,) = nccl_warnings((rank(tmp_path),))
    assert "hunter2" not in log.lines[0]


def test_a_dead_file_system_costs_one_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def silent(path: str, _seconds: float) -> bool:
        asked.append(path)
        return False

    monkeypatch.setattr(nccl_log, "responds", silent)
    assert nccl_warnings(tuple(rank(tmp_path, number) for number in range(8))) == []
    assert len(asked) == 1


def test_they_pass_the_wire() -> None:
    reader = CaptureReader()
    reader.feed(encode("library_log", LibraryLog(3, (WARNING,))))
    assert reader.library_logs == (LibraryLog(3, (WARNING,)),)
