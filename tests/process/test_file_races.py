"""Somebody who exchanges files and directories as fast as inotify tells of them, while they are written."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from saferun.errors import SaferunError
from saferun.files.file_stream import APPENDED, FRESH, WHOLE
from saferun.files.operations import make_log_directories, make_run_directory, write_error
from saferun.files.private_file import new_name, write_private
from saferun.linux import task_sockets
from saferun.linux.task_sockets import TaskSockets, connect_to_task
from tests.breadth import slow_but
from tests.direct_files import DirectFiles
from tests.process.somebody import SOMEBODY, as_user, directory_for_all, needs_root
from tests.process.watching import ROUNDS, Attacker, rounds_until

pytestmark = needs_root

MANY = 200
FILES = ("run.json", "report.json", "report.txt", "events.jsonl", "stdout.log", "error.json", "latest")


@pytest.fixture(name="directory")
def _directory() -> Iterator[Path]:
    """A directory in which every user may make files, and rename those of others."""
    with directory_for_all(0o777) as directory:
        yield directory


@pytest.fixture(name="home")
def _home(directory: Path) -> Path:
    """What is to be left alone, though everybody may look at it, and so lead there."""
    home = directory / "home"
    (home / "node3").mkdir(parents=True)
    for path in (home / "bashrc", home / "node3" / "bashrc", *(home / name for name in FILES)):
        path.write_text("mine")
    return home


def content_of(path: Path) -> dict[str, tuple[str, int]]:
    return {
        str(found.relative_to(path)): (found.read_text() if found.is_file() else "", found.stat().st_mode)
        for found in (path, *path.rglob("*"))
    }


def exchange_all(attacker: Attacker, run: Path, home: Path) -> None:
    """At each event: whatever is there is moved away, temporary files too, and links to the victim's take its place."""
    attacker.watch(run)
    attacker.watch(run / "node3")
    attacker.is_ready()
    turn = 0
    while attacker.goes_on:
        attacker.wait()
        turn += 1
        for folder in (run / "node3", run):
            try:
                names = os.listdir(folder)
            except OSError:
                continue
            for name in {*names, *FILES}:
                if name.startswith("away") or (name == "node3" and turn % 7):
                    continue
                try:
                    if name in names:
                        os.rename(folder / name, folder / f"away.{turn}.{name}")
                    if turn % 2:
                        os.symlink(home if name in {"node3", "latest"} else home / "bashrc", folder / name)
                    else:
                        os.link(home / "bashrc", folder / name)
                except OSError:
                    continue


def write_all(run: Path, error_path: Path, number: int) -> None:
    files = DirectFiles()
    try:
        make_run_directory(str(run), str(run / "node3"), "", [f".latest-{number}", "latest"])
    except OSError:
        pass
    for name in FILES[:3]:
        stream = files.open(str(run / name), WHOLE)
        stream.write(b"ours")
        stream.close()
    for name, how in (("events.jsonl", APPENDED), ("stdout.log", FRESH)):
        stream = files.open(str(run / "node3" / name), how)
        stream.write(b"ours")
        stream.close()
    try:
        write_error(str(error_path), "no port", "", 1)
    except OSError:
        pass
    files.finish()


@ROUNDS
def test_no_race_for_the_files_of_a_run_is_lost(directory: Path, home: Path, rounds: int) -> None:
    """In a directory that everybody may write to: the worst that a ``--run-dir`` can be."""
    before = content_of(home)
    swapped: list[int] = []
    for number in rounds_until(rounds, swapped):
        run = directory / f"run{number}"
        make_run_directory(str(run), str(run / "node3"), "", [])
        for path in (run, run / "node3"):
            path.chmod(0o777)
        with Attacker(partial(exchange_all, run=run, home=home)):
            write_all(run, run / "error.json", number)
        if any(path.name.startswith("away") for path in run.iterdir()):
            swapped.append(number)
        assert content_of(home) == before


def exchange_logs(attacker: Attacker, logs: Path, home: Path) -> None:
    """The launch's own directory, as soon as it is there."""
    attacker.watch(logs)
    attacker.is_ready()
    turn = 0
    while attacker.goes_on:
        attacker.wait()
        for name in os.listdir(logs):
            if not name.startswith("away"):
                turn += 1
                try:
                    os.rename(logs / name, logs / f"away.{turn}")
                    os.symlink(home, logs / name)
                except OSError:
                    continue


@pytest.mark.slow
def test_no_race_for_the_directories_of_logs_is_lost(directory: Path, home: Path) -> None:
    """A ``--log-dir`` that everybody may write to."""
    before = content_of(home)
    logs = directory / "logs"
    logs.mkdir()
    logs.chmod(0o777)
    swapped = 0
    with Attacker(partial(exchange_logs, logs=logs, home=home)):
        for number in range(MANY):
            files = DirectFiles()
            try:
                name = make_log_directories(str(logs), f"job_{number:08}", 0, ["0"], 0)
                stream = files.open(str(logs / name / "attempt_0" / "0" / "stdout.log"), FRESH)
                stream.write(b"ours")
                stream.close()
            except OSError:
                swapped += 1
            files.finish()
            assert content_of(home) == before
    assert swapped or any(path.name.startswith("away") for path in logs.iterdir())


