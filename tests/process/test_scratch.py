"""Private temporary directories, and the place where the tasks of a host meet, on systems that lack something."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.errors import SaferunError
from saferun.linux import scratch, task_sockets
from saferun.linux.children import fork
from saferun.linux.task_sockets import connect_to_task

# ---------------------------------------------------------------------------------------------------------- scratch


@pytest.fixture
def directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three places for temporary files; the test says what they are like."""
    found = [str(tmp_path / name) for name in ("first", "second", "third")]
    for path in found:
        os.mkdir(path)
    monkeypatch.setattr(scratch, "scratch_bases", lambda: list(found))
    return found


def test_a_scratch_directory_is_private_and_goes_away(directories: list[str]) -> None:
    held = scratch.Scratch("id")
    assert os.listdir(directories[0]) == []
    path = Path(held.path())
    assert str(path.parent) == directories[0]
    assert path.stat().st_mode & 0o777 == 0o700
    (path / "deep").mkdir()
    (path / "deep" / "file").touch()
    held.close()
    assert os.listdir(directories[0]) == []


def test_a_deleted_scratch_directory_is_made_again(directories: list[str]) -> None:
    """Cleaners of temporary directories delete what is older than ten days."""
    held = scratch.Scratch("id")
    path = held.path()
    os.rmdir(path)
    assert held.path() == path
    assert os.path.isdir(path)
    held.close()
    assert os.listdir(directories[0]) == []


