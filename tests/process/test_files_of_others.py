"""What another user of the machine plants where saferun makes, reads, empties or deletes files."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from saferun.errors import SaferunError
from saferun.files.operations import write_error
from saferun.linux import task_sockets
from saferun.linux.core_files import find_cores
from saferun.linux.core_notes import CoreError, is_core, read_core_notes
from saferun.linux.core_pattern import CorePattern
from saferun.linux.error_files import read_error_file
from saferun.linux.ownership import identity, make_directory, owner_of_new
from saferun.linux.scratch import remove_scratch
from saferun.linux.task_sockets import TaskSockets, connect_to_task
from tests.process.launching import STAY, read_stat, running, until
from tests.process.planting import (
    content_of,
)
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root, start_as_user
from tests.unit.linux.test_core_files import make_core

pytestmark = needs_root
_LIBC = ctypes.CDLL(None, use_errno=True)
_IN_OPEN, _IN_DELETE = 0x20, 0x200


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory in which every user may make files, and rename those of others."""
    with directory_for_all(0o777) as directory:
        yield directory


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What is to be left alone."""
    home = tmp_path / "home"
    (home / "thesis").mkdir(parents=True)
    (home / "id_rsa").write_text("secret")
    (home / "thesis" / "chapter").write_text("one")
    return home


# --------------------------------------------------------------------------------------------------------------------
# What is deleted


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_a_killed_run_deletes_nothing_that_others_have_planted_under_its_name(
    tmp_path: Path, home: Path, kind: str
) -> None:
    """The name of the private directories is no secret; others make it where the run has made none."""
    before = content_of(home)
    planted: list[Path] = []
    with running(tmp_path, STAY, "--run-dir", "none", nproc=1, store=False) as job:
        job.hear("ready")
        made = [path for path in Path("/dev/shm").glob("saferun-*") if is_of(path, job.process.pid)]
        name = made[0].name
        try:
            for directory in ("/tmp", "/var/tmp"):
                path = Path(directory) / name
                if path.exists():
                    continue
                as_user(partial(squat_with_links, path, home, kind))
                planted.append(path)
            assert planted
            reaper = job.reaper()
            assert reaper is not None
            job.send(signal.SIGKILL)
            job.wait()
            until(lambda: read_stat(reaper) is None, "the reaper has done its work")
            assert not made[0].exists()
            assert all(os.path.lexists(path) for path in planted)
            assert kind == "link" or all((path / "sub").is_dir() for path in planted)
            assert content_of(home) == before
        finally:
            for path in planted:
                for below in ("a", "sub", ""):
                    if (path / below).is_symlink():
                        (path / below).unlink()
                    elif (path / below).is_dir():
                        (path / below).rmdir()


def squat_with_links(path: Path, home: Path, kind: str) -> None:
    if kind == "link":
        path.symlink_to(home)
        return
    path.mkdir()
    (path / "sub").mkdir()
    (path / "a").symlink_to(home)


def is_of(path: Path, supervisor: int) -> bool:
    """Whether a process holds a directory open."""
    for link in Path(f"/proc/{supervisor}/fd").iterdir():
        try:
            if os.readlink(link) == str(path):
                return True
        except OSError:
            continue
    return False


def attack(top: Path, home: Path, names: list[str], ready: int) -> None:
    """Exchange directories for links as soon as the removal has begun: as fast as inotify tells."""
    watch = _LIBC.inotify_init1(0)
    assert _LIBC.inotify_add_watch(watch, os.fsencode(top), _IN_OPEN | _IN_DELETE) >= 0
    os.write(ready, b"x")
    os.read(watch, 4096)
    for name in names:
        try:
            os.rename(top / name, top / f"{name}.away")
            os.symlink(home, top / name)
        except OSError:
            continue


def race(shared: Path, home: Path, rounds: int) -> None:
    before = content_of(home)
    swapped = number = 0
    # On a busy machine the attacker may come too late a few times.
    while number < rounds or (not swapped and number < rounds + 500):
        number += 1
        top = shared / f"saferun-{number}"
        which = identity(fd := make_directory(str(top)))
        os.close(fd)
        top.chmod(0o777)
        names = [f"d{index}" for index in range(100)]
        for name in names:
            (top / name).mkdir()
            (top / name / "file").touch()
        read_end, write_end = os.pipe()
        order = os.listdir(top)[::-1]  # the last ones first: the removal comes from the other side
        pid = start_as_user(partial(attack, top, home, order, write_end))
        os.close(write_end)
        assert os.read(read_end, 1) == b"x"
        remove_scratch([(str(top), *which)])
        assert os.waitpid(pid, 0)[1] == 0
        swapped += any(path.name.endswith(".away") for path in top.iterdir()) if top.exists() else 0
        os.close(read_end)
        assert content_of(home) == before
        remove_scratch([(str(top), *which)])
        assert content_of(home) == before
    assert swapped, "the attacker has never been quick enough to be of any use here"


def test_directories_that_turn_into_links_while_they_are_deleted_lead_nowhere(shared: Path, home: Path) -> None:
    race(shared, home, 5)


@pytest.mark.slow
@pytest.mark.limit_s(900)
def test_no_race_for_links_is_lost(shared: Path, home: Path) -> None:
    race(shared, home, 200)


def test_a_directory_that_is_none_of_the_runs_is_left_alone(tmp_path: Path) -> None:
    """Not even one of the same user: it has the name by now, and may hold anything."""
    made = tmp_path / "saferun-1"
    which = identity(fd := make_directory(str(made)))
    made.rename(tmp_path / "moved")
    made.mkdir()
    (made / "file").touch()
    remove_scratch([(str(made), *which)])
    os.close(fd)
    assert (made / "file").exists()


# --------------------------------------------------------------------------------------------------------------------
# What is read


def plant(path: Path, content: bytes) -> None:
    def write() -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)

    as_user(write)


def test_a_planted_core_is_not_read(shared: Path) -> None:
    """Tools that read cores open what a core names, and believe it."""
    shared.chmod(0o1777)
    content = make_core(4711)
    plant(shared / "core.theirs", content)
    pattern = CorePattern(f"{shared}/core.%e", uses_pid=False)
    since = time.time() - 1000
    assert find_cores(pattern, [], since) == []
    with pytest.raises(CoreError, match=f"it belongs to user {SOMEBODY}"):
        read_core_notes(str(shared / "core.theirs"))
    assert not is_core(str(shared / "core.theirs"))
    (shared / "core.mine").write_bytes(content)
    assert [Path(core.path).name for core in find_cores(pattern, [], since)] == ["core.mine"]


def test_roots_cores_are_read_by_everybody(shared: Path) -> None:
    """Those of programs that change their user are root's."""
    (shared / "core").write_bytes(make_core(4711))
    (shared / "core").chmod(0o644)
    assert as_user(lambda: read_core_notes(str(shared / "core")).pid) == "4711"


