"""Networks that are away for a while, in virtual time: no host may be lost for it that torchrun would have kept."""

from __future__ import annotations

import pytest

from saferun.cluster.meeting import _REJOIN_TIMEOUT_S
from saferun.config import LaunchConfig
from saferun.launch.entry import _JOIN_BACKSTOP_S
from saferun.supervisor.machine import State
from tests.fleet import virtual_host
from tests.fleet.fleet import Fleet

_AT_ONCE_S = 5.0
_OTHERS = {1, 2, 3}
# From one sample of the ranks to the next one, and what a probe takes.
_FOUND_S = 20.0
# When a host takes another one for lost.
_SILENT_S = 24.0


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hosts of a fleet have an elastic job, as far as their patience goes: how they meet is another matter."""
    fixed = virtual_host._config

    def config_of(fleet: Fleet, number: int) -> LaunchConfig:
        config = fixed(fleet, number)
        assert config.retry.start_retries
        return config._replace(hosts=config.hosts._replace(least=fleet.count - 1))

    monkeypatch.setattr(virtual_host, "_config", config_of)


def _ends_well(fleet: Fleet) -> bool:
    fleet.stopped_at = None
    fleet.run(5.0)
    fleet.finish_ranks()
    fleet.await_end(_AT_ONCE_S)
    return {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}


@pytest.mark.parametrize("after_s", [20.0, 45.0, 60.0, 85.0])
def test_a_rank_that_fails_while_the_leader_cannot_be_reached_costs_a_restart_and_not_the_job(after_s: float) -> None:
    """A switch restarts, for longer than the other fabric of the ranks bears it. The leader has lost its hosts by then.

    Under torchrun each agent starts its ranks again, and they meet as soon as there is a network.
    """
    fleet = Fleet(4, restarts=3, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.stopped_at = fleet.simulation.now
        fleet.network.divide(_OTHERS)
        fleet.run(after_s)
        fleet.fail(1)
        fleet.run(90.0 - after_s)
        assert fleet.hosts[1].state is State.DIAGNOSING, fleet.story()
        fleet.network.heal()
        fleet.await_running(300.0, attempt=1)
        assert _ends_well(fleet), fleet.story()


def test_a_host_whose_rank_fails_while_the_leader_is_off_ends_within_bounds() -> None:
    """It waits for a decision that never comes, and says so; the others wait for ranks that show no progress."""
    fleet = Fleet(4, restarts=3, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(0)
        fleet.run(60.0)
        fleet.fail(1)
        failed = fleet.hosts[1]
        assert 100.0 < fleet.run(300.0, lambda: failed.finish) < 200.0, fleet.story()
        fleet.await_end(600.0)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish is not None] == [1, 1, 1], fleet.story()


def _probing(*, restarts: int = 0, spares: int = 0) -> Fleet:
    return Fleet(4 + spares, restarts=restarts, spares=spares, is_patient=True, start_timeout_s=120.0)


def _await_probing(fleet: Fleet) -> None:
    hosts = fleet.hosts[: fleet.count - fleet.spares]
    # A host has no supervisor before it has begun.
    fleet.run(60.0, lambda: all(hasattr(host, "supervisor") and host.state is State.PROBING for host in hosts))
    assert all(host.state is State.PROBING for host in hosts), fleet.story()


@pytest.mark.parametrize("outage_s", [6.0, 12.0, 25.0, 40.0])
@pytest.mark.parametrize("who", [0, 2])
def test_a_network_that_is_away_while_the_hosts_probe_each_other_ends_no_job(who: int, outage_s: float) -> None:
    """Once the ranks run such a silence is none, and under torchrun TCP sends again what is lost."""
    fleet = _probing()
    with fleet.running():
        _await_probing(fleet)
        fleet.network.divide({who})
        fleet.run(outage_s)
        fleet.network.heal()
        fleet.await_running(60.0)
        fleet.run(30.0)
        assert _ends_well(fleet), fleet.story()
    assert "abort" not in _kinds(fleet)


def _kinds(fleet: Fleet) -> list[str]:
    return [entry["kind"] for entry in fleet.entries[0]]


@pytest.mark.parametrize(("restarts", "spares"), [(0, 0), (1, 0), (0, 1)])
def test_a_host_that_dies_while_the_hosts_probe_each_other_is_lost_within_bounds(restarts: int, spares: int) -> None:
    """Its silence is found as while ranks run: where no other attempt can follow, after the hang timeout."""
    fleet = _probing(restarts=restarts, spares=spares)
    with fleet.running():
        _await_probing(fleet)
        fleet.power_off(2)
        within_s = 60.0 if restarts or spares else 300.0 + _FOUND_S

        assert fleet.run(400.0, lambda: "abort" in _kinds(fleet) if 0 in fleet.entries else False) < within_s
        if spares:
            fleet.await_running(300.0, attempt=1)
            assert _ends_well(fleet), fleet.story()
            return
        fleet.await_end(300.0)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish is not None] == [1, 1, 1], fleet.story()
    (lost,) = [entry for entry in fleet.entries[0] if entry["kind"] == "abort"]
    assert (lost["reason"], lost["text"].partition(":")[0]) == ("lost", "node2"), fleet.story()


def _capture_hang(fleet: Fleet) -> None:
    """The leader waits for what the others have captured of a hang, which is only reported."""
    leader = fleet.leader
    fleet.simulation.at(
        fleet.simulation.now, lambda: leader.job.collect("hang-1", 32.0, lambda _: None, attempt=0), leader
    )
    fleet.simulation.at(fleet.simulation.now, leader._set_alarm, leader)


@pytest.mark.parametrize("outage_s", [6.0, 12.0, 20.0])
def test_a_network_that_is_away_while_a_hang_is_captured_ends_no_job(outage_s: float) -> None:
    """The hang may be a slow evaluation: it is reported, and the job goes on."""
    fleet = Fleet(4, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.network.divide({2})
        _capture_hang(fleet)
        fleet.run(outage_s)
        fleet.network.heal()
        fleet.run(30.0)
        assert _ends_well(fleet), fleet.story()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_host_that_dies_while_a_hang_is_captured_is_lost_within_bounds(restarts: int) -> None:
    """As at any other moment."""
    fleet = Fleet(4, restarts=restarts, is_patient=True, start_timeout_s=120.0)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(2)
        _capture_hang(fleet)
        within_s = 60.0 if restarts else 300.0 + _FOUND_S
        assert fleet.run(400.0, lambda: "abort" in _kinds(fleet)) < within_s
        fleet.await_end(300.0)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish is not None] == [1, 1, 1], fleet.story()


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize("after_s", [0.0, 20.0, 60.0])
def test_a_host_of_an_elastic_job_that_stands_still_soon_after_the_start_is_waited_for(after_s: float) -> None:
    """A virtual machine is moved. Without restarts its loss would be the end of the job, while torchrun waits."""
    fleet = Fleet(4, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(after_s)
        fleet.stopped_at = fleet.simulation.now
        fleet.freeze(2, 50.0)
        fleet.run(50.0)
        assert all(host.state is State.RUNNING for host in fleet.hosts), fleet.story()
        fleet.stopped_at = None
        fleet.run(60.0)
        assert _ends_well(fleet), fleet.story()


@pytest.mark.usefixtures("elastic")
def test_a_host_of_an_elastic_job_that_dies_soon_after_the_start_is_lost_after_the_hang_timeout() -> None:
    """It does not come back; if the start had not been over, it would be tried again then without that host."""
    fleet = Fleet(4, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.power_off(2)
        assert 300.0 < fleet.run(400.0, lambda: "abort" in _kinds(fleet)) < 300.0 + _FOUND_S
        fleet.await_end(_AT_ONCE_S)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish is not None] == [1, 1, 1], fleet.story()
    (warning,) = fleet.leader.lines
    assert "no heartbeat received from node2" in warning
    assert "the job ends if no rank makes progress for 300 s" in warning


@pytest.mark.parametrize("outage_s", [30.0, 40.0, pytest.param(80.0, marks=pytest.mark.slow)])
def test_a_host_whose_place_a_spare_has_taken_while_its_network_was_away_does_not_end_the_job(outage_s: float) -> None:
    """It has lost the leader, and no spare leads. Any exit code but 0 would end the step, with the others' ranks."""
    fleet = Fleet(5, spares=1, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.stopped_at = fleet.simulation.now
        away = fleet.hosts[2]
        fleet.network.divide({2})
        fleet.run(outage_s)
        fleet.network.heal()
        fleet.run(5.0)
        fleet.stopped_at = None
        joins_s = outage_s - _SILENT_S + fleet.run(200.0, lambda: away.finish)
        assert away.finish is not None, fleet.story()
        assert away.finish.exit_code == 0, fleet.story()
        assert joins_s < _REJOIN_TIMEOUT_S + _JOIN_BACKSTOP_S - _AT_ONCE_S
        assert all(1 in host.running_since for host in fleet.hosts if host is not away), fleet.story()
        assert _ends_well(fleet), fleet.story()


def test_a_host_that_no_network_leads_to_any_more_ends_with_the_reason() -> None:
    """It has lost the leader, no spare leads, and the leader does not come back."""
    fleet = Fleet(5, spares=1, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.stopped_at = fleet.simulation.now
        away = fleet.hosts[2]
        fleet.network.divide({2})
        assert fleet.run(200.0, lambda: away.finish) < 110.0, fleet.story()
        assert away.finish is not None
        assert away.finish.exit_code == 1
