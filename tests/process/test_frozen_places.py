"""Each place in which a launch has files, alone and with the others, stops answering while ranks run.

The ranks go on, and so does all that saferun does for them: the console, the verdict on a hang, the end by a signal.
"""

from __future__ import annotations

import _json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import slow_but
from tests.process.frozen import needs_mounts
from tests.process.frozen_places import PLACES, SLOW_S, Frozen, launched_from
from tests.process.launching import REPOSITORY, Job, command_line, state_of, until

pytestmark = needs_mounts

SPEAK_AND_HANG = """
from rank import *
def hang():
    time.sleep(1000)
tell("ready")
await_release("speak")
print("still here", flush=True)
tell("spoke")
if RANK and sys.argv[1:]:
    os.stat(sys.argv[1])
hang()
"""
# The first attempt fails when it may.
FAILS_ONCE = """
from rank import *
tell("ready")
await_release("end" if ATTEMPT else "fail")
print("attempt", ATTEMPT, flush=True)
sys.exit(not ATTEMPT)
"""
# Has a library loaded from the place that its argument names.
LOADS = """
import ctypes
from rank import *
def hang():
    time.sleep(1000)
ctypes.CDLL(sys.argv[1])
tell("ready")
await_release("hang")
hang()
"""
OPTIONS = ("--env-profile", "minimal", "--hang-timeout", "2", "--external-wait-timeout", "0", "--shutdown-timeout", "2")


