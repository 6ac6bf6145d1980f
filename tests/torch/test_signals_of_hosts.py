"""A scheduler's signal to the saferuns of several hosts, which come a moment apart: what the ranks get."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.breadth import slow_but
from tests.ports import own_port
from tests.process.launching import Job, until
from tests.torch.several import hosts

# Ranks that save a checkpoint at a signal, which takes a while, and then end by themselves.
SAVE = """
from rank import *
tell_signals(signal.SIGUSR1, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP)
tell("ready")
await_release("saved")
"""
HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT,SIGUSR1", "--preflight", "off")


def said(job: Job) -> list[str]:
    return [word.word for word in job.said()]


def end(jobs: list[Job]) -> None:
    """The checkpoints are saved."""
    for job in jobs:
        job.release("saved")
    assert [job.wait(60.0) for job in jobs] == [1, 1], jobs[0].err + jobs[1].err


@pytest.mark.parametrize(("signum", "first"), slow_but([("SIGUSR1", 0), ("SIGQUIT", 1), ("SIGTERM", 0)], "SIGUSR1"))
def test_ranks_of_all_hosts_get_the_signal_that_the_first_of_them_got_and_get_it_once(
    tmp_path: Path, signum: str, first: int
) -> None:
    """By SIGTERM they might die without a checkpoint; twice would be two checkpoints and two requeues."""
    with hosts(tmp_path, SAVE, *HANDLED) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[first].send(signal.Signals[signum])
        for job in jobs:
            job.hear(signum)
        jobs[1 - first].send(signal.Signals[signum])
        until(lambda: jobs[1 - first].has_happened("SignalReceived"), "its own signal")
        end(jobs)
        assert [said(job) for job in jobs] == [[], []]


def test_a_host_that_gets_another_signal_a_moment_later_passes_it_on_once(tmp_path: Path) -> None:
    """Under torchrun its ranks would get nothing but that."""
    with hosts(tmp_path, SAVE, *HANDLED) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].send(signal.SIGUSR1)
        jobs[1].hear("SIGUSR1")
        jobs[1].send(signal.SIGQUIT)
        jobs[1].hear("SIGQUIT")
        jobs[1].send(signal.SIGTERM)
        until(lambda: jobs[1].has_happened("SignalReceived", signum=int(signal.SIGTERM)), "the second one")
        end(jobs)
        assert "SIGQUIT: passed on to 1 rank" in jobs[1].err
        assert [said(job) for job in jobs] == [["SIGUSR1"], []]


@pytest.mark.slow
def test_a_signal_that_stops_no_launch_on_another_host_is_sigterm_there(tmp_path: Path) -> None:
    """Each host knows its own ``--signals-to-handle``, and no other host chooses for it."""
    own = (("--signals-to-handle", "SIGTERM,SIGUSR1"), ("--signals-to-handle", "SIGTERM"))
    with hosts(tmp_path, SAVE, "--preflight", "off", each=lambda number: own[number]) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].send(signal.SIGUSR1)
        jobs[0].hear("SIGUSR1")
        jobs[1].hear("SIGTERM")
        end(jobs)


@pytest.mark.slow
def test_ranks_of_an_elastic_job_get_the_signal_that_all_hosts_get(tmp_path: Path) -> None:
    """The first of the hosts leaves the job by it, and the others would start their ranks again."""
    c10d = ("--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", f"127.0.0.1:{own_port()}")
    options = (*HANDLED, *c10d, "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=5")
    with hosts(tmp_path, SAVE, *options, place=False) as jobs:
        for job in jobs:
            job.hear("ready")
        jobs[0].send(signal.SIGUSR1)
        until(lambda: jobs[1].has_happened("JobAborted"), "the other host has read of it")
        jobs[1].send(signal.SIGUSR1)
        for job in jobs:
            job.hear("SIGUSR1")
        end(jobs)
        assert [said(job) for job in jobs] == [[], []]
