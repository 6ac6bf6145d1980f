"""What ranks leave in /dev/shm: real processes map real segments, and are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from saferun.linux import shm_segments
from saferun.linux.shm_segments import SHM, remove_orphans, segments_of

# Makes or opens a file of shared memory, holds it in one of two ways, says "ready", and waits for the end of its stdin.
_PROGRAM = """
import mmap, os, sys
path, how = sys.argv[1:3]
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, 8192)
if how == "map":
    view = mmap.mmap(fd, 8192)
    os.close(fd)  # mmap keeps a copy: as a library that maps without one, it is closed
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink("/proc/self/fd/" + name) == path:
                os.close(int(name))
        except OSError:
            pass
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a process that holds a file in /dev/shm."""
    started: list[subprocess.Popen[str]] = []

    def begin(path: str, how: str = "map") -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, path, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield begin
    for child in started:
        child.kill()
        child.communicate()


@pytest.fixture
def name() -> Iterator[Callable[[str], str]]:
    """Paths in /dev/shm that nobody else has; removed in the end."""
    paths: list[str] = []

    def path(beginning: str) -> str:
        digits = {"nccl-": 6, "psm_": 8}.get(beginning, 12)
        paths.append(f"{SHM}/{beginning}{uuid.uuid4().hex[:digits]}")
        return paths[-1]

    yield path
    for left in paths:
        Path(left).unlink(missing_ok=True)


def kill(child: subprocess.Popen[str]) -> int:
    """As a rank is killed: it cleans nothing up."""
    child.send_signal(signal.SIGKILL)
    child.wait()
    return child.pid


@pytest.mark.parametrize("how", ["map", "open"])
def test_what_a_killed_rank_held_is_seen_before_and_removed_after(
    start: Start, name: Callable[[str], str], how: str
) -> None:
    """NCCL's names tell nothing of their maker: only looking at the living rank tells whose they are."""
    path = name("nccl-")
    rank = start(path, how)
    held = segments_of([rank.pid])
    assert held == {path}
    pid = kill(rank)
    assert segments_of([pid]) == frozenset()
    assert remove_orphans(held, [pid]) == (path,)
    assert not os.path.exists(path)


@pytest.mark.parametrize("how", ["map", "open"])
def test_what_a_living_process_holds_stays(start: Start, name: Callable[[str], str], how: str) -> None:
    """Another job of the user's, or a rank of the next attempt."""
    path = name("nccl-")
    rank, other = start(path), start(path, how)
    held = segments_of([rank.pid])
    assert remove_orphans(held, [kill(rank)]) == ()
    assert os.path.exists(path)
    kill(other)
    assert remove_orphans(held, [rank.pid]) == (path,)


def test_what_was_there_before_the_ranks_stays(start: Start, name: Callable[[str], str]) -> None:
    """A cache of an earlier job that they only read; or that of a rank of it which had the same pid."""
    path = name("psm_")
    rank = start(path)
    held = segments_of([rank.pid])
    changed = os.stat(path).st_ctime
    gone = kill(rank)
    mine = name(f"torch_{gone}_")
    Path(mine).touch()
    assert remove_orphans(held, [gone], since=max(changed, os.stat(mine).st_ctime) + 1.0) == ()
    assert remove_orphans(held, [gone], since=changed - 1.0) == tuple(sorted((path, mine)))


def test_a_data_set_that_the_ranks_only_read_stays(start: Start, name: Callable[[str], str]) -> None:
    """Copied to /dev/shm for speed, it is the user's, and costs an hour to copy again."""
    path = name("train-shard-")
    rank = start(path)
    held = segments_of([rank.pid])
    assert held == {path}
    assert remove_orphans(held, [kill(rank)]) == ()
    assert os.path.exists(path)


