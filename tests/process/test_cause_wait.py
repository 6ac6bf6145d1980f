"""The rank that fails first is often a victim: the rank that caused it gets a moment to show its own error."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from tests.process.launching import Job, customized, in_saferun, running, until

if TYPE_CHECKING:
    from pathlib import Path

# Rank 0 loses its connection while rank 1 still cleans up after an error of its own, which Python prints only then.
VICTIM_FIRST = """
from rank import *
if RANK == 0:
    await_release("fail")
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29612")
def clean_up():
    tell("cleans up")
    await_release("end")
try:
    tell("ready")
    raise ValueError("a label is out of range")
finally:
    clean_up()
"""
QUIET = ("--env-profile", "minimal", "--shutdown-timeout", "2")
WAITS = "rank 0 may have failed because of another rank; waiting up to"


def failure(job: Job) -> dict[str, Any]:
    """The incident of the report."""
    report = json.loads((job.run_dir / "report.json").read_text(encoding="utf-8"))
    (incident,) = report["incidents"]
    found: dict[str, Any] = incident
    return found


def test_the_rank_that_shows_its_error_after_its_victim_failed_is_the_cause(tmp_path: Path) -> None:
    with running(tmp_path, VICTIM_FIRST, *QUIET, nproc=2, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        until(lambda: f"{WAITS} 10 s for the error of rank 1" in job.err, "rank 1 is given a moment")
        job.release("end")
        assert job.wait() == 1
        assert failure(job)["cause"]["ranks"] == [1], job.err
        assert "saferun: rank 1 (" in job.err
        assert "failed because of it: rank 0" in job.err
        assert "ValueError: a label is out of range" in job.err


@pytest.mark.slow
def test_a_rank_that_shows_nothing_is_stopped_after_the_wait(tmp_path: Path) -> None:
    with running(tmp_path, VICTIM_FIRST, *QUIET, "--cause-wait", "0.5", nproc=2, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        assert job.wait() == 1
        assert f"{WAITS} 0.5 s" in job.err
        assert "Connection closed by peer" in job.err


@pytest.mark.slow
def test_without_a_wait_ranks_are_stopped_at_once(tmp_path: Path) -> None:
    with running(tmp_path, VICTIM_FIRST, *QUIET, "--cause-wait", "0", nproc=2, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        assert job.wait() == 1
        assert "waiting up to" not in job.err


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_with_the_grace_that_it_always_gives(tmp_path: Path) -> None:
    """The rank that is waited for has done nothing wrong yet."""
    program = VICTIM_FIRST.replace('tell("ready")', 'signal.signal(signal.SIGINT, lambda *_: sys.exit(tell("asked")))')
    with running(tmp_path, program, *QUIET, nproc=2, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        until(lambda: WAITS in job.err, "rank 1 is given a moment")
        job.send(signal.SIGINT)
        job.hear("asked")
        assert job.wait() != 0
        assert "killing" not in job.err


@pytest.mark.slow
def test_a_failure_that_is_a_ranks_own_waits_for_nobody(tmp_path: Path) -> None:
    program = VICTIM_FIRST.replace("Connection closed by peer", "cannot open shard 7")
    with running(tmp_path, program, *QUIET, nproc=2, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        assert job.wait() == 1
        assert "waiting up to" not in job.err
        assert failure(job)["cause"]["ranks"] == [0]


BROKEN_WAIT = """import saferun.launch.cause_wait as wait
    def poll(self, now): raise OSError(5, 'Input/output error')
    wait.CauseWait.poll = poll"""
BROKEN_JUDGEMENT = """import saferun.diagnosis.pending_cause as pending
    def broken(evidence): raise OSError(5, 'Input/output error')
    pending.ranks_that_may_show_it = broken"""


@pytest.mark.parametrize("broken", [BROKEN_WAIT, pytest.param(BROKEN_JUDGEMENT, marks=pytest.mark.slow)])
def test_what_breaks_costs_the_wait_and_nothing_else(tmp_path: Path, broken: str) -> None:
    environ = customized(tmp_path, in_saferun(broken))
    with running(tmp_path / "run", VICTIM_FIRST, *QUIET, nproc=2, environ=environ, store=False) as job:
        job.hear("cleans up")
        job.release("fail")
        assert job.wait() == 1
        assert ("waiting up to" in job.err) is (broken is BROKEN_WAIT)
        assert ("saferun: cannot wait for the cause: OSError: " in job.err) is (broken is BROKEN_WAIT)
        assert "Connection closed by peer" in job.err


OWN_PIPE = """
from rank import *
import subprocess
if RANK == 0:
    viewer = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    viewer.wait()
    await_release("fail")
    viewer.stdin.write(bytes(1 << 20))
    viewer.stdin.flush()
tell("works")
signal.pause()
"""


@pytest.mark.slow
def test_a_broken_pipe_to_a_process_of_its_own_is_not_waited_for(tmp_path: Path) -> None:
    """The other ranks have nothing to show: no other one has failed."""
    with running(tmp_path, OWN_PIPE, *QUIET, "--cause-wait", "250", nproc=2, store=False) as job:
        job.hear("works")
        job.release("fail")
        assert job.wait() == 1
        assert "may have failed because of another rank" not in job.err
        cause = failure(job)["cause"]
        assert (cause["class"], cause["ranks"]) == ("python_exception", [0]), job.err
