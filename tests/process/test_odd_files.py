"""File systems and files that are not as they mostly are: nothing of what saferun does there costs a job, or a file."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from saferun.errors import SaferunError
from saferun.files.file_server import FileServer
from saferun.files.file_stream import FRESH
from saferun.files.hand_in import hand_in
from saferun.files.inbox import Inbox
from saferun.files.operations import make_log_directories, make_run_directory, write_error
from saferun.linux import scratch, task_sockets
from saferun.linux.ownership import make_directory, remove_tree
from saferun.linux.scratch import Scratch
from saferun.linux.task_sockets import TaskSockets
from tests.descriptors import open_descriptors
from tests.direct_files import DirectFiles
from tests.process.launching import STAY, running
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root


@pytest.fixture(name="files")
def _files() -> Iterator[DirectFiles]:
    files = DirectFiles()
    yield files
    files.finish()


# ------------------------------------------------------------------------------------------- the launcher's error file


@pytest.mark.parametrize("way", ["itself", "a link to it"])
def test_a_device_as_the_launchers_error_file_stays_a_device(tmp_path: Path, way: str) -> None:
    """``TORCHELASTIC_ERROR_FILE=/dev/null``: as root, whoever replaces it breaks the machine."""
    device = tmp_path / "null"
    if os.geteuid() == 0:
        try:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            os.close(os.open(device, os.O_WRONLY))
        except OSError:
            device.unlink(missing_ok=True)
    if not device.exists():  # no root, or a file system without devices
        os.mkfifo(device)
    reader = os.open(device, os.O_RDONLY | os.O_NONBLOCK)
    path = device
    if way != "itself":
        path = tmp_path / "stderr"
        path.symlink_to(device)
    write_error(str(path), "no port", "", 1)
    os.close(reader)
    assert not device.is_file()
    assert device.exists()
    assert path.is_symlink() is (way != "itself")


def test_a_pipe_as_the_launchers_error_file_gets_it_or_is_passed_over(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
        write_error(str(pipe), "no port", "", 1)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_error(str(pipe), "no port", "", 1)
    assert b"no port" in os.read(reader, 1 << 16)
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@needs_root
def test_a_pipe_of_somebody_else_gets_no_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    os.chown(pipe, SOMEBODY, -1)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionError, match=f"it belongs to user {SOMEBODY}"):
        write_error(str(pipe), "no port", "", 1)
    assert os.read(reader, 10) == b""
    os.close(reader)


@needs_root
def test_a_link_of_somebody_else_to_a_device_is_replaced_and_leads_nowhere(tmp_path: Path) -> None:
    """Root's error file in /tmp, and a link to a disk."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    path = tmp_path / "error.json"
    path.symlink_to(pipe)
    os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)
    write_error(str(path), "no port", "", 1)
    assert os.read(reader, 10) == b""
    os.close(reader)
    assert not path.is_symlink()
    assert "no port" in path.read_text()


def test_a_file_or_a_link_to_one_is_replaced(tmp_path: Path) -> None:
    """As torchrun does."""
    (tmp_path / "target").write_text("mine")
    path = tmp_path / "error.json"
    for target in ("target", "missing"):
        path.symlink_to(target)
        write_error(str(path), "no port", "", 1)
        assert not path.is_symlink()
        assert "no port" in path.read_text()
        path.unlink()
    assert (tmp_path / "target").read_text() == "mine"
    assert not (tmp_path / "missing").exists()


def cannot_be_replaced(monkeypatch: pytest.MonkeyPatch, number: int, before: Callable[[str], None]) -> None:
    """Whoever removes a file gets an error, and something else may be there by then."""

    def fail(path: str) -> None:
        before(path)
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "unlink", fail)


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS])
def test_an_error_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A mount point, or a file in a directory that may not be written to: torchrun writes there."""
    path = tmp_path / "error.json"
    path.write_text("what an earlier launch has left, which is longer than what follows" * 100)
    inode = path.stat().st_ino
    cannot_be_replaced(monkeypatch, number, lambda _: None)
    write_error(str(path), "no port", "", 1)
    assert json.loads(path.read_text())["message"]["message"] == "no port"
    assert path.stat().st_ino == inode


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EACCES])
@pytest.mark.parametrize("kind", ["a link", "a pipe", "nothing"])
def test_what_is_no_file_by_then_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, number: int
) -> None:
    """Through no link, and no pipe without a reader is waited for."""
    path = tmp_path / "error.json"
    path.write_text("old")
    (tmp_path / "bashrc").write_text("mine")
    remove = os.unlink

    def exchange(_: str) -> None:
        remove(path)
        if kind == "a link":
            path.symlink_to("bashrc")
        elif kind == "a pipe":
            os.mkfifo(path)

    cannot_be_replaced(monkeypatch, number, exchange)
    with pytest.raises(OSError, match=re.escape(str(path))):
        write_error(str(path), "no port", "", 1)
    assert (tmp_path / "bashrc").read_text() == "mine"
    monkeypatch.undo()


@needs_root
def test_a_file_of_somebody_else_that_cannot_be_replaced_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a directory such as /tmp."""
    path = tmp_path / "error.json"
    path.write_text("of somebody else")
    os.chown(path, SOMEBODY, -1)
    cannot_be_replaced(monkeypatch, errno.EPERM, lambda _: None)
    with pytest.raises(PermissionError, match=f"it belongs to user {SOMEBODY}"):
        write_error(str(path), "no port", "", 1)
    assert path.read_text() == "of somebody else"


