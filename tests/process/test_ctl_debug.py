"""``saferunctl debug``: gdb on one rank of a running job, and a job that goes on however that ends."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import termios
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from saferun.captures.ptrace import tracer_of
from tests import debian_python
from tests.matrix import DIRECTORY
from tests.process.control_clients import connected, control_socket, saferunctl
from tests.process.launching import kill, parent_of, running, state_of, two_lines, until
from tests.process.test_ctl_attach import Shell, attached

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.process.launching import Job

pytestmark = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
QUIET = ("--preflight", "off")
# The ranks sleep: a hang for certain, unless a debugger holds one of them.
HANGS = ("--hang-timeout", "2", "--on-hang", "stop", "--external-wait-timeout", "0")
WAITS = """
from rank import *
tell("ready")
await_release("end")
tell("went on")
"""
LOOPS = """
from rank import *
secret = 41
tell("ready")
while not os.path.exists(FOLDER + "/release.end"):
    time.sleep(0.05)
tell("went on")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


@contextlib.contextmanager
def debugged(job: Job, rank: int) -> Iterator[tuple[Shell, int]]:
    """A rank in gdb, from another shell: at its prompt."""
    (pid,) = (said.pid for said in job.hear("ready", 2) if said.rank == rank)
    control_socket(job)
    with attached(job, "latest", "--rank", str(rank), verb="debug") as shell:
        until(lambda: shell.text.rstrip().endswith("(gdb)"), "gdb asks")
        until(lambda: state_of(pid) == "t", "the rank is stopped")
        yield shell, pid


def goes_on(job: Job, pid: int) -> None:
    """The rank is in no debugger, and works on to its end."""
    until(lambda: not tracer_of(pid) and state_of(pid) in {"R", "S"}, "the rank goes on")
    until(lambda: "the debugger of rank 1 has detached" in job.err, "it is said")
    job.release("end")
    job.hear("went on", 2)
    assert job.wait() == 0


