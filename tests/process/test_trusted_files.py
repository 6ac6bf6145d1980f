"""Files that count although the user did not name them: only if no other user can have written them."""

from __future__ import annotations

import errno
import grp
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.linux import trusted_files
from saferun.linux.trusted_files import open_found
from tests.process.ownership_steps import (
    planted,
)
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may make files."""
    with directory_for_all(0o755) as top:
        (top / "shared").mkdir()
        (top / "shared").chmod(0o777)
        yield top / "shared"


# --------------------------------------------------------------------------------------------------------------------
# Files that count though nobody named them


def content_found(path: Path) -> str:
    """What was found there, or why it does not count."""
    try:
        fd = open_found(str(path))
    except OSError as error:
        return error.strerror or str(error)
    try:
        return os.read(fd, 100).decode()
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("file_mode", "directory_mode", "found"),
    [
        (0o644, 0o755, "mine"),
        (0o600, 0o700, "mine"),
        (0o644, 0o1777, "mine"),
        (0o644, 0o1775, "mine"),
        (0o646, 0o755, "it is writable by everyone"),
        (0o664, 0o755, "it is writable by group {gid}"),
        (0o644, 0o757, "its directory is writable by everyone"),
        (0o644, 0o775, "its directory is writable by group {gid}"),
        (0o666, 0o1777, "it is writable by everyone"),
    ],
)
def test_a_file_counts_where_nobody_else_can_have_written_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_mode: int, directory_mode: int, found: str
) -> None:
    monkeypatch.setattr(trusted_files, "is_private_group", lambda _gid: False)
    file = tmp_path / "place" / "saferun.yaml"
    file.parent.mkdir()
    file.write_text("mine")
    file.chmod(file_mode)
    file.parent.chmod(directory_mode)
    assert content_found(file) == found.format(gid=file.stat().st_gid)


@needs_root
def test_a_file_of_somebody_else_does_not_count_wherever_it_lies(shared: Path) -> None:
    shared.chmod(0o1777)
    planted(shared / "saferun.yaml", "theirs")
    assert content_found(shared / "saferun.yaml") == f"it belongs to user {SOMEBODY}"


@needs_root
def test_a_file_of_ours_in_a_directory_of_somebody_else_does_not_count(shared: Path) -> None:
    as_user(lambda: os.mkdir(shared / "theirs"))
    (shared / "theirs" / "saferun.yaml").write_text("mine")
    assert content_found(shared / "theirs" / "saferun.yaml") == f"its directory belongs to user {SOMEBODY}"


@needs_root
def test_a_file_that_only_somebody_else_may_read_is_theirs_before_it_is_unreadable(shared: Path) -> None:
    """Else it would be an error that ends a launch, which anybody could plant."""
    shared.chmod(0o1777)
    (shared / "saferun.yaml").write_text("root's")
    (shared / "saferun.yaml").chmod(0o600)
    os.chown(shared / "saferun.yaml", 54322, -1)
    assert as_user(lambda: content_found(shared / "saferun.yaml")) == "it belongs to user 54322"


@needs_root
def test_what_root_owns_counts_for_everybody(shared: Path) -> None:
    shared.chmod(0o755)
    (shared / "saferun.yaml").write_text("root's")
    assert as_user(lambda: content_found(shared / "saferun.yaml")) == "root's"


@needs_root
def test_for_root_every_directory_above_counts(shared: Path) -> None:
    """Whoever may rename one of them decides what root finds in it."""
    (shared / "home").mkdir()
    (shared / "home" / "saferun.yaml").write_text("root's")
    assert content_found(shared / "home" / "saferun.yaml") == "a directory above it is writable by everyone"
    shared.chmod(0o1777)
    assert content_found(shared / "home" / "saferun.yaml") == "root's"
    os.chown(shared, SOMEBODY, -1)
    assert content_found(shared / "home" / "saferun.yaml") == f"a directory above it belongs to user {SOMEBODY}"


@needs_root
def test_a_user_needs_no_directory_above_to_be_private(shared: Path) -> None:
    """In a project's directory everybody of the group may write: what lies in a user's own part of it is the user's."""

    def look() -> str:
        os.mkdir(shared / "mine")
        with open(shared / "mine" / "saferun.yaml", "w", encoding="utf-8") as file:
            file.write("mine")
        return content_found(shared / "mine" / "saferun.yaml")

    assert as_user(look) == "mine"


