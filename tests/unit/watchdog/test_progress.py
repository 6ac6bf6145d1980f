"""What is read of processes, of this one and of a few of its children."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from saferun.linux import procfs
from saferun.linux.small_files import read_bytes
from saferun.watchdog import proc_sampler
from saferun.watchdog.flight_recorder_seq import numbers_from
from saferun.watchdog.proc_sampler import FamilyReader, ProcessReader, newest_pid
from saferun.watchdog.samples import ProcessSample


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A Python that does a piece of work for each line that it is sent, and says when it has."""
    program = """
import os, sys, time
print(flush=True)
for line in sys.stdin:
    exec(line)
    print(flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-S", "-u", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def do(child: subprocess.Popen[bytes], line: str) -> None:
    """Have it done, and return when the child waits for the next line."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(line.encode() + b"\n")
    child.stdin.flush()
    child.stdout.readline()
    while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.001)


def read(reader: ProcessReader, *, closely: bool = True) -> ProcessSample:
    sample = reader.read(closely=closely)
    assert sample is not None
    return sample


def test_work_is_counted_in_fractions_of_a_clock_tick(child: subprocess.Popen[bytes]) -> None:
    """A slow loader works for 3 ms a batch; ticks are of 10 ms."""
    reader = ProcessReader(child.pid)
    before = read(reader)
    do(child, "exec('until = time.thread_time() + 0.003\\nwhile time.thread_time() < until: pass')")
    now = read(reader)
    assert 3e6 <= now.main_run_ns - before.main_run_ns < 1e9
    assert now.cpu_ns - before.cpu_ns >= 3e6
    assert now.main_wakes > before.main_wakes


def test_what_is_read_and_written_is_counted(child: subprocess.Popen[bytes]) -> None:
    """By the main thread, and by all together."""
    reader = ProcessReader(child.pid)
    before = read(reader)
    do(child, "os.write(os.open('/dev/null', os.O_WRONLY), bytes(100_000))")
    now = read(reader)
    assert 100_000 <= now.main_io_bytes - before.main_io_bytes < 110_000
    do(child, "import threading; t = threading.Thread(target=os.write, args=(3, bytes(50_000))); t.start(); t.join()")
    later = read(reader)
    threads_bytes = (later.io_bytes - now.io_bytes) - (later.main_io_bytes - now.main_io_bytes)
    assert 50_000 <= threads_bytes < 55_000


class OldKernel:
    """One before Linux 5.7, on which reading what a process in exec has read and written waits for that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = ""  # "D", "fuse" or nothing
        self._read_file, self._read_bytes = proc_sampler._read, read_bytes
        monkeypatch.setattr(procfs, "_EXEC_IS_WAITED_FOR", True)
        monkeypatch.setattr(proc_sampler, "_read", self.read)
        monkeypatch.setattr(procfs, "read_bytes", self.read_bytes)

    def read(self, path: str) -> bytes:
        assert not (self.waits and path.endswith("/io")), "the watch would wait"
        content = self._read_file(path)
        return content.replace(b") S ", b") D ") if self.waits == "D" and path.endswith("/stat") else content

    def read_bytes(self, path: str, most_bytes: int) -> bytes:
        is_fuse = self.waits == "fuse" and path.endswith("/wchan")
        return b"request_wait_answer" if is_fuse else self._read_bytes(path, most_bytes)


@pytest.mark.parametrize("waits", ["D", "fuse"])
def test_a_process_that_may_be_in_exec_holds_nothing_up(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """On an old kernel the supervisor waited with it for the file system of the program; nothing is missed so."""
    kernel = OldKernel(monkeypatch)
    reader = ProcessReader(child.pid)
    before = read(reader)
    do(child, "os.write(os.open('/dev/null', os.O_WRONLY), bytes(100_000))")
    kernel.waits = waits
    now = read(reader)
    assert now.state == "D"  # one such wait after the other is progress
    assert (now.main_io_bytes, now.io_bytes) == (before.main_io_bytes, before.io_bytes)
    kernel.waits = ""
    do(child, "pass")
    now = read(reader)
    assert now.state == "S"
    assert 100_000 <= now.main_io_bytes - before.main_io_bytes < 110_000
    assert 100_000 <= now.io_bytes - before.io_bytes < 110_000


def test_what_was_done_before_a_process_could_be_read_is_no_progress(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = OldKernel(monkeypatch)
    do(child, "os.write(os.open('/dev/null', os.O_WRONLY), bytes(1_000_000))")
    kernel.waits = "D"
    reader = ProcessReader(child.pid)
    before = read(reader)
    kernel.waits = ""
    do(child, "pass")
    now = read(reader)
    assert (now.main_io_bytes, now.io_bytes) == (before.main_io_bytes, before.io_bytes)
    do(child, "os.write(3, bytes(50_000))")
    assert 50_000 <= read(reader).io_bytes - now.io_bytes < 60_000


def test_newer_kernels_are_asked_whatever_a_process_waits_for(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a slow disk is written to is progress also where each sample finds the process in state D."""
    kernel = OldKernel(monkeypatch)
    monkeypatch.setattr(procfs, "_EXEC_IS_WAITED_FOR", False)
    reader = ProcessReader(child.pid)
    read(reader)
    do(child, "pass")
    kernel.waits = "D"
    with pytest.raises(AssertionError, match="the watch would wait"):
        read(reader)