def test_a_rank_is_debugged_without_its_help_and_goes_on(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job:
        with debugged(job, 1) as (shell, pid):
            assert f"(pid {pid}) stops in gdb" in " ".join(shell.text.split())
            until(lambda: "rank 1 is in a debugger" in job.err, "the console says so")
            shell.type(b"py-spy\r")
            until(lambda: "await_release" in shell.text, "the calls of Python")
            shell.type(b"\x1a")
            shell.type(b"p 41 + 1\r")
            until(lambda: "$1 = 42" in shell.text, "gdb answers, also after Ctrl-Z")
            shell.type(b"continue\r")
            until(lambda: state_of(pid) == "S", "the rank runs in gdb")
            shell.type(b"\x03")
            until(lambda: "SIGINT" in shell.text, "Ctrl-C goes to gdb")
            until(lambda: state_of(pid) == "t", "the rank is stopped again")
            shell.type(b"kill\r")
            until(lambda: "(y or n)" in shell.text, "gdb asks before it kills the rank")
            shell.type(b"n\r")
            until(lambda: "Not confirmed" in shell.text, "it does not")
            # A question would keep the rank stopped.
            shell.type(b"quit\r")
            assert shell.process.wait() == 0
            until(lambda: "rank 1 goes on" in shell.text, "it is said")
            assert termios.tcgetattr(shell.slave) == shell.before
        goes_on(job, pid)


def test_hang_detection_waits_for_the_debugger_and_goes_on_after_it(folder: Path) -> None:
    program = """
from rank import *
tell("ready")
if RANK == 0:
    await_release("sleep")
    time.sleep(14)
    tell("slept")
stay()
"""
    with running(folder, program, *QUIET, *HANGS, "--hang-timeout", "10", nproc=2, store=False) as job:
        with debugged(job, 1) as (shell, _):
            job.release("sleep")
            job.hear("slept")
            shell.type(b"continue\r")  # in which no thread is traced as stopped
            assert not job.has_happened("HangSuspected")
            kill(shell.process.pid, signal.SIGTERM)
            assert shell.process.wait() == 0
        assert job.wait() == 1
        assert job.has_happened("HangSuspected")


@pytest.mark.slow
def test_the_clock_stands_for_a_client_that_has_asked_until_it_is_gone(folder: Path) -> None:
    """Whatever its debugger does meanwhile: one of Python's own traces nothing."""
    program = """
from rank import *
tell("ready")
if RANK == 0:
    await_release("sleep")
    time.sleep(6)
    tell("slept")
stay()
"""
    with running(folder, program, *QUIET, *HANGS, nproc=2, store=False) as job:
        path = control_socket(job)
        with connected(path) as connection:
            connection.sendall(b'{"op": "debug", "rank": "1"}\n')
            assert json.loads(connection.recv(1 << 12)) == {"ok": True, "rank": 1}
            job.release("sleep")
            job.hear("slept")
            assert not job.has_happened("HangSuspected")
        assert job.wait() == 1
        assert job.has_happened("HangSuspected")


@pytest.mark.slow
@pytest.mark.parametrize("when", ["at the prompt", "as the rank is continued", "while the rank runs in gdb"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_client_that_is_ended_lets_go_of_the_rank(folder: Path, signum: int, when: str) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        if when != "at the prompt":
            shell.type(b"continue\r")
        if when == "while the rank runs in gdb":
            until(lambda: state_of(pid) == "S", "the rank runs in gdb")
            assert tracer_of(pid)
        os.kill(shell.process.pid, signum)
        shell.process.wait()
        goes_on(job, pid)


@pytest.mark.slow
def test_a_debugger_that_is_killed_lets_go_of_the_rank(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        debugger = tracer_of(pid)
        assert parent_of(debugger) == shell.process.pid
        os.kill(debugger, signal.SIGKILL)
        assert shell.process.wait() == 1
        until(lambda: "gdb was ended by SIGKILL" in shell.text, "it is said")
        assert termios.tcgetattr(shell.slave) == shell.before
        goes_on(job, pid)


@pytest.mark.slow
def test_client_and_debugger_that_are_killed_together_let_go_of_the_rank(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        for one in (shell.process.pid, tracer_of(pid)):
            os.kill(one, signal.SIGKILL)
        goes_on(job, pid)


@pytest.mark.slow
def test_a_terminal_that_is_gone_lets_go_of_the_rank(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        shell.close()
        shell.process.wait()
        goes_on(job, pid)


@pytest.mark.slow
def test_a_supervisor_that_is_killed_ends_its_ranks_as_without_a_debugger(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        job.send(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        assert shell.process.wait() == 0
        assert termios.tcgetattr(shell.slave) == shell.before
        until(lambda: not state_of(pid), "the rank has ended")


@pytest.mark.slow
def test_a_job_that_is_stopped_ends_the_debugger_first(folder: Path) -> None:
    """A rank gets its SIGTERM, and the time to save a checkpoint."""
    program = """
from rank import *
def save(*_):
    tell("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("ready")
while True:
    time.sleep(0.05)
"""
    with running(folder, program, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, _):
        job.send(signal.SIGTERM)
        job.hear("saved", 2)
        assert shell.process.wait() == 0
        until(lambda: "the ranks of this attempt are being ended" in shell.text, "it is said why")
        assert job.wait() == 1


@pytest.mark.slow
def test_a_rank_that_is_killed_in_its_debugger_fails_as_ever(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, pid):
        os.kill(pid, signal.SIGKILL)
        assert shell.process.wait() == 0
        assert job.wait() == 1
        until(lambda: "rank 1" in job.err and "SIGKILL" in job.err, "the report names it")


@pytest.mark.slow
def test_another_rank_that_fails_ends_the_attempt_and_the_debugger(folder: Path) -> None:
    program = WAITS + "\nif RANK == 0:\n    sys.exit(3)\nstay()"
    with running(folder, program, *QUIET, nproc=2, store=False) as job, debugged(job, 1) as (shell, _):
        job.release("end")
        assert shell.process.wait() == 0
        assert job.wait() == 1


@pytest.mark.slow
def test_what_cannot_be_debugged_is_refused_in_two_lines(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job:
        with debugged(job, 1) as (shell, pid):
            for rank, wanted in (("1", f"process {tracer_of(pid)} traces rank 1"), ("7", "the job has no rank 7")):
                with attached(job, "latest", "--rank", rank, verb="debug") as second:
                    assert second.process.wait() == 2
                    until(lambda text=wanted, one=second: text in " ".join(one.text.split()), wanted)  # type: ignore[misc]
            done = saferunctl(job, "debug", "latest", "--rank", "1")
            assert done.returncode == 2
            assert two_lines(done.stderr)[0].startswith("debug needs a terminal")
            with connected(control_socket(job)) as connection:
                connection.sendall(b'{"op": "debug", "rank": "1"}\n')
                assert json.loads(connection.recv(1 << 12))["refused"] == "another shell debugs rank 1"
            kill(shell.process.pid, signal.SIGTERM)
            assert shell.process.wait() == 0
        goes_on(job, pid)


@pytest.mark.slow
def test_a_client_that_says_more_is_dropped_and_holds_nothing(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job:
        (pid,) = (said.pid for said in job.hear("ready", 2) if said.rank == 1)
        with connected(control_socket(job)) as connection:
            connection.sendall(b'{"op": "debug", "rank": "1"}\n')
            assert json.loads(connection.recv(1 << 12))["ok"]
            connection.sendall(b'{"op": "debug", "rank": "0"}\n')
            assert connection.recv(1 << 12) == b""
        goes_on(job, pid)


@pytest.fixture(scope="module")
def newest_python() -> str:
    """A Python that lets a debugger in."""
    found = shutil.which("python3.14")
    try:
        return found or str(debian_python.python("3.14", DIRECTORY / "debian-python3.14"))
    except debian_python.NotHadError as error:
        pytest.skip(f"no Python 3.14 here: {error}")


@pytest.mark.slow
def test_python_s_own_debugger_is_used_where_the_rank_lets_it_in(folder: Path, newest_python: str) -> None:
    """Its locals can be seen and changed. The rank goes on whichever way pdb ends, and needs no gdb."""
    options = (*QUIET, "--no-python")
    with running(folder, LOOPS, *options, nproc=2, store=False, script=(newest_python, "-u", "train.py")) as job:
        (pid,) = (said.pid for said in job.hear("ready", 2) if said.rank == 1)
        control_socket(job)
        with attached(job, "latest", "--rank", "1", verb="debug") as shell:
            until(lambda: shell.text.rstrip().endswith("(Pdb)"), "pdb asks")
            assert "stops in pdb" in " ".join(shell.text.split())
            until(lambda: "rank 1 is in a debugger" in job.err, "the console says so")
            shell.type(b"p secret + 1000\r")
            until(lambda: "\n1041" in shell.text.replace("\r", ""), "pdb answers")
            shell.type(b"q\r")
            assert shell.process.wait() == 0
        until(lambda: "the debugger of rank 1 has detached" in job.err, "it is said")
        with attached(job, "latest", "--rank", "1", verb="debug") as shell:
            until(lambda: shell.text.rstrip().endswith("(Pdb)"), "pdb asks again")
            shell.process.kill()
        until(lambda: job.err.count("has detached") == 2, "it is said again")
        for path in (folder / "tmp").glob("tmp*"):
            path.unlink()  # pdb's own: the script by which it gets in, which one that is killed leaves behind
        with attached(job, "latest", "--rank", "1", "--with", "gdb", verb="debug") as shell:
            until(lambda: shell.text.rstrip().endswith("(gdb)"), "gdb asks")
        until(lambda: not tracer_of(pid), "gdb has detached")
        job.release("end")
        job.hear("went on", 2)
        assert job.wait() == 0


@pytest.mark.slow
def test_where_python_lets_no_debugger_in_that_is_said(folder: Path) -> None:
    with running(folder, WAITS, *QUIET, nproc=2, store=False) as job:
        job.hear("ready", 2)
        control_socket(job)
        with attached(job, "latest", "--rank", "1", "--with", "pdb", verb="debug") as shell:
            assert shell.process.wait() == 2
            until(lambda: "that takes Python 3.14" in " ".join(shell.text.split()), "it is said")
        assert "is in a debugger" not in job.err
        job.release("end")
        assert job.wait() == 0
