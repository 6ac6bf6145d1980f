"""What each host says on a console that is that of all hosts: it names itself."""

from __future__ import annotations

import re
import signal
import time
from typing import TYPE_CHECKING

from tests.cluster.jobs import STAY, assert_nothing_left, by_hand
from tests.cluster.machines.process import DEADLINE_S

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster

# The rank itself may end before the reaper ends it; what it has started does not.
WITH_A_CHILD = f"import subprocess\nsubprocess.Popen(['sleep', '1000'])\n{STAY}"


def test_what_concerns_one_host_names_it(cluster: Cluster, tmp_path: Path) -> None:
    """No files can be kept, a signal comes, a saferun is killed: each of them is about a host."""
    hosts = cluster.hosts[:2]
    nowhere = ("--run-dir", "/proc/nowhere")
    job = by_hand(cluster, tmp_path, STAY, *nowhere, hosts=hosts)
    job.hear("ready", 2)
    for process, host in zip(job.processes, hosts, strict=True):
        assert f"saferun: {host.name}: no run directory: /proc/nowhere" in process.err, job.story("which host")
    job.processes[1].send_signal(signal.SIGTERM)
    job.finish()
    assert "saferun: SIGTERM on node2: stopping 1 rank, SIGKILL follows" in job.processes[1].err, job.story("which")

    job = by_hand(cluster, tmp_path, WITH_A_CHILD, *nowhere, hosts=hosts)
    job.hear("ready", 2)
    job.processes[0].kill()
    job.finish()
    give_up_at = time.monotonic() + DEADLINE_S
    # The reaper outlives the supervisor for a moment.
    while not re.search("^saferun: the supervisor on node1 was killed; .* ended$", job.processes[0].err, re.MULTILINE):
        assert time.monotonic() < give_up_at, job.story("the reaper does not say where")
        time.sleep(0.01)
    assert_nothing_left(cluster)