def exchange_runs(attacker: Attacker, directory: Path, runs: Path, home: Path) -> None:
    """The directory of runs, for one whose .gitignore is a link, as soon as there is anything in it."""
    attacker.watch(directory)
    attacker.is_ready()
    turn = 0
    while attacker.goes_on:
        attacker.wait()
        turn += 1
        try:
            os.mkdir(directory / f"theirs.{turn}")
            os.symlink(home / "bashrc", directory / f"theirs.{turn}" / ".gitignore")
            os.rename(runs, directory / f"away.{turn}")
            os.rename(directory / f"theirs.{turn}", runs)
        except OSError:
            continue


def test_no_race_for_a_file_of_the_user_s_processes_on_other_hosts_is_lost(directory: Path, home: Path) -> None:
    """Below a directory in which everybody may rename everything."""
    before = content_of(home)
    parent = directory / "project"
    parent.mkdir()
    parent.chmod(0o777)
    runs = parent / "saferun-runs"
    with Attacker(partial(exchange_runs, directory=parent, runs=runs, home=home)):
        for number in range(MANY):
            try:
                write_private(str(runs), new_name(), b"secret")
            except OSError:
                pass
            assert content_of(home) == before
            with suppress(FileNotFoundError):  # the attacker has moved it
                os.rename(runs, parent / f"gone.{number}")
    theirs = [found.read_bytes() for found in parent.rglob("content") if found.stat().st_uid == SOMEBODY]
    assert theirs == []
    assert any(path.name.startswith(("away", "theirs")) for path in parent.iterdir())


# --------------------------------------------------------------------------------------------------- where tasks meet


def take_names(attacker: Attacker, base: Path, home: Path, own: str, *, exchange: bool) -> None:
    """At each event: the user's name in that place, and those like it, as a directory, a link or a socket's place."""
    attacker.watch(base)
    attacker.is_ready()
    turn = 0
    while attacker.goes_on:
        attacker.wait()
        turn += 1
        names = [name for name in os.listdir(base) if name.startswith(own)] if exchange else []
        for name in (own, f"{own}-{turn % 50}", *names):
            try:
                if exchange and name in names:
                    os.rename(base / name, base / f"away.{turn}.{name}")
                if turn % 3 == 0:
                    os.symlink(home, base / name)
                else:
                    os.mkdir(base / name, 0o777 if turn % 3 == 1 else 0o700)
                    for sock in sockets_of(base, names):
                        os.symlink(home / "bashrc", base / name / sock)
            except OSError:
                continue


def sockets_of(base: Path, names: list[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        try:
            found += os.listdir(base / name)
        except OSError:
            continue
    return found or ["0.sock"]


@pytest.mark.parametrize("is_sticky", slow_but([True, False], "False"), ids=["sticky", "not sticky"])
def test_no_race_for_the_place_where_tasks_meet_is_lost(
    directory: Path, home: Path, monkeypatch: pytest.MonkeyPatch, is_sticky: bool
) -> None:
    """/tmp, and one that lacks the sticky bit: tasks meet among themselves, or do not meet, and change nothing else."""
    before = content_of(home)
    base = directory / "tmp"
    base.mkdir()
    base.chmod(0o1777 if is_sticky else 0o777)
    monkeypatch.setattr(task_sockets, "_bases", lambda: [str(base)])
    own = f"saferun-{os.getuid()}"
    met = 0
    with Attacker(partial(take_names, base=base, home=home, own=own, exchange=not is_sticky)):
        for number in range(MANY):
            head, task = TaskSockets(f"job-{number}"), TaskSockets(f"job-{number}")
            try:
                listener, path = head.listen()
            except SaferunError:
                assert not is_sticky
                continue
            if is_sticky:
                status = os.lstat(os.path.dirname(path))
                assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (os.geteuid(), 0o700)
            met += meets(listener, task)
            listener.close()
            forget(base, own)
    assert met == MANY or not is_sticky
    after = {name: found for name, found in content_of(home).items() if not name.endswith(".sock")}
    assert after == before
    assert any(path.lstat().st_uid == SOMEBODY for path in base.iterdir())


def test_as_many_names_as_somebody_likes_to_make_keep_no_task_waiting(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None but the user's own is even opened."""
    directory.chmod(0o1777)
    own = f"saferun-{os.getuid()}"

    def take() -> None:
        os.mkdir(directory / own)
        for number in range(100):
            os.mkdir(directory / f"{own}-{number}", 0o700)

    as_user(take)
    monkeypatch.setattr(task_sockets, "_bases", lambda: [str(directory)])
    checked: list[str] = []
    check = task_sockets._check

    def noted(directory: str) -> None:
        checked.append(os.path.basename(directory))
        check(directory)

    monkeypatch.setattr(task_sockets, "_check", noted)
    listener, path = TaskSockets("job").listen()
    with listener:
        assert meets(listener, TaskSockets("job"))
    assert set(checked) == {own, os.path.basename(os.path.dirname(path))}


def meets(listener: socket.socket, task: TaskSockets) -> bool:
    """Whether a task finds the one that listens; whatever else it finds would be somebody else's."""
    for path in task.paths():
        found = connect_to_task(path)
        if found is not None:
            connection, _ = listener.accept()
            assert task_sockets.peer_of(connection) == os.getuid()
            connection.close()
            found.lines.close()
            return True
    return False


def forget(base: Path, own: str) -> None:
    """The user's directories go, so that there is something to be made again."""
    for path in base.iterdir():
        try:
            if path.name.startswith(own) and path.lstat().st_uid == os.geteuid():
                for sock in path.iterdir():
                    sock.unlink()
                path.rmdir()
        except OSError:
            continue
