"""The process that watches for cores: what it takes for one of the launch, and what it leaves alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from saferun.linux import core_saving
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
    ("text", "name", "kind", "is_other"),
    [
        ("core", "core", "file", True),
        ("core", "core", "empty", True),
        ("core", "core", "moved", True),
        ("core", "core", "link", True),
        ("core", "core", "directory", False),
        ("core", "core", "core", False),
        ("core", "core", "core of others", False),
        ("core", "core.md", "file", False),
        ("core", "checkpoint", "file", False),
        ("core.%e", "core.python", "file", True),
        ("core.%e", "core.python", "core", False),
        ("core.%p", "core.12", "file", False),
    ],
)
@pytest.mark.parametrize("is_present", [False, True])
def test_a_file_that_the_next_core_would_replace_is_noticed(
    tmp_path: Path, text: str, name: str, kind: str, is_other: bool, is_present: bool
) -> None:
    """A script may write one called ``core`` while its ranks may leave cores."""

    def appear() -> None:
        if kind == "link":
            path.symlink_to("/no/such")
        elif kind == "directory":
            path.mkdir()
        elif kind == "moved":
            (tmp_path / "new").write_text("my data")
            (tmp_path / "new").rename(path)
        else:
            of_rank, of_others = make_core(RANK, ppid=os.getpid()), make_core(RANK, ppid=RANK)
            contents = {"file": b"my data", "empty": b"", "core": of_rank, "core of others": of_others}
            path.write_bytes(contents[kind])

    path = tmp_path / name
    if is_present:
        appear()
    saver = CoreSaver(str(tmp_path), os.getpid(), CorePattern(text))
    try:
        saver.save_present()
        if not is_present:
            assert not saver.has_other
            appear()
            saver.handle_events()
        saver.handle_events()  # that it has renamed a core itself
    finally:
        saver.close()
    assert saver.has_other is is_other
    assert kind == "core" or os.path.lexists(path)


def test_an_empty_file_may_be_a_core_on_a_kernel_that_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at when it is closed."""
    monkeypatch.setattr(core_saving, "tells_core_dumping", lambda: False)
    saver = CoreSaver(str(tmp_path), os.getpid(), CorePattern("core"))
    try:
        with (tmp_path / "core").open("w") as file:
            saver.handle_events()
            assert not saver.has_other
            file.write("my data")
        saver.handle_events()
        assert saver.has_other
    finally:
        saver.close()


@pytest.mark.parametrize(
    ("ranks", "environ", "is_saved"),
    [({RANK}, "SAFERUN_RUN_ID=ab", True), ({RANK}, "SAFERUN_RUN_ID=cd", False), (set(), "SAFERUN_RUN_ID=ab", False)],
)
def test_a_core_of_a_rank_that_has_ended_is_known_by_its_run(
    tmp_path: Path, ranks: set[int], environ: str, is_saved: bool
) -> None:
    """Where the ranks had ended before anybody watched, and their numbers say nothing by themselves."""
    (tmp_path / "core").write_bytes(make_core(RANK + 1, ppid=RANK, sid=RANK, environ=["HOME=/", environ]))
    saver = CoreSaver(str(tmp_path), os.getpid(), CorePattern("core"), ranks=ranks, run_entry="SAFERUN_RUN_ID=ab")
    saver.save_present()
    saver.close()
    assert bool(saver.paths) is is_saved
    assert (tmp_path / "core").exists() is not is_saved


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
