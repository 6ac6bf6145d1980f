"""Processes that are forked before it is known what they become: no rank can tell, and none is needed."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from errno import EAGAIN, ENOENT
from pathlib import Path
from typing import Any

import pytest

from saferun.linux.children import Child, begin_spawn, spawn_error
from saferun.linux.core_limits import RankPreparation
from saferun.linux.preforked import PreforkedProcesses
from tests.process.launching import DEADLINE_S, read_stat, running, until

# What a program has from whoever started it.
STATE = """
import ctypes, json, os, resource, sys

dies_by = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(dies_by))  # PR_GET_PDEATHSIG
fds = os.listdir("/proc/self/fd")
print(json.dumps({
    "argv": sys.argv[1:],
    "environ": dict(os.environ),
    "signals": [line for line in open("/proc/self/status") if line.startswith(("SigBlk", "SigIgn", "SigCgt"))],
    "fds": sorted(fd for fd in fds if os.path.exists(f"/proc/self/fd/{fd}")),
    "standard": [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 2)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
    "files": resource.getrlimit(resource.RLIMIT_NOFILE),
    "cwd": os.getcwd(),
    "dies_by": dies_by.value,
}))
"""
ARGV = [sys.executable, "-I", "-c", STATE, "word", "trän\udcff"]
ENVIRON = {"PATH": "/usr/bin:/bin", "NAME": "väl\udcff ue", "EMPTY": ""}
NOTHING_DONE = RankPreparation(raise_core_limit=False, drop_shared_memory=False, tracer_pid=0)


@pytest.fixture
def preforked() -> Iterator[PreforkedProcesses]:
    preforked = PreforkedProcesses(2)
    assert len(preforked.pids) == 2
    yield preforked
    pids = preforked.pids
    preforked.close()
    assert not [pid for pid in pids if read_stat(pid) is not None]


def said(child: Child, report: int, output: int) -> dict[str, Any]:
    """What the program has printed."""
    os.set_blocking(report, True)
    assert spawn_error(report) is None
    with os.fdopen(output) as file:
        text = file.read()
    assert os.waitpid(child.pid, 0)[1] == 0
    if child.pidfd >= 0:
        os.close(child.pidfd)
    state: dict[str, Any] = json.loads(text)
    return state


def by_a_preforked_one(
    preforked: PreforkedProcesses, argv: list[str], environ: dict[str, str], stdout: int = 1
) -> tuple[Child, int] | None:
    """What a rank is started by, where there is a preforked process."""
    return preforked.begin_spawn(argv, environ, stdout=stdout, stderr=2, preparation=NOTHING_DONE, files=(512, 1024))


def test_a_program_cannot_tell_that_its_process_was_preforked(preforked: PreforkedProcesses) -> None:
    """Arguments, environment, signals, descriptors, session, limits: all as begin_spawn has it."""
    states = []
    read_end, write_end = os.pipe()
    begun = by_a_preforked_one(preforked, ARGV, ENVIRON, write_end)
    os.close(write_end)
    assert begun is not None
    states.append(said(*begun, read_end))
    read_end, write_end = os.pipe()
    child, report = begin_spawn(
        ARGV,
        ENVIRON,
        stdout=write_end,
        prepare=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024)),
    )
    os.close(write_end)
    states.append(said(child, report, read_end))
    assert states[0] == states[1]
    assert states[0]["argv"] == ["word", "trän\udcff"]
    assert states[0]["environ"].items() >= {"NAME": "väl\udcff ue", "EMPTY": ""}.items()
    assert states[0]["leads"] == [True, True]
    assert states[0]["dies_by"] == signal.SIGKILL
    assert states[0]["fds"] == ["0", "1", "2"]
    assert states[0]["files"] == [512, 1024]


def test_a_program_that_is_missing_says_so(preforked: PreforkedProcesses) -> None:
    begun = by_a_preforked_one(preforked, ["/nonexistent/program"], {})
    assert begun is not None
    child, report = begun
    os.set_blocking(report, True)
    error = spawn_error(report)
    assert error is not None
    assert (error.errno, error.where) == (ENOENT, "exec")
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 127
    if child.pidfd >= 0:
        os.close(child.pidfd)


def test_who_finds_no_preforked_process_forks(preforked: PreforkedProcesses) -> None:
    """One that somebody has ended, an environment that is longer than a message, none left, none from the beginning."""
    dead, living = preforked.pids
    os.kill(dead, signal.SIGKILL)
    until(lambda: (stat := read_stat(dead)) is None or stat.state == "Z", "the end of a preforked process")
    assert by_a_preforked_one(preforked, ["/bin/true"], {"LONG": "x" * 100_000}) is None
    assert by_a_preforked_one(preforked, ["/bin/true"], {}) is None
    assert not os.path.exists(f"/proc/{dead}")  # it has been reaped
    begun = by_a_preforked_one(preforked, ["/bin/true"], {})
    assert begun is not None
    child, report = begun
    assert child.pid == living
    os.close(report)
    assert os.waitpid(child.pid, 0)[1] == 0
    if child.pidfd >= 0:
        os.close(child.pidfd)
    assert by_a_preforked_one(preforked, ["/bin/true"], {}) is None
    assert by_a_preforked_one(PreforkedProcesses(0), ["/bin/true"], {}) is None


def test_a_preforked_process_that_has_been_reaped_is_sent_no_signal(
    preforked: PreforkedProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop reaps whatever child has ended; from then on the number may be a stranger's."""
    dead, _ = preforked.pids
    os.kill(dead, signal.SIGKILL)
    os.waitpid(dead, 0)
    signalled: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, _signum: signalled.append(pid))
        assert by_a_preforked_one(preforked, ["/bin/true"], {}) is None
    assert signalled == []


