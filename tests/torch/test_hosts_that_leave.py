"""Hosts that a signal ends while the job can go on without them, as under torchrun."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.ports import own_port
from tests.process.launching import Job, running, until
from tests.torch.several import hosts

# Before the first restart the ranks stay, and after it they end.
STAY_ONCE = """
from rank import *
tell("ready")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not os.path.exists("../again"):
    stay()
print("started again", flush=True)
"""
C10D = ("--rdzv-backend", "c10d", "--rdzv-id", "job7", "--max-restarts", "1", "--rdzv-conf")


@pytest.mark.slow
@pytest.mark.parametrize("nnodes", ["2", "2:3"])
def test_the_place_of_a_pod_that_is_evicted_is_kept_for_its_successor(tmp_path: Path, nnodes: str) -> None:
    """Its node is drained: all hosts but the one that has the endpoint may go, where restarts are left."""
    meeting = ("--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{own_port()}")

    def options(number: int) -> tuple[str, ...]:
        return (*meeting, *C10D, f"is_host={'false' if number else 'true'}")

    with hosts(tmp_path, STAY_ONCE, place=False, each=options) as (first, second):
        for job in (first, second):
            job.hear("ready")
        for job in (first, second):
            (job.folder / "again").touch()
        second.send(signal.SIGTERM)
        assert second.wait(60.0) == 1, second.err
        until(lambda: "leaves the job" in first.err, "the other host waits")
        with running(tmp_path / "third", STAY_ONCE, *options(2), nproc=1) as third:
            (third.folder / "again").touch()
            assert [third.wait(60.0), first.wait(60.0)] == [0, 0], first.err + third.err
        assert first.out.count("started again") == third.out.count("started again") == 1


def await_end_of_ranks(job: Job) -> None:
    until(lambda: job.has_happened("RankExited"), "its rank ends")
    until(lambda: job.has_happened("OrphansGone"), "and what it left")


@pytest.mark.slow
@pytest.mark.parametrize("signum", ["SIGTERM", "SIGINT"])
def test_a_host_whose_ranks_have_ended_well_can_be_ended_alone(tmp_path: Path, signum: str) -> None:
    """Rank 0 still writes the last checkpoint, and the other node is drained."""
    program = """
from rank import *
tell("ready")
if os.environ["RANK"] == "0":
    await_release("end")
"""
    with hosts(tmp_path, program) as (first, second):
        for job in (first, second):
            job.hear("ready")
        await_end_of_ranks(second)
        second.send(signal.Signals[signum])
        assert second.wait(60.0) == 1, second.err
        assert "all ranks of this host have ended well, and it does not wait for the others" in second.err
        first.release("end")
        assert first.wait(60.0) == 0, first.err
