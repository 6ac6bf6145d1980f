"""Records of launches without files: where they are, and which of them a launch that was killed has left."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files import live_records
from saferun.files.live_records import LiveRecord, record_directories, recorded_runs
from saferun.files.run_files import open_run, read_state
from saferun.linux.process_identity import own_identity

if TYPE_CHECKING:
    from pathlib import Path

NAME = "20260314-020000-d2ad7e"
OLD = "20260101-000000-aaaaaa"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def content(**process: Any) -> str:
    """A run.json with this process and what changes of it."""
    who = own_identity()._asdict() | process
    return json.dumps({"run_id": "d2ad7e0123456789", "command": ["train.py"], "host": "node1", "process": who})


def test_the_users_own_runtime_directory_comes_first(tmp_path: Path) -> None:
    uid = os.geteuid()
    others = [f"/run/user/{uid}/saferun", f"/dev/shm/saferun-{uid}", f"/tmp/saferun-{uid}"]
    assert record_directories({"XDG_RUNTIME_DIR": str(tmp_path)}) == [str(tmp_path / "saferun"), *others]
    assert record_directories({"XDG_RUNTIME_DIR": "relative"}) == record_directories({}) == others


def test_a_record_reads_as_a_run_that_lives_until_it_is_removed(tmp_path: Path, environ: dict[str, str]) -> None:
    record = LiveRecord(NAME, "node1", "run.json", is_part=False)
    for _ in range(2):
        record.write(content(), environ)
    assert str(tmp_path / "saferun" / NAME) in recorded_runs(environ)
    fd = open_run(str(tmp_path / "saferun" / NAME))
    assert read_state(fd).name == "running"
    os.close(fd)
    record.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_socket_of_a_job_with_one_saferun_a_rank_is_no_run(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the same directory, and stays there where the job was killed."""
    record = LiveRecord(NAME, "node1", "run.json", is_part=False)
    record.write(content(), environ)
    monkeypatch.chdir(tmp_path / "saferun")  # the path may be too long for a socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("32dc69f9fd803a3e86992a64.sock")
    (tmp_path / "saferun" / "link").symlink_to(tmp_path)
    assert [path for path in recorded_runs(environ) if path.startswith(str(tmp_path))] == [
        str(tmp_path / "saferun" / NAME)
    ]
    record.remove()


def test_launches_of_one_job_share_a_directory_and_each_removes_its_file(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    records = [
        LiveRecord(NAME, "node1", "run.json", is_part=False),
        LiveRecord(NAME, "node1", "run.task_1.json", is_part=True),
    ]
    for record in records:
        record.write(content(), environ)
    records[0].remove()
    found = [path.name for path in (tmp_path / "saferun").rglob("*.json")]
    assert found == ["run.task_1.json"]
    records[1].remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "host", "why"),
    [
        ("n" * 300, "node1", "File name too long"),
        (NAME, "n" * 300, "File name too long"),
        (NAME, "no/such", "No such file or directory"),
    ],
)
def test_a_place_without_room_for_a_directory_is_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, host: str, why: str
) -> None:
    """Not even the user's own directory stays there, empty."""
    monkeypatch.setattr(live_records, "record_directories", lambda _: [str(tmp_path / "saferun")])
    with pytest.raises(OSError, match=why):
        LiveRecord(name, host, "run.json", is_part=False).write(content(), {})
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_is_full_is_left_as_it_was(tmp_path: Path) -> None:
    """Only a part of the file finds room there."""
    writes = (
        "import os, resource, sys; from saferun.files import live_records\n"
        "directories = sys.argv[1:3]; live_records.record_directories = lambda _environ: directories\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        f"record = live_records.LiveRecord({NAME!r}, 'node1', 'run.json', is_part=False)\n"
        "try:\n"
        "    record.write('x' * 100, {})\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    directories = [str(tmp_path / "first"), str(tmp_path / "second")]
    done = subprocess.run([sys.executable, "-c", writes, *directories], capture_output=True, text=True, check=True)
    assert done.stdout == "File too large\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("process", [{"start_ticks": 1}, {"pid": 1 << 29}, {"pid_namespace": "another"}])
def test_what_was_left_is_removed_by_the_next_record(
    tmp_path: Path, environ: dict[str, str], process: dict[str, Any]
) -> None:
    """Of a process that cannot be seen from here the lock says it: no one holds it."""
    old = tmp_path / "saferun" / OLD
    (old / "node1").mkdir(parents=True)
    (tmp_path / "saferun").chmod(0o700)
    (old / "run.json").write_text(content(**process))
    LiveRecord(NAME, "node1", "run.json", is_part=False).write(content(), environ)
    assert [path.name for path in (tmp_path / "saferun").iterdir()] == [NAME]


def test_the_record_of_a_process_in_another_container_stays_as_long_as_it_is_locked(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    writes = (
        "import sys; from saferun.files.live_records import LiveRecord\n"
        f"record = LiveRecord({OLD!r}, 'node1', 'run.json', is_part=False)\n"
        f"record.write(sys.argv[1], {environ!r}); print('ready', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", writes, content(pid_namespace="another")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        LiveRecord(NAME, "node1", "run.json", is_part=False).write(content(), environ)
        names = {path.name for path in (tmp_path / "saferun").iterdir()}
        other.communicate()
    assert names == {NAME, OLD}


def test_a_directory_without_a_record_may_be_one_that_is_being_made(tmp_path: Path, environ: dict[str, str]) -> None:
    new, old = tmp_path / "saferun" / "new", tmp_path / "saferun" / OLD
    for path in (new, old):
        path.mkdir(parents=True, mode=0o700)
    (tmp_path / "saferun").chmod(0o700)
    os.utime(old, (1, 1))
    LiveRecord(NAME, "node1", "run.json", is_part=False).write(content(), environ)
    assert {path.name for path in (tmp_path / "saferun").iterdir()} == {NAME, "new"}