RECORD = json.dumps({"message": {"message": "M", "extraInfo": {"py_callstack": "C", "timestamp": "1"}}})


def test_a_planted_error_file_is_not_read(shared: Path, tmp_path: Path) -> None:
    plant(shared / "error.json", RECORD.encode())
    assert read_error_file(str(shared / "error.json")) is None
    (tmp_path / "mine").write_text(RECORD)
    as_user(lambda: os.symlink(tmp_path / "mine", shared / "link.json"))
    assert read_error_file(str(shared / "link.json")) is None
    assert read_error_file(str(tmp_path / "mine")) is not None


def test_a_file_system_that_gives_all_files_one_owner_is_no_attack(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """root_squash, shares of virtual machines: what is made there is at once somebody else's."""
    plant(shared / "error.json", RECORD.encode())
    (shared / "core").write_bytes(make_core(4711))
    os.chown(shared / "core", SOMEBODY, -1)
    assert owner_of_new(str(shared)) == os.geteuid()
    monkeypatch.setattr("saferun.linux.ownership.owner_of_new", lambda *_, **__: SOMEBODY)
    assert read_error_file(str(shared / "error.json")) is not None
    assert read_core_notes(str(shared / "core")).pid == 4711


def test_the_question_for_a_new_files_owner_leaves_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there are no files without a name, as on NFS."""
    opened = os.open

    def refuse(path: str, flags: int, *arguments: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "Operation not supported")
        return opened(path, flags, *arguments, **more)

    monkeypatch.setattr(os, "open", refuse)
    assert owner_of_new(str(shared)) == os.geteuid()
    assert os.listdir(shared) == []
    assert owner_of_new("/proc") == -1


def test_the_question_for_a_new_files_owner_needs_no_o_tmpfile(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some Pythons lack it."""
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    assert owner_of_new(str(shared)) == os.geteuid()
    assert os.listdir(shared) == []


def test_a_large_error_file_is_handed_on_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Millions of small objects would take a hundred times their size. Whoever started the launcher may read it."""
    monkeypatch.setattr(json, "loads", pytest.fail)
    content = '{"message": [' + "{}," * 100_000 + "{}]}"
    (tmp_path / "error.json").write_text(content)
    assert read_error_file(str(tmp_path / "error.json")) is None
    write_error(str(tmp_path / "copy.json"), "", str(tmp_path / "error.json"), 1)
    assert (tmp_path / "copy.json").read_text() == content
    (tmp_path / "error.json").write_bytes(b" " * (5 << 20))
    write_error(str(tmp_path / "none.json"), "", str(tmp_path / "error.json"), 1)
    assert not (tmp_path / "none.json").exists()


def test_the_launchers_error_file_is_not_written_through_a_planted_link(
    shared: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even through one that is made between the removal and the writing."""
    (home / "bashrc").write_text("mine")
    unlink = os.unlink

    def exchange(path: str) -> None:
        if os.path.lexists(path):
            unlink(path)
        as_user(lambda: os.symlink(home / "bashrc", path))

    monkeypatch.setattr(os, "unlink", exchange)
    with pytest.raises(FileExistsError):
        write_error(str(shared / "error.json"), "no port", "", 1)
    assert (home / "bashrc").read_text() == "mine"


# --------------------------------------------------------------------------------------------------------------------
# Where tasks meet


@pytest.fixture
def directories(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two sticky directories, as /tmp and /var/tmp are, with names that are short enough for sockets."""
    with directory_for_all(0o755) as directory:
        found = [directory / name for name in ("tmp", "shm")]
        for path in found:
            path.mkdir()
            path.chmod(0o1777)
        monkeypatch.setattr(task_sockets, "_bases", lambda: list(map(str, found)))
        yield list(map(str, found))


def squat(path: str, kind: str) -> None:
    if kind == "link":
        os.symlink("/tmp", path)
    elif kind == "file":
        os.close(os.open(path, os.O_CREAT))
    else:
        os.mkdir(path, {"directory": 0o755, "closed directory": 0o700}[kind])


@pytest.mark.parametrize("kind", ["directory", "closed directory", "link", "file"])
def test_a_taken_name_is_told_with_its_owner_and_the_tasks_meet_all_the_same(directories: list[str], kind: str) -> None:
    own = f"saferun-{os.getuid()}"
    for directory in directories:
        as_user(partial(squat, f"{directory}/{own}", kind))
        as_user(partial(squat, f"{directory}/{own}-0123", kind))
    head, task = TaskSockets("job"), TaskSockets("job")
    assert all(connect_to_task(path) is None for path in task.paths())
    listener, path = head.listen()
    assert path.startswith(f"{directories[0]}/{own}-")
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert head.squatted == [
        f"{directories[0]}/{own}: it belongs to user {SOMEBODY}; the tasks of this job meet elsewhere"
    ]
    found = next(found for path in task.paths() if (found := connect_to_task(path)) is not None)
    found.lines.close()
    listener.close()
    # The next job finds the directory of this one.
    listener, again = TaskSockets("another job").listen()
    assert os.path.dirname(again) == os.path.dirname(path)
    listener.close()


def test_tasks_meet_in_the_users_own_directory_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path(f"/tmp/runtime-{os.urandom(4).hex()}")
    own.mkdir(0o700)
    try:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(own))
        listener, path = TaskSockets("job").listen()
        listener.close()
        assert Path(path).parents[1] == own
        # One that is too long for a socket's path, or missing, is passed over.
        for odd in (tmp_path / ("long" * 30), tmp_path / "missing"):
            if odd.name != "missing":
                odd.mkdir()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
            sockets = TaskSockets("job")
            listener, path = sockets.listen()
            listener.close()
            assert not path.startswith(str(odd))
            sockets.remove(path)
            assert not odd.exists() or not list(odd.iterdir())
    finally:
        for folder in (*own.iterdir(), own):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()


def test_where_all_is_taken_the_hint_can_be_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_sockets, "_bases", list)
    (path,) = TaskSockets("job-without-a-place").paths()
    read_end, write_end = os.pipe()

    def take() -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        os.write(write_end, b"x")
        signal.pause()

    pid = start_as_user(take)
    try:
        assert os.read(read_end, 1) == b"x"
        with pytest.raises(SaferunError, match=f"user {SOMEBODY} has taken @saferun-") as raised:
            TaskSockets("job-without-a-place").listen()
        assert raised.value.hint.startswith("set XDG_RUNTIME_DIR")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read_end)
        os.close(write_end)
