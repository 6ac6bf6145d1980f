"""The addresses that a host publishes to the others."""

from __future__ import annotations

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Self

import pytest

from saferun.linux import names, netlink
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


class Unbound:
    """A socket that can be bound to any address."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def bind(self, _address: tuple[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("address", "is_own"),
    [("10.0.0.2", True), ("10.0.0.3", False), ("127.0.0.1", True), ("::", True), ("fe80::1", True), ("::1", False)],
)
def test_an_address_that_any_host_can_bind_is_this_hosts_only_if_an_interface_has_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str, *, is_own: bool
) -> None:
    """With net.ipv4.ip_nonlocal_bind each host of a job would take the endpoint of the c10d rendezvous for itself."""
    setting = tmp_path / "ip_nonlocal_bind"
    monkeypatch.setattr(names, "_NONLOCAL_BIND", (str(setting),))
    monkeypatch.setattr(netlink, "read_nics", lambda: (ETH,))
    real, fake = dict(vars(socket)), {"socket": lambda *_: Unbound()}
    monkeypatch.setattr(names, "socket", SimpleNamespace(**{**real, **fake}))
    for text, expected in (("0\n", True), ("1\n", is_own)):
        setting.write_text(text, encoding="ascii")
        assert names.known_at_once(address) is expected
