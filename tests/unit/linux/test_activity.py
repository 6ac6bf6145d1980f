"""Whether processes work: what an upload, a copy or a compression does, and what a monitor does."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import pytest

from saferun.linux import activity as module
from saferun.linux.activity import Activity
from saferun.linux.connections import Connections
from saferun.linux.procfs import Stat

WINDOW_S = 60.0
KIB, MIB = 1 << 10, 1 << 20


class Processes:
    """Processes as /proc has them, and a clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.cpu_s: dict[int, float] = {}
        self.parents: dict[int, int] = {}
        self.counted: dict[int, dict[str, int]] = {}
        self.disk_waits: set[int] = set()
        self.wchan: dict[int, bytes] = {}
        self.unreadable: set[int] = set()
        self.found = Connections(frozenset(), frozenset())
        self.asked_for: list[Collection[int]] = []
        monkeypatch.setattr(module, "read_stat", self.stat)
        monkeypatch.setattr(module, "read_bytes", self.read)
        monkeypatch.setattr(module, "waits_uninterruptibly", self.disk_waits.__contains__)
        monkeypatch.setattr(module, "list_directory", lambda path: [path.split("/")[2]])
        self.activity = Activity(WINDOW_S, self.connections)

    def stat(self, pid: int) -> Stat | None:
        return Stat("S", self.parents.get(pid, 1), self.cpu_s[pid], 1, 1) if pid in self.cpu_s else None

    def read(self, path: str) -> bytes:
        pid = int(path.split("/")[2])
        if path.endswith("wchan"):
            return self.wchan.get(pid, b"0")
        assert pid not in self.unreadable, "it would be waited for"
        return "".join(f"{name}: {value}\n" for name, value in self.counted.get(pid, {}).items()).encode()

    def connections(self, pids: Collection[int], _others: Iterable[int]) -> Connections:
        self.asked_for.append(pids)
        return self.found

    def start(self, pid: int, parent: int = 1, cpu_s: float = 0.0) -> None:
        self.cpu_s[pid], self.parents[pid], self.counted[pid] = cpu_s, parent, {}

    def end(self, pid: int) -> None:
        del self.cpu_s[pid], self.parents[pid], self.counted[pid]

    def add(self, pid: int, name: str, size_bytes: int) -> None:
        self.counted[pid][name] = self.counted[pid].get(name, 0) + size_bytes

    def idle(self) -> dict[int, float]:
        """For how long each has been idle."""
        sampled = self.activity.sample(sorted(self.cpu_s), self.now)
        return {pid: idle_s for members, idle_s in sampled for pid in members}

    def pass_s(self, seconds: float) -> dict[int, float]:
        self.now += seconds
        return self.idle()


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Processes:
    return Processes(monkeypatch)


def test_a_sleep_is_idle_from_the_beginning(processes: Processes) -> None:
    processes.start(10)
    assert processes.idle() == {10: 0.0}
    assert processes.pass_s(30) == {10: 30.0}
    assert processes.pass_s(31) == {10: 61.0}


@pytest.mark.parametrize(
    ("cpu_s", "written_bytes", "read_bytes"),
    [(0.01, 15 * KIB, 15 * KIB), (0.02, 20 * KIB, 600 * KIB), (0.001, 100, 100)],
    ids=["a loop of date", "top", "tail -f"],
)
def test_a_monitor_is_idle(processes: Processes, cpu_s: float, written_bytes: int, read_bytes: int) -> None:
    """What it does each second is little, but never nothing: it held a finished job up for ten minutes."""
    processes.start(10)
    idle = processes.idle()
    for second in range(61):
        processes.cpu_s[10] += cpu_s
        processes.add(10, "wchar", written_bytes)
        processes.add(10, "rchar", read_bytes)
        child = 100 + second
        processes.start(child, 10, cpu_s=0.01)
        idle = processes.pass_s(1)
        processes.end(child)
    assert idle[10] >= WINDOW_S


@pytest.mark.parametrize(
    ("cpu_s", "name", "size_bytes"),
    [(0.9, "wchar", 0), (0.15, "wchar", 0), (0.0, "wchar", 100 * KIB), (0.0, "read_bytes", MIB)],
    ids=["compression", "on a busy machine", "a slow copy", "a read from a disk"],
)
def test_work_is_never_idle_for_as_long_as_the_window(
    processes: Processes, cpu_s: float, name: str, size_bytes: int
) -> None:
    processes.start(10)
    processes.idle()
    for _ in range(300):
        processes.cpu_s[10] += cpu_s
        processes.add(10, name, size_bytes)
        assert processes.pass_s(1)[10] < WINDOW_S


