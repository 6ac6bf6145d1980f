"""The tools that ``--wrap`` knows by name, as stand-ins on PATH that behave as the real ones do.

What ranks are run with, what the tool writes, how it ends, and the time that it takes after its script.

Sources: the user guides of Nsight Systems, Nsight Compute, Compute Sanitizer and ROCprofiler-SDK, numactl(8).
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.process.launching import END_AS_TOLD, kill, parent_of, read_stat, running, until
from tests.process.process_ends import kernel_reports_exits

if TYPE_CHECKING:
    from tests.process.launching import Job

QUIET = ("--preflight", "off")
# Each begins in this way: it says what it was called with, in a file that the test reads.
HEAD = f"""#!{sys.executable} -S
import json, os, signal, subprocess, sys, time
folder, name = os.environ["LAUNCHING_FOLDER"], os.path.basename(sys.argv[0])
with open(f"{{folder}}/called.{{name}}", "w") as file:
    json.dump(sys.argv[1:], file)
def await_release(what):
    while not os.path.exists(f"{{folder}}/release.{{what}}"):
        time.sleep(0.005)
def parsed(words, flags=(), values=(), joined=(), separator=False):
    # Options up to the first word that is none, or up to --, if the tool wants that; and the program's command line.
    found, words = {{}}, list(words)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if option in flags and not equals:
            found[option] = True
        elif option in joined and equals:
            found[option] = value
        elif option in values and not equals and words and not words[0].startswith("-"):
            found[option] = words.pop(0)
        else:
            sys.exit(f"{{name}}: unrecognised option {{word}}")
    if separator and (not words or words.pop(0) != "--"):
        sys.exit(f"{{name}}: -- has to come before the application")
    if not words:
        sys.exit(f"{{name}}: no application")
    return found, words
"""
# What of their options the manuals have, in the form in which these want them: nsys long ones with = and short ones
# with a space, ncu and compute-sanitizer with either, rocprofv3 a -- before the application.
TOOLS = {
    # Runs the program as a child in its own group, and is busy with its report when that has ended.
    "nsys": """
if sys.argv[1] != "profile":
    sys.exit("nsys: unknown command")
long = ("--trace", "--force-overwrite", "--output", "--sample", "--kill", "--wait")
options, program = parsed(sys.argv[2:], values=("-t", "-f", "-o", "-s"), joined=long)
if not set(options["-t"].split(",")) <= {"cuda", "nvtx", "osrt", "cublas", "cudnn", "mpi", "ucx", "none"}:
    sys.exit("nsys: not to be traced")
if options["-f"] not in ("true", "false"):
    sys.exit("nsys: -f is true or false")
code = subprocess.call(program, process_group=0)
open(f"{folder}/script_ended", "w").close()
await_release("report")
open(options["-o"] + ".nsys-rep", "w").write("a report")
sys.exit(code if code >= 0 else 128 - code)
""",
    # Lives beside it, with a thread of its own.
    "ncu": """
long = ("--target-processes", "--export", "--kernel-name", "--set", "--section")
flags = ("-f", "--force-overwrite")
options, program = parsed(sys.argv[1:], flags=flags, values=("-o", "-k", "-c", *long), joined=long)
if options["--target-processes"] not in ("all", "application-only"):
    sys.exit("ncu: --target-processes")
child = subprocess.Popen(program)
code = child.wait()
open(options["-o"] + ".ncu-rep", "w").write("a report")
sys.exit(code if code >= 0 else 128 - code)
""",
    # Has exit codes of its own.
    "compute-sanitizer": """
long = ("--log-file", "--tool", "--target-processes", "--error-exitcode", "--save", "--print-limit")
options, program = parsed(sys.argv[1:], values=long, joined=long)
subprocess.call(program)
open(options["--log-file"], "w").write("========= ERROR SUMMARY: 1 error")
sys.exit(86)
""",
    # Prepares the environment, and becomes the program.
    "rocprofv3": """
flags = ("-s", "--sys-trace", "-r", "--runtime-trace", "--kernel-trace")
options, program = parsed(
    sys.argv[1:], flags=flags, values=("-d", "--output-directory", "-o", "--output-file"), separator=True
)
os.mkdir(options["-d"])
os.execvpe(program[0], program, {**os.environ, "ROCP": "1"})
""",
    "numactl": """
