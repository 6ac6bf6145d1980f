"""Hosts that a signal ends while the job can go on without them, as under torchrun."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path

import pytest

from tests.ports import own_port
from tests.process.launching import Job, customized, running, until
from tests.torch.several import hosts

# Before the first restart the ranks stay, and after it they end.
STAY_ONCE = """
from rank import *
tell("ready")
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and not os.path.exists("../again"):
    stay()
print("started again", flush=True)
"""
# In the coordinator of each host: one that is gone once torch's rendezvous is complete is waited for for 5 s, and the
# saferun of the host that GOES is killed then, with its coordinator.
GOES = """
import importlib.machinery, os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "saferun.coordinator.handler_rendezvous":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module._EXCHANGE_S = module._LEAST_EXCHANGE_S = 5.0
            if os.environ["GOES"] == "yes":
                module.HandlerRendezvous._lead = module.HandlerRendezvous._follow = go

        spec.loader.exec_module = exec_module
        return spec

def go(*_, **__):
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

if any(argument.endswith("coordinator/__main__.py") for argument in sys.orig_argv):
    sys.meta_path.insert(0, Finder())
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


@pytest.mark.slow
@pytest.mark.parametrize("nnodes", ["2:3", "3"])
def test_a_host_that_is_killed_as_the_hosts_meet_ends_no_job_that_can_do_without_it(
    tmp_path: Path, nnodes: str
) -> None:
    """Torch's rendezvous had counted it in. An elastic job has enough hosts; in another one a host takes its place."""
    meeting = ("--nnodes", nnodes, "--rdzv-endpoint", f"127.0.0.1:{own_port()}")
    environ = customized(tmp_path, GOES)

    def options(number: int) -> tuple[str, ...]:
        return (*meeting, *C10D, f"is_host={'false' if number else 'true'},last_call_timeout=10")

    def environs(number: int) -> dict[str, str]:
        return {**environ, "GOES": "yes" if number == 2 else "no"}

    program = "from rank import *\nprint('trained', flush=True)"
    with hosts(tmp_path, program, place=False, count=3, each=options, environs=environs) as job:
        assert job[2].wait(60.0) == -signal.SIGKILL
        with contextlib.ExitStack() as stack:
            if nnodes == "3":
                until(lambda: all("starting again" in one.err for one in job[:2]), "they meet again")
                stack.enter_context(running(tmp_path / "next", program, *options(3), nproc=1, environ=environs(3)))
            assert [one.wait(90.0) for one in job[:2]] == [0, 0], job[0].err + job[1].err
    for one in job[:2]:
        assert "saferun: starting again in " in one.err
        assert one.out.count("trained") == 1


@pytest.mark.slow
def test_a_host_that_is_killed_as_the_hosts_meet_and_has_no_successor_ends_the_job(tmp_path: Path) -> None:
    """It is waited for as long as if it had never come."""
    meeting = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{own_port()}", "--start-timeout", "15")
    environ = customized(tmp_path, GOES)

    def options(number: int) -> tuple[str, ...]:
        return (*meeting, *C10D, f"is_host={'false' if number else 'true'}")

    def environs(number: int) -> dict[str, str]:
        return {**environ, "GOES": "yes" if number else "no"}

    with hosts(tmp_path, "from rank import *", place=False, each=options, environs=environs) as (first, second):
        assert second.wait(60.0) == -signal.SIGKILL
        assert first.wait(90.0) == 1, first.err
    assert "saferun: starting again in " in first.err
    assert "the hosts of the job did not come to the rendezvous 'job7'" in first.err
