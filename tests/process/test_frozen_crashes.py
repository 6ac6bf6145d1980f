"""Ranks and processes of saferun's own end while every file system that they need does not answer."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.process.frozen import needs_mounts
from tests.process.frozen_places import PLACES, launched_from
from tests.process.launching import kill, until
from tests.process.test_investigation import process_called

pytestmark = needs_mounts

OPTIONS = ("--env-profile", "minimal", "--hang-timeout", "3", "--external-wait-timeout", "0", "--shutdown-timeout", "5")
CRASH = """
import ctypes
from rank import *
def crash():
    if "exception" in sys.argv:
        raise ValueError("a wrong value")
    if "exit" in sys.argv:
        os._exit(7)
    ctypes.string_at(8)
def work():
    tell("at work")
    while True:
        time.sleep(0.01 if "exception" in sys.argv else 1000)
tell("ready")
await_release("crash" if RANK == 1 else "work")
crash() if RANK == 1 else work()
"""
HANG = """
from rank import *
tell("ready")
await_release("hang")
time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("how", "told", "place"),
    [
        ("signal", "killed by SIGSEGV", "all"),
        pytest.param("exit", "exit code 7", "all but run directory", marks=pytest.mark.slow),
    ],
)
def test_a_crash_is_told_while_nothing_can_be_read(tmp_path: Path, how: str, told: str, place: str) -> None:
    """The rank and how it ended, and the launch ends without having waited for a core that cannot be found."""
    # No hang is captured while the ranks wait for the test: a failure meanwhile is told with the stacks taken for that.
    options = (*OPTIONS, "--hang-timeout", "600")
    with launched_from(tmp_path, PLACES[place], CRASH, *options, nproc=2, arguments=(how,)) as (job, frozen):
        job.hear("ready", 2)
        frozen.await_memory()
        frozen.system.freeze()
        job.release("work")
        (worker,) = job.hear("at work")
        # Where it waits tells of what it calls, since no source can be read.
        until(lambda: "nanosleep" in Path(f"/proc/{worker.pid}/wchan").read_text(), "the other rank is asleep")
        job.release("crash")
        assert job.wait() == 1
        (verdict,) = [line for line in job.err.splitlines() if "failed first" in line]
        assert verdict.startswith("saferun: rank 1 ")
        assert told in verdict
        assert "time.sleep  train.py:13 in work" in job.err
        if how == "signal":
            words = f"core: none: no core can be looked for: the file system at {frozen.system.path} does not answer"
            assert words in job.err


@pytest.mark.slow
def test_an_exception_is_told_while_nothing_can_be_read(tmp_path: Path) -> None:
    """Python reads the script for its traceback, and sleeps there: the rank hangs, and is known to have failed."""
    with launched_from(tmp_path, PLACES["all"], CRASH, *OPTIONS, nproc=2, arguments=("exception",)) as (job, frozen):
        job.hear("ready", 2)
        frozen.await_memory()
        frozen.system.freeze()
        job.release("work")
        job.release("crash")
        until(lambda: "saferun: the job hangs: rank 1 " in job.err, "the hang is told")
        until(lambda: "rank 1 has raised an exception, and its traceback is not complete" in job.err, "and why")
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "stopped by SIGTERM" in job.err
        assert "uninterruptible" in job.err


@pytest.mark.slow
def test_an_examiner_that_cannot_be_replaced_is_not_waited_for(tmp_path: Path) -> None:
    """Those that would take its place need files; the hang is told without what they would have seen."""
    with launched_from(tmp_path, PLACES["all"], HANG, *OPTIONS, nproc=2) as (job, frozen):
        job.hear("ready", 2)
        frozen.await_memory()
        frozen.system.freeze()
        kill(process_called("sr-examiner", job), signal.SIGKILL)
        job.release("hang")
        until(lambda: "saferun: the job hangs" in job.err, "the hang is told")
        assert "capture budget exceeded" not in job.err
        assert "saferun: the examiner has ended; another one takes its place" in job.err
        job.send(signal.SIGTERM)
        assert job.wait() == 1
