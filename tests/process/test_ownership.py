"""Whose a file is: what is opened, made and removed where other users have planted something."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.linux import ownership
from saferun.linux.ownership import (
    NotOursError,
    identity,
    make_directory,
    open_directory,
    open_ours,
    open_temporary,
    remove_tree,
)
from tests.descriptors import open_descriptors
from tests.process.ownership_steps import (
    planted,
)
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root, start_as_user


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may make files."""
    with directory_for_all(0o755) as top:
        (top / "shared").mkdir()
        (top / "shared").chmod(0o777)
        yield top / "shared"


def names_below(path: Path) -> set[str]:
    return {str(found.relative_to(path)) for found in path.rglob("*")}


# --------------------------------------------------------------------------------------------------------------------
# Directories and files of ours


def test_a_directory_of_ours_is_opened_and_made(tmp_path: Path) -> None:
    top = open_directory(str(tmp_path))
    made = make_directory("new", dir_fd=top)
    again = make_directory("new", dir_fd=top)
    try:
        assert identity(made) == identity(again)
        assert stat.S_IMODE(os.fstat(made).st_mode) == 0o700
        assert not os.get_inheritable(made)
    finally:
        for fd in (top, made, again):
            os.close(fd)


@needs_root
def test_a_directory_of_somebody_else_is_refused_with_its_owner(shared: Path) -> None:
    as_user(lambda: os.mkdir(shared / "theirs"))
    for take in (open_directory, make_directory):
        with pytest.raises(NotOursError, match=f"it belongs to user {SOMEBODY}"):
            take(str(shared / "theirs"))


def test_a_link_to_a_directory_is_not_followed(tmp_path: Path) -> None:
    """Not even one of our own to a directory of our own: who made it cannot be told later."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for take in (open_directory, make_directory):
        with pytest.raises(NotADirectoryError):
            take(str(tmp_path / "link"))


def test_a_private_directory_has_no_access_for_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)
    with pytest.raises(NotOursError, match="others have access"):
        open_directory(str(tmp_path), private=True)
    tmp_path.chmod(0o700)
    os.close(open_directory(str(tmp_path), private=True))


@needs_root
def test_what_is_roots_counts_where_that_is_asked_for(shared: Path) -> None:
    shared.chmod(0o755)
    (shared / "file").write_text("root's")

    def look() -> str:
        said = []
        for or_root in (False, True):
            try:
                os.close(open_directory(str(shared), or_root=or_root))
                os.close(open_ours(str(shared / "file"), os.O_RDONLY, or_root=or_root))
                said.append("opened")
            except NotOursError as error:
                said.append(str(error.strerror))
        return ", ".join(said)

    assert as_user(look) == "it belongs to root, opened"


@needs_root
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, os.O_RDONLY], ids=str)
def test_a_file_of_somebody_else_is_not_opened_and_keeps_its_content(shared: Path, flags: int) -> None:
    planted(shared / "log", "theirs", mode=0o666)
    with pytest.raises(NotOursError, match=f"it belongs to user {SOMEBODY}"):
        open_ours(str(shared / "log"), flags)
    assert (shared / "log").read_text() == "theirs"


@needs_root
@pytest.mark.parametrize("exists", [True, False], ids=["a file", "nothing"])
def test_a_planted_link_is_not_written_through(shared: Path, tmp_path: Path, exists: bool) -> None:
    """The file that it leads to stays as it is, and none is made where there is none."""
    victim = tmp_path / "bashrc"
    if exists:
        victim.write_text("mine")
    as_user(lambda: os.symlink(victim, shared / "stdout.log"))
    with pytest.raises(OSError, match=os.strerror(errno.ELOOP)):
        open_ours(str(shared / "stdout.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.exists() == exists
    assert not exists or victim.read_text() == "mine"


def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    """Old kernels let anybody make one to a file of ours."""
    victim = tmp_path / "bashrc"
    victim.write_text("mine")
    os.link(victim, tmp_path / "stdout.log")
    with pytest.raises(OSError, match="it has another name elsewhere"):
        open_ours(str(tmp_path / "stdout.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert victim.read_text() == "mine"
    os.close(open_ours(str(tmp_path / "stdout.log"), os.O_RDONLY))


def test_a_pipe_is_neither_waited_for_nor_taken_for_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        open_ours(str(tmp_path / "pipe"), os.O_RDONLY)


def test_a_file_of_ours_is_made_emptied_and_read(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    for content in (b"first, longer", b"second"):
        fd = open_ours(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        assert os.get_blocking(fd)
        os.write(fd, content)
        os.close(fd)
    fd = open_ours("file", os.O_RDONLY, dir_fd=(top := open_directory(str(tmp_path))))
    assert os.read(fd, 100) == b"second"
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    os.close(fd)
    os.close(top)


def test_a_temporary_file_is_always_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that somebody has guessed is passed over, also where it is a link that leads nowhere."""
    texts = iter([b"guess", b"guess", b"fresh"])
    monkeypatch.setattr(os, "urandom", lambda _size: next(texts))
    (tmp_path / f"report.{b'guess'.hex()}").symlink_to(tmp_path / "elsewhere")
    fd, name = open_temporary("report", dir_fd=(top := open_directory(str(tmp_path))))
    os.close(fd)
    os.close(top)
    assert name == f"report.{b'fresh'.hex()}"
    assert not (tmp_path / "elsewhere").exists()


# --------------------------------------------------------------------------------------------------------------------
# Removal


def tree(path: Path) -> Path:
    (path / "a" / "b" / "c").mkdir(parents=True)
    (path / "d").mkdir()
    for name in ("file", "a/file", "a/b/file", "a/b/c/file", "d/file"):
        (path / name).write_text(name)
    return path


