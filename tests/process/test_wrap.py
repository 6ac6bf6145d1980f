"""Ranks that run under a tool (``--wrap``): real tools, real ranks."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.process.launching import END_AS_TOLD, customized, in_saferun, kill, parent_of, running, two_lines, until

QUIET = ("--preflight", "off")
# A tool that forks, waits, and ends with an exit code of its own.
SHELL = "sh -c '\"$@\"; exit 9' sh"
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


@pytest.mark.parametrize(("how", "code"), [("0", 0), ("3", 3), ("SIGKILL", -signal.SIGKILL)])
def test_the_exit_code_is_the_scripts_and_not_the_tools(folder: Path, how: str, code: int) -> None:
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", f"0:{SHELL}", arguments=(how,), store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.release("end")
        assert job.wait() == (0 if code == 0 else 1)
        if code:
            assert ("exit code 3" if code == 3 else "SIGKILL") in job.err


def test_signals_go_to_the_script(folder: Path) -> None:
    """A tool that got them would end without it, or keep it from ending."""
    with running(folder, HANDLES, *QUIET, "--wrap", f"0:{SHELL}", store=False) as job:
        job.hear("ready")
        until(lambda: job.has_happened("ScriptFound"), "the script is found")
        job.send(signal.SIGTERM)
        job.hear("asked")
        job.wait()
        assert "has ended" not in job.err, "the tool got the signal, too"


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


def test_a_tool_that_is_not_there_is_said_before_any_rank_starts(folder: Path) -> None:
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", "0:no-such-tool -x", arguments=("0",), store=False) as job:
        assert job.wait() == 2
        what, _ = two_lines("\n".join(job.err.splitlines()[:2]))
        assert "no-such-tool is not installed here" in what
        assert job.said() == []


@pytest.mark.parametrize("member", ["begin", "tick", "adopts", "status_of", "_take"])
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
        job.release("end")
        assert job.wait() == 0, job.err


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["gdb", "valgrind", "py-spy", "nice -n 1", "timeout 100", "env -u X"])
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
        assert job.wait() == code, job.err
