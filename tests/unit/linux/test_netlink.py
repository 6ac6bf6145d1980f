"""Interfaces from the kernel's answers, and what sysfs adds to them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.linux import netlink
from saferun.linux.netlink import kind_of

UP, LOOPBACK, RUNNING = 0x1, 0x8, 0x40
ETHER, INFINIBAND, NONE = 1, 32, 65534


@pytest.mark.parametrize(
    ("flags", "hardware", "driver", "kind"),
    [
        (UP | LOOPBACK, 772, "", "loopback"),
        (UP, ETHER, "", "ethernet"),
        (UP, INFINIBAND, "ipoib", "infiniband"),
        (UP, ETHER, "bridge", "bridge"),
        (UP, ETHER, "bond", "bond"),
        (UP, ETHER, "vlan", "vlan"),
        (UP, ETHER, "veth", "virtual"),
        (UP, ETHER, "something new", "virtual"),
        (UP, NONE, "tun", "tunnel"),
        (UP, NONE, "", "tunnel"),
    ],
)
def test_the_kind_of_an_interface(flags: int, hardware: int, driver: str, kind: str) -> None:
    assert kind_of(flags, hardware, driver) == kind


@given(content=st.binary(max_size=200))
def test_a_malformed_answer_ends_and_breaks_nothing(content: bytes) -> None:
    """Lengths come from outside: one of zero would be read forever."""
    for _, body in netlink._messages(content):
        assert len(body) <= len(content)
    for _, body in netlink._attributes(content):
        assert len(body) <= len(content)


def test_attributes_are_padded_and_carry_flags_in_their_types() -> None:
    nested = 0x8000
    content = struct.pack("=HH3sx", 7, 3, b"lo\0") + struct.pack("=HHI", 8, 4 | nested, 1500)
    assert dict(netlink._attributes(content)) == {3: b"lo\0", 4: struct.pack("=I", 1500)}


# --------------------------------------------------------------------------------------------------------------- sysfs


def interface(root: Path, name: str, **files: str) -> Path:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")
    return folder


def link(name: str, number: int = 4, kind: str = "ethernet", flags: int = UP | RUNNING) -> netlink.Link:
    return netlink.Link(number, name, flags, 1500, kind, "02:fc:00:00:00:01")


def test_speed_and_rdma_device_come_from_sysfs(tmp_path: Path) -> None:
    folder = interface(tmp_path, "ib0", ifindex="4", address="02:fc:00:00:00:01", speed="200000", dev_port="0")
    (folder / "device/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    assert netlink._read_sysfs(f"{tmp_path}/", link("ib0", kind="infiniband")) == (200_000_000_000, ("mlx5_0:1",))


def test_of_a_device_with_two_ports_the_interfaces_own_is_taken(tmp_path: Path) -> None:
    folder = interface(tmp_path, "ib1", ifindex="4", address="02:fc:00:00:00:01", speed="56000", dev_port="1")
    for port in "12":
        (folder / "device/infiniband/mlx4_0/ports" / port).mkdir(parents=True)
    assert netlink._read_sysfs(f"{tmp_path}/", link("ib1"))[1] == ("mlx4_0:2",)


@pytest.mark.parametrize("speed", ["-1", "", "what?"])
def test_a_speed_that_the_driver_does_not_know_is_unknown(tmp_path: Path, speed: str) -> None:
    """Virtual machines say -1, which is no speed."""
    interface(tmp_path, "eth0", ifindex="4", address="02:fc:00:00:00:01", speed=speed)
    assert netlink._read_sysfs(f"{tmp_path}/", link("eth0")) == (0, ())


@pytest.mark.parametrize("told", [{"ifindex": "5"}, {"address": "02:fc:00:00:00:02"}])
def test_another_namespaces_interface_of_the_same_name_is_not_believed(tmp_path: Path, told: dict[str, str]) -> None:
    """Both numbers and names repeat between namespaces; hardware addresses do not."""
    interface(tmp_path, "eth0", **{"ifindex": "4", "address": "02:fc:00:00:00:01", "speed": "10000", **told})
    assert netlink._read_sysfs(f"{tmp_path}/", link("eth0")) == (0, ())


def test_drivers_of_what_is_down_or_made_of_software_are_not_asked(tmp_path: Path) -> None:
    """Some take long to answer."""
    interface(tmp_path, "eth0", ifindex="4", address="02:fc:00:00:00:01", speed="10000")
    assert netlink._read_sysfs(f"{tmp_path}/", link("eth0", flags=UP)) == (0, ())
    assert netlink._read_sysfs(f"{tmp_path}/", link("eth0", kind="virtual")) == (0, ())
