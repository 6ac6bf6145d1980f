"""Files are found without waiting for a server: which paths lead through file systems of this machine only."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from saferun.linux import answering_files, child_output
from saferun.linux.answering_files import present_files
from saferun.linux.procfs import parse_mounts
from saferun.model import ExitStatus

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:20 / /proc rw - proc proc rw
24 22 0:40 / {home} rw - nfs4 server:/home rw
25 22 0:41 / {home}/with\\040blank rw - tmpfs tmpfs rw
26 22 0:42 / {home}/twice rw - tmpfs tmpfs rw
27 22 0:43 / {home}/twice rw - fuse.sshfs host:/ rw
nonsense
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that is said to be on a network file system."""
    (tmp_path / "mounts").write_text(MOUNTS.format(home=tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the processes that were asked."""
    asked: list[str] = []
    run_forked = child_output.run_forked

    def run(serve: Callable[[int], None], timeout_s: float, name: str = "") -> tuple[bytes, ExitStatus | None]:
        asked.append(name)
        return run_forked(serve, timeout_s, name)

    monkeypatch.setattr(child_output, "run_forked", run)
    return asked


def found(*paths: Path) -> set[str]:
    """Those that are there."""
    present, silent = present_files([str(path) for path in paths], mounts_file=str(_mounts_of(paths[0])))
    assert silent == ""
    return {os.path.basename(path) for path in present}


def _mounts_of(path: Path) -> Path:
    return next(parent / "mounts" for parent in path.parents if (parent / "mounts").exists())


def test_what_is_on_a_disk_of_this_machine_is_found_without_another_process(home: Path, asked: list[str]) -> None:
    (home.parent / "here").write_text("x")
    assert found(home.parent / "here", home.parent / "missing") == {"here"}
    assert asked == []


def test_another_process_asks_a_network_file_system(home: Path, asked: list[str]) -> None:
    (home / "here").write_text("x")
    (home / "folder").mkdir()
    assert found(home / "here", home / "missing", home / "folder") == {"here", "folder"}
    assert asked == ["sr-files"]


@pytest.mark.parametrize("target", ["home/here", "../{top}/home/here", "{parent}/home/here", "other/../home/here"])
def test_a_link_to_a_network_file_system_leads_there(home: Path, asked: list[str], target: str) -> None:
    (home / "here").write_text("x")
    (home.parent / "other").mkdir()
    os.symlink(target.format(top=home.parent.name, parent=home.parent), home.parent / "link")
    assert found(home.parent / "link") == {"link"}
    assert asked == ["sr-files"]


def test_a_local_file_system_below_another_and_one_that_is_mounted_over(home: Path, asked: list[str]) -> None:
    """The last one that is mounted at a place counts; blanks are escaped in the list."""
    for name in ("with blank", "twice"):
        (home / name).mkdir()
        (home / name / "file").write_text("x")
    assert found(home / "twice" / "file") == {"file"}
    assert asked == ["sr-files"]
    kinds = dict(parse_mounts((home.parent / "mounts").read_text()))
    assert answering_files._kind_at(f"{home}/with blank/file", kinds) == "tmpfs"
    assert answering_files._kind_at(f"{home}/twice/file", kinds) == "fuse.sshfs"


def test_links_that_lead_to_each_other_are_no_file(home: Path) -> None:
    os.symlink("b", home.parent / "a")
    os.symlink("a", home.parent / "b")
    assert found(home.parent / "a") == set()


def test_without_a_list_of_mounts_another_process_asks(home: Path, asked: list[str]) -> None:
    (home.parent / "here").write_text("x")
    (home.parent / "mounts").write_text("")
    assert found(home.parent / "here") == {"here"}
    assert asked == ["sr-files"]


def test_what_cannot_be_read_is_there_all_the_same(home: Path) -> None:
    """Whoever reads it reports why it cannot."""
    os.mkfifo(home / "pipe")
    os.symlink("nowhere", home / "dangling")
    assert found(home / "pipe", home / "dangling") == {"pipe"}


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], tuple[bytes, ExitStatus | None]]) -> None:
    """Another process answers so."""
    monkeypatch.setattr(child_output, "run_forked", lambda *_: answer())


@pytest.fixture
def three(home: Path) -> list[str]:
    """Three files on a network file system."""
    for name in ("a", "b", "c"):
        (home / name).write_text("x")
    return [str(home / name) for name in ("a", "b", "c")]


def test_what_is_not_answered_for_in_time_counts_as_missing_and_so_does_what_comes_after_it(
    home: Path, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, lambda: (b"1", None))
    assert present_files(three, mounts_file=str(home.parent / "mounts")) == (frozenset(three[:1]), three[1])


def test_where_no_other_process_can_ask_this_one_does(
    home: Path, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on processes says nothing about a file system."""

    def refuse() -> tuple[bytes, ExitStatus | None]:
        raise BlockingIOError

    answering(monkeypatch, refuse)
    missing = str(home / "missing")
    assert present_files([*three, missing], mounts_file=str(home.parent / "mounts")) == (frozenset(three), "")


def test_what_a_process_that_was_killed_has_not_answered_for_is_asked_for_in_this_one(
    home: Path, three: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by the kernel, which needs the memory."""
    is_there = answering_files._is_there

    def end(path: str) -> bool:
        if path.endswith("b"):
            os.kill(os.getpid(), signal.SIGKILL)
        return is_there(path)

    monkeypatch.setattr(answering_files, "_is_there", end)
    assert present_files(three, mounts_file=str(home.parent / "mounts")) == (frozenset(three), "")
