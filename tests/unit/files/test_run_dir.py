"""The run directory: there for people to read, and never a reason to fail."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from saferun.files import earlier_run, operations
from saferun.files.run_dir import BASE, RunDirectory
from saferun.linux import abandoned_scratch
from saferun.linux.scratch import Scratch, logs_id
from tests.direct_files import DirectFiles

ID = "0123456789abcdef"


class Warnings(list[str]):
    """Collects what is told."""


def make(path: str | None, warnings: Warnings, *, wanted: bool = True, run_id: str = ID) -> RunDirectory:
    run_dir = RunDirectory(path, wanted=wanted, host="node3", run_id=run_id, warn=warnings.append, files=DirectFiles())
    run_dir.open()
    return run_dir


@pytest.fixture(name="warnings")
def _warnings() -> Warnings:
    return Warnings()


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def test_the_layout(tmp_path: Path, warnings: Warnings) -> None:
    """run.json, <host>/events.jsonl, <host>/attempt_<N>/rank_<R>."""
    run_dir = make("runs/7", warnings)
    assert run_dir.path == str(tmp_path / "runs" / "7")
    run_dir.write_json("run.json", {"a": 1, "odd": Path("x")})
    run_dir.write_event({"event": "A"})
    run_dir.write_event({"event": "B", "odd": {1}})
    assert run_dir.rank_path(2, 13) == str(tmp_path / "runs" / "7" / "node3" / "attempt_2" / "rank_13")
    run_dir.close()
    assert json.loads((tmp_path / "runs" / "7" / "run.json").read_text()) == {"a": 1, "odd": "x"}
    lines = (tmp_path / "runs" / "7" / "node3" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["A", "B"]
    assert warnings == []


def test_by_default_each_run_has_a_directory_below_the_current_one(tmp_path: Path, warnings: Warnings) -> None:
    """With a link to the newest, and ignored by git."""
    first = make(None, warnings, run_id="aaaaaaaa")
    second = make(None, warnings, run_id="bbbbbbbb")
    assert first.path is not None
    assert second.path is not None
    assert Path(first.path).parent == tmp_path / BASE
    assert first.path != second.path
    latest = tmp_path / BASE / "latest"
    assert latest.is_symlink()
    assert latest.resolve() == Path(second.path)
    assert not os.path.isabs(os.readlink(latest))  # the tree may be moved
    assert (tmp_path / BASE / ".gitignore").read_text() == "*\n"
    first.close()
    second.close()
    assert warnings == []


def test_a_directory_that_the_user_names_is_not_hidden_from_git(tmp_path: Path, warnings: Warnings) -> None:
    """It may be where the configuration and the results of an experiment are, too."""
    make("fresh", warnings).close()
    assert not (tmp_path / "fresh" / ".gitignore").exists()
    (tmp_path / "mine").mkdir()
    make("mine", warnings).close()
    assert not (tmp_path / "mine" / ".gitignore").exists()
    (tmp_path / BASE).mkdir()
    (tmp_path / BASE / ".gitignore").write_text("!keep\n")
    make(None, warnings).close()
    assert (tmp_path / BASE / ".gitignore").read_text() == "!keep\n"


def test_a_directory_may_be_used_again(tmp_path: Path, warnings: Warnings) -> None:
    """Events are added; what is written as a whole is replaced."""
    for number in (1, 2):
        run_dir = make("again", warnings)
        run_dir.write_event({"run": number})
        run_dir.write_json("whole.json", {"run": number})
        run_dir.rank_path(0, 0)
        run_dir.close()
    lines = (tmp_path / "again" / "node3" / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [1, 2]
    assert json.loads((tmp_path / "again" / "whole.json").read_text()) == {"run": 2}
    assert warnings == []


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/saferun", "x" * 300])
def test_a_directory_that_cannot_be_made_is_one_warning(path: str, tmp_path: Path, warnings: Warnings) -> None:
    """The launch goes on, on the console alone."""
    (tmp_path / "file").write_text("")
    run_dir = make(path, warnings)
    assert (run_dir.path, run_dir.host_path) == (None, None)
    (warning,) = warnings
    assert warning.startswith("no run directory: ")
    assert "; the job runs without it; all output is on the console, except what -r" in warning
    assert "\n" not in warning
    run_dir.write_event({"event": "A"})
    run_dir.write_json("run.json", {})
    run_dir.close()
    assert len(warnings) == 1


def test_a_directory_whose_inside_cannot_be_written_is_one_warning(tmp_path: Path, warnings: Warnings) -> None:
    """Here a file stands where the host's directory should be."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "node3").write_text("")
    run_dir = make("run", warnings)
    assert run_dir.path is None
    assert len(warnings) == 1
    run_dir.close()


