"""Cores of subprocesses whose crash their rank survives: they do not pile up, and a failure finds its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from saferun.linux.core_files import find_cores_below
from saferun.linux.core_pattern import CorePattern
from saferun.linux.handled_cores import HandledCores
from tests.unit.linux.test_core_files import make_core

# No process has such a number: it is beyond what the kernel gives.
RANK, OTHER_RANK, SUBPROCESS, STRANGER = ((1 << 23) + number for number in range(4))
OWNER = os.getpid()


class Directory:
    """A directory in which subprocesses of two ranks crash."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.handled = HandledCores(OWNER, {RANK, OTHER_RANK})

    def crash(self, name: str, now: float, *, pid: int = SUBPROCESS, ppid: int = RANK, sid: int = RANK) -> None:
        (self.path / name).write_bytes(make_core(pid, ppid=ppid, sid=sid))
        self.handled.add(str(self.path / name), now)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    return Directory(tmp_path)


def test_only_the_newest_core_of_each_rank_s_subprocesses_stays(directory: Directory) -> None:
    """A decoder that is run on each file may crash on many of them."""
    for number in range(4):
        directory.crash(f"core.saferun.1.{number}", 61.0 * number)
        directory.handled.trim(61.0 * number)
    directory.crash("core.saferun.1.4", 184, ppid=OTHER_RANK, sid=OTHER_RANK)
    assert directory.handled.trim(184.0) == 599.0
    assert directory.names() == ["core.saferun.1.3", "core.saferun.1.4"]
    assert directory.handled.trim(783.5) is not None
    assert directory.names() == ["core.saferun.1.4"]
    assert directory.handled.trim(784.5) is None
    assert directory.names() == []


def burst(directory: Directory, count: int, *, apart: float = 1.0) -> list[int]:
    """Crashes of one rank's subprocesses, one after another. Returns the numbers of the cores that stay."""
    for number in range(count):
        directory.crash(f"core.{number}", apart * number)
        directory.handled.trim(apart * number)
    return sorted(int(name.removeprefix("core.")) for name in directory.names())


def test_crashes_one_after_another_belong_together(directory: Directory) -> None:
    """The siblings of a process that crashes abort because of it: the first core has the cause."""
    assert burst(directory, 3) == [0, 1, 2]
    directory.handled.hand_over([RANK])
    directory.handled.sweep(4.0)
    assert len(directory.names()) == 3


def test_of_many_that_belong_together_the_first_and_the_last_ones_stay(directory: Directory) -> None:
    assert burst(directory, 20) == [0, *range(13, 20)]
    directory.handled.sweep(30.0)
    assert directory.names() == []


def test_crashes_that_go_on_do_not_pile_up(directory: Directory) -> None:
    """They belong together for a minute, not for as long as the next one is near."""
    assert burst(directory, 20, apart=30.0) == [17, 18, 19]


@pytest.mark.parametrize(("cores", "stay"), [(1.5, [4]), (2.5, [0, 4]), (3.5, [0, 3, 4]), (0, [0, 1, 2, 3, 4])])
def test_together_they_take_no_more_room_than_there_was(tmp_path: Path, cores: float, stay: list[int]) -> None:
    """Checkpoints go to the same disk. The newest stays, and the oldest is more use than those between."""
    directory = Directory(tmp_path)
    (tmp_path / "size").write_bytes(make_core(SUBPROCESS))
    size_bytes = (tmp_path / "size").stat().st_blocks * 512
    (tmp_path / "size").unlink()
    assert size_bytes
    directory.handled = HandledCores(OWNER, {RANK}, room_bytes=int(cores * size_bytes))
    assert burst(directory, 5) == stay


def test_what_the_user_keeps_does_not_cost_the_first_of_a_burst(tmp_path: Path) -> None:
    """``--cores keep``: until the run ends or ten minutes have passed, its rank may fail because of it."""
    directory = Directory(tmp_path)
    directory.handled = HandledCores(OWNER, {RANK}, spared=2)
    assert burst(directory, 4) == [0, 1, 2, 3]
    assert directory.handled.trim(4.0) == 596.0
    directory.handled.sweep(5.0)
    assert directory.names() == ["core.2", "core.3"]


def test_the_end_of_the_run_takes_the_last_ones(directory: Directory) -> None:
    """As without saferun."""
    directory.crash("core.saferun.1.0", 0.0)
    directory.handled.trim(0.0)
    directory.crash("core.saferun.1.1", 1.0, ppid=STRANGER)  # of its session
    directory.handled.sweep(1.0)
    assert directory.names() == []


def test_a_process_that_runs_is_traced_to_its_rank_by_its_ancestors(directory: Directory) -> None:
    """A subprocess may lead a session of its own."""
    grandparent = os.getppid()
    directory.handled = HandledCores(int(Path(f"/proc/{grandparent}/stat").read_text().rpartition(")")[2].split()[1]))
    directory.crash("core", 0.0, ppid=OWNER, sid=STRANGER)
    directory.handled.sweep(0.0)
    assert directory.names() == []