def test_a_tree_is_removed(tmp_path: Path) -> None:
    tree(tmp_path / "run")
    assert remove_tree(str(tmp_path / "run"))
    assert names_below(tmp_path) == set()
    assert remove_tree(str(tmp_path / "run"))


def test_links_in_a_tree_are_removed_and_not_followed(tmp_path: Path) -> None:
    home = tree(tmp_path / "home")
    before = names_below(home)
    run = tree(tmp_path / "run")
    (run / "to a directory").symlink_to(home)
    (run / "a" / "to a file").symlink_to(home / "file")
    assert remove_tree(str(run))
    assert names_below(home) == before


def test_a_link_at_the_top_is_not_followed(tmp_path: Path) -> None:
    home = tree(tmp_path / "home")
    before = names_below(home)
    (tmp_path / "saferun-1").symlink_to(home)
    assert not remove_tree(str(tmp_path / "saferun-1"))
    assert names_below(home) == before


@needs_root
def test_a_tree_of_somebody_else_is_left_alone(shared: Path) -> None:
    def plant() -> None:
        os.mkdir(shared / "saferun-1")
        os.close(os.open(shared / "saferun-1" / "file", os.O_CREAT))

    as_user(plant)
    assert not remove_tree(str(shared / "saferun-1"))
    assert names_below(shared) == {"saferun-1", "saferun-1/file"}


def test_another_directory_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    """The reaper is told which directory was made: what has its name now may be anything of this user's."""
    made = make_directory(str(tmp_path / "run"))
    which = identity(made)
    (tmp_path / "run").rename(tmp_path / "moved")
    tree(tmp_path / "run")
    assert not remove_tree(str(tmp_path / "run"), made=which)
    assert (tmp_path / "run" / "a" / "file").exists()
    assert remove_tree(str(tmp_path / "moved"), made=which)
    os.close(made)


def test_a_tree_deeper_than_any_number_of_descriptors_is_removed(tmp_path: Path) -> None:
    top = os.open(tmp_path, os.O_RDONLY)
    here = os.dup(top)
    os.mkdir("run", dir_fd=here)
    for name in ("run", *["deep"] * 900):
        os.mkdir("deep", dir_fd=(below := os.open(name, os.O_RDONLY, dir_fd=here)))
        os.close(here)
        here = below
    os.close(here)
    descriptors = open_descriptors()
    assert remove_tree("run", dir_fd=top)
    assert open_descriptors() == descriptors
    os.close(top)


@needs_root
@pytest.mark.parametrize("kind", ["tmpfs", "bind"])
def test_a_mount_in_a_tree_is_left_alone(tmp_path: Path, kind: str) -> None:
    """A bind mount of the same file system has the same device number, and is another place all the same."""
    home = tree(tmp_path / "home")
    run = tree(tmp_path / "run")
    mount = ("mount", "--bind", str(home)) if kind == "bind" else ("mount", "-t", "tmpfs", "none")
    subprocess.run([*mount, str(run / "d")], check=True)
    try:
        (run / "d" / "kept").write_text("")
        assert not remove_tree(str(run))
        assert (run / "d" / "kept").exists()
        assert names_below(run) - {f"d/{name}" for name in names_below(run / "d")} == {"d"}
    finally:
        subprocess.run(["umount", str(run / "d")], check=True)


def test_a_directory_that_is_exchanged_for_a_link_meanwhile_leads_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a directory and the step into it there is always a moment."""
    home = tree(tmp_path / "home")
    before = names_below(home)
    run = tree(tmp_path / "run")
    opened = ownership.open_directory

    def exchange(path: str, **options: Any) -> int:
        if path == "b":
            (run / "a" / "b").rename(tmp_path / "away")
            (run / "a" / "b").symlink_to(home)
        return opened(path, **options)

    monkeypatch.setattr(ownership, "open_directory", exchange)
    remove_tree(str(run))
    assert names_below(home) == before
    assert (tmp_path / "away" / "file").exists()


def test_a_directory_that_is_moved_away_meanwhile_ends_the_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ``..`` leads to a place that is not the tree's."""
    home = tree(tmp_path / "home")
    run = tree(tmp_path / "run")
    mount_of = ownership._mount_of
    moved: list[Path] = []

    def move(fd: int) -> bytes:
        if not moved and os.readlink(f"/proc/self/fd/{fd}").endswith("run/a/b"):
            moved.append((run / "a" / "b").rename(home / "b"))
        return mount_of(fd)

    monkeypatch.setattr(ownership, "_mount_of", move)
    assert not remove_tree(str(run))
    assert moved
    assert {"a", "a/file", "d", "d/file", "file"} <= names_below(home)


@needs_root
def test_a_race_with_somebody_who_exchanges_directories_is_never_lost(shared: Path, tmp_path: Path) -> None:
    """The tree of the attack: directories of somebody else that turn into links to a home directory."""
    home = tree(tmp_path / "home")
    before = names_below(home)

    def attack() -> None:
        for _ in range(300):
            os.mkdir(shared / "run")
            os.close(os.open(shared / "run" / "file", os.O_CREAT))
            os.unlink(shared / "run" / "file")
            for name in ("x", "y"):
                os.mkdir(shared / "run" / name)
                os.rename(shared / "run" / name, shared / f"{name}.old")
                os.symlink(home, shared / "run" / name)
                os.unlink(shared / "run" / name)
                os.rmdir(shared / f"{name}.old")
            os.rmdir(shared / "run")
            os.symlink(home, shared / "run")
            os.unlink(shared / "run")

    pid = start_as_user(attack)
    while not os.waitpid(pid, os.WNOHANG)[0]:
        remove_tree(str(shared / "run"))
    assert names_below(home) == before