@needs_root
def test_a_user_writes_to_roots_error_file_where_no_file_can_be_replaced() -> None:
    """In a pod whose processes are not root's, /dev is root's, and the kubelet lets everyone write to the file."""
    with directory_for_all(0o755) as directory:
        path = directory / "termination-log"
        path.touch()
        path.chmod(0o666)
        as_user(lambda: write_error(str(path), "no port", "", 1))
        assert json.loads(path.read_text())["message"]["message"] == "no port"


@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="a bind mount takes a mount namespace")
def test_an_error_file_that_is_a_mount_point_is_written(tmp_path: Path) -> None:
    """/dev/termination-log in a pod: what is behind it, the kubelet reads."""
    behind, path = tmp_path / "behind", tmp_path / "termination-log"
    behind.touch()
    path.touch()
    mounted = f'mount --make-rprivate / && mount --bind {behind} {path} && exec "$@"'
    before = ("unshare", "--mount", "sh", "-c", mounted, "sh")
    with running(tmp_path / "run", STAY, before=before, environ={"TORCHELASTIC_ERROR_FILE": str(path)}) as job:
        job.hear("ready")
        job.send(signal.SIGTERM)
        assert job.wait() == 1, job.err
        assert "TORCHELASTIC_ERROR_FILE" not in job.err
    message = json.loads(behind.read_text())["message"]["message"]
    assert message.endswith(f"got signal: {signal.SIGTERM.value}")


# --------------------------------------------------------------------------------------------------------- directories


@needs_root
def test_a_directory_that_may_be_written_and_not_read_takes_log_files() -> None:
    """Where a plugin of torch's, or --log-dir, puts them: torchrun only opens files there."""
    with directory_for_all(0o733) as directory:

        def write() -> None:
            files = DirectFiles()
            said: list[str] = []
            files.on_failed = lambda path, error, _: said.append(f"{path}: {error}")
            stream = files.open(str(directory / "log"), FRESH)
            stream.write(b"hello")
            stream.close()
            assert said == []

        as_user(write)
        assert (directory / "log").read_bytes() == b"hello"


def test_a_place_without_private_directories_is_passed_over_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of Windows, or a file system that makes every file anybody's: each launch would leave a directory."""
    directories = [tmp_path / "share", tmp_path / "disk"]
    for directory in directories:
        directory.mkdir()
    monkeypatch.setattr(scratch, "scratch_bases", lambda: list(map(str, directories)))
    made = os.mkdir

    def make(path: str, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        made(path, mode, dir_fd=dir_fd)
        if str(path).startswith(str(directories[0])):
            os.chmod(path, 0o755)  # noqa: S103 - as such a share has it

    monkeypatch.setattr(os, "mkdir", make)
    private = Scratch("0123456789abcdef")
    assert private.path() == str(directories[1] / "saferun-0123456789abcdef")
    assert os.listdir(directories[0]) == []
    # What somebody else has made there is theirs.
    (directories[0] / "saferun-0123456789abcdef").mkdir()
    Scratch("0123456789abcdef").path()
    assert os.listdir(directories[0]) == ["saferun-0123456789abcdef"]
    private.close()


def test_a_directory_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of file systems refuse to make it with various words: read-only, not permitted."""
    (tmp_path / "node3").mkdir()

    def refuse(_path: str, *_arguments: int, **_more: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", refuse)
    os.close(make_directory(str(tmp_path / "node3")))


def test_a_run_directory_without_room_for_a_gitignore_is_one_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody needs it. The disk may have room again later."""
    opened = os.open

    def refuse(path: str, flags: int, *arguments: int, **more: Any) -> int:
        if path == ".gitignore":
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    make_run_directory(str(tmp_path / "runs" / "1"), str(tmp_path / "runs" / "1" / "node3"), str(tmp_path / "runs"), [])
    assert (tmp_path / "runs" / "1" / "node3").is_dir()


@pytest.mark.parametrize("latest", ["a directory", "no links"])
def test_where_the_newest_run_cannot_be_linked_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latest: str
) -> None:
    top = tmp_path / "runs"
    (top / "latest" if latest == "a directory" else top).mkdir(parents=True)

    def refuse(*_arguments: str, **_more: int) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if latest == "no links":
        monkeypatch.setattr(os, "symlink", refuse)
    make_run_directory(str(top / "1"), str(top / "1" / "node3"), str(top), [".latest-1", "latest"])
    assert not list(top.glob(".latest*"))


