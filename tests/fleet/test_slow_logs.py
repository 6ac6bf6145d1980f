"""What hosts learn late of each other, by a slow network or a leader that is stopped for a while."""

from __future__ import annotations

import signal

import pytest

from saferun.model import ExitStatus
from saferun.supervisor.events import RestartRequested, SignalReceived
from saferun.supervisor.machine import State
from tests.fleet.fleet import Fleet
from tests.fleet.virtual_host import FleetHost

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


def restarted(failing: int, cores_s: float, seed: int) -> Fleet:
    """A job that a user has started again, one of whose hosts had seen a rank fail before it read of that."""
    fleet = Fleet(4, seed, restarts=3, network={"latency_s": 0.05})
    host = fleet.hosts[failing]
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        host.cores_s, host.pipe_s = cores_s, 0.06
        fleet.hosts[1].later(0.01, RestartRequested(fleet.simulation.now, 0, "saferunctl restart"))
        host.end_rank(0, FAILED, 0.05 if failing else 0.07)
        fleet.await_running(attempt=1)
        fleet.run(10.0)
        assert [host.state for host in fleet.hosts] == [State.RUNNING] * 4, fleet.story()
        assert any(before == "diagnosing" and after == "backoff" for before, after in states(host))
        assert "end" not in fleet.leader.job.current.chunks.names
        fleet.finish_ranks()
        fleet.await_end(60.0)
    return fleet


def states(host: FleetHost) -> list[tuple[str, str]]:
    """The changes of state of a host."""
    return [(entry["before"], entry["after"]) for entry in host.supervisor.story.entries(0.0)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_evidence_that_comes_late_is_none_of_the_next_attempt(seed: int) -> None:
    """A core takes seconds to read; by then all ranks run again."""
    fleet = restarted(2, 4.0, seed)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish} == {0}


@pytest.mark.parametrize("cores_s", [0.3, 0.8, 1.0, 1.3])
def test_a_leader_that_is_late_with_its_evidence_does_not_forget_what_it_waits_for(cores_s: float) -> None:
    """The hosts probe each other by then, and it waits for what they have found."""
    fleet = restarted(0, cores_s, 1)
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


@pytest.mark.parametrize(
    ("state", "is_last"), [(State.STOPPING, False), (State.STOPPING, True), (State.WAITING, False)]
)
def test_a_leader_that_is_evicted_after_its_ranks_stops_a_job_that_is_not_done(state: State, *, is_last: bool) -> None:
    """Also where processes that its ranks have left behind are still waited for; the others would lose their leader."""
    fleet = Fleet(3, 1, restarts=3, network={"latency_s": 0.05})
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        leader, simulation = fleet.leader, fleet.simulation
        for host in fleet.hosts[1:] if is_last else ():
            host.end_rank(0, OK)
        fleet.run(5.0)
        leader.end_rank(0, OK)

        def evict() -> None:
            if leader.state is state:
                leader.post(SignalReceived(simulation.now, 0, signal.SIGTERM))
            else:
                simulation.at(simulation.now + 1e-4, evict, leader)

        simulation.at(simulation.now, evict, leader)
        fleet.await_end(30.0)
    assert [host.finish.exit_code for host in fleet.hosts if host.finish] == [0 if is_last else 1] * 3