long = ("--interleave", "--cpunodebind", "--membind", "--preferred")
options, program = parsed(sys.argv[1:], flags=("--localalloc", "-l"), values=("-i", "-N", "-m", *long), joined=long)
os.execvp(program[0], program)
""",
}
WRITTEN = {
    "nsys": ("nsys.nsys-rep",),
    "ncu": ("ncu.ncu-rep",),
    "compute-sanitizer": ("compute-sanitizer.txt",),
    "rocprofv3": (),
    "numactl --interleave=all": (),
}
# What they end with, where that is not what the script ended with.
CODES = {
    "nsys": {"SIGSEGV": "exit code 139"},
    "ncu": {"SIGSEGV": "exit code 139"},
    "compute-sanitizer": {"0": "exit code 86", "3": "exit code 86", "SIGSEGV": "exit code 86"},
}
CALLED = {
    "nsys": ["profile", "-t", "cuda,nvtx,osrt", "-f", "true", "-o", "RANK_DIR/nsys"],
    "ncu": ["--target-processes", "all", "-f", "-o", "RANK_DIR/ncu"],
    "compute-sanitizer": ["--log-file", "RANK_DIR/compute-sanitizer.txt"],
    "rocprofv3": ["--sys-trace", "-d", "RANK_DIR/rocprofv3", "--"],
    "numactl --interleave=all": ["--interleave=all"],
}


SAVES = """
from rank import *
def save(*_):
    tell("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
tell("ready")
while True:
    time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "launch"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """The stand-ins are the first on PATH."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, source in TOOLS.items():
        (directory / name).write_text(HEAD + source)
        (directory / name).chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}


def find_script(job: Job) -> None:
    until(lambda: job.has_happened("ScriptFound"), "the script is found")


# All tools are called in the same way: how a script ends under one of them is enough for every day.
CALLS = [pytest.param(how, tool, id=f"{how}-{tool}") for how in ("0", "3", "SIGSEGV") for tool in CALLED]


@pytest.mark.parametrize(("how", "tool"), slow_but(CALLS, "3-nsys", "0-ncu", "0-rocprofv3"))
def test_a_tool_is_called_as_its_manual_says_and_the_exit_code_is_the_scripts(
    folder: Path, environ: dict[str, str], tool: str, how: str
) -> None:
    """Whatever the tool ends with, if the kernel tells; it writes into the directory of its rank."""
    options = (*QUIET, "--wrap", f"0:{tool}", "--cores", "off")
    with running(folder, END_AS_TOLD, *options, nproc=2, arguments=(how, "0"), environ=environ, store=False) as job:
        job.hear("ready", 2)
        name = tool.partition(" ")[0]
        if "exec" not in TOOLS[name]:
            find_script(job)
        job.release("end")
        job.release("report")
        said = {"3": "exit code 3", "SIGSEGV": "SIGSEGV"}.get(how)
        if name in CODES and not kernel_reports_exits():
            said = CODES[name].get(how, said)
        assert job.wait() == (1 if said else 0), job.err
        assert said is None or said in job.err
        for written in WRITTEN[tool]:
            assert job.rank_file(0, written)
        called = json.loads((folder / f"called.{name}").read_text())
        rank_dirs = [str(path.resolve()) for path in job.run_dir.glob("*/attempt_0/rank_0")]
        expected = [word.replace("RANK_DIR", "".join(rank_dirs)) for word in CALLED[tool]]
        assert called[: len(expected)] == expected
        assert called[len(expected) :] == [sys.executable, "-u", "train.py", how, "0"]


@pytest.mark.parametrize("tool", slow_but([*CALLED], "nsys"))
def test_sigterm_reaches_the_script_in_a_known_tool(folder: Path, environ: dict[str, str], tool: str) -> None:
    """The scheduler's notice: the script saves a checkpoint, and the tool has its report."""
    with running(folder, SAVES, *QUIET, "--wrap", f"0:{tool}", nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        if "exec" not in TOOLS[tool.partition(" ")[0]]:
            find_script(job)
        job.send(signal.SIGTERM)
        job.hear("saved", 2)
        job.release("report")
        job.wait()
        for written in WRITTEN[tool]:
            assert job.rank_file(0, written)


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["strace", "gdb", "valgrind", "perf", "py-spy", "nice -n 1", "timeout 100"])
def test_sigterm_reaches_the_script_in_a_tool_that_is_installed(folder: Path, tool: str) -> None:
    """As in the stand-ins."""
    environ = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
    with running(folder, SAVES, *QUIET, "--wrap", f"0:{tool}", nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        if tool in {"py-spy", "perf", "strace", "gdb"}:
            find_script(job)
        job.send(signal.SIGTERM)
        job.hear("saved", 2)
        job.wait()


@pytest.mark.slow
def test_a_tool_that_writes_its_report_is_not_killed_when_the_job_is_stopped(
    folder: Path, environ: dict[str, str]
) -> None:
    """The grace of the ranks is over by then; a rank whose script lives has no more time."""
    # In which the script of a busy machine has to end.
    options = (*QUIET, "--wrap", "0:nsys", "--shutdown-timeout", "4")
    arguments = ("stay", "stubborn")
    with running(folder, END_AS_TOLD, *options, nproc=2, arguments=arguments, environ=environ, store=False) as job:
        _, other = sorted(job.hear("ready", 2))
        find_script(job)
        job.send(signal.SIGTERM)
        said = re.compile("the script of 1 rank ended, its tool has not: SIGKILL follows in (300|29[0-9]) s")
        until(lambda: said.search(job.err), "it is said")
        until(lambda: read_stat(other.pid) is None, "the other rank is killed")
        job.release("report")
        job.wait()
        assert job.rank_file(0, "nsys.nsys-rep") == b"a report"


@pytest.mark.slow
def test_ctrl_c_ends_a_tool_that_writes_its_report(folder: Path, environ: dict[str, str]) -> None:
    """Whoever does not want to wait for it says so."""
    options = (*QUIET, "--wrap", "0:nsys", "--shutdown-timeout", "1")
    with running(folder, END_AS_TOLD, *options, arguments=("stay",), environ=environ, store=False) as job:
        job.hear("ready")
        find_script(job)
        job.send(signal.SIGINT)
        until(lambda: "its tool has not" in job.err, "it is said")
        job.send(signal.SIGINT)
        job.wait()


def test_the_first_failure_is_that_of_the_script_that_failed_first(folder: Path, environ: dict[str, str]) -> None:
    """Its tool ends later than the rank that failed because of it."""
    program = """
from rank import *
if RANK == 0:
    tell("ready")
    await_release("end")
    sys.exit(3)
tell("ready")
await_release("fail")
sys.exit(4)
"""
    with running(folder, program, *QUIET, "--wrap", "0:nsys", nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        find_script(job)
        job.release("end")
        until(lambda: job.has_happened("ScriptEnded"), "the end of the script is seen")
        job.release("fail")
        until(lambda: job.has_happened("RankExited"), "the other one fails")
        job.release("report")
        assert job.wait() == 1
        assert "rank 0 (" in job.err.partition(" failed first at ")[0]
        assert "failed after it: rank 1 (exit code 4)" in job.err


def test_a_rank_whose_tool_is_at_work_takes_no_part_in_a_hang(folder: Path, environ: dict[str, str]) -> None:
    """Its tool may wait for a slow disk for long, and the other ranks are judged without it."""
    program = """
from rank import *
tell("ready")
if RANK == 0:
    await_release("end")
    sys.exit(0)
stay()
"""
    options = ("--wrap", "0:nsys", "--hang-timeout", "3", "--external-wait-timeout", "0", "--on-hang", "stop")
    with running(folder, program, *QUIET, *options, nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        find_script(job)
        job.release("end")
        until(lambda: job.has_happened("ScriptEnded"), "the end of the script is seen")
        until(lambda: job.has_happened("HangSuspected"), "the other rank hangs")
        job.release("report")
        assert job.wait() == 1
        assert "the job hangs: rank 1 (" in job.err
        assert "rank 0  dead: exit code 0" in job.err


def test_the_script_of_a_tool_is_captured_in_a_hang_and_the_tool_is_not_blamed(
    folder: Path, environ: dict[str, str]
) -> None:
    """The rank is the script's process."""
    program = """
from rank import *
def never_ends():
    tell("ready")
    while True:
        time.sleep(1000)
never_ends()
"""
    options = ("--wrap", "0:ncu", "--hang-timeout", "2", "--external-wait-timeout", "0", "--on-hang", "stop")
    with running(folder, program, *QUIET, *options, environ=environ, store=False) as job:
        (ready,) = job.hear("ready")
        find_script(job)
        assert job.wait() == 1
        assert "never_ends" in job.err
        report = json.loads((job.run_dir / "report.json").read_text())
        assert f'"pid": {ready.pid}' in json.dumps(report)
        assert job.rank_file(0, "ncu.ncu-rep")


@pytest.mark.slow
def test_a_rank_goes_on_where_its_profiler_crashes(folder: Path, environ: dict[str, str]) -> None:
    """The job does not end by that."""
    with running(folder, END_AS_TOLD, *QUIET, "--wrap", "0:ncu", arguments=("0",), environ=environ, store=False) as job:
        (ready,) = job.hear("ready")
        find_script(job)
        kill(parent_of(ready.pid), signal.SIGSEGV)
        until(lambda: "the rank goes on without it" in job.err, "it is said")
        job.release("end")
        assert job.wait() == 0


def test_a_tool_may_start_its_script_again(folder: Path) -> None:
    """Then the last one is the rank."""
    tool = "sh -c 'until \"$@\"; do sleep 0.01; done' sh"
    program = """
from rank import *
again = os.path.exists(FOLDER + "/again")
open(FOLDER + "/again", "w").close()
tell("second" if again else "first")
await_release("end" if again else "begin")
sys.exit(0 if again else 3)
"""
    with running(folder, program, *QUIET, "--wrap", f"0:{tool}", store=False) as job:
        job.hear("first")
        find_script(job)
        job.release("begin")
        job.hear("second")
        until(lambda: sum(event["event"] == "ScriptFound" for event in job.events()) == 2, "it is found again")
        job.release("end")
        assert job.wait() == 0, job.err