@pytest.mark.parametrize(
    "beginning", ["torch_cache.", "torch_7_cache", "psm_data_", "loky-", "nccl-tuning-", "pym-", "sem.mp-of-mine-"]
)
def test_a_file_that_only_begins_like_a_library_s_stays(
    start: Start, name: Callable[[str], str], beginning: str
) -> None:
    """The next attempt reads what this one has put there."""
    path = name(beginning)
    rank = start(path)
    held = segments_of([rank.pid])
    assert held == {path}
    assert remove_orphans(held, [kill(rank)]) == ()
    assert os.path.exists(path)


def test_names_that_carry_a_dead_rank_s_pid_are_found_without_having_been_seen(
    start: Start, name: Callable[[str], str]
) -> None:
    """A rank that dies before anybody looks leaves them too."""
    gone = kill(start(name("other-")))
    mine = os.getpid()
    left = [name(f"torch_{gone}_"), name(f"__KMP_REGISTERED_LIB_{gone}_"), name(f"cuda.shm.{os.getuid():x}.{gone:x}.")]
    stay = [name(f"torch_{mine}_"), name(f"torch_{gone}"), name(f"mine_{gone}_"), name(f"cuda.shm.{gone:x}.")]
    for path in (*left, *stay):
        Path(path).touch()
    assert set(remove_orphans((), [gone, mine])) == set(left)
    assert all(os.path.exists(path) for path in stay)


def test_in_a_container_a_pid_in_a_name_proves_nothing(
    start: Start, name: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share /dev/shm have the same pids for different processes."""
    path = name("nccl-")
    rank = start(path)
    held = segments_of([rank.pid])
    gone = kill(rank)
    other = name(f"torch_{gone}_")
    Path(other).touch()
    monkeypatch.setattr(shm_segments, "INITIAL_PID_NAMESPACE", "pid:[1]")
    assert remove_orphans(held, [gone]) == (path,)
    assert os.path.exists(other)


def test_whose_name_was_removed_already_is_no_segment(start: Start, name: Callable[[str], str]) -> None:
    """Most libraries remove the name as soon as all have it open: the kernel then frees it by itself."""
    path = name("psm_")
    rank = start(path, "open")
    os.unlink(path)
    assert segments_of([rank.pid]) == frozenset()
    Path(path).touch()
    assert segments_of([rank.pid]) == frozenset(), "another file of the same name is not the rank's"


def test_links_directories_and_other_places_are_never_removed(tmp_path: Path, name: Callable[[str], str]) -> None:
    """Nothing that a rank can make leads anywhere else."""
    precious = tmp_path / "nccl-precious"
    precious.touch()
    link = name("nccl-")
    os.symlink(precious, link)
    directory = name("nccl-")
    os.mkdir(directory)
    try:
        paths = [link, directory, str(precious), f"{SHM}/../{precious}", f"{directory}/nccl-x"]
        assert remove_orphans(paths, []) == ()
        assert precious.exists()
        assert os.path.islink(link)
    finally:
        os.rmdir(directory)


def test_without_the_time_to_look_at_all_processes_nothing_is_removed(start: Start, name: Callable[[str], str]) -> None:
    path = name("nccl-")
    rank = start(path)
    held = segments_of([rank.pid])
    gone = kill(rank)
    assert remove_orphans(held, [gone], deadline_s=0.0) == ()
    assert os.path.exists(path)


def test_what_python_s_own_shared_memory_leaves_is_removed() -> None:
    """A rank that is killed with a SharedMemory of its own, and its resource tracker with it."""
    program = (
        "import os, sys\n"
        "from multiprocessing import resource_tracker, shared_memory\n"
        "block = shared_memory.SharedMemory(create=True, size=4096)\n"
        "print(resource_tracker._resource_tracker._pid, block._name, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as rank:
        assert rank.stdout is not None
        tracker, block = rank.stdout.readline().split()
        path = f"{SHM}{block}"
        try:
            assert path in segments_of([rank.pid])
            os.kill(int(tracker), signal.SIGKILL)
            kill(rank)
            assert remove_orphans([path], [rank.pid]) == (path,)
        finally:
            Path(path).unlink(missing_ok=True)
