"""A file system that stalls on one host of a job ends nothing: the ranks go on, and so does the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.process.frozen import frozen_disk, needs_mounts
from tests.torch.several import hosts

if TYPE_CHECKING:
    from pathlib import Path

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


@needs_mounts
@pytest.mark.parametrize(
    ("host_timeout_s", "frozen_s"), [(3.0, 9.0), pytest.param(30.0, 120.0, marks=pytest.mark.slow)]
)
def test_a_host_whose_run_directory_is_frozen_is_not_lost(
    tmp_path: Path, host_timeout_s: float, frozen_s: float
) -> None:
    """For much longer than a host may be silent; and all that it printed is in its file when that wakes."""
    (tmp_path / "frozen").mkdir()
    with frozen_disk(tmp_path / "frozen") as disk:
        run_dirs = [tmp_path / "run", disk.path / "run"]
        with hosts(
            tmp_path,
            PRINT,
            *("--host-timeout", str(host_timeout_s)),
            each=lambda i: ("--run-dir", str(run_dirs[i])),
            before=disk.before(),
        ) as jobs:
            for job in jobs:
                job.hear("ready")
            disk.freeze()
            try:
                time.sleep(frozen_s)
                assert [job.process.poll() for job in jobs] == [None, None], jobs[0].err
            finally:
                disk.thaw()
            for job in jobs:
                job.release("end")
            assert [job.wait(60.0) for job in jobs] == [0, 0]
            said = "".join(job.err for job in jobs)
            assert "is lost" not in said
            assert said.count("warning: ") <= 1
        (log,) = disk.inside(run_dirs[1]).glob("**/rank_1/stdout.log")
        lines = log.read_text().splitlines()
        assert lines == [*(f"line {i}" for i in range(len(lines) - 1)), "last"]