def test_a_link_counts_where_both_it_and_what_it_leads_to_do(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "settings.yaml").write_text("the team's")
    link = tmp_path / "here" / "saferun.yaml"
    link.symlink_to("../team/settings.yaml")
    assert content_found(link) == "the team's"
    (tmp_path / "team").chmod(0o777)
    assert content_found(link) == "its directory is writable by everyone"
    link.unlink()
    link.symlink_to("nothing")
    assert content_found(link) == os.strerror(errno.ENOENT)
    link.unlink()
    link.symlink_to("saferun.yaml")
    assert content_found(link) == os.strerror(errno.ELOOP)


@needs_root
def test_a_link_of_somebody_else_does_not_count_though_it_leads_to_a_file_of_ours(shared: Path, tmp_path: Path) -> None:
    """Which of our files are settings is not for others to say."""
    shared.chmod(0o1777)
    (tmp_path / "other.yaml").write_text("mine")
    as_user(lambda: os.symlink(tmp_path / "other.yaml", shared / "saferun.yaml"))
    assert content_found(shared / "saferun.yaml") == f"it belongs to user {SOMEBODY}"


def as_alice(
    monkeypatch: pytest.MonkeyPatch, *, name: str = "alice", members: tuple[str, ...] = (), first_gid: int = 700
) -> None:
    """This user is alice with group 700."""
    monkeypatch.setattr(os, "geteuid", lambda: 700)
    monkeypatch.setattr(pwd, "getpwuid", lambda _uid: pwd.struct_passwd(("alice", "x", 700, first_gid, "", "/", "/")))
    monkeypatch.setattr(grp, "getgrgid", lambda gid: grp.struct_group((name, "x", gid, list(members))))


def test_a_group_of_this_user_alone_is_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites with umask 002 give each user a group of that user's name; all that the user makes is writable for it."""
    as_alice(monkeypatch)
    assert trusted_files.is_private_group(700)
    as_alice(monkeypatch, members=("alice",))
    assert trusted_files.is_private_group(700)


@pytest.mark.parametrize("no", ["members", "a name", "first", "root", "unknown"])
def test_any_other_group_is_others(monkeypatch: pytest.MonkeyPatch, no: str) -> None:
    match no:
        case "members":
            as_alice(monkeypatch, members=("alice", "bob"))
        case "a name":
            as_alice(monkeypatch, name="users")
        case "first":
            as_alice(monkeypatch, first_gid=100)
        case "root":
            as_alice(monkeypatch)
            monkeypatch.setattr(os, "geteuid", lambda: 0)
        case _:
            as_alice(monkeypatch)
            monkeypatch.setattr(pwd, "getpwuid", _raise_key_error)
    assert not trusted_files.is_private_group(700)


def _raise_key_error(_uid: int) -> None:
    raise KeyError


def test_a_file_that_a_private_group_may_write_counts_unless_an_access_list_says_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a list, the group's bits in the mode are its mask, and may stand for other users' rights."""
    monkeypatch.setattr(trusted_files, "is_private_group", lambda _gid: True)
    file = tmp_path / "saferun.yaml"
    file.write_text("mine")
    file.chmod(0o664)
    assert content_found(file) == "mine"
    # Version 2; the owner, user 54321, the group, the mask, others: tag, permissions, id.
    entries = [(0x01, 6, 0xFFFFFFFF), (0x02, 6, SOMEBODY), (0x04, 4, 0xFFFFFFFF), (0x10, 6, 0xFFFFFFFF)]
    entries.append((0x20, 4, 0xFFFFFFFF))
    packed = (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + rights.to_bytes(2, "little") + number.to_bytes(4, "little")
        for tag, rights, number in entries
    )
    try:
        os.setxattr(file, "system.posix_acl_access", packed)
    except OSError as error:
        if error.errno not in {errno.ENOTSUP, errno.EPERM}:
            raise
        pytest.skip("this file system has no access lists")
    assert content_found(file) == f"it is writable by group {file.stat().st_gid}"


def test_root_of_a_user_namespace_is_a_user() -> None:
    """Of containers that a user makes: what is above belongs to root of the machine, whom the namespace cannot name."""
    program = "from saferun.linux import trusted_files; print(trusted_files._is_root_of_the_machine())"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("user namespaces may not be made here")
    assert done.stdout == "False\n", done.stderr
