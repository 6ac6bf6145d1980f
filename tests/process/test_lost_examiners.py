"""The examiner is lost while it looks: another one takes its place, and no third one is waited for."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from saferun.captures.examiner import Examiner
from saferun.linux.poller import Poller
from tests.breadth import slow_but
from tests.process.launching import customized, in_saferun, kill, running, until
from tests.process.test_investigation import TOLD, incidents, process_called

if TYPE_CHECKING:
    from pathlib import Path
from types import SimpleNamespace

HANG = """
from rank import *
tell("ready")
def hold_still():
    stay()
hold_still()
"""
STOPPED = (*TOLD, "--on-hang", "stop", "--shutdown-timeout", "5")
# The second examiner does this to itself before it has begun with anything.
SECOND = (
    "import os, saferun.captures.examiner as run\n"
    "    serve = run.Examiner._serve\n"
    "    def second(self, *arguments):\n"
    "        if self._replaced == 2: os.kill(os.getpid(), {signum})\n"
    "        serve(self, *arguments)\n"
    "    run.Examiner._serve = second"
)

# The first capture process stops itself before it has begun: it is short, and could be over before a test has seen it.
HELD = (
    "import os, saferun.captures.examiner_process as serve\n"
    "    set_name = serve.set_name\n"
    "    def hold(name):\n"
    "        set_name(name)\n"
    "        if name == 'sr-capture' and not os.path.exists({mark!r}):\n"
    "            open({mark!r}, 'w').close()\n"
    "            os.kill(os.getpid(), {signum})\n"
    "    serve.set_name = hold"
)


def holding(folder: Path, then: str = "") -> dict[str, str]:
    """An environment in which the first capture is held; ``then`` is done in saferun as well."""
    held = HELD.format(mark=str(folder / "held"), signum=int(signal.SIGSTOP))
    return customized(folder, in_saferun(f"{held}\n    {then}"))


@pytest.mark.parametrize("signum", slow_but([signal.SIGKILL, signal.SIGSTOP], "SIGKILL"), ids=["SIGKILL", "SIGSTOP"])
def test_a_capture_whose_examiner_is_lost_is_made_by_the_next_one(tmp_path: Path, signum: int) -> None:
    """The whole of it, within the same budget. One that is stopped does not answer, and is ended."""
    program = "from rank import *\ntell('ready')\nawait_release('hang')\ntime.sleep(1000)\n"
    options = (
        "--env-profile",
        "minimal",
        "--hang-timeout",
        "3",
        "--external-wait-timeout",
        "0",
        "--on-hang",
        "stop",
        "--shutdown-timeout",
        "5",
    )
    budget = ("--capture-budget", "60")  # half of it for each of the two, on a busy machine
    environ = holding(tmp_path) if signum == signal.SIGKILL else None
    with running(tmp_path / "run", program, *options, *budget, nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        first = until(lambda: process_called("sr-examiner", job), "the examiner")
        until(lambda: job.has_happened("ExaminerReady"), "it is ready")
        if signum == signal.SIGSTOP:
            kill(first, signum)
            job.release("hang")
        else:
            job.release("hang")
            # Lost in the midst of the capture and not after it.
            until((tmp_path / "held").exists, "the capture process")
            kill(first, signum)
        assert job.wait(60) == 1
        told = "does not answer" if signum == signal.SIGSTOP else "has ended"
        assert job.err.count(f"saferun: the examiner {told}; another one takes its place") == 1, job.err
        hang = incidents(job)[0]
        assert hang["cause"]["location"] == "train.py:4", job.err
        assert hang["timed_out"] == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["SIGKILL", "SIGSTOP"])
def test_a_second_examiner_that_is_lost_is_not_waited_for(tmp_path: Path, signum: int) -> None:
    """The hang is told without what it would have seen, long before the budget is over."""
    environ = holding(tmp_path, SECOND.format(signum=int(signum)))
    options = (*STOPPED, "--capture-budget", "20")
    with running(tmp_path / "run", HANG, *options, nproc=2, environ=environ, store=False) as job:
        job.hear("ready", 2)
        first = until(lambda: process_called("sr-examiner", job), "the examiner")
        until((tmp_path / "held").exists, "the capture process")
        kill(first, signal.SIGKILL)
        assert job.wait(60) == 1
        assert "the examiner has ended; another one takes its place" in job.err
        assert "capture budget exceeded" not in job.err
        assert "saferun: the job hangs" in job.err
        assert "the capture process ended before it was done" in job.err
        assert incidents(job)[0]["outcome"] == "stopped"


def test_each_who_waits_for_the_examiner_learns_whether_it_has_run_since_they_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one asks leaves the other one's answer as it is."""
    run_s = 1.0
    poller = Poller()
    examiner = Examiner(os.environ, poller, warn=lambda _: None)
    monkeypatch.setattr(examiner, "_helper", SimpleNamespace(pids={1}))
    monkeypatch.setattr("saferun.captures.examiner.main_thread_run_s", lambda _pid: run_s)
    monkeypatch.setattr("saferun.captures.examiner.children_of", lambda _pid: set())
    monkeypatch.setattr("saferun.captures.examiner.read_stat", lambda _pid: None)
    assert examiner.runs("a")
    assert not examiner.runs("a")
    assert examiner.runs("b")
    run_s = 2.0
    assert examiner.runs("a")
    assert examiner.runs("b")
    assert not examiner.runs("b")
    poller.close()


@pytest.mark.parametrize(("runs", "kept_s"), [(True, 30.0), (False, 10.0)])
def test_an_examiner_that_waits_for_a_processor_is_kept(
    runs: bool, kept_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would wait for it as well. Half of the budget is left to its replacement in any case."""
    poller, warnings = Poller(), list[str]()
    examiner = Examiner(os.environ, poller, warn=warnings.append)
    monkeypatch.setattr(examiner, "runs", lambda _caller: runs)
    _, fd = examiner.ask("code", [], 60)
    (first,) = examiner.pids
    kill(first, signal.SIGSTOP)
    now = time.monotonic()
    try:
        examiner.tick(now + kept_s - 2)
        assert not warnings
        examiner.tick(now + kept_s + 1)
        assert warnings == ["the examiner does not answer; another one takes its place"]
    finally:
        os.close(fd)
        examiner.close()
        for pid in examiner.pids:
            os.waitpid(pid, 0)
        poller.close()
