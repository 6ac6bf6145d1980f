"""Hosts that meet again, after a coordinator was replaced or a connection broke."""

from __future__ import annotations

import pytest

from tests.fleet.fleet import Fleet

_AT_ONCE_S = 5.0
_LOST_S = 60.0


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
