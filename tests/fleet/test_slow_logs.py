"""What hosts learn late of each other, by a slow network or a leader that is stopped for a while."""

from __future__ import annotations

import signal

import pytest

from saferun.model import ExitStatus
from saferun.supervisor.events import RestartRequested, SignalReceived
from saferun.supervisor.machine import State
from tests.fleet.fleet import Fleet

OK, FAILED = ExitStatus(0, None), ExitStatus(1, None)


@pytest.mark.parametrize("latency_s", [5e-5, 0.02, 0.05])
@pytest.mark.parametrize("after", [0.5, 1.0])
def test_a_host_whose_ranks_fail_before_it_reads_of_a_restart_is_in_the_next_attempt(
    latency_s: float, after: float
) -> None:
    """Its peers have ended the connections; what it has seen fail is no failure of the job."""
    fleet = Fleet(4, 1, restarts=3, network={"latency_s": latency_s})
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.hosts[1].later(0.01, RestartRequested(fleet.simulation.now, 0, "saferunctl restart"))
        fleet.hosts[2].end_rank(0, FAILED, 0.01 + after * latency_s)
        fleet.run(60.0)
        attempts = {host.supervisor.attempt for host in fleet.hosts}
        assert [host.state for host in fleet.hosts] == [State.RUNNING] * 4
        assert attempts == {1}
        fleet.finish_ranks()
        fleet.await_end(60.0)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish} == {0}


@pytest.mark.parametrize(("after_s", "frozen_s"), [(6.0, 10.0), (2.0, 4.5), (0.01, 5.0)])
def test_a_host_that_is_ended_after_its_ranks_is_not_lost_to_a_leader_that_was_stopped(
    after_s: float, frozen_s: float
) -> None:
    """That its ranks have ended well is written before its coordinator ends."""
    fleet = Fleet(3, 1)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        host, simulation = fleet.hosts[2], fleet.simulation
        fleet.freeze(0, frozen_s)
        host.end_rank(0, OK, after_s)

        def end() -> None:
            if host.state is State.WAITING:
                host.post(SignalReceived(simulation.now, host.supervisor.attempt, signal.SIGTERM))
            else:
                simulation.at(simulation.now + 1e-5, end, host)

        simulation.at(simulation.now + after_s, end, host)
        fleet.run(120.0)
        fleet.finish_ranks()
        fleet.await_end(300.0)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish] == [0, 0, 1]
