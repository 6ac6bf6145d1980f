"""The coordinators, jobs and supervisors of many hosts, in virtual time: whatever happens to hosts and network.

The laws are checked at every step (``Fleet.note_entry`` and the like): one decision, the same entries in the same order
everywhere, ranks in the same attempt everywhere. At the end everybody has ended, as was decided, and nothing is lost.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import NamedTuple

import pytest

from saferun.supervisor.events import RestartRequested, SignalReceived, StopRequested
from saferun.supervisor.machine import State
from tests.fleet.fleet import Fleet, LawError

# Of the host timeout and what probes take.
_LOST_S = 60.0
_AT_ONCE_S = 5.0
_SLOW_START_S = 0.25  # a host, where the leader is slow
_CLOCKS_S = 0.005  # a host: then the leader has measured all clocks
_CLOCK_S = 0.005
_WORST_CLOCK_S = 0.25  # what may be further off is not used


class Scenario(NamedTuple):
    """What happens while all ranks run, and how it has to end.

    ``within_s``: all have ended so long after it. ``code``: their exit code. ``silent``: of whom no evidence can come;
    None: the leader itself is lost, and gets none.
    """

    happens: Callable[[Fleet], object]
    within_s: float
    code: int
    silent: Callable[[Fleet], set[int]] | None = lambda _: set()
    network: dict[str, float] = {}  # noqa: RUF012 - never changed


def _some(fleet: Fleet, part: float = 0.01) -> list[int]:
    """A part of the hosts, two at least, and not the leader."""
    return fleet.simulation.random.sample(range(1, fleet.count), max(2, round(part * fleet.count)))


def _divided(fleet: Fleet) -> set[int]:
    return set(range(fleet.count // 2, fleet.count))


def _divide_and_heal(fleet: Fleet) -> None:
    fleet.network.divide(_divided(fleet))
    fleet.run(60.0)
    fleet.network.heal()
    fleet.run(60.0)
    fleet.finish_ranks()


def _divide_all(fleet: Fleet) -> None:
    """The ranks' own network is cut as well, so that they stop."""
    fleet.stopped_at = fleet.simulation.now
    fleet.network.divide(_divided(fleet))


def _freeze_leader(fleet: Fleet) -> None:
    fleet.freeze(0, 20.0)
    fleet.run(60.0)
    fleet.finish_ranks()


