"""How long the phases of a launch may last, by its settings."""

from __future__ import annotations

import signal

import pytest

from saferun.cli.main import read_config
from saferun.config import HostsConfig
from saferun.coordinator import waiting_notice
from saferun.launch.entry import _job_policy, _limits
from saferun.supervisor.policy import JobPolicy
from tests.unit.samples import CONFIG


@pytest.mark.parametrize(
    ("backend", "environ", "waits"),
    [
        ("c10d", {}, True),
        ("static", {}, False),
        ("c10d", {"SLURM_JOB_ID": "4711"}, False),
        ("c10d", {"FLUX_JOB_ID": "f4711"}, False),
        ("c10d", {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, True),
    ],
)
def test_a_batch_system_ends_all_hosts_of_a_job(backend: str, environ: dict[str, str], waits: bool) -> None:
    """There a host that gets SIGTERM has no successor."""
    words = ["--nnodes", "2", "--rdzv-backend", backend, "--rdzv-endpoint", "node1:29400", "--rdzv-id", "job", __file__]
    config = read_config(words, environ)
    assert _job_policy(config, 0.0).awaits_replacement_host is waits


@pytest.mark.parametrize(
    ("words", "environ", "least"),
    [
        ([], {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "1:3"}, 3),
        (["--nnodes", "1:3"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "PET_NNODES": "1:3"}, 1),
        (["--nnodes", "1:3"], {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 1),
        ([], {"PET_NNODES": "1:3"}, 1),
    ],
)
def test_no_host_is_left_out_where_an_operator_takes_its_exit_code_for_the_end_of_the_job(
    words: list[str], environ: dict[str, str], least: int
) -> None:
    """A PyTorchJob with an elasticPolicy has succeeded as soon as one worker ends with 0, as a host left out does."""
    words = [*words, "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:29400", "--rdzv-id", "job", __file__]
    config = read_config(words, environ)
    assert config.hosts.least == 1
    assert _job_policy(config, 0.0).least_hosts == least


def test_a_signal_that_another_host_got_may_be_one_that_stops_this_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under nohup, SIGHUP is none: the ranks ignore it as well, and would be killed after their grace."""
    config = read_config(["--nnodes", "2", "--node-rank", "1", "--master-addr", "node1", __file__], {})
    assert _job_policy(config, 0.0).stop_signals == JobPolicy().stop_signals
    with_usr1 = read_config(["--signals-to-handle", "SIGHUP,SIGUSR1", __file__], {})
    assert _job_policy(with_usr1, 0.0).stop_signals == (signal.SIGHUP, signal.SIGUSR1)
    monkeypatch.setattr(signal, "getsignal", lambda signum: signal.SIG_IGN if signum == signal.SIGHUP else None)
    assert _job_policy(with_usr1, 0.0).stop_signals == (signal.SIGUSR1,)


@pytest.mark.parametrize(
    ("backend", "is_bounded"), [("static", True), ("etcd", True), ("c10d", False), ("etcd-v2", False)]
)
@pytest.mark.parametrize("least", [1, 2])
def test_a_host_beyond_the_maximum_waits_until_it_is_needed(least: int, backend: str, is_bounded: bool) -> None:
    """Days, if the others train for days; who waits for too few hosts gives up by itself, in torch's handler."""
    config = CONFIG._replace(hosts=HostsConfig(least, 2, 0), rendezvous=CONFIG.rendezvous._replace(backend=backend))
    limits = _limits(config)
    assert limits.join_s < 7200
    assert (limits.awaited_s == 0.0) is is_bounded
    assert is_bounded or limits.awaited_s > waiting_notice._LONGEST_REPORT_S + 600.0
