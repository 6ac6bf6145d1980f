"""The process that watches for cores: what it takes for one of the launch, and what it leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from saferun.linux.core_pattern import CorePattern, are_together, share_a_name
from saferun.linux.core_saving import CoreSaver
from tests.unit.linux.test_core_files import make_core

RANK = 1 << 23  # beyond the numbers of processes


@pytest.mark.parametrize(("text", "names"), [("core", ["core.saferun.{}.0"]), ("core.%p", ["core.{}"])])
def test_cores_of_distinct_names_are_found_where_they_are(tmp_path: Path, text: str, names: list[str]) -> None:
    """Those of one name are moved out of the way of the next one."""
    saver = CoreSaver(str(tmp_path), os.getpid(), CorePattern(text))
    try:
        (tmp_path / text.replace("%p", str(os.getpid()))).write_bytes(make_core(RANK, ppid=os.getpid()))
        (tmp_path / "checkpoint").write_text("of the user's own")
        saver.handle_events()
    finally:
        saver.close()
    expected = [str(tmp_path / name.format(os.getpid())) for name in names]
    assert saver.paths == expected
    assert sorted(map(str, tmp_path.iterdir())) == sorted([*expected, str(tmp_path / "checkpoint")])


@pytest.mark.parametrize("is_older", [False, True])
def test_a_core_from_before_the_launch_stays(tmp_path: Path, is_older: bool) -> None:
    """Numbers of processes come again."""
    since = time.time() - 60
    (tmp_path / "core").write_bytes(make_core(RANK, ppid=os.getpid()))
    if is_older:
        os.utime(tmp_path / "core", (since - 1, since - 1))
    saver = CoreSaver(str(tmp_path), os.getpid(), CorePattern("core"), since=since)
    saver.save_present()
    saver.close()
    assert (saver.paths == []) is is_older
    assert (tmp_path / "core").exists() is is_older


@pytest.mark.parametrize(
    ("pattern", "together", "shared"),
    [
        (CorePattern("core"), True, True),
        (CorePattern("core", uses_pid=True), True, False),
        (CorePattern("core.%e.%p"), True, False),
        (CorePattern("%p/core"), False, False),
        (CorePattern("/var/crash/core.%p"), False, False),  # other users' cores are there, too
        (CorePattern("|/usr/lib/systemd/systemd-coredump %P"), False, False),
    ],
)
def test_only_the_directory_of_the_ranks_is_watched(pattern: CorePattern, together: bool, shared: bool) -> None:
    assert (are_together(pattern), share_a_name(pattern)) == (together, shared)