SCENARIOS = {
    "all end well": Scenario(Fleet.finish_ranks, _AT_ONCE_S, 0, None),
    "a rank fails": Scenario(lambda fleet: fleet.fail(fleet.count // 2), _AT_ONCE_S, 1),
    "ranks of many hosts fail": Scenario(lambda fleet: fleet.fail(*_some(fleet)), _AT_ONCE_S, 1),
    "all ranks fail": Scenario(lambda fleet: fleet.fail(*range(fleet.count)), _AT_ONCE_S, 1),
    "a host is off": Scenario(lambda fleet: fleet.power_off(2), _LOST_S, 1, lambda _: {2}),
    "a saferun is killed": Scenario(lambda fleet: fleet.kill(2), _LOST_S, 1, lambda _: {2}),
    "the leader is off": Scenario(lambda fleet: fleet.power_off(0), _LOST_S, 1, None),
    "the leader is killed": Scenario(lambda fleet: fleet.kill(0), _AT_ONCE_S, 1, None),
    "the leader stands still": Scenario(_freeze_leader, _AT_ONCE_S, 0, None),
    "the network is divided for a while": Scenario(_divide_and_heal, _AT_ONCE_S, 0, None),
    "the network is divided": Scenario(_divide_all, 2 * _LOST_S, 1, _divided),
    "a rank fails where the leader is slow": Scenario(
        lambda fleet: fleet.fail(1), 30.0, 1, network={"store_s": 2e-3, "latency_s": 0.02, "loss": 0.01}
    ),
}


def _check(scenario: Scenario, count: int, seed: int) -> None:
    fleet = Fleet(count, seed, network=scenario.network)
    with fleet.running():
        fleet.await_running(max(120.0, count * _SLOW_START_S))
        fleet.run(max(2.0, count * _CLOCKS_S))
        scenario.happens(fleet)
        fleet.await_end(scenario.within_s)
    gone = {host.number for host in fleet.hosts if host.is_off or host.is_killed}
    ends = {host.finish.exit_code for host in fleet.hosts if host.finish is not None}
    assert ends == {scenario.code}, fleet.story()
    assert sum(host.finish is None for host in fleet.hosts) == len(gone)
    if scenario.silent is not None:
        silent = {0, *scenario.silent(fleet)}
        assert fleet.leader.evidence_of == {0: set(range(count)) - silent}, fleet.story()
        for number, (offset_s, measured) in fleet.leader.clock.items():
            assert measured or scenario.network  # a leader that has too much to do has no time for clocks
            error_s = _CLOCK_S if not scenario.network else _WORST_CLOCK_S
            assert not measured or offset_s == pytest.approx(-fleet.hosts[number].clock_ahead_s, abs=error_s)


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_laws_hold_on_a_few_hosts(name: str) -> None:
    """Whatever happens."""
    _check(SCENARIOS[name], 8, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_laws_hold_on_many_hosts(name: str, seed: int) -> None:
    """In whatever order messages come."""
    _check(SCENARIOS[name], 64, seed)


@pytest.mark.slow
@pytest.mark.limit_s(1800)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_laws_hold_on_two_thousand_hosts(name: str) -> None:
    """What is linear for a leader shows. One that takes 2 ms for each message could not serve so many."""
    scenario = SCENARIOS[name]
    network = {**scenario.network, "store_s": 5e-4} if scenario.network else {}
    _check(scenario._replace(network=network, within_s=scenario.within_s * (4 if network else 1)), 2048, seed=0)


@pytest.mark.parametrize("count", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (64, 512))])
def test_a_restarted_job_meets_again(count: int) -> None:
    """All in the next attempt, of which nothing of the previous one is left."""
    fleet = Fleet(count, restarts=1)
    with fleet.running():
        fleet.await_running()
        fleet.fail(3, 5)
        fleet.await_running(attempt=1)
        fleet.stopped_at = None
        fleet.run(5.0)
        fleet.finish_ranks()
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}
    assert all(set(host.running_since) == {0, 1} for host in fleet.hosts)


@pytest.mark.parametrize("count", [8, *(pytest.param(count, marks=pytest.mark.slow) for count in (64, 512))])
@pytest.mark.parametrize("spares", [0, 1, 2])
def test_an_unfit_host_is_replaced_before_the_ranks_are_started_where_there_is_a_spare(count: int, spares: int) -> None:
    """Two are unfit: both are replaced, one after the other, or neither. No rank is started in vain."""
    fleet = Fleet(count, spares=spares, unfit={2, 3})
    is_enough = spares == 2
    with fleet.running():
        fleet.await_running(attempt=2 if is_enough else 0)
        fleet.run(5.0)
        fleet.finish_ranks()
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}
    trained = {host.number: set(host.running_since) for host in fleet.hosts if host.running_since}
    out = {2, 3} if is_enough else set(range(count - spares, count))
    assert trained == {number: {2 if is_enough else 0} for number in range(count) if number not in out}


@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_a_host_that_stands_still_until_a_spare_has_its_place_ends_with_exit_code_0(count: int) -> None:
    """The job goes on without it: any other code would end that under ``srun --kill-on-bad-exit``, and mpirun."""
    fleet = Fleet(count, spares=1)
    with fleet.running():
        fleet.await_running()
        fleet.stopped_at = fleet.simulation.now
        fleet.freeze(1, 120.0)
        others = [host for host in fleet.hosts if host.number != 1]
        fleet.run(100.0, lambda: all(1 in host.running_since for host in others))
        fleet.stopped_at = None
        assert all(1 in host.running_since for host in others), fleet.story()
        fleet.run(180.0, lambda: fleet.hosts[1].finish)
        left_out = fleet.hosts[1].finish
        assert left_out is not None, fleet.story()
        assert left_out.exit_code == 0, fleet.story()
        fleet.finish_ranks()
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}


