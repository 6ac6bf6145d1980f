"""The clocks of real hosts that differ: by how much is measured, and decides who was first."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cluster.faulted import FaultedJob

if TYPE_CHECKING:
    from tests.cluster.conftest import MakeCluster
    from tests.cluster.machines.faults import Host

_EXACT_S = 0.005
_APART_S = 0.3
# Each fails by itself at its own moment, of the clock that all hosts have in common: none has been told of the other.
_FAIL_IN_TURN = f"""
await_release("end")
at = float(open(f"{{FOLDER}}/at").read()) + {{1: {_APART_S}, 2: 0.0}}.get(RANK, 3600.0)
time.sleep(max(0.0, at - time.monotonic()))
raise ValueError("a label is out of range")
"""


def _measured(job: FaultedJob, host: Host) -> list[tuple[float, float]]:
    """How far a host has noted its clock to be ahead, and by how much that may be wrong on a machine that is busy."""
    log = job.run_dir / host.name / "events.jsonl"
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    return [(line["ahead_s"], line["error_s"]) for line in lines if line["event"] == "ClockMeasured"]


@pytest.mark.slow
def test_the_first_failure_is_the_first_by_one_clock(make_cluster: MakeCluster, tmp_path: Path) -> None:
    """The clock of the host that fails second is behind: by its own clock it fails first, minutes before the other."""
    cluster = make_cluster(3)
    _, node2, node3 = cluster.hosts
    ahead_s = {node2: -200, node3: 7}
    for host, seconds in ahead_s.items():
        host.shift_clock(seconds)
    job = FaultedJob(cluster, tmp_path, _FAIL_IN_TURN)
    job.job.until(lambda: all(_measured(job, host) for host in ahead_s), "the clocks are measured")
    job.now()
    (tmp_path / "at").write_text(str(time.monotonic() + 1.0))
    job.job.release("end")
    assert set(job.end().values()) == {1}
    for host, seconds in ahead_s.items():
        found_s, error_s = _measured(job, host)[-1]
        assert found_s == pytest.approx(seconds, abs=max(_EXACT_S, error_s)), job.story("not exact")
    assert re.search(r"rank 2 \(node3, local rank 0, pid \d+\) failed first", job.said(cluster.hosts[0])), job.story(
        "?"
    )
