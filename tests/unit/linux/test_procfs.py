"""What /proc tells: about this process, about children with odd names, and about environments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.captures.waiting import list_fds, read_memory
from saferun.linux import procfs, small_files
from saferun.linux.procfs import (
    belongs_to_run,
    children_of,
    descendants_of,
    living_processes,
    read_stat,
)
from saferun.linux.shm_segments import segments_of
from saferun.linux.syscalls import read_syscall
from saferun.watchdog.proc_sampler import ProcessReader
from saferun.watchdog.wait_sampler import WaitSampler, uses_gpu


@contextmanager
def child(*, environ: dict[str, str] | None = None, name: str | None = None, stopped: bool = False) -> Iterator[int]:
    """A child that waits to be killed; it has said through a pipe that it is what it should be."""
    read_end, write_end = os.pipe()
    never_read, never_write = os.pipe()  # what the child waits for
    pid = os.fork()
    if pid == 0:
        try:
            if name is not None:
                Path("/proc/self/comm").write_text(name)
            if environ is not None:
                os.dup2(never_read, 0)
                os.dup2(write_end, 1)
                os.execve("/bin/sh", ["sh", "-c", "echo; read x"], environ)
            os.write(write_end, b".")
            if stopped:
                os.kill(os.getpid(), signal.SIGSTOP)
            signal.pause()
        finally:
            os._exit(1)
    os.close(write_end)
    os.close(never_read)
    try:
        assert os.read(read_end, 1)
        if stopped:
            os.waitpid(pid, os.WUNTRACED)
        yield pid
    finally:
        os.close(read_end)
        os.close(never_write)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


@pytest.mark.parametrize("name", ["plain", "with space", "a) R 1 (b", ")))", "(", "x\ny"])
def test_names_do_not_confuse_the_fields(name: str) -> None:
    """A process may call itself ``) R 1 (``: the fields begin behind the last parenthesis."""
    with child(name=name) as pid:
        stat = read_stat(pid)
        assert stat is not None
        assert stat.ppid == os.getpid()
        assert stat.state in "SR"
        assert stat.start_ticks > 0


def test_a_stopped_process_shows_as_such() -> None:
    """T: somebody pressed Ctrl-Z, or a debugger holds it."""
    with child(stopped=True) as pid:
        stat = read_stat(pid)
        assert stat is not None
        assert stat.state in "Tt"


def test_a_process_that_is_gone_is_no_error() -> None:
    """They come and go meanwhile."""
    with child() as pid:
        pass
    assert read_stat(pid) is None
    assert children_of(pid) == []
    assert descendants_of(pid) == []


def test_a_zombie_is_no_descendant() -> None:
    """It needs no signal."""
    with child() as pid:
        assert pid in descendants_of(os.getpid())
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pid not in descendants_of(os.getpid())
        assert pid in children_of(os.getpid())


def test_the_children_of_one_that_is_ending_are_descendants() -> None:
    """Its main thread has ended, another has not: the kernel shows it as a zombie, which still has its children."""
    source = """
import ctypes, os, platform, signal, sys, threading
child = os.fork()
if child == 0:
    signal.pause()
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(child, flush=True)
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
"""
    with subprocess.Popen([sys.executable, "-S", "-c", source], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        grandchild = int(process.stdout.readline())
        try:
            while (stat := read_stat(process.pid)) is not None and stat.state != "Z":
                time.sleep(0.01)
            found = descendants_of(os.getpid())
            assert grandchild in found
            assert process.pid not in found
        finally:
            os.kill(grandchild, signal.SIGKILL)
            process.kill()


def test_descendants_without_some_and_what_is_below_them() -> None:
    """Children from before the launch, and theirs, are nobody's leftovers."""
    tree = {1: [2, 3], 2: [4, 5], 3: [6], 5: [7]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "children_of", lambda pid: tree.get(pid, []))
        patch.setattr(procfs, "read_stat", lambda pid: procfs.Stat("Z" if pid == 6 else "S", 0, 0.0, 1, 0))
        assert sorted(descendants_of(1)) == [2, 3, 4, 5, 7]
        assert sorted(descendants_of(1, frozenset({5}))) == [2, 3, 4]
        assert sorted(descendants_of(1, frozenset({2}))) == [3]


def test_a_tree_that_changes_meanwhile_is_walked_once() -> None:
    """A pid that is seen twice, or that is its own descendant for a moment, ends the walk all the same."""
    tree = {1: [2, 2], 2: [1, 3], 3: [2]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(procfs, "children_of", lambda pid: tree.get(pid, []))
        patch.setattr(procfs, "read_stat", lambda _: procfs.Stat("S", 0, 0.0, 1, 0))
        assert sorted(set(descendants_of(1))) in ([1, 2, 3], [2, 3])


def test_kernels_without_a_list_of_children_are_searched() -> None:
    """CONFIG_PROC_CHILDREN is not everywhere."""
    with child() as pid:
        assert pid in procfs._children_by_scan(os.getpid())
        assert sorted(procfs._children_by_scan(os.getpid())) == sorted(children_of(os.getpid()))


def test_processes_of_a_run_are_found_by_their_environment() -> None:
    """Also where they have changed parent and session."""
    run_id = os.urandom(8).hex()
    with (
        child(environ={"SAFERUN_RUN_ID": run_id}) as own,
        child(environ={"SAFERUN_RUN_ID": "other", "SAFERUN_OUTER_RUNS": f"a:{run_id}:b"}) as inner,
        child(environ={"SAFERUN_RUN_ID": "other", "NOTE": run_id}) as stranger,
        child(environ={"SAFERUN_RUN_ID": f"{run_id}0"}) as longer,
    ):
        found = [pid for pid in living_processes() if belongs_to_run(pid, run_id)]
        assert {own, inner} <= set(found)
        assert not {stranger, longer, os.getpid()} & set(found)


@pytest.mark.parametrize(
    ("environ", "belongs"),
    [
        (b"SAFERUN_RUN_ID=abc\0", True),
        (b"SAFERUN_RUN_ID=abc", True),
        (b"A=1\0SAFERUN_RUN_ID=abc\0B=2\0", True),
        (b"SAFERUN_OUTER_RUNS=abc\0", True),
        (b"SAFERUN_OUTER_RUNS=x:abc\0SAFERUN_RUN_ID=y\0", True),
        (b"SAFERUN_RUN_ID=abcd\0", False),
        (b"SAFERUN_RUN_ID=xabc\0", False),
        (b"XSAFERUN_RUN_ID=abc\0", False),
        (b"SAFERUN_OUTER_RUNS=xabc:abcx\0", False),
        (b"NOTE=SAFERUN_RUN_ID=abc\0", False),
        (b"SAFERUN_RUN_ID=ABC\0", False),
        (b"", False),
    ],
)
def test_an_environment_belongs_to_a_run_or_not(environ: bytes, *, belongs: bool) -> None:
    """A wrong yes kills a stranger; a wrong no leaves an orphan with a GPU."""
    assert procfs._belongs(environ, b"abc") == belongs


@given(st.binary(max_size=60))
def test_any_environment_can_be_looked_at(environ: bytes) -> None:
    """Programs write what they like over theirs."""
    assert procfs._belongs(environ, b"0123456789abcdef") is False


def test_in_the_proc_of_another_pid_namespace_no_process_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """``unshare --pid`` without ``--mount-proc``: what has its number there is another process."""
    monkeypatch.setattr(small_files, "_has_own_processes", False)
    pid = os.getpid()
    assert (read_stat(pid), children_of(pid), descendants_of(1), living_processes()) == (None, [], [], [])
    assert (procfs.thread_ids(pid), procfs.read_cmdline(pid), procfs.read_name(pid)) == ([], [], "")
    assert (belongs_to_run(pid, "x"), procfs.waits_uninterruptibly(pid)) == (False, False)
    assert (read_syscall(pid), read_memory(pid, id(pid), 8), list_fds(pid), uses_gpu(pid)) == (None, b"", [], False)
    assert (ProcessReader(pid).read(closely=True), ProcessReader(pid).is_python) == (None, False)
    assert (WaitSampler().waits(pid), segments_of([pid])) == (None, frozenset())
    assert small_files.read_bytes("/proc/self/stat")
    assert os.path.exists(f"{small_files.own_directory()}/fd")


def test_where_proc_is_not_mounted_it_has_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_files, "_has_own_processes", None)
    monkeypatch.setattr(small_files, "read_link", lambda _path: "")
    assert not small_files.has_own_processes()
    assert small_files.own_directory() == f"/proc/{os.getpid()}"
