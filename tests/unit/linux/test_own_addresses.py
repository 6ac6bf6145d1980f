"""The addresses that a host publishes to the others."""

from __future__ import annotations

import pytest

from saferun.linux import netlink
from saferun.linux.nic import Nic

ETH = Nic("eth0", ("10.0.0.2", "fe80::1"))
DOCKER = Nic("docker0", ("172.17.0.1",), kind="bridge")
BRIDGE = Nic("br-ex", ("10.0.1.2",), kind="bridge")
DUMMY = Nic("dummy0", ("10.9.0.2",), kind="virtual")
SERVICES = Nic("kube-ipvs0", ("10.96.0.1", "10.96.0.10"), kind="virtual")


@pytest.mark.parametrize(
    ("nics", "found"),
    [
        ([DOCKER, ETH], ["10.0.0.2"]),  # of docker's each host has one, and other machines may have it, too
        ([DOCKER], ["172.17.0.1"]),
        ([BRIDGE, ETH], ["10.0.1.2", "10.0.0.2"]),  # the way out of many hosts
        ([DUMMY, ETH], ["10.9.0.2", "10.0.0.2"]),  # an address that is routed to this host
        ([SERVICES, ETH], ["10.0.0.2"]),  # every host answers at them itself
    ],
)
def test_a_bridge_of_containers_is_no_way_to_this_host(
    monkeypatch: pytest.MonkeyPatch, nics: list[Nic], found: list[str]
) -> None:
    """Who is refused at such an address must not take this host to be gone."""
    monkeypatch.setattr(netlink, "read_nics", lambda: tuple(nics))
    assert netlink.own_addresses() == found


def test_the_addresses_of_such_bridges_are_known_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that exchange them reach none but themselves."""
    monkeypatch.setattr(netlink, "read_nics", lambda: (DOCKER, ETH, BRIDGE, DUMMY))
    assert netlink.bridge_addresses() == ["172.17.0.1"]
