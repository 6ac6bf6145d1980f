"""Ranks that run under a tool (``--wrap``): real tools, real ranks."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.launch.rank import Script
from saferun.launch.wrap_tools import TOOLS
from saferun.launch.wrapped_ranks import WrappedRanks
from saferun.linux.children import Child
from saferun.linux.pidfd import open_pidfd
from saferun.linux.poller import Poller
from saferun.linux.procfs import read_stat
from saferun.model import ExitStatus
from tests.breadth import slow_but
from tests.matrix import DIRECTORY
from tests.process.launching import (
    END_AS_TOLD,
    REPOSITORY,
    customized,
    in_saferun,
    kill,
    parent_of,
    running,
    two_lines,
    until,
)
from tests.process.process_ends import kernel_reports_exits

QUIET = ("--preflight", "off")
# A tool that forks, waits, and ends with an exit code of its own.
SHELL = "sh -c '\"$@\"; exit 9' sh"
needs_gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed here")
HANDLES = """
from rank import *
def end(number, frame):
    tell("asked")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
tell("ready")
stay()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


def test_a_rank_runs_under_strace_and_the_other_does_not(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", "1:strace", nproc=2, arguments=("0", "0"), store=False) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == 0
        assert "rank 1 runs under strace" in job.err
        assert b"execve" in job.rank_file(1, "strace.txt")
        assert not (job.run_dir / "attempt_0" / "rank_0" / "strace.txt").exists()


@pytest.mark.parametrize(("how", "code"), slow_but([("0", 0), ("3", 3), ("SIGKILL", -signal.SIGKILL)], "3"))
def test_the_exit_code_is_the_scripts_and_not_the_tools(folder: Path, how: str, code: int) -> None:
    """Where the kernel does not tell how the script ended, all that is known is how the tool did."""
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", f"0:{SHELL}", arguments=(how,), store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.release("end")
        is_known = kernel_reports_exits()
        assert job.wait() == (0 if code == 0 and is_known else 1)
        if code or not is_known:
            assert ("exit code 9" if not is_known else "exit code 3" if code == 3 else "SIGKILL") in job.err


def test_signals_go_to_the_script(folder: Path) -> None:
    """A tool that got them would end without it, or keep it from ending."""
    with running(folder, HANDLES, *QUIET, "--wrap", f"0:{SHELL}", store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.send(signal.SIGTERM)
        job.hear("asked")
        job.wait()
        assert "has ended" not in job.err, "the tool got the signal, too"


@pytest.mark.parametrize("tool", slow_but([SHELL, "strace"], "strace"))
def test_signals_reach_what_a_shell_runs_under_the_tool(folder: Path, tool: str) -> None:
    """As they do without a tool: the shell's child is in its process group."""
    # A shell that goes on until its child has ended: else the sweep would end that.
    script = ("bash", "-c", f"trap true TERM; {sys.executable} train.py; exit 5")
    with running(folder, HANDLES, *QUIET, "--wrap", f"0:{tool}", "--no-python", script=script, store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.send(signal.SIGTERM)
        job.hear("asked")
        job.wait()
        assert "has ended" not in job.err, "the tool got the signal, too"


def test_a_process_of_the_script_in_a_group_of_its_own_gets_no_signal_of_the_scripts(folder: Path) -> None:
    """As without a tool: a script that puts a process aside ends it itself, or leaves it to the sweep."""
    program = """
from rank import *
tell_signals(signal.SIGTERM)
if os.fork() == 0:
    os.setpgid(0, 0)
    tell("apart")
    stay()
await_release("end")
"""
    with running(folder, program, *QUIET, "--wrap", f"0:{SHELL}", store=False) as job:
        (apart,) = job.hear("apart")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.send(signal.SIGTERM)
        (first,) = job.hear("SIGTERM")
        assert first.pid == parent_of(apart.pid)
        assert job.said() == []
        job.release("end")
        job.wait()


def test_sigkill_reaches_a_script_that_its_tool_has_put_into_another_session(folder: Path) -> None:
    """It would be taken for a rank that goes on without its tool."""
    source = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], start_new_session=True))"
    options = ("--wrap", f"0:{sys.executable} -c '{source}'", "--shutdown-timeout", "1")
    with running(folder, END_AS_TOLD, *QUIET, *options, arguments=("stubborn",), store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.send(signal.SIGTERM)
        job.wait()
        assert "goes on without it" not in job.err
        assert "left behind" not in job.err


def test_a_rank_goes_on_where_its_tool_is_killed(folder: Path) -> None:
    """It is told, and the script's end is the rank's."""
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", f"0:{SHELL}", arguments=("3",), store=False) as job:
        (ready,) = job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        kill(parent_of(ready.pid), signal.SIGKILL)
        until(lambda: "the rank goes on without it" in job.err, "it is told")
        job.release("end")
        assert job.wait() == 1
        assert "exit code 3" in job.err


@pytest.mark.parametrize("has_pidfds", [True, False])
def test_another_process_with_the_scripts_number_is_no_rank(*, has_pidfds: bool) -> None:
    """Numbers are given again; the descriptor, or else the time of the start, tells them apart."""
    if has_pidfds and not kernel_reports_exits():
        pytest.skip("the kernel does not tell how a process ended")
    with subprocess.Popen(["sleep", "1000"]) as script:
        pidfd = open_pidfd(script.pid) if has_pidfds else -1
        script.kill()
    with subprocess.Popen(["sleep", "1000"]) as other:
        try:
            stat = read_stat(other.pid)
            assert stat is not None
            context: Any = SimpleNamespace(report=lambda _: None, guarded_poller=Poller())
            rank: Any = SimpleNamespace(child=Child(1, -1), assignment=SimpleNamespace(rank=0), signals=())
            rank.wrapped = Script(Child(other.pid, -1), stat.start_ticks)
            assert WrappedRanks(context).adopts(rank, ExitStatus(0, None))
            rank.wrapped = Script(Child(other.pid, pidfd), stat.start_ticks - (not has_pidfds))
            assert not WrappedRanks(context).adopts(rank, ExitStatus(0, None))
        finally:
            other.kill()
            if pidfd >= 0:
                os.close(pidfd)


def test_the_ranks_of_the_next_attempt_are_read(folder: Path) -> None:
    """What watched the scripts of the last attempt has no descriptor any more: others have got its numbers."""
    program = """
from rank import *
tell("ready")
if ATTEMPT == 0:
    await_release("end")
    sys.exit(7)
for _ in range(300):
    for stream in sys.stdout, sys.stderr:
        print("x" * 2000, file=stream, flush=True)
"""
    options = (*QUIET, "--wrap", "*:timeout 100", "--max-restarts", "1", "--shutdown-timeout", "1")
    with running(folder, program, *options, nproc=3, store=False) as job:
        job.hear("ready", 3)
        until(lambda: sum(entry["event"] == "ScriptFound" for entry in job.events()) == 3, "the scripts are found")
        job.release("end")
        assert job.wait() == 0
        assert [text.count("x" * 2000) for text in (job.out, job.err)] == [900, 900]


def test_a_tool_that_is_not_there_is_said_before_any_rank_starts(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", "0:no-such-tool -x", arguments=("0",), store=False) as job:
        assert job.wait() == 2
        what, _ = two_lines("\n".join(job.err.splitlines()[:2]))
        assert "no-such-tool is not installed here" in what
        assert job.said() == []


@pytest.mark.parametrize("is_dry", slow_but([False, True], "False"))
def test_a_misspelt_placeholder_is_named_once(folder: Path, *, is_dry: bool) -> None:
    question = ("--dry-run",) if is_dry else ()
    wrap = ("--wrap", "*:env X={rankdir} Y={own}")
    with running(folder, END_AS_TOLD, *QUIET, *question, *wrap, nproc=2, arguments=("0", "0"), store=False) as job:
        job.release("end")
        assert job.wait() == 0
        line = "--wrap: {rankdir} goes to env as it is; did you mean {rank_dir}?"
        assert (job.out if is_dry else job.err).count(line) == 1
        assert "{own}" not in job.err


@pytest.mark.parametrize("wrap", slow_but(["0:no-such-tool -x", "7:nice"], "7:nice"))
def test_a_dry_run_refuses_a_tool_as_the_launch_does(tmp_path: Path, wrap: str) -> None:
    """It promises that the launch is possible, as far as that is known before."""
    ends = []
    for question in ((), ("--dry-run",)):
        folder = tmp_path / f"launch{len(question)}"
        with running(folder, END_AS_TOLD, *QUIET, *question, "--wrap", wrap, arguments=("0",), store=False) as job:
            code = job.wait()
            ends.append((code, two_lines("\n".join(job.err.splitlines()[:2]))))
            assert job.out == ""
            assert job.said() == []
    assert ends[0] == ends[1]
    assert ends[0][0] == 2


@pytest.mark.parametrize("member", slow_but(["begin", "tick", "adopts", "status_of", "_take"], "tick"))
def test_a_mistake_of_saferuns_own_costs_only_the_scripts_exit_code(folder: Path, member: str) -> None:
    """The tool's process stands for the rank."""
    planted = (
        "from saferun.launch.wrapped_ranks import WrappedRanks as owner\n"
        "    def fail(*_, **__): raise RuntimeError('a mistake')\n"
        f"    owner.{member} = fail"
    )
    environ = customized(folder.parent, in_saferun(planted))
    with running(
        folder, END_AS_TOLD, *QUIET, "--wrap", "*:nice", nproc=2, arguments=("0", "0"), environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        if member in {"begin", "tick", "_take"}:
            until(lambda: "RuntimeError: a mistake" in job.err, "it is reached")
        job.release("end")
        assert job.wait() == 0, job.err
        assert "RuntimeError: a mistake" in job.err


def test_a_tool_that_ended_its_rank_is_named_first(folder: Path) -> None:
    """The scheduler's log, to which the hint would lead, knows nothing of it."""
    options = (*QUIET, "--wrap", "0:timeout 1")
    with running(folder, END_AS_TOLD, *options, arguments=("stay",), store=False) as job:
        job.hear("ready")
        job.release("end")
        assert job.wait() == 1
        assert "terminated from outside (SIGTERM)" in job.err
        assert "hint: it ran under timeout 1 (--wrap), which may have sent the signal; if not, look at" in job.err


def test_py_spy_is_found_where_saferun_has_it(folder: Path) -> None:
    """Also in a second attempt. The environment need not be activated."""
    program = """
from rank import *
tell("ready")
await_release(f"end{ATTEMPT}")
sys.exit(3 if ATTEMPT == 0 else 0)
"""
    options = (*QUIET, "--wrap", "0:py-spy", "--max-restarts", "1")
    with running(folder, program, *options, environ={"PATH": "/usr/bin:/bin"}, store=False) as job:
        for attempt in range(2):
            job.hear("ready")
            times = attempt + 1
            until(lambda: [entry["event"] for entry in job.events()].count("ScriptFound") == times, "it is found")  # noqa: B023
            job.release(f"end{attempt}")
        job.wait()


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["gdb", "valgrind", "perf", "py-spy", "nice -n 1", "timeout 100", "env -u X"])
@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 1)])
def test_known_tools_end_as_the_script_does(folder: Path, tool: str, how: str, code: int) -> None:
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    with running(
        folder, END_AS_TOLD, *QUIET, "--wrap", f"0:{tool}", nproc=2, arguments=(how, "0"), environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        if tool == "py-spy":
            # It keeps the exit code to itself: the kernel is asked for it.
            until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.release("end")
        assert job.wait() == (0 if tool == "py-spy" and not kernel_reports_exits() else code), job.err
        written = {"perf": "perf.data", "valgrind": "valgrind.txt", "py-spy": "py-spy.speedscope.json"}.get(tool)
        assert written is None or job.rank_file(0, written)


@needs_gdb
@pytest.mark.parametrize("how", slow_but(["SIGSEGV", "SIGABRT", "SIGTRAP", "SIGKILL"], "SIGSEGV"))
def test_a_script_that_crashes_under_gdb_dies_of_its_own_signal(folder: Path, how: str) -> None:
    """After the stacks. gdb kills what it still has when it exits, and SIGKILL would be blamed on others."""
    options = ("--wrap", "1:gdb", "--cores", "off")
    with running(folder, END_AS_TOLD, *QUIET, *options, nproc=2, arguments=("0", how), store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.release("end")
        assert job.wait() == 1
        assert how in job.err
        assert ("killed from outside" in job.err) == (how == "SIGKILL")
        assert (f"received signal {how}" in job.out) == (how != "SIGKILL")
        assert "Are you sure" not in job.out


GDB_ENDS = [
    pytest.param("ctypes.string_at(0)", 128 + signal.SIGSEGV, True, id="crash"),
    pytest.param("faulthandler.enable(); ctypes.string_at(0)", 128 + signal.SIGSEGV, True, id="faulthandler"),
    pytest.param("os.kill(os.getpid(), signal.SIGTRAP)", 128 + signal.SIGTRAP, True, id="trap"),
    pytest.param("os.kill(os.getpid(), signal.SIGTERM)", 128 + signal.SIGTERM, False, id="terminated"),
    pytest.param("signal.signal(6, print); os.kill(os.getpid(), 6); sys.exit(5)", 5, True, id="handled"),
    pytest.param("os.kill(os.getpid(), signal.SIGPIPE); sys.exit(5)", 5, False, id="ignored"),
    pytest.param("sys.exit(7)", 7, False, id="failure"),
    pytest.param("0", 0, False, id="success"),
]


@needs_gdb
@pytest.mark.parametrize(("end", "code", "has_stacks"), slow_but(GDB_ENDS, "handled", "terminated"))
def test_gdb_ends_as_the_script_does(end: str, code: int, *, has_stacks: bool) -> None:
    """As a shell writes it: on older kernels nothing else is known of a script that ends in its first moment."""
    source = f"import ctypes, faulthandler, os, signal, sys\n{end}"
    command = [*TOOLS["gdb"].argv, sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60.0, check=False)
    assert ended.returncode == code
    assert ("#0 " in ended.stdout) == has_stacks
    assert ("Current thread" in ended.stderr) == ("faulthandler.enable" in end)


@pytest.fixture(scope="module")
def memray() -> Path:
    """Where memray can be imported from: a directory of its own, since it is large and nothing else needs it."""
    directory = DIRECTORY / "memray"
    if not (directory / "complete").exists():
        shutil.rmtree(directory, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory), "memray"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=240.0, check=False)
        if ended.returncode != 0:
            pytest.skip(f"memray cannot be had here: {(ended.stderr.strip().splitlines() or ['no output'])[-1]}")
        (directory / "complete").touch()
    return directory


@pytest.mark.slow
@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 1), ("SIGTERM", 1)])
def test_memray_writes_its_file_and_the_exit_code_is_the_scripts(
    folder: Path, memray: Path, how: str, code: int
) -> None:
    """The real one, in which the rank's Python runs the script."""
    environ = {"PYTHONPATH": f"{REPOSITORY}:{memray}"}
    arguments = (how, "0")
    with running(
        folder, END_AS_TOLD, *QUIET, "--wrap", "0:memray", nproc=2, arguments=arguments, environ=environ, store=False
    ) as job:
        job.hear("ready", 2)
        job.release("end")
        assert job.wait() == code, job.err
        assert job.rank_file(0, "memray.bin")
        if how != "0":
            assert ("exit code 3" if how == "3" else "SIGTERM") in job.err