def test_those_that_are_left_end_by_themselves(preforked: PreforkedProcesses) -> None:
    pids = preforked.pids
    preforked.release()
    assert preforked.pids == []
    for pid in pids:
        assert os.waitpid(pid, 0)[1] == 0


def test_fewer_processes_than_wanted_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are forked as ever; whether that works is told then."""
    forks = iter([True, False])
    fork = os.fork

    def refuse() -> int:
        if next(forks):
            return fork()
        raise OSError(EAGAIN, os.strerror(EAGAIN))

    monkeypatch.setattr(os, "fork", refuse)
    preforked = PreforkedProcesses(3)
    assert len(preforked.pids) == 1
    preforked.close()


def test_a_preforked_process_does_not_outlive_its_parent() -> None:
    """Saferun may be killed before its ranks are started."""
    read_end, write_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.write(write_end, json.dumps(PreforkedProcesses(2).pids).encode())
        signal.pause()
    pids = json.loads(os.read(read_end, 1000))
    os.close(read_end)
    os.close(write_end)
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    until(lambda: not [pid for pid in pids if read_stat(pid) is not None], "the end of the preforked processes")


RANKS = """
from rank import *
tell("ready")
await_release("end")
"""


@pytest.mark.parametrize("change", [{}, {"LONG_VARIABLE": "x" * 100_000}], ids=["preforked", "forks"])
def test_ranks_are_started_either_way_and_none_is_left(tmp_path: Path, change: dict[str, str]) -> None:
    """An environment of more than a message is for none of them: the launch is the same, and they are gone."""
    with running(tmp_path, RANKS, nproc=2, store=False, environ=change) as job:
        ranks = {said.pid for said in job.hear("ready", 2)}
        assert len(ranks) == 2
        own = f"/proc/{job.process.pid}/task/{job.process.pid}/children"

        def children_like_saferun() -> list[str]:
            names = []
            for pid in Path(own).read_text().split():
                try:
                    names.append(Path(f"/proc/{pid}/comm").read_text().strip())
                except OSError:
                    continue
            return [name for name in names if not name.startswith("sr-")]

        until(lambda: len(children_like_saferun()) <= 3, "the end of the preforked processes", timeout_s=DEADLINE_S)
        job.release("end")
        assert job.process.wait(DEADLINE_S) == 0
