"""Every platform that torch runs on: old kernels, Pythons of conda and uv, containers that refuse or lack things.

Each job here runs on a machine that lacks something, and ends as it does elsewhere. ``tests/without.py`` says what is
taken away; ``make test-all`` runs all of tests/process that way.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.process.launching import DEADLINE_S, END_AS_TOLD, STAY, Job, in_mounts, read_stat, running, until
from tests.without import lacks_pidfds, without

# An old kernel, and a Python that was built against old headers on a new one.
LACKING = ("kernel", "python")
FAIL_ONCE = """
from rank import *
tell("ready")
await_release("end")
sys.exit(3 if ATTEMPT == 0 and RANK == 1 else 0)
"""
HANG = """
from rank import *
tell("ready")
def wait_for_nothing():
    stay()
wait_for_nothing()
"""
HANG_OPTIONS = ("--env-profile", "minimal", "--hang-timeout", "1", "--on-hang", "stop", "--shutdown-timeout", "5")


def report(job: Job) -> str:
    """The report as text."""
    return json.dumps(json.loads((job.run_dir / "report.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("lacking", slow_but(LACKING, "kernel"))
def test_a_crash_is_told_with_the_survivors_stacks(tmp_path: Path, lacking: str) -> None:
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["stay", "7"], before=without(lacking), store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1
        assert "exit code 7" in job.err
        assert "cannot" not in job.err, job.err
        assert "train.py" in report(job), "the stack of the rank that was still there"


@pytest.mark.parametrize("lacking", slow_but(LACKING, "kernel"))
def test_a_hang_is_told_with_stacks(tmp_path: Path, lacking: str) -> None:
    with running(tmp_path, HANG, *HANG_OPTIONS, nproc=2, before=without(lacking), store=False) as job:
        job.hear("ready", 2)
        assert job.wait() != 0
        assert "wait_for_nothing" in job.err, job.err


def test_a_hang_is_reported_where_no_memory_can_be_executed(tmp_path: Path) -> None:
    """A container that refuses memfd_create; Docker and Kubernetes mount /dev/shm with noexec."""
    before = [*in_mounts(("/dev/shm", "noexec,size=64m")), *without("kernel")]
    with running(tmp_path, HANG, *HANG_OPTIONS, nproc=2, before=before, store=False) as job:
        job.hear("ready", 2)
        assert job.wait() != 0
        assert "wait_for_nothing" in job.err, job.err
        assert "cannot" not in job.err, job.err


def test_a_limit_on_the_size_of_files_costs_nothing_but_files(tmp_path: Path) -> None:
    """``ulimit -f``: it holds for files in memory too, and ends a program that does not ignore its signal."""
    limit = ["sh", "-c", 'ulimit -f 96 && exec "$@"', "sh"]
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["stay", "7"], before=limit, store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("ExaminerReady"), "the examiner has all that it needs")
        job.release("end")
        assert job.wait() == 1
        assert "exit code 7" in job.err
        assert "the examiner has ended" not in job.err
        assert "cannot" not in job.err, job.err
        assert "train.py" in report(job), "the stack of the rank that was still there"


@pytest.mark.slow
def test_eight_ranks_are_restarted(tmp_path: Path) -> None:
    """A loop over a million descriptors at each start of a process would end it: see tests/without.py."""
    options = ("--max-restarts", "1")
    with running(tmp_path, FAIL_ONCE, *options, nproc=8, before=without("kernel"), store=False) as job:
        job.hear("ready", 8)
        job.release("end")
        job.hear("ready", 8)
        assert job.wait() == 0
        assert "restart" in job.err


@pytest.mark.parametrize("lacking", ["kernel", "kernel,prctl"])
def test_nothing_is_left_of_a_run_whose_supervisor_is_killed(tmp_path: Path, lacking: str) -> None:
    """With prctl refused no rank dies with its parent: the reaper ends them."""
    program = STAY.replace('tell("ready")', 'if os.fork() == 0:\n    os.setsid()\ntell("ready")')
    with running(tmp_path, program, nproc=2, before=without(lacking), store=False, sweeps=False) as job:
        job.hear("ready", 4)
        job.send(signal.SIGKILL)
        job.wait()
        job.assert_nothing_left(DEADLINE_S)


@pytest.mark.slow
def test_a_stop_ends_a_stubborn_rank(tmp_path: Path) -> None:
    options, ranks = ("--shutdown-timeout", "1"), ("stubborn", "stay")
    with running(
        tmp_path, END_AS_TOLD, *options, nproc=2, arguments=ranks, before=without("kernel"), store=False
    ) as job:
        job.hear("ready", 2)
        job.send(signal.SIGTERM)
        assert job.wait() == 1


@pytest.mark.slow
def test_ends_are_seen_although_sigchld_was_blocked(tmp_path: Path) -> None:
    """Some daemons start their children so, and without pidfds nothing else tells of an end."""
    blocked = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})"
    before = [*without("kernel"), sys.executable, "-c", f"{blocked}; os.execv(sys.argv[1], sys.argv[1:])"]
    with running(tmp_path, END_AS_TOLD, nproc=2, arguments=["stay", "3"], before=before, store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 1


def test_the_end_of_what_started_saferun_is_noticed(tmp_path: Path) -> None:
    """``--stop-with-parent``, which is on under schedulers: where there are no pidfds, /proc is asked each second."""
    starter = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    before = [*starter, *without("kernel")]
    with running(tmp_path, STAY, "--stop-with-parent", "on", nproc=2, before=before, store=False, sweeps=False) as job:
        ranks = job.hear("ready", 2)
        job.send(signal.SIGKILL)
        until(lambda: not any(read_stat(rank.pid) for rank in ranks), "the ranks are ended")
        until(lambda: "saferun: parent process " in job.err, "why is told")
        job.assert_nothing_left(DEADLINE_S)


def test_the_store_is_served_without_the_newer_calls(tmp_path: Path) -> None:
    """The coordinator is started like any other process."""
    program = """
