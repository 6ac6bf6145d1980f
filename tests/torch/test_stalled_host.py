"""A host that stands still for a while, or whose file systems do, ends nothing: the job goes on with its ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.ports import own_port
from tests.process.frozen import mirror, needs_mounts
from tests.process.frozen_places import PLACES, SLOW_S, Frozen
from tests.torch.several import hosts

# Prints until it may end, and how often it did.
PRINT = """
import os
import time

import rank

rank.tell("ready")
lines = 0
while not os.path.exists(f"{rank.FOLDER}/release.end"):
    print("line", lines, flush=True)
    lines += 1
    time.sleep(0.01)
print("last", flush=True)
"""


@pytest.mark.slow
@needs_mounts
@pytest.mark.parametrize(
    ("place", "which", "host_timeout_s", "frozen_s"),
    [
        ("all", 2, 3.0, 9.0),
        *(pytest.param(place, 2, 3.0, 9.0, marks=pytest.mark.slow) for place in PLACES if place != "all"),
        pytest.param("all", 0, 3.0, 9.0, marks=pytest.mark.slow),
        pytest.param("run directory", 2, 30.0, 120.0, marks=pytest.mark.slow),
        pytest.param("all", 2, 30.0, 120.0, marks=pytest.mark.slow),
    ],
)
def test_a_host_whose_file_systems_are_frozen_is_not_lost(
    tmp_path: Path, place: str, which: int, host_timeout_s: float, frozen_s: float
) -> None:
    """For much longer than a host may be silent; and all that its ranks printed is in its files when they wake."""
    with mirror(tmp_path, Path("/")) as system:
        one = Frozen(system, PLACES[place], tmp_path / f"host{which}")
        arguments = one.arguments()
        environ = arguments.pop("environ")
        with hosts(
            tmp_path,
            PRINT,
            *("--host-timeout", str(host_timeout_s), "--env-profile", "minimal"),
            count=3,
            each=lambda i: one.options() if i == which else ("--run-dir", str(tmp_path / "run")),
            environs=lambda i: environ if i == which else {},
            of_each=lambda i: arguments if i == which else {},
        ) as jobs:
            for job in jobs:
                job.hear("ready", timeout_s=SLOW_S)
            one.await_memory()
            system.freeze()
            try:
                time.sleep(frozen_s)
                assert [job.process.poll() for job in jobs] == [None] * 3, "".join(job.err for job in jobs)
            finally:
                system.thaw()
            for job in jobs:
                job.release("end")
            assert [job.wait(SLOW_S) for job in jobs] == [0] * 3
            said = "".join(job.err for job in jobs)
            assert "is lost" not in said
            assert "missing" not in said
        lines = one.log(which).splitlines()
        assert lines == [*(f"line {i}" for i in range(len(lines) - 1)), "last"]


# The other rank waits for one that tells it when to end, as for a collective.
PAIR = """
import os
import sys

import rank

path = sys.argv[1]
rank.tell("ready")
if os.environ["IS_PAUSED"] == "1":
    rank.await_release("end")
    with open(path, "w") as pipe:
        pipe.write("end")
else:
    with open(path) as pipe:
        pipe.read()
"""
# The elastic job waits for both hosts, however slowly they come.
ELASTIC = ("--nnodes", "1:2", "--rdzv-id", "job", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=120")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "options"),
    [
        pytest.param(0, (), id="leader"),
        pytest.param(1, (), id="other"),
        pytest.param(0, ("--max-restarts", "3"), id="leader of a job with restarts"),
        pytest.param(0, ELASTIC, id="first of an elastic job"),
        pytest.param(1, ELASTIC, id="other of an elastic job"),
    ],
)
def test_a_host_that_is_paused_for_a_while_is_waited_for(tmp_path: Path, which: int, options: tuple[str, ...]) -> None:
    """A virtual machine that is moved: longer than a host may be silent, while all ranks wait for its rank.

    No other attempt could follow: without its leader a static job has none, and an elastic one without restarts.
    """
    path = tmp_path / "pipe"
    os.mkfifo(path)
    is_elastic = options == ELASTIC
    endpoint = ("--rdzv-endpoint", f"127.0.0.1:{own_port()}") if is_elastic else ()
    with hosts(
        tmp_path,
        PAIR,
        *(*options, *endpoint),
        place=not is_elastic,
        environs=lambda i: {"IS_PAUSED": str(int(i == which))},
        arguments=(str(path),),
    ) as jobs:
        for job in jobs:
            job.hear("ready")
        launcher = psutil.Process(jobs[which].process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(50.0)
            assert [job.process.poll() for job in jobs] == [None, None], jobs[0].err + jobs[1].err
            assert "the job ends if no rank makes progress for 300 s" in jobs[1 - which].err
        finally:
            for process in reversed(processes):
                process.send_signal(signal.SIGCONT)
        jobs[which].release("end")
        assert [job.wait(60.0) for job in jobs] == [0, 0], jobs[0].err + jobs[1].err
        said = jobs[0].err + jobs[1].err
        assert "is lost" not in said
        assert "hang" not in said, said
        assert "starting again" not in said, said