@pytest.mark.parametrize(("restarts", "spares"), [(0, 0), (3, 0), (0, 2), (3, 2)])
def test_a_leader_that_stands_still_for_a_while_is_waited_for_where_the_others_cannot_do_without_it(
    restarts: int, spares: int
) -> None:
    """Whatever --max-restarts says, and where spares may not lead: they are as many as the hosts that train."""
    fleet = Fleet(4, restarts=restarts, spares=spares, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.stopped_at = fleet.simulation.now
        fleet.freeze(0, 50.0)
        fleet.run(50.0)
        training = fleet.hosts[: 4 - spares]
        assert all(host.state is State.RUNNING for host in training), fleet.story()
        fleet.stopped_at = None
        fleet.run(60.0)
        fleet.finish_ranks()
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}, fleet.story()
    assert all(set(host.running_since) == {0} for host in training)


@pytest.mark.parametrize("divided_s", [40.0, 200.0])
def test_hosts_that_cannot_reach_their_leader_for_a_while_are_there_for_its_next_attempt(divided_s: float) -> None:
    """A switch restarts: the leader has lost them and starts again, and none of them has ended meanwhile."""
    fleet = Fleet(4, restarts=3, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.stopped_at = fleet.simulation.now
        fleet.network.divide({1, 2, 3})
        fleet.run(divided_s)
        assert fleet.leader.state is State.JOINING, fleet.story()
        fleet.network.heal()
        fleet.await_running(300.0, attempt=1)
        fleet.stopped_at = None
        fleet.run(5.0)
        fleet.finish_ranks()
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}, fleet.story()


def test_a_leader_that_is_off_ends_the_job_after_the_hang_timeout_where_it_may_come_back() -> None:
    """It is waited for no longer, so that a dead one holds up nothing forever; nor does it hold up the spares."""
    fleet = Fleet(4, restarts=3, spares=2, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.power_off(0)
        assert fleet.await_end(600.0) > 280.0
    assert [host.finish.exit_code for host in fleet.hosts if host.finish is not None] == [1, 0, 0], fleet.story()


def test_a_host_that_does_not_come_ends_the_start_of_all() -> None:
    """Each says who is missing."""
    fleet = Fleet(8, start_timeout_s=20.0)
    fleet.power_off(5)
    with fleet.running():
        fleet.await_end(40.0)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {1}
    assert all(not host.running_since for host in fleet.hosts)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_host_that_is_stopped_between_attempts_ends_the_others_when_the_leader_goes_on(*, at_once: bool) -> None:
    """The leader stands still, so that the host ends alone, and nothing of it is left that could send more later."""
    fleet = Fleet(4, restarts=2)
    by = "saferunctl kill" if at_once else "saferunctl stop"
    with fleet.running():
        fleet.await_running()
        fleet.kill(3)
        fleet.run(60.0, lambda: all(host.state is State.JOINING for host in fleet.hosts[:3]))
        fleet.run(20.0)  # they wait for the fourth
        fleet.freeze(0, 60.0)
        fleet.run(10.0)  # a heartbeat is on its way, and the request behind it
        asked = fleet.hosts[1]
        fleet.simulation.at(fleet.simulation.now, lambda: asked.job.broadcast_request(by, at_once=at_once), asked)
        asked.later(10.0, StopRequested(fleet.simulation.now, asked.supervisor.attempt, by, at_once))
        fleet.run(45.0)
        assert [host.is_gone for host in fleet.hosts[:3]] == [False, True, False]
        fleet.await_end(30.0)
    ends = [host.finish for host in fleet.hosts[:3] if host.finish is not None]
    assert [end.exit_code for end in ends] == [137 if at_once else 143] * 3, fleet.story()
    assert [end.by for end in ends] == [f"{by} on node1", by, f"{by} on node1"]


@pytest.mark.parametrize("after_s", [-0.001, 0.0, 0.001, 0.05, 0.1])
def test_a_host_that_is_stopped_while_all_start_again_is_not_waited_for(after_s: float) -> None:
    """A user asks one host for another attempt, and SIGTERM comes to another one: before it hears of that, or later."""
    fleet = Fleet(4)
    with fleet.running():
        fleet.await_running()
        asked, stopped = fleet.hosts[1], fleet.hosts[2]
        now = fleet.simulation.now
        asked.later(0.01, RestartRequested(now, 0, "saferunctl restart"))

        def stop() -> None:
            stopped.post(SignalReceived(fleet.simulation.now, stopped.supervisor.attempt, signal.SIGTERM))

        fleet.simulation.at(now + 0.01 + after_s, stop, stopped)
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {1}


@pytest.mark.parametrize("state", [State.CHECKING, State.JOINING])
def test_a_host_that_ends_between_attempts_is_not_waited_for(state: State) -> None:
    """It publishes that in the rendezvous that the others are about to begin."""
    fleet = Fleet(4, restarts=1)
    with fleet.running():
        fleet.await_running()
        stopped = fleet.hosts[2]

        def stop_in_time() -> None:
            if stopped.state is state and stopped.finish is None:
                attempt = stopped.supervisor.attempt
                stopped.post(SignalReceived(fleet.simulation.now, attempt, signal.SIGTERM))
            elif stopped.finish is None:
                fleet.simulation.at(fleet.simulation.now + 0.0001, stop_in_time, stopped)

        fleet.simulation.at(fleet.simulation.now, stop_in_time, stopped)
        fleet.fail(3)
        fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {1}
    assert all(set(host.running_since) == {0} for host in fleet.hosts)


@pytest.mark.slow
def test_hosts_that_have_much_to_tell_meet() -> None:
    """Of all of them together the leader's supervisor hears in messages that it can read."""
    fleet = Fleet(1024, info_bytes=20_000)
    with fleet.running():
        fleet.await_running()
    assert len(fleet.leader.job.peers) == 1024


def test_a_run_is_decided_by_its_seed() -> None:
    """So that what has gone wrong once goes wrong again."""

    def steps(seed: int) -> tuple[int, float]:
        fleet = Fleet(8, seed)
        with fleet.running():
            fleet.await_running()
            fleet.fail(3)
            fleet.await_end(_AT_ONCE_S)
        return fleet.simulation.events, fleet.simulation.now

    assert steps(1) == steps(1) != steps(2)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))])
