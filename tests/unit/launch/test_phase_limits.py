"""How long the phases of a launch may last, by its settings."""

from __future__ import annotations

import pytest

from saferun.config import HostsConfig
from saferun.launch.entry import _open_supervisor
from tests.unit.samples import CONFIG


@pytest.mark.parametrize(
    ("backend", "variable", "waits"),
    [("c10d", "", True), ("static", "", False), ("c10d", "SLURM_JOB_ID", False), ("etcd", "PBS_JOBID", False)],
)
def test_a_batch_system_ends_all_hosts_of_a_job(
    monkeypatch: pytest.MonkeyPatch, backend: str, variable: str, waits: bool
) -> None:
    """There a host that gets SIGTERM has no successor."""
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "4711")
    config = CONFIG._replace(hosts=HostsConfig(2, 2, 0), rendezvous=CONFIG.rendezvous._replace(backend=backend))
    assert _open_supervisor(config)[0]._launch.job.awaits_successors is waits


@pytest.mark.parametrize(
    ("backend", "is_bounded"), [("static", True), ("etcd", True), ("c10d", False), ("etcd-v2", False)]
)
def test_a_host_beyond_the_maximum_waits_until_it_is_needed(backend: str, is_bounded: bool) -> None:
    """Days, if the others train for days; who waits for too few hosts gives up by itself, in torch's handler."""
    config = CONFIG._replace(hosts=HostsConfig(1, 2, 0), rendezvous=CONFIG.rendezvous._replace(backend=backend))
    limits = _open_supervisor(config)[0]._launch.limits
    assert (limits.join_s < 7200) is is_bounded
    assert is_bounded or limits.join_s > 30 * 86400
