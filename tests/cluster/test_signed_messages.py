"""Hosts of a Slurm cluster share a secret by munge, and sign what they tell each other, without any option."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.breadth import slow_but
from tests.cluster.jobs import DIE_WHEN_RELEASED, Way, assert_nothing_left, by_hand, start

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

DONE = """
tell("ready")
await_release("end")
"""


def signed_by(run: Path) -> list[tuple[int, str, str]]:
    """For each attempt and host: by which secret its messages are signed, or why by none."""
    events = [
        json.loads(line) for path in sorted(run.glob("node*/events.jsonl")) for line in path.read_text().splitlines()
    ]
    return sorted(
        (e["attempt"], e["signed_by"], e["unsigned_reason"]) for e in events if e["event"] == "MessagesSigned"
    )


@pytest.mark.parametrize("tasks", slow_but([1, 2], "2"), ids=["a task a host", "a task a rank"])
def test_hosts_of_slurm_sign_their_messages_by_munge(cluster: Cluster, tmp_path: Path, tasks: int) -> None:
    """Also after a restart; and no file is made for it."""
    run = tmp_path / "run"
    options = ("--run-dir", str(run), "--max-restarts", "1")
    job = start(cluster, Way("srun", tasks), tmp_path, DIE_WHEN_RELEASED, *options)
    job.hear("ready", 8)
    job.release("die.3")
    job.hear("ready", 8, attempt=1)
    # A release is for good: the rank has died again.
    assert 0 not in job.finish(), job.story("the failure was lost")
    # Of several tasks of a host the first one writes events.jsonl.
    assert signed_by(run) == [(0, "munge", "")] * 4 + [(1, "munge", "")] * 4
    assert not list(tmp_path.rglob(".private-*"))
    assert not job.saferun_said("saferun: warning: .*sign"), job.story("something was said")
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_a_host_whose_munged_hangs_has_the_job_run_unsigned(cluster: Cluster, tmp_path: Path) -> None:
    """The first host says so in one line, and the job goes on."""
    node3 = cluster.hosts[2]
    munged = node3.pids("munged")
    node3.freeze(munged)
    try:
        job = by_hand(cluster, tmp_path, DONE, "--nproc-per-node", "1", hosts=cluster.hosts)
        job.hear("ready", 4)
    finally:
        node3.thaw(munged)
    job.release("end")
    assert set(job.finish()) == {0}, job.story("failed")
    said = job.saferun_said("saferun: warning: messages between the hosts are not signed")
    assert said == ["saferun: warning: messages between the hosts are not signed: node3 did not take the secret"]
    (run,) = tmp_path.glob("saferun-runs/[0-9]*")
    assert [by for _, by, _ in signed_by(run)] == [""] * 4
    assert [why for _, _, why in signed_by(run) if why.startswith("munge")] == ["munge: unmunge did not end within 3 s"]
