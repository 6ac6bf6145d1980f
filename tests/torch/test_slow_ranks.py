"""The rank that the others wait for is named over several hosts, and in jobs of gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.process.in_step import IN_STEP, table_of
from tests.process.launching import running, until
from tests.process.test_slow_ranks import reports
from tests.torch.several import hosts

SLOW = " is slow: the other ranks spent "
GLOO = """
from rank import *
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
SLOW, FACTOR = int(sys.argv[1]), float(sys.argv[2])
tell("ready")
while True:
    time.sleep(0.05 * (FACTOR if RANK == SLOW else 1.0))
    is_over = torch.tensor([RANK == 0 and os.path.exists(FOLDER + "/release.end")], dtype=torch.uint8)
    dist.all_reduce(is_over)
    if is_over:
        break
os._exit(0)
"""


@pytest.mark.slow
def test_a_slow_rank_of_one_of_two_hosts_is_named_by_the_first(tmp_path: Path) -> None:
    """With the host it is on; the other host says nothing."""
    (tmp_path / "place").mkdir()
    environs = {"IN_STEP_PLACE": str(tmp_path / "place")}
    arguments = {"arguments": ["3", "1.5"]}
    with hosts(
        tmp_path, IN_STEP, "--slow-window", "3", nproc=2, environs=lambda _: environs, of_each=lambda _: arguments
    ) as jobs:
        until(lambda: SLOW in jobs[0].err, "it is named")
        table = table_of(jobs[0])
        assert [row["rank"] for row in table["ranks"]] == [0, 1, 2, 3]
        jobs[0].release("end")
        assert [job.wait() for job in jobs] == [0, 0]
    assert f"rank 3 ({table['ranks'][3]['host']}){SLOW}" in jobs[0].err
    assert SLOW not in jobs[1].err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("factor", [1.3, 1.0])
def test_a_rank_of_gloo_that_is_slower_is_named_and_an_even_one_is_not(
    tmp_path: Path, ranks: int, factor: float
) -> None:
    program = GLOO
    with running(tmp_path, program, "--slow-window", "6", nproc=ranks, arguments=["2", str(factor)]) as job:
        job.hear("ready", ranks, timeout_s=240.0)
        if factor > 1.0:
            until(lambda: SLOW in job.err, "it is named")
            assert f"rank 2 ({table_of(job)['ranks'][2]['host']}){SLOW}" in job.err
        else:
            reports(job, 12)
        job.release("end")
        assert job.wait() == 0
    assert (SLOW in job.err) == (factor > 1.0)


@pytest.mark.slow
def test_a_rank_of_gloo_that_is_30_percent_slower_is_named_without_any_option(tmp_path: Path) -> None:
    """Within the window that everybody has; the time from which on ranks are compared is another."""
    with running(tmp_path, GLOO, nproc=4, arguments=["2", "1.3"]) as job:
        job.hear("ready", 4, timeout_s=120.0)
        until(lambda: SLOW in job.err, "it is named", timeout_s=120.0)
        assert f"rank 2 ({table_of(job)['ranks'][2]['host']}){SLOW}" in job.err
        job.release("end")
        assert job.wait() == 0
    (found,) = [event for event in job.events() if event["event"] == "RanksSlow"]
    assert found["window_s"] <= 60.0


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1.3, 1.0])
def test_of_gloo_on_two_hosts_the_slow_rank_is_named_and_an_even_one_is_not(tmp_path: Path, factor: float) -> None:
    arguments = {"arguments": ["3", str(factor)]}
    with hosts(tmp_path, GLOO, "--slow-window", "6", nproc=2, of_each=lambda _: arguments) as jobs:
        for job in jobs:
            job.hear("ready", 2, timeout_s=120.0)
        if factor > 1.0:
            until(lambda: SLOW in jobs[0].err, "it is named")
            assert f"rank 3 ({table_of(jobs[0])['ranks'][3]['host']}){SLOW}" in jobs[0].err
        else:
            reports(jobs[0], 12)
        jobs[0].release("end")
        assert [job.wait() for job in jobs] == [0, 0]
    assert (SLOW in jobs[0].err) == (factor > 1.0)
    assert SLOW not in jobs[1].err