def test_a_process_that_has_not_run_is_not_read_again(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred idle data-loader workers cost next to nothing."""
    reader = ProcessReader(child.pid)
    do(child, "pass")
    before = read(reader, closely=False)
    monkeypatch.setattr(proc_sampler, "_read", lambda path: pytest.fail(f"{path} is read"))
    assert read(reader, closely=False) is before


def test_the_state_is_read_also_where_nothing_else_is(child: subprocess.Popen[bytes]) -> None:
    """A stopped process does not run, and that it is stopped is what is wanted."""
    reader = ProcessReader(child.pid)
    do(child, "pass")
    assert read(reader).state == "S"
    child.send_signal(19)
    os.waitpid(child.pid, os.WUNTRACED)
    assert read(reader).state == "T"
    child.send_signal(18)


def test_the_busiest_of_the_other_threads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is at work; the sum of many that do nothing looks the same."""
    monkeypatch.setattr(proc_sampler, "_BUSY_THREADS_SHARE", 0.0)  # on a busy machine the others may run for less
    reader = ProcessReader(os.getpid())
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            pass

    threads = [threading.Thread(target=spin), threading.Thread(target=stop.wait)]
    for thread in threads:
        thread.start()
    schedstat = Path(f"/proc/self/task/{threads[0].native_id}/schedstat")

    def look() -> tuple[int, int, int]:
        """How long the busiest ran, between two looks at how long the one that is busy has run so far."""
        before_ns = int(schedstat.read_text().split()[0])
        busy_ns = read(reader).busy_thread_ns
        return before_ns, busy_ns, int(schedstat.read_text().split()[0])

    try:
        looks = [look()]
        deadline = time.monotonic() + 30
        while looks[-1][1] < 1e6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            looks.append(look())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    # The first looks had nothing to compare with.
    assert looks[0][1] == -1
    assert -1 in [busy_ns for _, busy_ns, _ in looks[1:-1]]
    (earliest_ns, _, early_ns), (late_ns, busy_ns, latest_ns) = looks[-2:]
    assert late_ns - early_ns <= busy_ns <= latest_ns - earliest_ns


def test_a_process_that_is_gone_is_none(child: subprocess.Popen[bytes]) -> None:
    """Ended and not reaped, and reaped; both happen between any two lines of code."""
    reader, family = ProcessReader(child.pid), FamilyReader(child.pid)
    assert reader.read(closely=True) is not None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert reader.read(closely=True) is None
    child.wait()
    assert reader.read(closely=False) is None
    family.walk(0.0, 0, 1.0)
    assert family.read(read_descendants=True) is None


def test_a_kernel_without_scheduling_statistics_counts_in_ticks(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds zeros there, or is missing."""
    read_file = proc_sampler._read
    monkeypatch.setattr(proc_sampler, "_read", lambda path: b"0 0 0\n" if "schedstat" in path else read_file(path))
    reader = ProcessReader(child.pid)
    before = read(reader)
    do(child, "exec('until = time.thread_time() + 0.05\\nwhile time.thread_time() < until: pass')")
    now = read(reader)
    assert 3e7 <= now.main_run_ns - before.main_run_ns < 1e9
    assert now.main_wakes > before.main_wakes


def test_all_descendants_are_found_and_followed(child: subprocess.Popen[bytes]) -> None:
    """Those of threads and those of children; the forked ones run the rank's own program."""
    do(child, "read_end, write_end = os.pipe(); worker = os.fork(); worker or (os.read(read_end, 1), os._exit(0))")
    do(child, "import subprocess, threading; started = []")
    do(
        child,
        "start = lambda: started.append(subprocess.Popen(['sh', '-c', 'sleep 1000; true'], start_new_session=True))",
    )
    do(child, "thread = threading.Thread(target=start); thread.start(); thread.join()")
    family = FamilyReader(child.pid)
    deadline = time.monotonic() + 30
    found: dict[str, bool] = {}
    while set(found) != {"sh", "sleep", Path(f"/proc/{child.pid}/comm").read_text().strip()}:
        assert time.monotonic() < deadline, found
        family.walk(time.monotonic(), newest_pid(), 0.0)
        both = family.read(read_descendants=True)
        assert both is not None
        principal, others = both
        assert principal.pid == child.pid
        assert others is not None
        found = {other.comm: other.forked for other in others}
    assert found.pop("sh") is found.pop("sleep") is False
    assert list(found.values()) == [True]
    assert not family.is_wrapper
    do(child, "os.killpg(started[0].pid, 9); started[0].wait(); os.write(write_end, b'x'); os.waitpid(worker, 0)")
    while (both := family.read(read_descendants=True)) is None or both[1]:
        assert time.monotonic() < deadline, both


def test_who_has_nobody_new_is_not_walked(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """The walk costs a file per thread; where no number was given to anybody, nobody was born."""
    walks: list[int] = []

    def children_of(pid: int) -> list[int]:
        walks.append(pid)
        return []

    monkeypatch.setattr(proc_sampler, "children_of", children_of)
    family = FamilyReader(child.pid)
    for at, newest in ((0.0, 7), (1.0, 7), (2.0, 8), (3.0, 8), (50.0, 8), (51.0, 0)):
        family.walk(at, newest, 40.0)
    assert len(walks) == 4


def test_the_newest_number_is_told() -> None:
    before = newest_pid()
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert before > 0
    assert newest_pid() != before


def test_the_python_below_a_shell_does_the_ranks_work() -> None:
    """Its main thread and its sequence numbers are what is wanted, not the shell's."""
    with subprocess.Popen(
        ["sh", "-c", f"{sys.executable} -S -c 'print(flush=True); input()'; exit"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as shell:
        assert shell.stdout is not None
        shell.stdout.readline()
        family = FamilyReader(shell.pid)
        family.walk(0.0, 0, 1.0)
        both = family.read(read_descendants=True)
        assert both is not None
        principal, others = both
        assert others is not None
        assert principal.pid != shell.pid
        assert [other.pid for other in others] == [shell.pid]
        assert not family.is_wrapper
        shell.communicate(b"\n")
        assert family.read(read_descendants=True) is None


# ---------------------------------------------------------------------------------------------------- sequence numbers


def test_the_numbers_are_read_from_the_end_of_an_answer() -> None:
    """Recorded from torch 2.13 with gloo; what stands before may be cut off anywhere."""
    text = (
        b'us":9}],"nccl_comm_state":{},"pg_config":{"":{"desc":"","name":"","ranks":"[0, 1]"}},"pg_status":{"0":'
        b'{"last_completed_collective":"2500","last_enqueued_collective":"2501","last_started_collective":"-1"}},'
        b'"version":"2.10"}'
    )
    assert numbers_from(text) == {"0": (2501, 2500)}
    assert numbers_from(b'"pg_status":{}}') == {}


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b'"pg_status":',
        b'"pg_status":[1]',
        b'"pg_status":{"0":{}}',
        b'"pg_status":{"0":{"last_enqueued_collective":[],"last_completed_collective":"x"}}',
        b'"pg_status":{"0":{"last_enqueued_collective":1e999,"last_completed_collective":"1"}}',
        b'"pg_status":' + b"[" * 100_000,
        b'"pg_status":{"0":{"last_enqueued_collective":"' + b"9" * 5000 + b'","last_completed_collective":"1"}}',
    ],
)
def test_what_holds_no_numbers_is_none(text: bytes) -> None:
    """It comes from the rank, and may be anything."""
    assert numbers_from(text) in (None, {"0": (-1, 1)})
