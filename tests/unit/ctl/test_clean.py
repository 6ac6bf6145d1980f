"""``saferunctl clean``: removes what is asked for, and nothing else."""

from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING

import pytest

from saferun import ctl
from saferun.ctl import clean
from saferun.files import run_removal
from tests.unit.described_runs import HERE, make_run

if TYPE_CHECKING:
    from pathlib import Path

DAY_S = 86400.0
NAMES = [f"2026010{day}-120000-abcdef" for day in range(1, 7)]


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six runs, the newest one a day old, the others each a day older than the next."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for number, name in enumerate(NAMES):
        make_run(tmp_path / "saferun-runs", name, age_s=(len(NAMES) - number) * DAY_S + 60.0)
    return tmp_path / "saferun-runs"


def left(base: Path) -> list[str]:
    """The runs that are left."""
    return sorted(path.name for path in base.iterdir())


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        (("--keep", "4"), 4),
        (("--keep", "0"), 0),
        (("--keep", "99"), 6),
        (("--older-than", "3d"), 2),
        (("--older-than", "72h"), 2),
        (("--older-than", "1w"), 6),
        (("--keep", "4", "--older-than", "3d"), 4),
        (("--keep", "1", "--older-than", "5d"), 4),
    ],
    ids=str,
)
def test_what_neither_option_keeps_is_removed(base: Path, arguments: tuple[str, ...], count: int) -> None:
    assert ctl.main(["clean", *arguments]) == 0
    assert left(base) == NAMES[len(NAMES) - count :]


def test_a_dry_run_removes_nothing(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl.main(["clean", "--keep", "5", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"saferun-runs/{NAMES[0]}" in lines[0]
    assert lines[1].startswith("would remove 1 run, ")
    assert ctl.main(["clean", "--keep", "5", "--dry-run", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["path"], run["is_removed"]) == (str(base / NAMES[0]), False)
    assert left(base) == NAMES


def test_a_living_run_and_what_is_no_run_stay(base: Path) -> None:
    make_run(base, "20250101-120000-aaaaaa", process=HERE, end=None)
    make_run(base, "20250102-120000-bbbbbb", directory="")
    (base / "notes").mkdir()
    assert ctl.main(["clean", "--keep", "0"]) == 0
    assert left(base) == ["20250101-120000-aaaaaa", "20250102-120000-bbbbbb", "notes"]


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ((), "neither --keep nor --older-than is given"),
        (("--keep", "-1"), "--keep -1 is negative"),
        (("--older-than", "soon"), "--older-than soon is not a duration"),
        (("--keep", "1", "nowhere"), "there is no directory nowhere"),
        (("--keep", "1", "saferun-runs", "nowhere"), "there is no directory nowhere"),
        (("--keep", "1", f"saferun-runs/{NAMES[0]}/run.json"), "run.json is not a directory"),
        (("--keep", "many"), "--keep many is not a whole number"),
    ],
    ids=str,
)
def test_a_wrong_question_removes_nothing(
    base: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], what: str
) -> None:
    try:
        code = ctl.main(["clean", *arguments])
    except SystemExit as error:
        code = int(str(error.code))
    assert code == 2
    first, second = capsys.readouterr().err.splitlines()
    assert what in first
    assert second.startswith("hint: ")
    assert left(base) == NAMES


def test_all_directories_of_the_index_can_be_cleaned(base: Path, tmp_path: Path) -> None:
    index = tmp_path / "state" / "saferun" / "runs"
    index.mkdir(parents=True)
    (index / "20260101-120000-abcdef0000000000").symlink_to(base / NAMES[0])
    (index / "20260101-120000-abcdef0000000001").symlink_to("/nowhere/x")
    os.chdir("/")
    assert ctl.main(["clean", "--everywhere", "--keep", "2"]) == 0
    assert left(base) == NAMES[4:]


def test_another_users_directory_is_refused(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(base, 1, -1)
    (base / "x").mkdir()
    os.seteuid(2)
    try:
        base.parent.stat()
        code = ctl.main(["clean", "--keep", "0"])
    except OSError:  # the test's own directory is not for others
        code = 2
    finally:
        os.seteuid(0)
    assert code == 2
    assert (base / NAMES[0] / "run.json").exists()
    capsys.readouterr()


def test_a_directory_of_the_index_that_cannot_be_read_does_not_keep_the_others(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is named, and the exit code is 1. What is beside a directory of --run-dir is no directory of runs."""
    index = tmp_path / "state" / "saferun" / "runs"
    index.mkdir(parents=True)
    closed = make_run(tmp_path / "closed", NAMES[0]).parent
    (index / "20260109-120000-abcdef0000000000").symlink_to(closed / NAMES[0])
    (index / "20260108-120000-abcdef0000000001").symlink_to(make_run(tmp_path / "chosen", "20260101-120000-run"))
    (index / "20260101-120000-abcdef0000000002").symlink_to(base / NAMES[0])

    def open_base(path: str) -> int:
        if path in {str(closed), str(tmp_path / "chosen")}:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return run_removal.open_base(path)

    monkeypatch.setattr(clean, "open_base", open_base)
    assert ctl.main(["clean", "--everywhere", "--keep", "2"]) == 1
    assert left(base) == NAMES[4:]
    out, err = capsys.readouterr()
    assert out.startswith("removed 4 runs, ")
    assert err.splitlines() == ["saferun: closed: Permission denied", "hint: name a directory of runs of yours"]
