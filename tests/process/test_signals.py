"""Signals that are meant for the training script end neither saferun nor a checkpoint that is being written.

``scancel -s USR1`` and ``srun --signal`` reach every process of a step, the ``kill`` of a batch script saferun alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from saferun.linux.procfs import read_name
from saferun.linux.signals import SURVIVED
from tests.breadth import slow_but
from tests.process.launching import Job, kill, kill_reapers, parent_of, read_stat, running, until
from tests.process.test_stop_order import PREEMPTED

if TYPE_CHECKING:
    from pathlib import Path

# Ranks that take a while to write a checkpoint when they are asked for one, and then end well.
CHECKPOINTS = """
from rank import *
import json
asked = []
def ask(signum, frame):
    asked.append(signum)
    tell(signal.Signals(signum).name)
signal.signal(signal.SIGUSR1, ask)
signal.signal(signal.SIGUSR2, ask)
tell("ready")
while not asked:
    time.sleep(0.005)
await_release("written")
open(f"{FOLDER}/checkpoint.{RANK}", "w").write(json.dumps(asked))
"""
WAITS = "from rank import *\ntell('ready')\nawait_release('end')"


def checkpoints(job: Job) -> list[str]:
    return [path.read_text() for path in sorted(job.folder.glob("checkpoint.*"))]


@pytest.mark.parametrize("signum", slow_but([signal.SIGUSR1, signal.SIGUSR2], "SIGUSR1"))
def test_a_signal_to_every_process_lets_the_ranks_finish_their_checkpoint(
    tmp_path: Path, signum: signal.Signals
) -> None:
    """As Slurm signals a step. Each rank has it once: twice would be two checkpoints and two requeues."""
    with running(tmp_path, CHECKPOINTS, nproc=2) as job:
        ranks = {word.pid for word in job.hear("ready", 2)}
        until(lambda: job.has_happened("StoreServed"), "the store is served")
        pids = job.processes()
        assert ranks < {*pids}
        for pid in sorted(pids, key=lambda pid: pid in ranks):
            kill(pid, signum)
        until(lambda: "the job goes on" in job.err, "saferun has taken notice")
        job.release("written")
        assert job.wait() == 0
        assert checkpoints(job) == [f"[{int(signum)}]"] * 2
        assert len(job.said(signum.name)) == 2
        assert f"saferun: {signum.name} was sent to saferun and its ranks; the job goes on\n" in job.err
        assert "passed on" not in job.err


def test_a_signal_to_saferun_alone_is_passed_on_to_ranks_that_handle_it(tmp_path: Path) -> None:
    """``kill -USR1 $!`` in a batch script means them; a rank without a handler would die of it."""
    program = CHECKPOINTS.replace("signal.signal(signal.SIGUSR2, ask)", "if RANK == 2: tell('ready'); stay()")
    program = program.replace("signal.signal(signal.SIGUSR1, ask)", "if RANK < 2: signal.signal(signal.SIGUSR1, ask)")
    with running(tmp_path, program, nproc=3) as job:
        words = job.hear("ready", 3)
        job.send(signal.SIGUSR1)
        job.hear("SIGUSR1", 2)
        job.release("written")
        until(lambda: len(checkpoints(job)) == 2, "both have written")
        (bystander,) = (word.pid for word in words if word.rank == 2)
        assert read_stat(bystander) is not None
        job.send(signal.SIGTERM)
        job.wait()
        assert "saferun: SIGUSR1: passed on to 2 ranks that handle it\n" in job.err


def test_no_signal_that_is_no_order_to_stop_ends_a_job(tmp_path: Path) -> None:
    """To any process of saferun's own, once or often; the ranks here handle none of them."""
    with running(tmp_path, WAITS, nproc=2) as job:
        ranks = {word.pid for word in job.hear("ready", 2)}
        until(lambda: job.has_happened("StoreServed"), "the store is served")
        # Those that stay: the checks and what the examiner has made are soon over.
        children = {pid for pid in job.processes() if pid not in ranks and parent_of(pid) == job.process.pid}
        helpers = {pid for pid in children if read_name(pid).startswith("sr-") or pid == job.coordinator()}
        assert job.reaper() in helpers
        assert job.coordinator() in helpers
        for signum in sorted(SURVIVED):
            for pid in helpers:
                kill(pid, signum)
            job.send(signum)
        until(lambda: job.err.count("the job goes on") >= len(SURVIVED), "each has been taken notice of")
        assert {pid for pid in helpers if read_stat(pid) is not None} == helpers
        assert {pid for pid in ranks if read_stat(pid) is not None} == ranks
        job.release("end")
        assert job.wait() == 0