def test_a_full_disk_is_told_once(tmp_path: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events stop; the run does not."""

    def fill(_fd: int, _blocks: list[memoryview]) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", fill)
    run_dir = make("run", warnings)
    for _ in range(3):
        run_dir.write_event({"event": "A"})
    run_dir.close()
    assert len(warnings) == 1
    assert f"{tmp_path}/run/node3/events.jsonl: No space left on device" in warnings[0]
    assert not run_dir.keeps_all


def test_json_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path, warnings: Warnings) -> None:
    """As a whole, or not at all."""
    run_dir = make("run", warnings)
    (tmp_path / "run" / "run.json").mkdir()  # cannot be replaced by a file
    run_dir.write_json("run.json", {"a": 1})
    run_dir.close()
    assert len(warnings) == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["node3", "run.json"]


def test_without_files_a_rank_gets_a_private_directory_that_goes_away(tmp_path: Path, warnings: Warnings) -> None:
    """Error files have to be somewhere."""
    run_dir = make(None, warnings, wanted=False)
    assert run_dir.path is None
    assert not (tmp_path / BASE).exists()
    assert run_dir.rank_path(0, 1) is None
    made: list[list[str] | OSError] = []
    for is_large in (False, True):
        run_dir.rank_scratch.make(0, [1], made.append, is_large=is_large)
    path, large = (Path(paths[0]) for paths in made if isinstance(paths, list))
    scratch, disk = Path(run_dir.scratch.in_memory_path()), Path(Scratch(logs_id(ID)).expected_path())
    assert disk.parent == tmp_path, "what may be large is not in memory"
    for directory, parent in ((path, scratch), (large, disk)):
        assert directory.is_dir()
        assert parent in directory.parents
        assert parent.stat().st_mode & 0o077 == 0
    run_dir.close()
    assert not scratch.exists()
    assert large.is_dir(), "the user wants these logs, and torchrun's stay too"
    assert not abandoned_scratch._NAME.fullmatch(disk.name), "nor does a later run remove them"
    assert warnings == [f"the log files of the ranks are in {disk}; they stay there"]


@pytest.mark.parametrize("is_full", [False, True])
def test_a_run_that_cannot_be_set_aside_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    """A disk without room for one directory more."""
    (tmp_path / "run.json").write_text("{}")
    monkeypatch.setattr(earlier_run, "read_run_record", lambda *_: SimpleNamespace(end=None))
    monkeypatch.setattr(earlier_run, "has_ended", lambda *_: True)

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if is_full:
        monkeypatch.setattr(os, "mkdir", fail)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        moved, unheard_s, left = earlier_run.set_aside(fd, "node3", leads=True)
    finally:
        os.close(fd)
    assert (bool(moved), unheard_s) == (not is_full, None)
    assert left == ("no directory can be made for them: No space left on device" if is_full else "")
    assert (tmp_path / moved / "run.json").exists()


@pytest.mark.parametrize("failure", [OSError(28, "No space left"), NotADirectoryError(20, "a file")])
def test_a_failure_while_an_earlier_run_is_looked_at_makes_the_directory_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError
) -> None:
    def fail(*_: object, **__: object) -> tuple[str, float | None]:
        raise failure

    monkeypatch.setattr(operations, "set_aside", fail)
    path = str(tmp_path / "run")
    assert operations.make_run_directory(path, f"{path}/node3", "", [], [1]) == ("", None, "", "")
    assert (tmp_path / "run" / "node3").is_dir()


@pytest.mark.parametrize("has_links", [True, False])
def test_files_of_the_user_s_own_are_kept_whatever_the_file_system_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Only those that the run would replace: not a directory, nor what stands beside them."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not has_links:
        monkeypatch.setattr(os, "link", fail)
    for name in ("run.json", "report.html", "on_event.log", "mine.txt"):
        (tmp_path / name).write_text(f"my {name}")
    (tmp_path / "report.json").mkdir()
    (tmp_path / "node3").mkdir()
    path = str(tmp_path)
    moved, unheard_s, left, kept = operations.make_run_directory(path, f"{path}/node3", "", [], [1], 1)
    assert (moved, unheard_s, left) == ("", None, "")
    assert {one.name: one.read_text() for one in (tmp_path / kept).iterdir()} == {
        "run.json": "my run.json",
        "report.html": "my report.html",
        "on_event.log": "my on_event.log",
    }
    assert (tmp_path / "run.json").read_text() == "my run.json"
    assert {"report.json", "node3", "mine.txt"} < set(os.listdir(tmp_path))


def test_a_directory_without_files_of_these_names_gets_no_other_one(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    path = str(tmp_path)
    assert operations.make_run_directory(path, f"{path}/node3", "", [], [1], 1) == ("", None, "", "")
    assert sorted(os.listdir(tmp_path)) == ["mine.txt", "node3"]


def test_no_file_of_the_job_stays_in_the_way_of_the_next_run() -> None:
    """Whatever is written beside the directories of the hosts has a name that is set aside."""
    package = Path(earlier_run.__file__).parents[1]
    written = {
        name
        for path in package.rglob("*.py")
        for name in re.findall(r'run_dir\.write_\w+\(\s*"([\w.]+)"', path.read_text(encoding="utf-8"))
    }
    written.remove("story.jsonl")  # in the directory of its host
    assert {"report.json", "preflight.json", "waits.json"} <= written <= set(earlier_run._OF_THE_JOB)