@pytest.mark.parametrize(
    ("pid", "ppid", "sid"),
    [(RANK, OWNER, RANK), (STRANGER, STRANGER, STRANGER), (SUBPROCESS, 1, STRANGER), (SUBPROCESS, os.getppid(), 1)],
    # Without the numbers of this process, which each worker has others of.
    ids=["rank", "stranger", "orphan", "sibling"],
)
def test_the_core_of_a_rank_and_of_anything_else_stays(directory: Directory, pid: int, ppid: int, sid: int) -> None:
    """The examiner reads those of ranks, and what is not provably of a subprocess of one is not saferun's."""
    directory.crash("core", 0.0, pid=pid, ppid=ppid, sid=sid)
    directory.handled.trim(1000.0)
    directory.handled.sweep(2000.0)
    assert directory.names() == ["core"]


@pytest.mark.parametrize("is_read", [False, True])
def test_what_a_failed_rank_s_subprocesses_left_is_the_examiner_s(directory: Directory, is_read: bool) -> None:
    """It may keep one that no tool can read, and name it in the report."""
    directory.crash("core.saferun.1.0", 0.0)
    directory.crash("core.saferun.1.1", 0.0, ppid=OTHER_RANK, sid=OTHER_RANK)
    if is_read:
        directory.handled.trim(0.0)
    directory.handled.hand_over([RANK])
    directory.handled.trim(1000.0)
    directory.handled.sweep(1000.0)
    assert directory.names() == ["core.saferun.1.0"]


def test_a_file_that_is_no_core_is_left_alone(directory: Directory) -> None:
    """It may be one that is being written; after a minute it is something else."""
    (directory.path / "core").write_text("of the user's own")
    directory.handled.add(str(directory.path / "core"), 0.0)
    assert directory.handled.trim(0.0) == 0.5
    assert directory.handled.trim(61.0) is None
    directory.handled.sweep(62.0)
    assert directory.names() == ["core"]


def test_a_file_that_has_taken_a_core_s_name_is_left_alone(directory: Directory) -> None:
    directory.crash("core", 0.0)
    directory.handled.trim(0.0)
    (directory.path / "new").write_text("of the user's own")
    (directory.path / "new").rename(directory.path / "core")
    directory.handled.sweep(1.0)
    assert directory.names() == ["core"]


def test_as_many_as_the_user_wants_to_keep_stay(tmp_path: Path) -> None:
    """``--cores keep``."""
    directory = Directory(tmp_path)
    directory.handled = HandledCores(OWNER, {RANK, OTHER_RANK}, spared=2)
    for number in range(4):
        directory.crash(f"core.{number}", number)
    assert directory.handled.trim(1000.0) is None
    directory.handled.sweep(2000.0)
    assert directory.names() == ["core.2", "core.3"]


RUN = "SAFERUN_RUN_ID=ab"


def found_below(directory: Directory, **core: object) -> bool:
    """A core in a directory that a rank had changed to. Returns whether it is still there after the end."""
    folder = directory.path / "outputs" / "today"
    folder.mkdir(parents=True, exist_ok=True)
    values = {"pid": SUBPROCESS, "ppid": RANK, "sid": RANK, "environ": ["HOME=/", RUN], **core}
    (folder / "core").write_bytes(make_core(**values))  # type: ignore[arg-type]
    for one in find_cores_below(CorePattern("core"), [str(directory.path)], 0.0):
        directory.handled.add_found(one, RUN, 1000.0)
    directory.handled.sweep(1000.0)
    return (folder / "core").exists()


def test_what_is_found_at_the_end_is_deleted_where_it_is_proved_to_be_of_the_run(directory: Directory) -> None:
    """A rank may change its directory, and start programs in others: there nobody sees cores appear."""
    assert not found_below(directory)
    assert not found_below(directory, ppid=STRANGER)  # of its session
    assert not found_below(directory, sid=STRANGER)
    assert found_below(directory, environ=["HOME=/"])  # of another run, where numbers come again
    assert found_below(directory, environ=[f"{RUN}c"])
    assert found_below(directory, environ=())
    assert found_below(directory, ppid=STRANGER, sid=STRANGER)
    assert found_below(directory, pid=RANK, ppid=OWNER, sid=RANK)  # the examiner reads it
    directory.handled.hand_over([RANK])
    assert found_below(directory)  # likewise
    assert not found_below(directory, ppid=OTHER_RANK, sid=OTHER_RANK)


def test_a_file_that_is_no_core_is_not_found_at_the_end(directory: Directory) -> None:
    (directory.path / "sub").mkdir()
    (directory.path / "sub" / "core").write_text("my data")
    assert not found_below(directory)
    assert (directory.path / "sub" / "core").read_text() == "my data"


def test_of_those_found_at_the_end_as_many_stay_as_the_user_keeps(tmp_path: Path) -> None:
    """The newest, wherever they are."""
    directory = Directory(tmp_path)
    directory.handled = HandledCores(OWNER, {RANK}, spared=2)
    now = time.time()
    for number in range(3):
        (tmp_path / f"w{number}").mkdir()
        (tmp_path / f"w{number}" / "core").write_bytes(make_core(SUBPROCESS, ppid=RANK, sid=RANK, environ=[RUN]))
        os.utime(tmp_path / f"w{number}" / "core", (now - number, now - number))
    directory.crash("core", 999.5)
    for one in find_cores_below(CorePattern("core"), [str(tmp_path)], 0.0):
        assert directory.handled.add_found(one, RUN, 1000.0)
        assert not directory.handled.add_found(one, RUN, 1000.0)
    directory.handled.sweep(1000.0)
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("core")) == ["core", "w0/core"]