def test_many_short_children_that_compute_are_work(processes: Processes) -> None:
    """As in ``for file in *; do gzip $file; done``."""
    processes.start(10)
    processes.idle()
    for second in range(120):
        child = 100 + second
        processes.start(child, 10, cpu_s=0.3)
        assert processes.pass_s(1)[10] < WINDOW_S
        processes.end(child)


def test_what_waits_for_a_disk_works(processes: Processes) -> None:
    processes.start(10)
    processes.idle()
    processes.disk_waits.add(10)
    assert processes.pass_s(100) == {10: 0.0}


@pytest.mark.parametrize("is_fuse", [False, True])
def test_of_what_waits_for_a_file_system_no_numbers_are_read(processes: Processes, *, is_fuse: bool) -> None:
    """Before Linux 5.7 they are waited for while it is in exec. What it did before is not work when it goes on."""
    processes.start(10)
    processes.add(10, "write_bytes", 500 * MIB)
    assert processes.idle() == {10: 0.0}
    if is_fuse:
        processes.wchan[10] = b"request_wait_answer"
    else:
        processes.disk_waits.add(10)
    processes.unreadable.add(10)
    processes.now = 100.0
    assert processes.idle() == {10: 0.0}
    processes.unreadable.clear()
    processes.disk_waits.clear()
    processes.wchan.clear()
    processes.now = 200.0
    assert processes.idle() == {10: 100.0}


@pytest.mark.parametrize(
    ("wchan", "works"), [(b"request_wait_answer", True), (b"fuse_simple_request", True), (b"fuse_dev_do_read", False)]
)
def test_what_waits_for_a_mounted_object_store_works(processes: Processes, wchan: bytes, works: bool) -> None:
    """A copy to s3fs is uploaded while the program closes the file, asleep and without a connection of its own."""
    processes.start(10)
    processes.idle()
    processes.wchan[10] = wchan
    assert processes.pass_s(100) == {10: 0.0 if works else 100.0}


def test_what_is_connected_works_and_has_time_to_try_again(processes: Processes) -> None:
    """A slow upload by send(2) is seen in none of the counters; a client that failed waits before the next try."""
    processes.start(10)
    processes.found = Connections(frozenset({10}), frozenset())
    for _ in range(10):
        processes.idle()
        assert processes.pass_s(60)[10] <= 0
    processes.found = Connections(frozenset(), frozenset())
    processes.pass_s(1)
    assert processes.pass_s(100)[10] < WINDOW_S
    assert processes.pass_s(30)[10] >= WINDOW_S


def test_what_is_connected_to_a_process_that_works_works_itself(processes: Processes) -> None:
    """A client and a proxy of the job's, which alone is connected to another host."""
    processes.start(10)
    processes.start(20)
    processes.start(30)
    processes.found = Connections(frozenset({20}), frozenset({(10, 20), (20, 10)}))
    processes.idle()
    idle = processes.pass_s(100)
    assert idle[10] == idle[20] <= 0
    assert idle[30] == 100


def test_connections_are_searched_now_and_then(processes: Processes) -> None:
    processes.start(10)
    for _ in range(40):
        processes.pass_s(0.05)
    assert len(processes.asked_for) <= 2


def test_a_process_that_loses_its_parent_has_been_idle_for_as_long_as_before(processes: Processes) -> None:
    processes.start(10)
    processes.start(11, 10)
    processes.idle()
    processes.pass_s(50)
    processes.end(10)
    processes.parents[11] = 1
    assert processes.pass_s(11) == {11: 61.0}


def test_time_in_which_it_may_have_been_suspended_is_none_in_which_a_process_was_idle(processes: Processes) -> None:
    """That of a tree of several processes, too, is made up for once."""
    processes.start(10)
    processes.start(11, 10)
    processes.idle()
    processes.pass_s(30)
    processes.now += 3600
    processes.activity.make_up_for(3600)
    assert processes.pass_s(1) == {10: 31.0, 11: 31.0}


def test_where_connections_cannot_be_read_nothing_is_idle(processes: Processes) -> None:
    def fail(_pids: Collection[int], _others: Iterable[int]) -> Connections:
        raise ImportError

    processes.activity = Activity(WINDOW_S, fail)
    processes.start(10)
    processes.idle()
    assert processes.pass_s(100)[10] <= 0
