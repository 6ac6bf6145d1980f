"""A copy of the ranks' output takes no room that the job needs: it stops before a disk is full, and gives way then."""

from __future__ import annotations

import errno
import os
import re
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from saferun.files.sinks import Budget, Sink

if TYPE_CHECKING:
    from pathlib import Path

LINES = b"".join(b"line %07d %s\n" % (number, b"x" * 80) for number in range(60_000))
MIB = 1 << 20


class Disk:
    """What the file system answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free_bytes = self.size_bytes = 100 << 30
        self.is_full = False
        self.checks = 0
        self._writev = os.writev
        monkeypatch.setattr("saferun.files.sinks.os.fstatvfs", self._fstatvfs)
        monkeypatch.setattr("saferun.files.sinks.os.writev", self._write)

    def _fstatvfs(self, _fd: int) -> Any:
        self.checks += 1
        return SimpleNamespace(f_frsize=4096, f_blocks=self.size_bytes // 4096, f_bavail=self.free_bytes // 4096)

    def _write(self, fd: int, blocks: Any) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._writev(fd, blocks)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


class Copy:
    """A file with a rank's output."""

    def __init__(self, path: Path, *, gives_way: bool = True) -> None:
        self.path = path
        self.said: list[str] = []
        self.sink = Sink(str(path), fresh=True, budget=Budget(), report=self._report)
        self.sink.gives_way = gives_way

    def _report(self, _path: str, error: OSError | None, missing_bytes: int) -> None:
        self.said.append(f"{missing_bytes} missing" if error is None else str(error.strerror))

    def write(self, content: bytes) -> None:
        self.sink.write([memoryview(content)])

    def retry(self) -> None:
        self.sink.retry(0.0, at_once=True)


@pytest.mark.parametrize(
    ("size_bytes", "free_bytes", "said"),
    [
        (100 << 30, 900 * MIB, ["less than 1024 MiB are free, which are left to the job"]),
        (10 << 30, 900 * MIB, []),
        (10 << 30, 100 * MIB, ["less than 204 MiB are free, which are left to the job"]),
        (100 << 30, 0, []),
    ],
    ids=["a large disk", "a small one has more than a little", "a small one", "a file system that does not know"],
)
def test_what_is_left_of_a_disk_is_left_to_the_job(
    tmp_path: Path, disk: Disk, size_bytes: int, free_bytes: int, said: list[str]
) -> None:
    """And the file is written on, with a note of what is missing, once there is room again."""
    copy = Copy(tmp_path / "log")
    disk.size_bytes, disk.free_bytes = size_bytes, free_bytes
    copy.write(LINES)
    copy.write(LINES)
    copy.write(b"the end\n")
    assert copy.said == said
    if not said:
        return
    copy.retry()
    assert copy.path.read_bytes() == LINES * 2
    disk.free_bytes = size_bytes // 2
    copy.retry()
    assert copy.said == [*said, "0 missing"]
    assert copy.path.read_bytes() == LINES * 2 + b"the end\n"


def test_the_room_is_checked_now_and_then_only(tmp_path: Path, disk: Disk) -> None:
    copy = Copy(tmp_path / "log")
    for _ in range(4):
        for start in range(0, len(LINES), 1000):
            copy.write(LINES[start : start + 1000])
    assert 1 <= disk.checks <= 4 * len(LINES) // (8 * MIB)
    assert copy.path.read_bytes() == LINES * 4


def test_a_file_that_is_no_copy_is_written_to_the_last_byte(tmp_path: Path, disk: Disk) -> None:
    """What the user has asked for by --log-dir, as under torchrun."""
    copy = Copy(tmp_path / "log", gives_way=False)
    disk.free_bytes = MIB
    copy.write(LINES * 3)
    copy.write(b"the end\n")
    disk.is_full = True
    copy.write(b"more\n")
    assert copy.path.read_bytes() == LINES * 3 + b"the end\n"
    assert not disk.checks


def test_where_the_disk_is_full_the_middle_of_the_copy_is_given_up(tmp_path: Path, disk: Disk) -> None:
    """The beginning and the newest lines stay, in whole lines, and the file grows no larger from then on."""
    copy = Copy(tmp_path / "log")
    copy.write(LINES)
    disk.is_full = True
    copy.write(b"while it is full\n")
    left = copy.path.read_bytes()
    assert len(left) <= len(LINES) // 2
    note = re.search(rb"\[saferun: (\d+) bytes of this stream are left out here: the disk was full\]\n", left)
    assert note is not None
    assert LINES.startswith(left[: note.start()])
    assert LINES.endswith(left[note.end() :])
    assert note.start() + int(note[1]) + len(left) - note.end() == len(LINES)
    disk.is_full = False
    copy.retry()
    assert copy.said == [os.strerror(errno.ENOSPC), "0 missing"]
    assert copy.path.read_bytes() == left + b"while it is full\n"
    copy.write(LINES)
    assert copy.path.stat().st_size <= len(LINES) // 2


def test_a_copy_that_has_stopped_before_gives_way_once(tmp_path: Path, disk: Disk) -> None:
    """Others fill what was left, and the disk stays full."""
    copy = Copy(tmp_path / "log")
    disk.free_bytes = MIB
    copy.write(LINES)
    copy.write(LINES)
    copy.write(b"more\n")
    assert copy.path.stat().st_size == 2 * len(LINES)
    disk.free_bytes, disk.is_full = 0, True
    sizes = []
    for _ in range(3):
        copy.retry()
        sizes.append(copy.path.stat().st_size)
    assert len(LINES) / 2 < sizes[0] <= len(LINES)
    assert len(set(sizes)) == 1


def test_a_small_file_keeps_all_of_it(tmp_path: Path, disk: Disk) -> None:
    copy = Copy(tmp_path / "log")
    copy.write(LINES[: 1 * MIB])
    disk.is_full = True
    copy.write(b"more\n")
    assert copy.path.read_bytes() == LINES[: 1 * MIB]
