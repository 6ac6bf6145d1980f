"""Where saferunctl writes: nothing that was there is lost but the old content of a file."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from saferun.ctl.output_files import is_stdout, write_output
from saferun.errors import SaferunError
from tests.process.somebody import SOMEBODY, needs_root


def mode_of(path: Path) -> int:
    """The permissions of a file."""
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_new_file_is_for_its_user_only_and_an_old_one_keeps_its_permissions(tmp_path: Path) -> None:
    """Who has opened a report for colleagues does not want to do so again each time."""
    path = tmp_path / "report.json"
    write_output(str(path), b"one")
    assert (path.read_bytes(), mode_of(path)) == (b"one", 0o600)
    path.chmod(0o644)
    write_output(str(path), b"two")
    assert (path.read_bytes(), mode_of(path)) == (b"two", 0o644)
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_link_of_the_user_stays_and_the_file_behind_it_is_written(tmp_path: Path) -> None:
    """Else the place that the link leads to, perhaps a web server's, keeps what is out of date."""
    behind, link, dangling = tmp_path / "public" / "x.html", tmp_path / "link.html", tmp_path / "dangling"
    behind.parent.mkdir()
    behind.write_text("old")
    link.symlink_to("public/x.html")
    dangling.symlink_to(tmp_path / "new")
    for path in (link, dangling):
        write_output(str(path), b"new")
        assert path.is_symlink()
        assert path.read_bytes() == b"new"
    assert not behind.is_symlink()


@needs_root
def test_a_link_of_another_user_is_replaced(tmp_path: Path) -> None:
    """It may lead to a file of whoever writes."""
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.write_text("kept")
    link.symlink_to(kept)
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    write_output(str(link), b"new")
    assert not link.is_symlink()
    assert (link.read_bytes(), kept.read_text()) == (b"new", "kept")


def test_a_fifo_is_written_to_and_stays(tmp_path: Path) -> None:
    """As with a redirection of the shell: another program waits at its other end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(fifo)
    for path in (fifo, tmp_path / "link"):
        read: list[bytes] = []
        reader = threading.Thread(target=lambda read=read: read.append(fifo.read_bytes()), daemon=True)
        reader.start()
        write_output(str(path), b"content")
        reader.join()
        assert read == [b"content"]
        assert stat.S_ISFIFO(fifo.lstat().st_mode)


@needs_root
def test_a_fifo_of_another_user_is_refused(tmp_path: Path) -> None:
    """Whoever has planted it would get the report."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    os.chown(fifo, SOMEBODY, SOMEBODY)
    with pytest.raises(SaferunError, match=f"it belongs to user {SOMEBODY}"):
        write_output(str(fifo), b"content")


def test_a_name_of_a_descriptor_means_that_descriptor(tmp_path: Path) -> None:
    """Behind /dev/fd/N may be a file whose first part is another program's, or a pipe of the shell's ``>(…)``."""
    with open(tmp_path / "log", "wb", buffering=0) as file:
        file.write(b"before ")
        for folder in ("/dev/fd", "/proc/self/fd"):
            write_output(f"{folder}/{file.fileno()}", b"report ")
        file.write(b"after")
        closed = file.fileno()
    assert (tmp_path / "log").read_bytes() == b"before report report after"
    with pytest.raises(SaferunError, match=f"/dev/fd/{closed}: Bad file descriptor"):
        write_output(f"/dev/fd/{closed}", b"")


def test_standard_output_has_several_names() -> None:
    assert all(map(is_stdout, ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1")))
    assert not any(map(is_stdout, ("/dev/stderr", "/dev/fd/2", "/dev/fd/11", "/dev/null", "stdout", "")))


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(SaferunError, match="Is a directory"):
        write_output(str(tmp_path), b"")
    with pytest.raises(SaferunError, match="No such file") as raised:
        write_output(str(tmp_path / "missing" / "x"), b"")
    assert raised.value.hint == "write elsewhere with --output"


@needs_root
def test_root_gives_a_file_to_the_user_whose_directory_it_is(tmp_path: Path) -> None:
    """``saferunctl report --html`` of an administrator, for the user who asked."""
    os.chown(tmp_path, SOMEBODY, SOMEBODY)
    path = tmp_path / "report.html"
    write_output(str(path), b"page", owner=SOMEBODY)
    assert (path.stat().st_uid, path.stat().st_gid, mode_of(path)) == (SOMEBODY, SOMEBODY, 0o600)
    write_output(str(tmp_path / "root's"), b"page")
    assert (tmp_path / "root's").stat().st_uid == 0
    os.chown(tmp_path, SOMEBODY + 1, 0)
    write_output(str(path), b"page", owner=SOMEBODY)
    assert path.stat().st_uid == 0  # another user's directory has come in its place
