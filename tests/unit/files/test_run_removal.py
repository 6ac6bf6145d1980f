"""Old runs are removed, and nothing else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files.run_removal import keep_newest, open_base, remove_run, run_names
from saferun.linux import ownership
from saferun.linux.ownership import NotOursError
from tests.unit.described_runs import ELSEWHERE, HERE, make_run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME, OTHER = "20260101-120000-abcdef", "20260102-120000-fedcba"


@pytest.fixture
def base(tmp_path: Path) -> Iterator[int]:
    """The directory of runs."""
    fd = open_base(str(tmp_path))
    yield fd
    os.close(fd)


def test_a_run_that_has_ended_is_removed_with_all_it_has(tmp_path: Path, base: int) -> None:
    path = make_run(tmp_path, NAME)
    (path / "node1" / "attempt_0" / "rank_0").mkdir(parents=True)
    (path / "node1" / "attempt_0" / "rank_0" / "stdout.log").write_text("x")
    assert remove_run(base, NAME)
    assert os.listdir(tmp_path) == []


def test_a_run_that_may_live_stays(tmp_path: Path, base: int) -> None:
    paths = [
        make_run(tmp_path, "20260101-120000-aaaaaa", process=HERE, end=None),
        make_run(tmp_path, "20260101-120000-bbbbbb", process=ELSEWHERE, end=None),
        make_run(tmp_path, "20260101-120000-cccccc", process=HERE),
    ]
    for path in paths:
        assert not remove_run(base, path.name)
        assert (path / "run.json").exists()
        assert (path / "node1" / "events.jsonl").exists()


@pytest.mark.parametrize(
    "changes", [{"directory": ""}, {"directory": "20260101-120000-fedcba"}, {"run_id": 3}], ids=str
)
def test_what_is_not_provably_a_run_directory_stays(tmp_path: Path, base: int, changes: dict[str, object]) -> None:
    """One that the user chose may hold what is not saferun's; so may a copy."""
    path = make_run(tmp_path, NAME, **changes)  # type: ignore[arg-type]
    assert not remove_run(base, NAME)
    assert (path / "node1" / "events.jsonl").exists()


def test_no_link_is_followed(tmp_path: Path, base: int) -> None:
    """Neither one in place of a run directory, nor one in it."""
    elsewhere = tmp_path / "elsewhere"
    path = make_run(elsewhere, NAME)
    (tmp_path / NAME).symlink_to(path)
    assert not remove_run(base, NAME)
    (tmp_path / NAME).unlink()
    other = make_run(tmp_path, NAME)
    (other / "link").symlink_to(elsewhere)
    (other / "node1" / "link").symlink_to(elsewhere)
    assert remove_run(base, NAME)
    assert (path / "node1" / "events.jsonl").exists()


def test_the_description_goes_last(tmp_path: Path, base: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was removed in part can still be removed."""
    path = make_run(tmp_path, NAME)
    monkeypatch.setattr("saferun.files.run_removal.remove_tree", lambda *_arguments, **_keywords: False)
    assert not remove_run(base, NAME)
    assert (path / "run.json").exists()
    monkeypatch.undo()
    assert remove_run(base, NAME)


def test_a_run_is_removed_where_the_file_system_gives_another_owner(
    tmp_path: Path, base: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS with root_squash or all_squash. What belongs to a third user stays, and the reports that explain it."""
    owner = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 4242)
    monkeypatch.setattr("saferun.linux.ownership.owner_of_new", lambda *_, **__: owner)
    for name in (NAME, OTHER):
        path = make_run(tmp_path, name)
        (path / "node1" / "attempt_0").mkdir()
        (path / "earlier-1").mkdir()
        (path / "node1" / "attempt_0" / "stdout.log").write_text("x")
        (path / "report.json").write_text("{}")
    assert remove_run(base, NAME)
    theirs = {(tmp_path / OTHER / name).stat().st_ino for name in ("node1", "earlier-1")}

    def check_owner(status: os.stat_result, path: str, **also: Any) -> None:
        if status.st_ino in theirs:
            raise NotOursError("it belongs to a third user", path)
        ownership_check(status, path, **also)

    ownership_check = ownership.check_owner
    monkeypatch.setattr(ownership, "check_owner", check_owner)
    assert not remove_run(base, OTHER)
    assert sorted(os.listdir(tmp_path)) == [OTHER]
    assert sorted(os.listdir(tmp_path / OTHER)) == ["earlier-1", "node1", "report.json", "run.json"]
    assert (tmp_path / OTHER / "node1" / "attempt_0" / "stdout.log").exists()


def test_the_newest_are_kept_and_recent_failures(tmp_path: Path, base: int) -> None:
    """``--keep-runs`` may not take away what the user has yet to look at."""
    old_s = 30 * 86400.0
    for number in range(6):
        make_run(tmp_path, f"2026010{number}-120000-abcdef", age_s=old_s)
    make_run(tmp_path, "20250101-000000-aaaaaa", end=(1, "failed"))
    make_run(tmp_path, "20250102-000000-aaaaaa", end=(1, "failed"), age_s=old_s)
    (make_run(tmp_path, "20250103-000000-aaaaaa") / "report.json").write_text('{"incidents": [{}]}')
    make_run(tmp_path, "20250104-000000-aaaaaa", process=HERE, end=None, age_s=old_s)
    make_run(tmp_path, "20250105-000000-aaaaaa", end=None)
    make_run(tmp_path, "20250106-000000-aaaaaa", end=(143, "stopped"))
    (tmp_path / "notes").mkdir()
    assert keep_newest(base, 2) == 5
    assert run_names(base) == [
        "20260105-120000-abcdef",
        "20260104-120000-abcdef",
        *(f"2025010{number}-000000-aaaaaa" for number in (6, 5, 4, 3, 1)),
    ]
    assert (tmp_path / "notes").exists()
