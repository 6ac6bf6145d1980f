"""What is printed and reported where a host reaches the leader over another route."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from saferun.cluster import leader_routes as leader_routes_module
from saferun.cluster.leader_routes import LeaderRoutes
from tests.unit.cluster.nics import stand_in_for_nics


class World:
    """One host's view."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...] = ("10.77.0.1", "10.78.0.1")
    ) -> None:
        self.now = 1000.0
        self.nics = {"eth0": "", "eth1": ""}
        self.lines: list[str] = []
        self.notices: list[str] = []
        stand_in_for_nics(monkeypatch, self.nics)
        monkeypatch.setattr(leader_routes_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.routes = LeaderRoutes(
            "node3", "node1", addresses, print_line=self.lines.append, on_notice=self.notices.append
        )

    def wait(self) -> None:
        """Until notices are due."""
        self.now += 1.0
        self.routes.tick(self.now)


def test_what_several_hosts_report_alike_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what one of them wrote cannot do anything to a terminal."""
    world = World(monkeypatch)
    for number in range(2, 9):
        world.routes.note(f"node{number}", "node1 does not answer any more\x1b[2J")
        world.now += 0.01
    world.routes.note("node9", "eth0 has no carrier")
    assert world.routes.deadline == 1001.0
    world.routes.tick(1000.9)
    assert not world.lines
    world.wait()
    assert world.lines == [
        "warning: node2, node3, node4 and 4 more hosts: node1 does not answer any more\\x1b[2J; the job goes on",
        "warning: node9: eth0 has no carrier; the job goes on",
    ]
    assert world.routes.deadline is None


def test_what_a_host_reports_again_is_no_second_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state has the route each time."""
    world = World(monkeypatch)
    for _ in range(3):
        world.routes.note("node2", "node1 does not answer any more")
        world.routes.note("node4", "")
        world.wait()
    assert world.lines == ["warning: node2: node1 does not answer any more; the job goes on"]


def test_where_its_own_interface_is_cut_the_leader_prints_that_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All others have lost their route to it, and none of them can know why. Once per fault."""
    world = World(monkeypatch)
    for fault in ("is down", "is down", "has no carrier"):
        world.nics["eth0"] = fault
        world.routes.note(f"node{2 + len(world.lines)}", f"node1 does not answer any more {world.now}")
        world.wait()
    sequel = "other hosts reach it over another network; the job goes on"
    assert world.lines == [
        f"warning: node3: eth0 is down; {sequel}",
        f"warning: node3: eth0 has no carrier; {sequel}",
    ]


def test_interfaces_that_led_to_no_host_are_at_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cable that was never plugged in explains nothing."""
    world = World(monkeypatch, ("10.78.0.1",))
    world.nics["eth0"] = "has no carrier"
    assert world.routes.own_nic_fault() == ""
    world.nics["eth1"] = "is down"
    assert world.routes.own_nic_fault() == "eth1 is down"


def test_a_route_that_changes_is_reported_with_the_reason_that_this_host_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own interface, or else only that the leader does not answer where it did."""
    world = World(monkeypatch)
    world.routes.report("node1", "10.78.0.1")
    world.nics["eth0"] = "has no carrier"
    world.routes.report("node1", "10.78.0.1")
    assert world.notices == [
        "node1 does not answer any more; messages to node1 go over eth1 (10.78.0.1) now",
        "eth0 has no carrier; messages to node1 go over eth1 (10.78.0.1) now",
    ]


def test_an_address_without_a_route_is_reported_without_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    monkeypatch.setattr(leader_routes_module, "_nic_to", lambda _: "")
    world.routes.report("node1", "10.78.0.1")
    assert world.notices == ["node1 does not answer any more; messages to node1 go to 10.78.0.1 now"]


def test_after_the_end_of_the_attempt_no_notice_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    world.routes.note("node2", "node1 does not answer any more")
    world.routes.end()
    world.wait()
    assert not world.lines