def test_everybody_ends_whatever_happens(seed: int) -> None:
    """Several faults, one after the other or at once, while the job starts, runs and ends."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    count = chance.choice([3, 8, 16, 32])
    fleet = Fleet(
        count, seed, restarts=chance.choice([0, 1]), start_timeout_s=60.0, network={"loss": chance.choice([0.0, 0.01])}
    )
    with fleet.running():
        fleet.run(chance.uniform(0.0, 3.0))
        for _ in range(chance.randint(1, 4)):
            host = chance.randrange(count)
            match chance.choice(["fail", "off", "kill", "freeze", "divide", "heal"]):
                case "fail":
                    fleet.fail(host)
                case "off":
                    fleet.power_off(host)
                case "kill":
                    fleet.kill(host)
                case "freeze":
                    fleet.freeze(host, chance.uniform(1.0, 40.0))
                case "divide":
                    fleet.stopped_at = fleet.simulation.now
                    fleet.network.divide(set(chance.sample(range(count), count // 2)))
                case "heal":
                    fleet.network.heal()
            fleet.run(chance.choice([0.0, 0.1, 5.0, 40.0]))
        fleet.network.heal()
        fleet.finish_ranks()
        fleet.await_end(1200.0)


def test_what_breaks_a_law_is_seen() -> None:
    """A host that reads something else, misses an entry, or runs another attempt than the others."""
    fleet = Fleet(3)
    with fleet.running():
        fleet.await_running()
        one, other = fleet.hosts[1:]
        k, entry = one.log[-1]
        with pytest.raises(LawError, match="where others have read"):
            fleet.note_entry(one, {"attempt": 0, "k": k, "message": {**entry, "kind": "abort"}})
        with pytest.raises(LawError, match="after"):
            fleet.note_entry(other, {"attempt": 0, "k": k, "message": entry})
        fleet.note_entry(one, {"attempt": 0, "k": k + 1, "message": {"kind": "decision"}})
        with pytest.raises(LawError, match="ended twice"):
            fleet.note_entry(one, {"attempt": 0, "k": k + 2, "message": {"kind": "decision"}})
        other.job.joined_attempt = 1
        with pytest.raises(LawError, match="runs attempt"):
            fleet.note_running(other)
