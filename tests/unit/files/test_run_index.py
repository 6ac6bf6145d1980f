"""The index of this user's runs: a convenience, which nothing depends on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from saferun.files.run_index import MOST_ENTRIES, index_path, note_run, read_index

if TYPE_CHECKING:
    from pathlib import Path

ID = "0123456789abcdef"


@pytest.mark.parametrize(
    ("environ", "path"),
    [
        ({"XDG_STATE_HOME": "/state", "HOME": "/home/me"}, "/state/saferun/runs"),
        ({"HOME": "/home/me"}, "/home/me/.local/state/saferun/runs"),
        ({"XDG_STATE_HOME": "relative", "HOME": "/home/me"}, "/home/me/.local/state/saferun/runs"),
        ({"HOME": "relative"}, ""),
        ({}, ""),
    ],
)
def test_its_place_is_where_programs_keep_their_state(environ: dict[str, str], path: str) -> None:
    assert index_path(environ) == path


def test_a_run_that_was_noted_is_found_and_no_other_user_sees_it(tmp_path: Path) -> None:
    index = index_path({"HOME": str(tmp_path)})
    note_run(index, ID, "/somewhere/run")
    assert [(entry.run_id, entry.path) for entry in read_index(index)] == [(ID, "/somewhere/run")]
    assert os.stat(index).st_mode & 0o777 == os.stat(os.path.dirname(index)).st_mode & 0o777 == 0o700


def test_old_entries_are_removed(tmp_path: Path) -> None:
    """It stays small however many runs there are."""
    index = tmp_path / "saferun" / "runs"
    index.mkdir(parents=True)
    for number in range(MOST_ENTRIES):
        (index / f"20200101-000000-{number:016x}").symlink_to("/old")
    note_run(str(index), ID, "/new")
    entries = read_index(str(index))
    assert len(entries) < MOST_ENTRIES
    assert (entries[0].path, entries[1].run_id) == ("/new", f"{MOST_ENTRIES - 1:016x}")


def test_what_is_no_entry_is_neither_read_nor_removed(tmp_path: Path) -> None:
    index = tmp_path / "saferun" / "runs"
    index.mkdir(parents=True)
    (index / "20200101-000000-0123456789abcdef").write_text("no link")
    (index / "20200101-000000-1123456789abcdef").symlink_to("relative")
    (index / "notes").write_text("mine")
    assert read_index(str(index)) == []
    note_run(str(index), ID, "/new")
    assert len(list(index.iterdir())) == 4


def test_where_there_is_none_there_are_no_runs(tmp_path: Path) -> None:
    assert read_index("") == []
    assert read_index(str(tmp_path / "nowhere")) == []
    index = tmp_path / "saferun" / "runs"
    index.mkdir(parents=True)
    (index / "20200101-000000-0123456789abcdef").symlink_to("/old")
    (tmp_path / "link").symlink_to(index)
    assert len(read_index(str(index))) == 1
    assert read_index(str(tmp_path / "link")) == []
