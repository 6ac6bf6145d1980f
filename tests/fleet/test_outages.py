"""Networks that are away for a while, in virtual time: no host may be lost for it that torchrun would have kept."""

from __future__ import annotations

import pytest

from saferun.supervisor.machine import State
from tests.fleet.fleet import Fleet

_AT_ONCE_S = 5.0
_OTHERS = {1, 2, 3}


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
