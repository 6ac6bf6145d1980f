"""Hosts that meet again, after a coordinator was replaced or a connection broke."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from saferun.supervisor.machine import State
from tests.fleet.fleet import Fleet
from tests.fleet.virtual_host import CONTROL_PORT, RANKS_PORT, FleetHost
from tests.fleet.virtual_network import StoreServer

_AT_ONCE_S = 5.0
_LOST_S = 60.0


def _when_written(monkeypatch: pytest.MonkeyPatch, key: str, happens: Callable[[StoreServer], object]) -> list[str]:
    """What happens once, when a host has written a key. Returns where it is noted."""
    write, seen = StoreServer.write, list[str]()

    def write_and_do(server: StoreServer, written: str, value: bytes) -> None:
        write(server, written, value)
        if written.endswith(key) and not seen:
            seen.append(written)
            happens(server)

    monkeypatch.setattr(StoreServer, "write", write_and_do)
    return seen


def _break_connections(number: int, server: StoreServer) -> None:
    """Those of a host: what the server answers on them is lost."""
    for client in list(server.clients):
        if client.here.number == number:
            client.break_off()


def _end_well(fleet: Fleet) -> None:
    fleet.run(5.0)
    fleet.finish_ranks()
    fleet.await_end(_AT_ONCE_S)
    assert {host.finish.exit_code for host in fleet.hosts if host.finish is not None} == {0}, fleet.story()


@pytest.mark.parametrize(
    ("count", "spares", "replaced"),
    [(4, 1, 1), (4, 1, 3), *(pytest.param(5, 2, number, marks=pytest.mark.slow) for number in (1, 3, 4))],
)
def test_a_host_whose_coordinator_was_replaced_finds_the_spare_that_leads(
    count: int, spares: int, replaced: int
) -> None:
    """It may be that spare itself. Else it looks for the lost leader, and the job needs it."""
    fleet = Fleet(count, spares=spares)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.replace_coordinator(replaced)
        fleet.power_off(0)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        training = [host for host in fleet.hosts[1:] if not host.is_waiting]
        assert [host.number for host in training] == list(range(1, count - spares + 1)), fleet.story()
        assert all(1 in host.running_since for host in training), fleet.story()
        assert len({host.master_addr for host in training}) == 1
        _end_well(fleet)


def test_a_host_whose_coordinator_is_replaced_once_a_spare_leads_has_the_address_of_the_others() -> None:
    """Its ranks would look for their store on a host that is gone, and those of the others wait for them."""
    fleet = Fleet(4, spares=1, restarts=1)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(0)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        fleet.run(5.0)
        fleet.replace_coordinator(1)
        fleet.fail(2)
        fleet.await_running(_LOST_S, attempt=2)
        fleet.stopped_at = None
        assert {host.master_addr for host in fleet.hosts[1:]} == {fleet.hosts[3].address}, fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize("one_port", [False, True])
@pytest.mark.parametrize("spares", [0, 1])
def test_a_host_that_stands_still_until_the_last_one_has_come_takes_part(
    monkeypatch: pytest.MonkeyPatch, spares: int, *, one_port: bool
) -> None:
    """With one port the store in which it has handed in its record ends with the previous attempt."""
    fleet = Fleet(5, spares=spares, restarts=1, is_patient=True, one_port=one_port)
    seen = _when_written(monkeypatch, "r1/host/2", lambda _: fleet.freeze(2, 20.0))
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.fail(1)
        fleet.run(0.3)
        fleet.freeze(3, 10.0)
        fleet.await_running(_LOST_S, attempt=1)
        assert seen
        assert all(set(host.running_since) == {0, 1} for host in fleet.hosts[: 5 - spares]), fleet.story()
        fleet.stopped_at = None
        _end_well(fleet)


@pytest.mark.parametrize("key", ["r0/host/2", "r0/done", "r0/assignment/2", "r0/assignment/3"])
@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("one_port", [False, True])
def test_a_host_whose_connection_breaks_before_it_has_its_answer_takes_part(
    monkeypatch: pytest.MonkeyPatch, key: str, restarts: int, *, one_port: bool
) -> None:
    """Its ranks have a place among those of the others, which wait for them."""
    fleet = Fleet(4, restarts=restarts, is_patient=True, one_port=one_port)
    seen = _when_written(monkeypatch, key, lambda server: _break_connections(2, server))
    with fleet.running():
        fleet.await_running(30.0)
        assert seen
        assert all(set(host.running_since) == {0} for host in fleet.hosts), fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize("one_port", [False, True])
def test_a_host_that_had_its_answer_waits_for_the_next_rendezvous(*, one_port: bool) -> None:
    """Its connection breaks before the leader has begun that: the answer of the previous one is still there."""
    fleet = Fleet(4, restarts=1, is_patient=True, one_port=one_port)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.leader.checks_s = 5.0
        fleet.fail(1)
        fleet.run(3.0)
        assert [host.state for host in fleet.hosts] == [State.CHECKING, *[State.JOINING] * 3], fleet.story()
        server = fleet.network.listening[0, RANKS_PORT if one_port else CONTROL_PORT]
        assert isinstance(server, StoreServer)
        _break_connections(2, server)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        assert all(set(host.running_since) == {0, 1} for host in fleet.hosts), fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize(
    ("spares", "number"), [(1, 1), *(pytest.param(2, number, marks=pytest.mark.slow) for number in (1, 4))]
)
def test_a_host_whose_connection_breaks_where_a_spare_leads_stays_with_that(spares: int, number: int) -> None:
    """While they meet again. It may be a spare itself: one that led instead would have no hosts."""
    fleet = Fleet(3 + spares, spares=spares, restarts=1, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(0)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        fleet.run(5.0)
        leader = fleet.hosts[3]
        assert leader.job.leads
        leader.checks_s = 5.0
        fleet.fail(2)
        fleet.run(3.0)
        assert fleet.hosts[number].state is State.JOINING or fleet.hosts[number].is_waiting
        server = fleet.network.listening[3, CONTROL_PORT]
        assert isinstance(server, StoreServer)
        _break_connections(number, server)
        fleet.await_running(_LOST_S, attempt=2)
        fleet.stopped_at = None
        assert all(2 in host.running_since for host in fleet.hosts[1:4]), fleet.story()
        assert {host.master_addr for host in fleet.hosts[1:]} == {leader.address}
        _end_well(fleet)


def _break_between_attempts(fleet: Fleet, leader: int, number: int, *, times: int) -> None:
    """A rank fails, the leader takes its time, and connections of a host that waits for it break."""
    fleet.hosts[leader].checks_s = 5.0
    fleet.fail(2)
    fleet.run(2.0)
    for _ in range(times):
        assert fleet.hosts[number].state is State.JOINING or fleet.hosts[number].is_waiting
        server = fleet.network.listening[leader, CONTROL_PORT]
        assert isinstance(server, StoreServer)
        _break_connections(number, server)
        fleet.run(1.0)


@pytest.mark.parametrize(
    ("number", "is_replaced"),
    [(1, False), (1, True), *(pytest.param(3, it, marks=pytest.mark.slow) for it in (False, True))],
)
def test_a_host_whose_connection_breaks_twice_between_attempts_is_not_late(number: int, *, is_replaced: bool) -> None:
    """It has taken part in the last one: a spare would get its place, or, of a spare, the job would have one less."""
    fleet = Fleet(4, spares=1, restarts=1, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        if is_replaced:
            fleet.replace_coordinator(number)
        _break_between_attempts(fleet, 0, number, times=2)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        assert all(set(host.running_since) == {0, 1} for host in fleet.hosts[:3]), fleet.story()
        assert fleet.hosts[3].is_waiting, fleet.story()
        assert fleet.hosts[3].finish is None, fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize("number", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_host_whose_connection_has_broken_finds_the_next_spare_where_the_one_that_leads_ends(number: int) -> None:
    """It is needed, and would take itself for one that the job does without."""
    fleet = Fleet(5, spares=2, restarts=2, is_patient=True)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(0)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        fleet.run(5.0)
        _break_between_attempts(fleet, 3, number, times=1)
        fleet.kill(3)
        fleet.await_running(_LOST_S, attempt=2)
        fleet.stopped_at = None
        assert all(2 in fleet.hosts[host].running_since for host in (1, 2, 4)), fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize("restarts", [0, 1])
@pytest.mark.parametrize("after_s", [16.0, 32.0])
@pytest.mark.parametrize(("failed", "is_patient"), [((1,), True), pytest.param((1, 2), False, marks=pytest.mark.slow)])
def test_a_host_whose_ranks_fail_while_it_goes_on_without_a_lost_leader_meets_the_spare_that_leads(
    restarts: int, after_s: float, failed: tuple[int, ...], *, is_patient: bool
) -> None:
    """It waited for the decision of the leader, or ended, and the others had one host less than they need."""
    fleet = Fleet(4, spares=1, restarts=restarts, is_patient=is_patient)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.power_off(0)
        fleet.stopped_at = None  # its ranks have nothing to do with the others' for a while
        fleet.run(after_s)
        fleet.fail(*failed)
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        assert all(1 in host.running_since for host in fleet.hosts[1:]), fleet.story()
        _end_well(fleet)


@pytest.mark.parametrize("cut_off", [{1}, {1, 2, 3}])
def test_without_spares_a_host_whose_ranks_fail_while_the_network_is_away_is_there_for_the_restart(
    cut_off: set[int],
) -> None:
    """No other host can lead, so that nothing is gained by an earlier end."""
    fleet = Fleet(4, restarts=1, is_patient=cut_off != {1})
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.network.divide(cut_off)
        fleet.run(16.0)
        fleet.fail(1)
        fleet.run(60.0)
        fleet.network.heal()
        fleet.await_running(_LOST_S, attempt=1)
        fleet.stopped_at = None
        assert all(1 in host.running_since for host in fleet.hosts), fleet.story()
        _end_well(fleet)


def test_where_the_spare_that_leads_is_lost_as_well_the_next_one_leads() -> None:
    """Its connections break; that it is gone is found out first."""
    fleet = Fleet(5, spares=2, restarts=1)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        for lost, attempt in ((0, 1), (3, 2)):
            fleet.power_off(lost)
            fleet.await_running(_LOST_S, attempt=attempt)
            fleet.stopped_at = None
            fleet.run(5.0)
        assert {host.master_addr for host in (fleet.hosts[number] for number in (1, 2, 4))} == {fleet.hosts[4].address}
        _end_well(fleet)


@pytest.mark.parametrize("one_port", [False, True])
@pytest.mark.parametrize("losses", [((1,), (2,)), ((1, 3),)])
def test_where_no_spare_is_left_a_lost_host_is_waited_for(
    losses: tuple[tuple[int, ...], ...], *, one_port: bool
) -> None:
    """The others would train on with a smaller WORLD_SIZE, and end with exit code 0."""
    fleet = Fleet(4, spares=1, restarts=2, is_patient=True, one_port=one_port, start_timeout_s=300.0)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        for attempt, lost in enumerate(losses, 1):
            fleet.power_off(*lost)
            if attempt < len(losses):
                fleet.await_running(_LOST_S, attempt=attempt)
                fleet.stopped_at = None
                fleet.run(5.0)
        fleet.run(_LOST_S + 30.0)
        living = [host for host in fleet.hosts if not host.is_over]
        assert {host.state for host in living} == {State.JOINING}, fleet.story()
        assert all(any("saferun: waiting for" in line for line in host.lines) for host in living), fleet.story()
        fleet.await_end(330.0)
        assert {host.finish.exit_code for host in living if host.finish is not None} == {1}


@pytest.mark.parametrize("one_port", [False, True])
def test_where_no_spare_is_left_hosts_that_a_switch_had_cut_off_take_part_again(*, one_port: bool) -> None:
    """The leader has taken all of them for lost, and would train alone."""
    fleet = Fleet(5, spares=1, restarts=2, is_patient=True, one_port=one_port)
    with fleet.running():
        fleet.await_running()
        fleet.run(5.0)
        fleet.network.divide({1, 2, 3, 4})
        fleet.run(0.3)
        fleet.fail(0)
        fleet.run(20.0)
        fleet.network.heal()
        fleet.await_running(300.0, attempt=1)
        fleet.stopped_at = None
        assert all(1 in host.running_since for host in fleet.hosts[:4]), fleet.story()
        _end_well(fleet)


def _launch_again(first: Fleet) -> Fleet:
    """Another launch on the same hosts, at the same ports, whose hosts have yet to start."""
    second = Fleet(first.count, spares=first.spares, start_timeout_s=120.0)
    second.simulation, second.network = first.simulation, first.network
    second.hosts = [FleetHost(second, number) for number in range(first.count)]
    return second


def _start(fleet: Fleet, *numbers: int) -> None:
    for number in numbers:
        host = fleet.hosts[number]
        fleet.network.add(host)
        fleet.simulation.at(fleet.simulation.now, host.start, host)


def _end_while_one_stands_still(fleet: Fleet) -> None:
    """The leader waits until that host has read how the job ended."""
    fleet.await_running()
    fleet.run(5.0)
    fleet.finish_ranks()
    fleet.run(10.0, lambda: fleet.leader.finish)
    fleet.freeze(2, 5.0)
    fleet.run(1.0)
    assert fleet.hosts[1].is_gone
    assert not fleet.leader.is_gone


@pytest.mark.parametrize("spares", [0, 1])
def test_a_host_that_meets_the_leader_of_the_previous_launch_of_its_step_waits_for_its_own(spares: int) -> None:
    """``srun bash -c 'saferun a.py; saferun b.py'``: with spares it took itself for late, and ended with 0 at once."""
    first = Fleet(3 + spares, spares=spares)
    with first.running():
        _end_while_one_stands_still(first)
        second = _launch_again(first)
        _start(second, 1)
        second.run(30.0)
        assert first.leader.is_gone
        assert second.hosts[1].finish is None, second.hosts[1].finish
        _start(second, *(number for number in range(3 + spares) if number != 1))
        second.await_running(_LOST_S)
        assert 0 in second.hosts[1].running_since
        _end_well(second)


def test_a_host_that_came_late_to_a_job_with_spares_ends_well_some_time_after_the_job() -> None:
    """No other launch follows at that address."""
    first = Fleet(4, spares=1)
    with first.running():
        _end_while_one_stands_still(first)
        late = _launch_again(first)
        _start(late, 1)
        late.run(100.0, lambda: late.hosts[1].finish)
        assert late.hosts[1].finish is not None
        assert late.hosts[1].finish.exit_code == 0
