"""File systems that stop answering while ranks run: those with saferun, Python, its packages and the script.

The ranks run, saferun runs, and from one moment on nothing of either can be opened, listed or read.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.frozen import FileSystem, mirror, needs_mounts
from tests.process.launching import DEADLINE_S, REPOSITORY, Job, running, until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_mounts

SPEAK_AND_HANG = """
import time
from rank import *
def hang():
    time.sleep(1000)
tell("ready")
if RANK == 0:
    await_release("speak")
    print("still here", flush=True)
    tell("spoke")
hang()
"""
OPTIONS = ("--env-profile", "minimal", "--hang-timeout", "3", "--shutdown-timeout", "5")


@contextlib.contextmanager
def running_from(system: FileSystem, folder: Path, program: str, *options: str, **arguments: Any) -> Iterator[Job]:
    """A launch whose saferun, Python, packages, script and current directory are on a file system.

    What it writes, and what the test says to its ranks, is elsewhere.
    """
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    places = [REPOSITORY, Path(sysconfig.get_path("purelib"))]
    environ = {
        "PYTHONPATH": os.pathsep.join(f"{system.path}{place}" for place in places),
        "PATH": os.pathsep.join([f"{system.path}{Path(sys.executable).parent}", os.environ["PATH"]]),
    }
    job_folder = Path(f"{system.path}{folder / 'run' / 'job'}")
    with running(
        folder / "run",
        program,
        *OPTIONS,
        *options,
        "--run-dir",
        str(folder / "run" / "files"),
        environ=environ,
        store=False,
        sweeps=False,
        before=system.before(job_folder),
        launcher=(f"{system.path}{base}", "-m", "saferun"),
        script=(str(job_folder / "train.py"),),
        **arguments,
    ) as job:
        try:
            yield job
        finally:
            system.thaw()
        # What waited for the file system ends as soon as it answers.
        job.wait()
        job.assert_nothing_left(DEADLINE_S)


def await_memory(job: Job) -> None:
    """Return when all that saferun needs is in memory."""

    def is_there() -> bool:
        told = "".join(path.read_text() for path in (job.folder / "files").glob("*/events.jsonl"))
        return "ExaminerReady" in told and "ModulesImported" in told

    until(is_there, "all is in memory")


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=["SIGTERM", "SIGINT"]
)
def test_a_hang_is_told_while_nothing_can_be_read(tmp_path: Path, signum: int) -> None:
    """The console goes on, the hang is told with stacks, and a signal ends the job.

    For the traceback of a Ctrl-C Python reads the script again, so that those ranks cannot be ended: they are named.
    """
    with mirror(tmp_path, Path("/")) as system, running_from(system, tmp_path, SPEAK_AND_HANG, nproc=2) as job:
        job.hear("ready", 2)
        await_memory(job)
        system.freeze()
        job.release("speak")
        job.hear("spoke")
        until(lambda: "still here" in job.out, "the console goes on")
        until(lambda: "saferun: the job hangs" in job.err, "the hang is told")
        assert "sleeps at train.py:5 in hang" in job.err
        assert f"saferun: the file system at {system.path} does not answer" in job.err
        assert "not ready in time" not in job.err
        job.send(signum)
        assert job.wait() == 1
        assert f"stopped by {signal.Signals(signum).name}" in job.err
        if signum == signal.SIGINT:
            assert "uninterruptible" in job.err


@pytest.mark.parametrize("end", ["exit", "crash", "stop"])
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
    with (
        mirror(tmp_path, Path("/")) as system,
        running_from(system, tmp_path, program, nproc=2, arguments=(end,)) as job,
    ):
        job.hear("ready", 2)
        system.freeze()
        if end == "stop":
            job.send(signal.SIGTERM)
        job.release("end")
        assert job.wait() == (0 if end == "exit" else 1)
        if end == "crash":
            assert "rank 1" in job.err
            assert "exit code 3" in job.err
        elif end == "stop":
            assert "stopped by SIGTERM" in job.err
        assert "Traceback" not in job.err