def places(*slow: str, without: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """The places as values of a test's argument; those that are named take it too long for every day."""
    names = [place for place in PLACES if place not in without]
    marked = [pytest.param(name, marks=pytest.mark.slow) if name in slow else name for name in names]
    return pytest.mark.parametrize("place", marked)


def freeze_and_speak(job: Job, frozen: Frozen) -> None:
    """Freeze the file system when all is in memory; afterwards both ranks have spoken."""
    job.hear("ready", 2, timeout_s=SLOW_S)
    frozen.await_memory()
    frozen.system.freeze()
    job.release("speak")
    job.hear("spoke", 2)


@places(*(place for place in PLACES if place != "all"))
def test_a_hang_is_reported_and_sigterm_ends_the_job(tmp_path: Path, place: str) -> None:
    """The console goes on, the report has stacks, and what is in files is whole afterwards."""
    with launched_from(tmp_path, PLACES[place], SPEAK_AND_HANG, *OPTIONS, nproc=2) as (job, frozen):
        freeze_and_speak(job, frozen)
        until(lambda: job.out.count("still here") == 2, "the console goes on")
        until(lambda: "sleeps at train.py:4 in hang" in job.err, "the hang is reported", timeout_s=SLOW_S)
        assert "not ready in time" not in job.err
        job.send(signal.SIGTERM)
        assert job.wait(SLOW_S) == 1
        assert "stopped by SIGTERM" in job.err
        assert "uninterruptible" not in job.err
        frozen.system.thaw()
        until(lambda: all(frozen.log(rank) == "still here\n" for rank in range(2)), "the files are whole")
        until((frozen.runs / "report.txt").exists, "the report is there")
    assert "missing" not in job.err


@places(
    *("run directory", "current directory with run directory", "current directory", "script and packages"),
    *("TMPDIR", "all but run directory", "all"),
)
def test_ctrl_c_ends_the_job(tmp_path: Path, place: str) -> None:
    """For the traceback Python reads the script again: where it is gone, the ranks cannot be ended, and are named."""
    with launched_from(tmp_path, PLACES[place], SPEAK_AND_HANG, *OPTIONS, nproc=2) as (job, frozen):
        freeze_and_speak(job, frozen)
        job.send(signal.SIGINT)
        assert job.wait(SLOW_S) == 1
        assert "stopped by SIGINT" in job.err
        assert ("uninterruptible" in job.err) == ("script" in PLACES[place])
        until(lambda: job.out.count("still here") == 2, "the console has everything")
        frozen.system.thaw()
        until(lambda: all(frozen.log(rank) == "still here\n" for rank in range(2)), "the files are whole")
    assert "missing" not in job.err


@pytest.mark.slow
@places()
def test_a_rank_that_waits_for_the_file_system_is_named_and_the_hang_of_another_one_reported(
    tmp_path: Path, place: str
) -> None:
    """What no signal ends does not keep the others from being ended, nor saferun from ending."""
    wanted = f"{tmp_path}/mirror/etc/passwd"
    with launched_from(tmp_path, PLACES[place], SPEAK_AND_HANG, *OPTIONS, nproc=2, arguments=[wanted]) as (job, frozen):
        freeze_and_speak(job, frozen)
        until(lambda: "newfstatat in request_wait_answer" in job.err, "it is named", timeout_s=SLOW_S)
        until(lambda: "sleeps at train.py:4 in hang" in job.err, "the hang is reported", timeout_s=SLOW_S)
        job.send(signal.SIGTERM)
        assert job.wait(SLOW_S) == 1
        assert "stopped because of it: rank 0\n" in job.err
        assert "could not be killed (uninterruptible, state D): local rank 1;" in job.err


@pytest.mark.slow
@places(
    "run directory",
    "current directory",
    without=tuple(place for place in PLACES if {"script", "saferun"} & {*PLACES[place]}),
)
def test_a_failure_is_reported_and_the_next_attempt_started(tmp_path: Path, place: str) -> None:
    """Where Python and the script can be read, so that ranks can be started."""
    options = (*OPTIONS, "--max-restarts", "1")
    with launched_from(tmp_path, PLACES[place], FAILS_ONCE, *options, nproc=2) as (job, frozen):
        job.hear("ready", 2, timeout_s=SLOW_S)
        frozen.await_memory()
        frozen.system.freeze()
        job.release("fail")
        assert [word.attempt for word in job.hear("ready", 2, timeout_s=SLOW_S)] == [1, 1]
        frozen.system.thaw()
        job.release("end")
        assert job.wait(SLOW_S) == 0
        assert "failed first" in job.err
        assert frozen.log(0, attempt=1) == "attempt 1\n"


@pytest.mark.parametrize("end", slow_but(["exit", "crash", "stop"], "exit"))
def test_a_file_system_that_dies_while_the_ranks_start_does_not_hang_the_supervisor(tmp_path: Path, end: str) -> None:
    """What it takes to look into a failure has not been read yet: it is absent, and the launch ends all the same."""
    program = """
from rank import *
tell("ready")
await_release("end")
if RANK == 1:
    os._exit(0 if sys.argv[1] == "exit" else 3)
os._exit(0) if sys.argv[1] == "exit" else stay()
"""
    with launched_from(tmp_path, PLACES["all but run directory"], program, *OPTIONS, nproc=2, arguments=(end,)) as (
        job,
        frozen,
    ):
        job.hear("ready", 2, timeout_s=SLOW_S)
        frozen.system.freeze()
        if end == "stop":
            job.send(signal.SIGTERM)
        else:
            job.release("end")
        assert job.wait(SLOW_S) == (0 if end == "exit" else 1)
        if end == "crash":
            assert "rank 1" in job.err
            assert "exit code 3" in job.err
        elif end == "stop":
            assert "stopped by SIGTERM" in job.err
        assert "Traceback" not in job.err


@pytest.mark.slow
def test_native_frames_of_a_rank_whose_libraries_cannot_be_read_are_not_waited_for(tmp_path: Path) -> None:
    """py-spy reads all of them, and no signal would end it."""
    library = f"{tmp_path}/mirror{_json.__file__}"
    options = (*OPTIONS, "--native-stacks", "always")
    with launched_from(tmp_path, PLACES["TMPDIR"], LOADS, *options, arguments=[library]) as (job, frozen):
        (rank,) = job.hear("ready", timeout_s=SLOW_S)
        frozen.await_memory()
        frozen.system.freeze()
        job.release("hang")
        until(lambda: "in hang" in job.err, "the hang is reported", timeout_s=SLOW_S)
        assert state_of(rank.pid) == "S"
        assert not [pid for pid in job.processes() if command_line(pid).endswith("--native")]
        job.send(signal.SIGTERM)
        assert job.wait(SLOW_S) == 1
        assert "stopped because of it: rank 0\n" in job.err


@pytest.mark.parametrize(
    "logs",
    [
        pytest.param((), marks=pytest.mark.slow),
        ("--tee", "3"),
        pytest.param(("--redirects", "2"), marks=pytest.mark.slow),
    ],
    ids=["", "tee", "redirects"],
)
def test_where_there_is_no_run_directory_a_dead_tmpdir_does_not_hang_the_supervisor(
    tmp_path: Path, logs: tuple[str, ...]
) -> None:
    """The ranks' error files are in a temporary directory then, and so are their logs; each attempt asks for both."""
    options = (*OPTIONS, "--max-restarts", "1", "--run-dir", "none", *logs)
    with launched_from(tmp_path, PLACES["TMPDIR"], FAILS_ONCE, *options, nproc=2) as (job, frozen):
        job.hear("ready", 2, timeout_s=SLOW_S)
        frozen.system.freeze()
        job.release("fail")
        assert [word.attempt for word in job.hear("ready", 2, timeout_s=SLOW_S)] == [1, 1]
        job.release("end")
        assert job.wait(SLOW_S) == 0


@pytest.mark.slow
def test_a_restart_does_not_wait_for_the_files_of_saferun(tmp_path: Path) -> None:
    """Where only those are dead: the ranks' Python, which reads the start-up hook first, and the script are not."""
    place = f"{tmp_path}/mirror{REPOSITORY}"
    program = f"import runpy, sys; sys.path.insert(0, {place!r}); runpy.run_module('saferun', run_name='__main__')"
    more: dict[str, Any] = {"launcher": (sys.executable, "-c", program), "environ": {"PYTHONPATH": ""}}
    options = (*OPTIONS, "--max-restarts", "1")
    with launched_from(tmp_path, (), FAILS_ONCE, *options, nproc=2, **more) as (job, frozen):
        (rank, _) = job.hear("ready", 2, timeout_s=SLOW_S)
        variables = Path(f"/proc/{rank.pid}/environ").read_text().split("\0")
        (heartbeat,) = (entry for entry in variables if entry.startswith("SAFERUN_HEARTBEAT_FILE="))
        hook = Path(heartbeat.partition("=")[2]).parent / "hook"
        frozen.await_memory()
        until(hook.exists, "the hook is in memory")
        frozen.system.freeze()
        job.release("fail")
        assert [word.attempt for word in job.hear("ready", 2, timeout_s=SLOW_S)] == [1, 1]
        frozen.system.thaw()
        job.release("end")
        assert job.wait(SLOW_S) == 0
        assert "failed first" in job.err