from rank import *
import socket
store = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
with socket.create_connection(store, 60) as connection:
    tell("connected")
await_release("end")
"""
    with running(tmp_path, program, nproc=2, before=without("kernel")) as job:
        job.hear("connected", 2)
        until(job.coordinator, "the store is served")
        job.release("end")
        assert job.wait() == 0


def test_what_is_taken_away_is_gone(tmp_path: Path) -> None:
    """A filter that takes nothing away would let every test here pass."""
    program = """
from rank import *
def refuses(call):
    try:
        return call() < 0
    except (OSError, AttributeError):
        return True
import ctypes
prctl = ctypes.CDLL(None).prctl
print([refuses(lambda: os.pidfd_open(os.getpid())), refuses(lambda: os.memfd_create("x")),
       refuses(lambda: prctl(36, 1, 0, 0, 0)), hasattr(os, "pidfd_open")], flush=True)
if os.fork() == 0:
    os.closerange(3, 1 << 20)
    os._exit(0)
print(os.WTERMSIG(os.wait()[1]) == signal.SIGSYS, flush=True)
"""
    for lacking, expected in (
        ("kernel", "[True, True, False, True]"),
        ("kernel,prctl", "[True, True, True, True]"),
        ("python", "[True, True, False, False]"),
    ):
        with running(tmp_path / lacking, program, before=without(lacking), store=False) as job:
            assert job.wait() == 0
            assert expected in job.out, (lacking, job.out)
            # Where all of this runs below such a filter already, it holds for each of the three.
            assert ("True" in job.out.splitlines()[-1]) == (lacks_pidfds() or lacking.startswith("kernel")), job.out


def test_a_sandbox_that_refuses_to_tell_limits_costs_nothing(tmp_path: Path) -> None:
    """Torchrun asks for none; saferun had ended with a traceback before any rank was started."""
    program = "from rank import *\nawait_release('end')\nsys.exit(3 if RANK else 0)\n"
    with running(tmp_path, program, nproc=2, before=without("limits")) as job:
        job.release("end")
        assert job.wait() == 1
        assert "rank 1 (" in job.err
        assert "Traceback" not in job.err


# The child traces its parent, as a debugger does that is left at its prompt.
TRACED = """
from rank import *
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_SEIZE, PR_SET_PTRACER, ANY = 0x4206, 0x59616D61, -1
libc.prctl(PR_SET_PTRACER, ctypes.c_ulong(ANY), 0, 0, 0)
read_end, write_end = os.pipe()
if os.fork() == 0:
    os.setsid()
    assert libc.ptrace(PTRACE_SEIZE, os.getppid(), 0, 0) == 0, ctypes.get_errno()
    os.write(write_end, b"x")
    tell("traces")
    await_release("let go")
    os._exit(0)
os.read(read_end, 1)
"""


def test_a_rank_that_a_debugger_holds_beyond_its_end_is_named(tmp_path: Path) -> None:
    """Its exit code is known once the debugger lets go of it, under torchrun as well."""
    with running(tmp_path, TRACED, store=False) as job:
        (tracer,) = job.hear("traces")
        if not lacks_pidfds():
            until(lambda: f"has ended, but process {tracer.pid} traces it" in job.err, "it is said")
        job.release("let go")
        assert job.wait() == 0
