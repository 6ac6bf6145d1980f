"""A file system that stalls on one host of a job ends nothing: the ranks go on, and so does the job."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

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
