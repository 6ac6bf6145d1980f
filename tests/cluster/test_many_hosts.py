"""Many hosts form a job, fail, and say who failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import DIE_WHEN_RELEASED, Way, assert_nothing_left, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.conftest import MakeCluster

HOSTS = 64


@pytest.mark.slow
def test_sixty_four_hosts_form_a_job_fail_and_name_the_failing_rank(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """One of them names it for all on the console of srun, and the report has a place for every host."""
    cluster = make_cluster(HOSTS, slurm=True)
    began_at = time.monotonic()
    job = start(cluster, Way("srun"), tmp_path, DIE_WHEN_RELEASED, nproc=1)
    job.hear("ready", HOSTS)
    met_at = time.monotonic()
    job.release("die.62")
    assert job.finish() == [1], job.story("another exit code")
    print(f"met after {met_at - began_at:.1f} s, ended after {time.monotonic() - met_at:.1f} s more")
    named = job.saferun_said(r"saferun: rank 62 \(node63, local rank 0, pid \d+\) failed first .*SIGKILL")
    assert len(named) == 1, job.story("not named once")
    (report,) = job.reports
    (incident,) = report["incidents"]
    assert incident["cause"]["ranks"] == [62]
    assert len(incident["hosts"]) == HOSTS
    assert len(list(tmp_path.glob("saferun-runs/[0-9]*/node*/events.jsonl"))) == HOSTS
    assert_nothing_left(cluster)
