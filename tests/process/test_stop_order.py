"""What a stop from outside does first: ranks that work get the signal at once, a job that hangs is looked at first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.launching import Job, customized, in_saferun, running, until

if TYPE_CHECKING:
    from pathlib import Path

# Works until it is told to stop, writes its checkpoint then, and ends well.
PREEMPTED = """
from rank import *
def stop(signum, frame):
    tell(signal.Signals(signum).name)
    await_release("written")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
tell("ready")
while True:
    time.sleep(0.01)
"""
STUBBORN = """
from rank import *
ignore(signal.SIGTERM)
tell("ready")
def never_ends():
    while True:
        time.sleep(0.01)
never_ends()
"""


def report(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.run_dir / "report.json").read_text())
    return found


def test_ranks_that_work_get_the_signal_before_anybody_looks_at_them(tmp_path: Path) -> None:
    """They are preempted, and every second that they have left is theirs."""
    with running(tmp_path, PREEMPTED, "--shutdown-timeout", "600", nproc=2, store=False) as job:
        job.hear("ready", 2)
        job.send(signal.SIGTERM)
        job.hear("SIGTERM", 2)
        until(lambda: job.has_happened("SignalReceived", state="stopping"), "the event is written")
        assert not job.has_happened("EvidenceCaptured")
        job.release("written")
        assert job.wait() == 1
        assert not job.has_happened("EvidenceCaptured")
        assert "SIGTERM: stopping 2 ranks, SIGKILL follows in 600 s\n" in job.err


@pytest.mark.skipif(
    shutil.which("strace") is None and not os.environ.get("CI"),
    reason="needs strace, which `make test` installs as root",
)
def test_ranks_that_handle_the_signal_have_it_before_saferun_does_anything_else(tmp_path: Path) -> None:
    """A fork, for a look at their shared memory, takes as long as saferun is large; a pane may have much to write."""
    calls = tmp_path / "calls"
    tracer = ("strace", "-D", "-s", "0", "-e", "trace=kill,write,fork,vfork,clone,clone3", "-e", "signal=SIGTERM")
    before = (*tracer, "-o", str(calls))
    with running(tmp_path / "run", PREEMPTED, nproc=3, before=before, store=False) as job:
        job.hear("ready", 3)
        until(lambda: job.has_happened("ModulesImported"), "all is in memory")
        job.send(signal.SIGTERM)
        pids = {word.pid for word in job.hear("SIGTERM", 3)}
        job.release("written")
        assert job.wait() == 1
    _, _, after = calls.read_text(errors="replace").partition("--- SIGTERM ")
    # What follows the signal first is Python's own note of it, in the pipe that wakes the loop.
    lines = [line for line in after.splitlines()[1:] if not line.startswith("write(") or " = 1" not in line]
    # The checks of this host may end at this very moment, and their process with them.
    lines = [line for line in lines if not line.startswith("kill(") or "SIGKILL" not in line or "kill(-" in line]
    assert {line.partition(",")[0] for line in lines[:3]} == {f"kill(-{pid}" for pid in pids}
    assert any(line.startswith(("fork", "vfork", "clone")) for line in lines[3:]), "the test sees no forks"


def test_a_rank_that_does_not_stop_is_looked_at_before_it_is_killed(tmp_path: Path) -> None:
    """At half of its grace; the report says where it was."""
    with running(tmp_path, STUBBORN, "--shutdown-timeout", "20", store=False) as job:
        job.hear("ready")
        job.send(signal.SIGTERM)
        assert job.wait(60) == 1
        assert "never_ends" in json.dumps(report(job))


@pytest.mark.slow
def test_a_job_that_hangs_is_looked_at_before_it_is_cancelled(tmp_path: Path) -> None:
    """It ends by the signal at once, and what it waited for would be gone with it."""
    program = "from rank import *\ndef waits():\n    stay()\ntell('ready')\nwaits()"
    with running(tmp_path, program, "--hang-timeout", "60", nproc=2, store=False) as job:
        job.hear("ready", 2)
        time.sleep(20)  # nothing moves for so long, which is what the test is about
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "so their stacks are captured first" in job.err
        assert "waits" in json.dumps(report(job))


@pytest.mark.slow
def test_ranks_that_work_a_little_get_the_signal_at_once(tmp_path: Path) -> None:
    """1 to 3 % of a core, and no file: a loop that waits may do the same, but they may have something to save."""
    program = "from rank import *\ntell('ready')\nwhile True:\n    sum(range(3000))\n    time.sleep(0.004)"
    with running(tmp_path, program, "--hang-timeout", "60", nproc=2, store=False) as job:
        job.hear("ready", 2)
        time.sleep(20)  # nothing else happens for so long, which is what the test is about
        job.send(signal.SIGTERM)
        assert job.wait() == 1
        assert "so their stacks are captured first" not in job.err


# Whatever has moved, it is a job that hangs which is being cancelled; and py-spy takes forever for rank 1. The look
# has more time than others, for rank 0's stacks and for the end: on a busy machine what came last would be missing.
CUT_SHORT = (
    "import saferun.supervisor.stopping as supervisor, saferun.captures.py_spy as py_spy\n"
    "    import saferun.captures.capture_processes as capture_processes\n"
    "    supervisor._HUNG_S = 0.0\n"
    "    supervisor.CAPTURE_BEFORE_SIGNAL_S = 6.0\n"
    "    capture_processes._WRAP_UP_S = 2.0\n"
    "    plain = py_spy.argv_of\n"
    "    def argv_of(program, pid, *flags):\n"
    "        slow = b'\\0RANK=1\\0' in open(f'/proc/{pid}/environ', 'rb').read()\n"
    "        return ('/bin/sleep', '1000') if slow else plain(program, pid, *flags)\n"
    "    py_spy.argv_of = argv_of"
)


@pytest.mark.slow
def test_a_look_that_is_cut_short_keeps_what_it_has_seen(tmp_path: Path) -> None:
    """What it has not seen is named, on the console and beside the files."""
    program = "from rank import *\ndef waits():\n    stay()\ntell('ready')\nwaits()"
    environ = customized(tmp_path, in_saferun(CUT_SHORT))
    with running(tmp_path / "run", program, "--hang-timeout", "600", nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        until(lambda: job.has_happened("ExaminerReady"), "who looks is ready")
        job.send(signal.SIGTERM)
        assert job.wait(60) == 1
        assert "waits  train.py:3" in job.err, job.err
        assert "captures timed out: py_spy of rank 1" in job.err, job.err
        assert "waits" in json.dumps(report(job))
        (directory,) = job.run_dir.glob("*/attempt_0/failure_1")
        assert json.loads((directory / "rank_0.py_spy.json").read_text())
        assert "captures timed out: py_spy of rank 1" in (directory / "missing.txt").read_text()