def test_directories_of_logs_are_made_where_the_launch_has_made_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not through a link that takes its place as soon as it is there."""
    home = tmp_path / "home"
    home.mkdir()
    logs = tmp_path / "logs"
    made = os.mkdir

    def make(path: str, *arguments: int, **more: int) -> None:
        made(path, *arguments, **more)
        if path == str(logs / "job_1"):
            os.rename(path, f"{path}.away")
            os.symlink(home, path)
            os.chown(path, SOMEBODY, SOMEBODY, follow_symlinks=False)

    with monkeypatch.context() as patch:
        patch.setattr(os, "mkdir", make)
        if os.geteuid() == 0:
            with pytest.raises(PermissionError, match=f"it belongs to user {SOMEBODY}"):
                make_log_directories(str(logs), "job_1", 0, ["0", "1"], 0)
            assert os.listdir(home) == []
    assert make_log_directories(str(logs), "job_2", 0, ["0", "1"], 0) == "job_2"
    assert make_log_directories(str(logs), "job_2", 1, ["0", "1"], 1) == "job_2"
    found = sorted(str(path.relative_to(logs)) for path in (logs / "job_2").glob("*/*"))
    assert found == ["job_2/attempt_0/0", "job_2/attempt_0/1", "job_2/attempt_1/0", "job_2/attempt_1/1"]


# --------------------------------------------------------------------------------------------------- what is in the way


@needs_root
def test_a_file_that_only_somebody_else_may_write_is_replaced_in_a_directory_of_ours() -> None:
    """Whoever may write to a run directory would keep its logs from being written."""
    with directory_for_all(0o777) as directory:
        as_user(lambda: make_run_directory(str(directory / "1"), str(directory / "1" / "node3"), "", []))
        log = directory / "1" / "node3" / "stdout.log"
        log.write_text("root's")
        log.chmod(0o600)

        def write() -> None:
            make_run_directory(str(directory / "1"), str(directory / "1" / "node3"), "", [])
            files = DirectFiles()
            stream = files.open(str(log), FRESH)
            stream.write(b"hello")
            stream.close()

        as_user(write)
        assert log.read_bytes() == b"hello"


def test_a_directory_that_cannot_be_listed_keeps_nothing_else_from_being_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "top"
    for name in ("a", "b", "c"):
        (top / name / "d").mkdir(parents=True)
        (top / name / "file").touch()
    silent = (top / "b").stat().st_ino
    scandir = os.scandir

    def refuse(fd: int) -> Any:
        if os.fstat(fd).st_ino == silent:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return scandir(fd)

    monkeypatch.setattr(os, "scandir", refuse)
    assert not remove_tree(str(top))
    monkeypatch.undo()
    assert sorted(str(path.relative_to(top)) for path in top.rglob("*")) == ["b", "b/d", "b/file"]
    assert remove_tree(str(top))


# ------------------------------------------------------------------------------------------------------------- and more


def test_a_handed_in_file_that_is_replaced_before_it_could_be_written_takes_nothing_with_it(tmp_path: Path) -> None:
    """Neither its descriptor nor its share of the room."""
    inbox = Inbox()
    directory = tmp_path / "place"
    directory.write_text("no directory")
    server = FileServer(lambda _: None)
    before = len(open_descriptors())
    for content in (b"one", b"two", b"three"):
        assert hand_in(inbox.outbox, str(directory / "a"), content, 0.0)
        assert server.take(inbox)
    assert len(open_descriptors()) == before + 1
    directory.unlink()
    server.retry(at_once=True)
    assert (directory / "a").read_bytes() == b"three"
    assert len(open_descriptors()) == before
    assert inbox.waiting_bytes() == 0
    inbox.close()


def test_a_stranger_who_takes_no_connections_keeps_no_job_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can take an abstract name, and let its queue run full."""
    monkeypatch.setattr(task_sockets, "_bases", list)
    (path,) = TaskSockets("job-with-a-stranger").paths()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.bind(path)
        stranger.listen(0)
        waiting = []
        while True:
            waiting.append(socket.socket(socket.AF_UNIX))
            waiting[-1].setblocking(False)
            if waiting[-1].connect_ex(path):
                break
        with pytest.raises(SaferunError, match="a process that accepts no connections has taken @saferun-"):
            TaskSockets("job-with-a-stranger").listen()
        for one in waiting:
            one.close()
