"""Two jobs that are started by hand, each without a port and an id of its own, meet at one address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cluster.jobs import SAFERUN, Job, assert_nothing_left, write
from tests.cluster.machines import launchers

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cluster.machines.cluster import Cluster
    from tests.cluster.machines.faults import Host


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--rdzv-id", "both"), marks=pytest.mark.slow)], ids=["nothing", "an-id"]
)
def test_two_jobs_at_the_default_port_do_not_train_together(
    cluster: Cluster, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """Unless an id says that they are one: hosts of a job may run different scripts."""
    scripts = [write(tmp_path, "print('trains', flush=True)\n")]
    scripts.append(str(tmp_path / "other.py"))
    (tmp_path / "other.py").write_text("print('trains on', flush=True)\n")
    hosts = cluster.hosts[:2]

    def command(host: Host) -> tuple[str, ...]:
        number = hosts.index(host)
        place = ("--nnodes", "2", "--node-rank", str(number), "--master-addr", hosts[0].name)
        return (*SAFERUN, *place, *options, scripts[number])

    job = Job(tmp_path, launchers.by_hand(cluster, command, hosts=hosts, cwd=tmp_path))
    codes = job.finish()
    if options:
        assert codes == [0, 0], job.story("a job with an id of its own")
    else:
        assert 0 not in codes, job.story("they trained together")
        name = scripts[0].rpartition("/")[2]
        for process in job.processes:
            assert "trains" not in process.out, job.story("ranks were started")
            assert "another job (script other.py of user " in process.err, job.story("not said on both")
            assert f"on {hosts[0].name} (script {name} of user " in process.err, job.story("not whose it is")
            assert "its own --master-port or --rdzv-id" in process.err, job.story("no hint")
    assert_nothing_left(cluster)