def test_a_signal_that_is_to_stop_the_job_stops_it(tmp_path: Path) -> None:
    """What the user wrote wins."""
    program = "from rank import *\ntell_signals(signal.SIGUSR1)\ntell('ready')\nawait_release('end')\nsys.exit(7)"
    with running(tmp_path, program, "--signals-to-handle", "SIGTERM,SIGUSR1", nproc=2) as job:
        job.hear("ready", 2)
        job.send(signal.SIGUSR1)
        job.hear("SIGUSR1", 2)
        job.release("end")
        assert job.wait() != 0
        assert "SIGUSR1: stopping 2 ranks" in job.err


def test_ctrl_c_that_is_not_handled_leaves_the_ranks_their_grace(tmp_path: Path) -> None:
    """Torchrun ends by KeyboardInterrupt, and sends SIGTERM on its way out; here the ranks were killed."""
    with running(tmp_path, PREEMPTED, "--signals-to-handle", "SIGTERM,SIGUSR1", nproc=2) as job:
        job.hear("ready", 2)
        job.send(signal.SIGINT)
        job.hear("SIGTERM", 2)
        job.release("written")
        assert job.wait() == 130
        assert "SIGINT: stopping 2 ranks, SIGKILL follows in " in job.err
        # A program that reads how the launch has ended need not know the options.
        run, report = (json.loads((job.run_dir / name).read_text()) for name in ("run.json", "report.json"))
        assert run["end"]["exit_code"] == report["run"]["exit_code"] == 130


def test_a_second_ctrl_c_that_is_not_handled_ends_the_grace(tmp_path: Path) -> None:
    """As of one that is."""
    with running(tmp_path, PREEMPTED, "--signals-to-handle", "SIGTERM", nproc=2) as job:
        job.hear("ready", 2)
        job.send(signal.SIGINT)
        job.hear("SIGTERM", 2)
        until(lambda: "or at the next Ctrl-C" in job.err, "the user is told")
        time.sleep(0.6)  # two at the same moment are one
        job.send(signal.SIGINT)
        assert job.wait() == 130
        assert "SIGINT: killing 2 ranks" in job.err


def test_a_job_without_its_witness_goes_on(tmp_path: Path) -> None:
    """Where nothing tells whether the ranks have got the signal themselves, they are not sent it twice."""
    with running(tmp_path, CHECKPOINTS, nproc=1) as job:
        (rank,) = job.hear("ready")
        kill_reapers(job)
        job.send(signal.SIGUSR1)
        until(lambda: "saferun: SIGUSR1: the job goes on" in job.err, "saferun has taken notice")
        kill(rank.pid, signal.SIGUSR2)
        job.release("written")
        assert job.wait() == 0
        assert checkpoints(job) == [f"[{int(signal.SIGUSR2)}]"]


def test_ranks_find_the_dispositions_that_saferun_was_started_with(tmp_path: Path) -> None:
    """A default is a default to them, and what was ignored is ignored, as under torchrun."""
    program = "import signal; print(*(int(signal.getsignal(one)) for one in (signal.SIGUSR1, signal.SIGUSR2, 50)))"
    (tmp_path / "show.py").write_text(program)
    code = (
        "import os, signal, sys; signal.signal(signal.SIGUSR2, signal.SIG_IGN);"
        "os.execv(sys.executable, [sys.executable, '-m', 'saferun', *sys.argv[1:]])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code, "--run-dir", "none", "--prefix", "none", "show.py"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "SAFERUN_LINT": "off"},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert shown.stdout == b"0 1 0\n"
