"""The ranks' directories in temporary directories: in memory if possible, and never a reason to fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from saferun.files.file_stream import OnAnswer
from saferun.files.rank_scratch import RankScratch
from saferun.linux.scratch import Scratch, logs_id, shared_bases
from tests.direct_files import DirectFiles

ID = "fedcba9876543210"


@pytest.fixture(name="warnings")
def _warnings() -> list[str]:
    return []


@pytest.fixture(name="files")
def _files() -> DirectFiles:
    return DirectFiles()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def directory_of(scratch: RankScratch, *, is_large: bool = False) -> Path:
    """The directory of rank 1 in a temporary directory."""
    made: list[list[str] | OSError] = []
    scratch.make(0, [1], made.append, is_large=is_large)
    assert isinstance(made[0], list)
    return Path(made[0][0])


def test_where_no_memory_takes_a_rank_s_directory_the_writer_makes_it(
    files: DirectFiles, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On whatever disk there is, which only the writer may wait for."""
    monkeypatch.setattr("saferun.linux.scratch.is_in_memory", lambda _path: False)
    scratch = RankScratch(ID, warnings.append, files)
    asked: list[str] = []
    plain = files.ask

    def ask(name: str, arguments: list[object], on_answer: OnAnswer | None = None) -> None:
        asked.append(name)
        plain(name, arguments, on_answer)

    monkeypatch.setattr(files, "ask", ask)
    path = directory_of(scratch)
    assert asked == ["make_scratch_directories"]
    assert path.is_dir()
    scratch.close()
    assert not path.exists()


@pytest.mark.parametrize("is_large", [False, True])
def test_a_temporary_directory_of_which_nothing_is_heard_keeps_no_rank_from_its_start(
    files: DirectFiles, warnings: list[str], monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    """Logs will be there when its file system answers; an error file is not relied upon."""
    monkeypatch.setattr("saferun.linux.scratch.is_in_memory", lambda _path: False)
    scratch = RankScratch(ID, warnings.append, files)
    asked: list[str] = []

    def ask(name: str, _arguments: list[object], on_answer: OnAnswer = lambda _: None) -> None:
        asked.append(name)
        on_answer(None)

    monkeypatch.setattr(files, "ask", ask)
    made: list[list[str] | OSError] = []
    scratch.make(1, [3, 4], made.append, is_large=is_large)
    base = Scratch(logs_id(ID)).expected_path()
    names = [f"{base}/attempt_1/rank_{rank}" for rank in (3, 4)]
    assert made == [names if is_large else ["", ""]]
    scratch.close()
    assert asked == ["make_scratch_directories", "remove_directories"], "whoever may have made it removes it"


def no_room_below(monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    """The last inodes of these file systems go to the directories of runs."""
    plain = os.mkdir

    def mkdir(path: str, mode: int = 0o777) -> None:
        if os.fspath(path).startswith(prefix) and "/attempt_" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        plain(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)


def test_memory_without_inodes_for_a_rank_s_directory_is_not_used(
    files: DirectFiles, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the run may be the last that it takes."""
    no_room_below(monkeypatch, "/dev/shm/")
    scratch = RankScratch(ID, warnings.append, files)
    path = directory_of(scratch)
    assert path.is_dir()
    assert not path.is_relative_to("/dev/shm")
    scratch.close()
    assert not path.exists()
    assert not os.path.exists(f"/dev/shm/saferun-{ID}")


@pytest.mark.parametrize("is_large", [False, True])
def test_no_room_for_error_files_keeps_no_rank_from_its_start(
    files: DirectFiles, warnings: list[str], monkeypatch: pytest.MonkeyPatch, *, is_large: bool
) -> None:
    """The user has asked for logs, and not for error files."""
    no_room_below(monkeypatch, "/")
    scratch = RankScratch(ID, warnings.append, files)
    made: list[list[str] | OSError] = []
    scratch.make(1, [3, 4], made.append, is_large=is_large)
    assert isinstance(made[0], OSError) if is_large else made == [["", ""]]
    assert len(warnings) == (0 if is_large else 1)
    scratch.close()
    assert not [base for base in shared_bases() if os.path.exists(f"{base}/saferun-{logs_id(ID)}")]


def test_the_log_files_of_all_attempts_are_in_one_place_that_is_named_once(
    files: DirectFiles, warnings: list[str]
) -> None:
    """And that stays, unlike the error files."""
    scratch = RankScratch(ID, warnings.append, files)
    assert scratch.logs_path == ""
    logs: list[list[str] | OSError] = []
    for attempt in (0, 1):
        scratch.make(attempt, [3], logs.append, is_large=True)
    error_files = directory_of(scratch)
    base = scratch.logs_path
    assert logs == [[f"{base}/attempt_0/rank_3"], [f"{base}/attempt_1/rank_3"]]
    assert warnings == [f"the log files of the ranks are in {base}; they stay there"]
    scratch.close()
    assert os.path.isdir(f"{base}/attempt_1/rank_3")
    assert not error_files.exists()


def test_nothing_is_removed_where_nothing_was_made(
    files: DirectFiles, warnings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch whose ranks' files are all in its run directory."""
    asked: list[str] = []
    monkeypatch.setattr(files, "ask", lambda name, *_: asked.append(name))
    RankScratch(ID, warnings.append, files).close()
    assert not asked