def test_a_scratch_directory_is_locked_against_cleaners(directories: list[str]) -> None:
    """systemd-tmpfiles leaves alone what it cannot lock for itself; also what was deleted and made again."""
    held = scratch.Scratch("id")
    for again in (False, True):
        if again:
            os.rmdir(held.path())
        fd = os.open(held.path(), os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
    held.close()
    assert os.listdir(directories[0]) == []


@pytest.mark.parametrize("kind", ["is missing", "is a file", "holds somebody's directory", "holds a link"])
def test_a_place_that_cannot_be_used_is_passed_over(kind: str, directories: list[str]) -> None:
    wanted = os.path.join(directories[0], "saferun-id")
    if kind in {"is missing", "is a file"}:
        os.rmdir(directories[0])
    if kind == "is a file":
        Path(directories[0]).touch()
    if kind == "holds somebody's directory":
        os.mkdir(wanted, 0o755)
    if kind == "holds a link":
        os.symlink(directories[2], wanted)
    held = scratch.Scratch("id")
    assert held.path() == os.path.join(directories[1], "saferun-id")
    if kind == "is missing":
        os.mkdir(directories[0])
    assert held.path() == os.path.join(directories[1], "saferun-id"), "nothing moves while a run lasts"
    held.close()
    if kind.startswith("holds"):
        assert os.path.lexists(wanted), "what is somebody else's is left alone"


def test_where_no_place_can_be_used_it_says_so(directories: list[str]) -> None:
    for path in directories:
        os.rmdir(path)
    with pytest.raises(OSError, match=r"saferun-id"):
        scratch.Scratch("id").path()


def test_sockets_get_a_short_path(directories: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TMPDIR that is too long for a socket's path still serves for files."""
    long = tmp_path / ("long" * 20)
    long.mkdir()
    short = Path(f"/tmp/short-{os.urandom(4).hex()}")
    short.mkdir()
    try:
        monkeypatch.setattr(scratch, "scratch_bases", lambda: [str(long), *directories, str(short)])
        monkeypatch.setattr(scratch, "_memory_bases", list)
        held = scratch.Scratch("0123456789abcdef")
        assert Path(held.path()).parent == long
        assert Path(held.socket_path()).parent == short
        held.close()
        assert not os.listdir(short)
        assert not os.listdir(long)
    finally:
        short.rmdir()


def test_the_places_for_temporary_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", "relative")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/runtime")
    bases = scratch.scratch_bases()
    assert bases[:2] == [str(tmp_path / "relative"), "/tmp"]
    assert {"/dev/shm", "/var/tmp", "/runtime", str(tmp_path)} <= set(bases)


# ------------------------------------------------------------------------------------------------- sockets of tasks


@pytest.fixture
def no_directories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nowhere a private directory can be made."""
    monkeypatch.setattr(task_sockets, "_bases", lambda: ["/proc/nowhere"])


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The one place for directories of sockets, whose names are limited to 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setattr(task_sockets, "_bases", lambda: [directory])
        yield Path(directory)


def test_the_directory_of_sockets_goes_with_the_last_of_them(base: Path) -> None:
    """Nothing is left; and two jobs of one user share it, of which either may end first."""
    jobs = [task_sockets.TaskSockets(os.urandom(8).hex()) for _ in range(2)]
    (first, first_path), (second, second_path) = [job.listen() for job in jobs]
    first.close()
    jobs[0].remove(first_path)
    assert [str(path) for path in base.glob("saferun-*/*")] == [second_path]
    second.close()
    jobs[1].remove(second_path)
    assert list(base.iterdir()) == []
    jobs[1].remove("\0abstract")


def test_a_directory_that_goes_meanwhile_is_made_again(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job has ended between the look at the directory and the socket in it."""
    sockets = task_sockets.TaskSockets(os.urandom(8).hex())
    made = sockets._made
    times: list[str] = []

    def made_and_gone(parent: str) -> str:
        directory = made(parent)
        if not times:
            os.rmdir(directory)
        times.append(parent)
        return directory

    monkeypatch.setattr(sockets, "_made", made_and_gone)
    listener, path = sockets.listen()
    assert path.startswith(str(base))
    listener.close()


def test_a_directory_without_a_socket_is_not_left(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without sockets, for one: the tasks meet under a name, and nothing stays behind."""

    def refuse(path: str) -> socket.socket:
        if path.startswith("\0"):
            return listen(path)
        raise OSError(errno.EPERM, "no sockets here")

    listen = task_sockets._listen
    monkeypatch.setattr(task_sockets, "_listen", refuse)
    listener, path = task_sockets.TaskSockets(os.urandom(8).hex()).listen()
    listener.close()
    assert path.startswith("\0")
    assert list(base.iterdir()) == []


@pytest.mark.usefixtures("no_directories")
def test_where_there_is_no_directory_tasks_meet_under_a_name() -> None:
    sockets = task_sockets.TaskSockets(os.urandom(8).hex())
    (path,) = sockets.paths()
    assert path.startswith(f"\0saferun-{os.getuid()}-")
    assert connect_to_task(path) is None
    listener, listens_at = sockets.listen()
    assert listens_at == path
    connection = connect_to_task(path)
    assert connection is not None
    with pytest.raises(SaferunError, match="local rank 0"):
        sockets.listen()
    assert not sockets.squatted
    assert connection.pid == os.getpid()
    connection.lines.close()
    listener.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.usefixtures("no_directories")
def test_somebody_else_under_that_name_is_not_spoken_to() -> None:
    """Anybody can take an abstract name."""
    sockets = task_sockets.TaskSockets(os.urandom(8).hex())
    (path,) = sockets.paths()
    ready_read, ready_write = os.pipe()

    def pretend() -> None:
        os.setuid(65534)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        os.write(ready_write, b"x")
        signal.pause()
        listener.close()

    pid = fork(pretend)
    try:
        assert os.read(ready_read, 1) == b"x"
        assert connect_to_task(path) is None
        with pytest.raises(SaferunError, match="user 65534 has taken @saferun-") as raised:
            sockets.listen()
        assert "XDG_RUNTIME_DIR" in raised.value.hint
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready_read)
        os.close(ready_write)


def test_a_directory_that_cannot_be_written_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that an earlier job left in a /tmp that is read-only by now."""
    monkeypatch.setattr(os, "access", lambda _path, _mode: False)
    sockets = task_sockets.TaskSockets(os.urandom(8).hex())
    assert [path[0] for path in sockets.paths()] == ["\0"]
    listener, path = sockets.listen()
    assert path.startswith("\0")
    listener.close()
