"""How a job of two hosts ends where one of them cannot be heard at the end: as torchrun's exit barrier lets it end."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.process.launching import Job, kill, state_of, until
from tests.torch.several import hosts

if TYPE_CHECKING:
    from pathlib import Path

# Each rank ends when it is told to.
RANK = """
from rank import *
tell("ready")
await_release("end")
sys.exit(0)
"""


def stop(job: Job) -> list[int]:
    """Stop what speaks to other hosts for this one."""
    coordinator = job.coordinator()
    assert coordinator is not None
    pids = [job.process.pid, coordinator]
    for pid in pids:
        kill(pid, signal.SIGSTOP)
    return pids


def end_rank(job: Job) -> None:
    job.release("end")
    until(lambda: job.has_happened("RankExited"), "the rank ends")


@pytest.mark.parametrize("comes_back", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_leader_whose_ranks_have_ended_waits_for_the_only_other_host(tmp_path: Path, *, comes_back: bool) -> None:
    """Which may be at work: nothing shows that. It is named, and the wait is bounded."""
    with hosts(tmp_path, RANK, "--host-timeout", "2") as (leader, other):
        heard = [job.hear("ready") for job in (leader, other)]
        end_rank(leader)
        pids = stop(other)
        well = "every rank that has reported ended with exit code 0"
        until(lambda: f"{well}; waiting for 20 s at most" in leader.err, "it says so")
        assert "warning: no heartbeat received from " in leader.err
        assert leader.process.poll() is None
        if not comes_back:
            assert leader.wait() == 0
            assert f" for 20 s; {well}" in leader.err
            # Where there is no leader any more, a rank that still runs would be ended.
            (rank,) = {word.pid for word in heard[1]}
            other.release("end")
            until(lambda: not state_of(rank), "the other host's rank has ended")
        for pid in pids:
            kill(pid, signal.SIGCONT)
        other.release("end")
        assert [job.wait() for job in (leader, other)] == [0, 0]
        assert "is lost" not in leader.err + other.err
