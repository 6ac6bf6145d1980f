"""What a tool leaves stopped when it is killed goes on, also where it stops only afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from saferun.captures import left_stopped, native_stacks, stacks
from saferun.captures.all_captures import CAPTURES
from saferun.captures.left_stopped import resumed_if_killed
from saferun.captures.process_state import read_thread_states
from saferun.evidence.job_evidence import StackDump
from saferun.linux.procfs import read_stat
from tests.process.capturing import python
from tests.process.launching import state_of, until
from tests.process.test_captures_that_fail import do

# A thread is in uninterruptible sleep, in a vfork, until its child has opened a FIFO; then there is a file.
ASLEEP = """
libc = ctypes.CDLL(None)
def spawn():
    actions = ctypes.create_string_buffer(256)
    libc.posix_spawn_file_actions_init(actions)
    libc.posix_spawn_file_actions_addopen(actions, 0, sys.argv[1].encode(), os.O_RDONLY, 0)
    argv = (ctypes.c_char_p * 2)(b"true", None)
    libc.posix_spawn(ctypes.byref(ctypes.c_int()), b"/bin/true", actions, None, argv, argv)
    open(sys.argv[1] + ".over", "w").close()
def step():
    for _ in range(int(sys.argv[2])):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    thread = threading.Thread(target=spawn)
    thread.start()
    while not any(") D " in open(f"/proc/self/task/{tid}/stat").read() for tid in os.listdir("/proc/self/task")):
        time.sleep(0.005)
    print("ready", flush=True)
    thread.join()
    time.sleep(1000)
step()
"""
# As pystack does, it stops one thread after the other, and waits for the one that cannot be stopped.
ATTACH = """
import ctypes, os, sys, time
PTRACE_ATTACH, PTRACE_CONT, WALL, SIGSTOP = 16, 7, 0x40000000, 19
ptrace = ctypes.CDLL(None).ptrace
pid = int(sys.argv[1])
for tid in map(int, os.listdir(f"/proc/{pid}/task")):
    assert ptrace(PTRACE_ATTACH, tid, 0, 0) == 0
    if ") D " in open(f"/proc/{pid}/task/{tid}/stat").read():
        break
    os.waitpid(tid, WALL)
if "stop" in sys.argv:
    assert ptrace(PTRACE_CONT, pid, 0, SIGSTOP) == 0
    os.waitpid(pid, WALL)
print("attached", flush=True)
time.sleep(1000)
"""


@contextmanager
def asleep(folder: Path, threads: int = 0) -> Iterator[tuple[int, Path]]:
    """A process with a thread in uninterruptible sleep, and the FIFO that wakes it."""
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    with python(ASLEEP, str(fifo), str(threads)) as pid:
        yield pid, fifo


@contextmanager
def attached(pid: int, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A tool that has stopped a process."""
    with subprocess.Popen([sys.executable, "-c", ATTACH, str(pid), *arguments], stdout=subprocess.PIPE) as tool:
        try:
            assert tool.stdout is not None
            assert tool.stdout.readline() == b"attached\n"
            yield tool
        finally:
            tool.kill()


def wake(fifo: Path) -> None:
    os.close(os.open(fifo, os.O_WRONLY))


def test_a_thread_that_could_not_be_stopped_does_not_stop_the_process_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the tool's SIGSTOP when it wakes, an hour after the tool was killed: the rank would stop for good."""
    monkeypatch.setattr(left_stopped, "_QUIET_CHECKS", 0)
    with asleep(tmp_path) as (pid, fifo):
        with resumed_if_killed([pid]) as resumer, attached(pid) as tool:
            tool.kill()
            tool.wait()
            resumer.tool_failed(pid)
        wake(fifo)
        until((tmp_path / "fifo.over").exists, "the thread goes on")
        until(lambda: set(read_thread_states(pid).values()) <= {"S"}, "all go on")


def test_a_process_that_was_stopped_before_stays_so(tmp_path: Path) -> None:
    """Setting it going is not ours, also where a thread is in uninterruptible sleep and stops later."""
    with asleep(tmp_path) as (pid, fifo):
        os.kill(pid, signal.SIGSTOP)
        until(lambda: state_of(pid) == "T", "stopped")
        with resumed_if_killed([pid]) as resumer:
            resumer.tool_failed(pid)
        assert not resumer.is_needed
        wake(fifo)
        until(lambda: set(read_thread_states(pid).values()) == {"T"}, "all are stopped")
        assert not (tmp_path / "fifo.over").exists()


def test_a_tool_that_is_killed_late_is_watched_on_and_holds_up_nothing(tmp_path: Path) -> None:
    """In uninterruptible sleep itself it holds the process until the kernel has ended it."""
    with asleep(tmp_path) as (pid, _):
        with attached(pid, "stop") as tool:
            with resumed_if_killed([pid]) as resumer:
                resumer.tool_failed(pid)
            assert state_of(pid) == "t", "the capture is over, the tool is not"
            tool.kill()
        until(lambda: state_of(pid) == "S", "the process goes on", timeout_s=20.0)


def test_the_process_that_watches_ends_with_a_capture_in_which_all_went_well() -> None:
    """No process is left of a capture."""
    before = children()
    with resumed_if_killed([os.getpid()]):
        assert len(children() - before) == 1
    assert children() == before


def children() -> set[int]:
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid for pid in pids if (stat := read_stat(pid)) is not None and stat.ppid == os.getpid()}


@pytest.mark.parametrize("is_asleep", [False, True])
def test_pystack_stops_a_process_only_if_nothing_else_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_asleep: bool
) -> None:
    """Each of its threads would get a SIGSTOP. One in uninterruptible sleep may be any of thousands."""
    log = tmp_path / "log"
    fake = tmp_path / "fake.py"
    fake.write_text(f"import sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[2:]) + '\\n')\nsys.exit(1)\n")
    monkeypatch.setattr(stacks, "find_tool", lambda _name: "")
    monkeypatch.setattr(stacks, "has_module", lambda _name: True)
    monkeypatch.setattr(stacks, "_PYSTACK_LIVE", str(fake))
    with asleep(tmp_path, threads=300) as (pid, fifo):
        if not is_asleep:
            wake(fifo)
            until(lambda: set(read_thread_states(pid).values()) <= {"S"}, "all sleep")
        do(CAPTURES[0], pid, 20.0)
    assert log.read_text().splitlines() == ["--no-block", *([] if is_asleep else [""])]


def test_gdb_is_not_started_for_a_process_that_it_would_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait a minute, be killed, and leave the process to be stopped later."""
    monkeypatch.setattr(native_stacks, "find_gdb", lambda: "/bin/false")
    with asleep(tmp_path) as (pid, _):
        dump = StackDump(0, pid, True, "tool", "", (), "tool is not a Python process")
        (answer,) = native_stacks.with_native_stacks([dump], {})
    assert answer.failure == ("tool is not a Python process, and gdb cannot stop it while a thread of it is in state D")


def test_the_states_of_all_threads_count(tmp_path: Path) -> None:
    """The one that cannot be stopped may be the last of many."""
    with asleep(tmp_path, threads=300) as (pid, _):
        states = read_thread_states(pid)
    assert len(states) == 302
    assert next(iter(states)) == pid
    assert list(states.values()).count("D") == 1
