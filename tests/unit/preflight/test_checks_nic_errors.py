"""Errors and lost carriers of interfaces and RDMA ports, counted from one look to the next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from saferun.linux import link_counters
from saferun.linux.link_counters import LinkCounters
from saferun.linux.nic import Nic
from saferun.preflight.checks import nic_errors
from saferun.preflight.checks.nic_errors import check_nic_errors
from saferun.preflight.results import CheckResult
from tests.unit.preflight.host_roots import Root

BOOT = "9fbf6883-0c1a-49d9-b37d-41fcec448964"
COUNTERS = "sys/class/infiniband/mlx5_0/ports/1/counters"


@pytest.fixture
def root(tmp_path: Path) -> Root:
    root = Root(tmp_path)
    root.write("proc/sys/kernel/random/boot_id", f"{BOOT}\n")
    return root


class Link:
    """An interface whose counters a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.nics = {name: Nic(name, ("10.0.0.1",)) for name in names or ("hsn0",)}
        monkeypatch.setattr(nic_errors, "read_nics", lambda _root: tuple(self.nics.values()))
        self.counters = {name: LinkCounters(name, "ethernet", True, 1_000_000, 7, 3) for name in names or ("hsn0",)}
        monkeypatch.setattr(nic_errors, "read_link_counters", lambda: tuple(self.counters.values()))

    def add(self, packets: int = 0, errors: int = 0, losses: int = 0, *, name: str = "hsn0") -> None:
        old = self.counters[name]
        self.counters[name] = old._replace(
            packets=old.packets + packets, errors=old.errors + errors, losses=old.losses + losses
        )


def compared(root: Root, earlier: CheckResult) -> CheckResult:
    """A look after another one."""
    return check_nic_errors(root.context(earlier=earlier.facts))


def test_what_was_counted_before_the_first_look_shows_nothing(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be years old."""
    link = Link(monkeypatch)
    link.add(errors=10**6, losses=1000)
    first = check_nic_errors(root.context())
    assert first.verdict == "ok"
    assert compared(root, first).verdict == "ok"


@pytest.mark.parametrize(
    ("added", "message", "class_name"),
    [
        ({"losses": 2}, "hsn0 has lost its carrier 2 times in the last ", "network_interface"),
        ({"losses": 1}, "hsn0 has lost its carrier once in the last ", ""),
        ({"errors": 500, "packets": 9500}, "hsn0 has counted 500 errors in 9500 packets", "network_interface"),
        ({"errors": 99, "packets": 100}, "", ""),
        ({"errors": 500, "packets": 10**8}, "", ""),
        ({"packets": 10**9}, "", ""),
    ],
)
def test_what_is_counted_between_two_looks_is_judged(
    root: Root, monkeypatch: pytest.MonkeyPatch, added: Any, message: str, class_name: str
) -> None:
    """Few errors among many packets are ordinary; one loss of the carrier is told, and blames no host."""
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    link.add(**added)
    second = compared(root, first)
    assert (second.verdict == "warn") == bool(message)
    assert second.class_name == class_name
    if message:
        assert second.message.startswith(message)
    # Once told, it is no news.
    assert compared(root, second).verdict == "ok"


def aged(earlier: CheckResult, seconds: float) -> CheckResult:
    """A look that was so long ago."""
    facts = dict(earlier.facts)
    return earlier._replace(facts=tuple({**facts, "at_s": str(float(facts["at_s"]) - seconds)}.items()))


@pytest.mark.parametrize(
    ("losses", "ago_s", "class_name"),
    [
        (2, 310.0, "network_interface"),
        (2, 3600.0, ""),
        (9, 23 * 3600.0, ""),
        (20, 3600.0, "network_interface"),
        (143, 6 * 3600.0, "network_interface"),
        (500, 23.9 * 3600.0, "network_interface"),
    ],
)
def test_few_losses_of_the_carrier_over_many_hours_blame_no_host(
    root: Root, monkeypatch: pytest.MonkeyPatch, losses: int, ago_s: float, class_name: str
) -> None:
    """Two within five minutes, or ten at any time, are a bad link; two within a day are a switch's maintenance."""
    link = Link(monkeypatch)
    first = aged(check_nic_errors(root.context()), ago_s)
    link.add(losses=losses)
    second = compared(root, first)
    assert (second.verdict, second.class_name) == ("warn", class_name)


@pytest.mark.parametrize(
    ("before", "after", "class_name"),
    [
        (Nic("hsn0"), Nic("hsn0"), ""),
        (Nic("hsn0", ("fe80::1",)), Nic("hsn0"), ""),
        (Nic("hsn0", ("10.0.0.1",)), Nic("hsn0"), "network_interface"),
        (Nic("hsn0"), Nic("hsn0", rdma=("mlx5_0:1",)), "network_interface"),
    ],
)
def test_an_interface_that_no_job_could_use_blames_no_host(
    root: Root, monkeypatch: pytest.MonkeyPatch, before: Nic, after: Nic, class_name: str
) -> None:
    """A port of a switch that someone tests with has no address. One whose carrier is gone may have lost its own."""
    link = Link(monkeypatch)
    link.nics = {"hsn0": before}
    first = check_nic_errors(root.context())
    link.nics = {"hsn0": after}
    link.add(losses=5)
    second = compared(root, first)
    assert (second.verdict, second.class_name) == ("warn", class_name)
    link.add(errors=10**6)
    assert compared(root, second).class_name == ("network_interface" if after.rdma else "")


@pytest.mark.parametrize(
    ("masters", "address", "class_name"),
    [
        (("bond0",), "10.0.0.1", "network_interface"),
        (("bond0", "br0"), "10.0.0.1", "network_interface"),
        (("bond0",), "", ""),
        (("virbr0",), "192.168.122.1", ""),
        (("vrf0",), "10.0.0.1", ""),
        (("unseen",), "10.0.0.1", ""),
    ],
)
def test_a_port_of_a_bond_or_a_bridge_is_used_if_that_has_an_address(
    root: Root, monkeypatch: pytest.MonkeyPatch, masters: tuple[str, ...], address: str, class_name: str
) -> None:
    """It has none of its own, and its losses of the carrier are those of the host all the same."""
    chain = ("hsn0", *masters)
    link = Link(monkeypatch, *(name for name in chain if name != "unseen"))
    for name, master in zip(chain, masters, strict=False):
        link.counters[name] = link.counters[name]._replace(master=master)
    kinds = {"bond0": "bond", "br0": "bridge", "virbr0": "bridge", "vrf0": "virtual"}
    own = {masters[-1]: (address,)} if address else {}
    link.nics = {name: Nic(name, own.get(name, ()), kind=kinds.get(name, "ethernet")) for name in link.counters}
    first = check_nic_errors(root.context())
    link.add(losses=5)
    second = compared(root, first)
    assert (second.verdict, second.class_name) == ("warn", class_name)


def test_a_virtual_machine_on_a_bridge_blames_no_host(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port loses its carrier whenever the machine is stopped."""
    link = Link(monkeypatch, "tap100i0", "br0")
    link.counters["tap100i0"] = link.counters["tap100i0"]._replace(kind="tunnel", master="br0")
    link.nics = {"tap100i0": Nic("tap100i0", kind="tunnel"), "br0": Nic("br0", ("10.0.0.1",), kind="bridge")}
    first = check_nic_errors(root.context())
    link.add(losses=20, name="tap100i0")
    assert compared(root, first).class_name == ""


def test_masters_that_name_each_other_have_no_address(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, "bond0", "bond1")
    for name, master in (("bond0", "bond1"), ("bond1", "bond0")):
        link.counters[name] = link.counters[name]._replace(kind="bond", master=master)
        link.nics[name] = Nic(name, kind="bond")
    first = check_nic_errors(root.context())
    link.add(losses=5, name="bond0")
    assert compared(root, first).class_name == ""


def test_interfaces_of_containers_come_and_go_unnoticed(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch, "veth0a1b", "docker0", "lo")
    link.counters["lo"] = link.counters["lo"]._replace(kind="loopback")
    first = check_nic_errors(root.context())
    for name in link.counters:
        link.add(name=name, losses=9, errors=10**6)
    assert compared(root, first).verdict == "ok"


def test_the_interfaces_of_another_network_namespace_are_not_compared(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the host has recorded is not about a container's eth0."""
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    (namespace := Path(root.path, "proc/self/ns/net")).parent.mkdir(parents=True)
    namespace.symlink_to("net:[4026532008]")
    link.add(losses=50)
    assert compared(root, first).verdict == "ok"
    second = check_nic_errors(root.context())
    link.add(losses=50)
    assert compared(root, second).verdict == "warn"


def test_an_interface_that_has_appeared_since_is_not_compared(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    link = Link(monkeypatch)
    first = check_nic_errors(root.context())
    link.counters["hsn1"] = LinkCounters("hsn1", "ethernet", True, 10, 10_000, 50)
    assert compared(root, first).verdict == "ok"


def test_errors_of_rdma_ports_are_compared_too(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    Link(monkeypatch)
    root.write(f"{COUNTERS}/link_downed", "4\n")
    root.write(f"{COUNTERS}/symbol_error", "70000\n")
    first = check_nic_errors(root.context())
    assert compared(root, first).verdict == "ok"
    root.write(f"{COUNTERS}/symbol_error", "70500\n")
    second = compared(root, first)
    assert (second.class_name, second.verdict) == ("fabric_degraded", "warn")
    assert second.message.startswith("mlx5_0:1 has counted 500 symbol_error in the last ")
    root.write(f"{COUNTERS}/link_downed", "6\n")
    assert "mlx5_0:1 has lost its carrier 2 times" in compared(root, second).message


def test_errors_of_rdma_ports_over_many_hours_are_ordinary(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is restarted after a day compares with what there was a day ago."""
    Link(monkeypatch)
    root.write(f"{COUNTERS}/symbol_error", "70000\n")
    first = check_nic_errors(root.context())
    root.write(f"{COUNTERS}/symbol_error", "70500\n")
    assert compared(root, first).verdict == "warn"
    assert compared(root, aged(first, 20 * 3600)).verdict == "ok"


@pytest.mark.parametrize(("physical", "class_name"), [("2: Polling", "network_interface"), ("3: Disabled", "")])
def test_one_loss_is_the_host_s_fault_where_the_port_is_still_down(
    root: Root, monkeypatch: pytest.MonkeyPatch, physical: str, class_name: str
) -> None:
    """Unless it was switched off. A port that never had a cable has lost none."""
    Link(monkeypatch)
    port = COUNTERS.removesuffix("counters")
    root.write(f"{COUNTERS}/link_downed", "4\n")
    root.write(f"{port}state", "1: DOWN\n")
    root.write(f"{port}phys_state", f"{physical}\n")
    first = check_nic_errors(root.context())
    assert compared(root, first).verdict == "ok"
    root.write(f"{COUNTERS}/link_downed", "5\n")
    second = compared(root, first)
    assert second.class_name == class_name
    assert ("and is down" in second.message) == bool(class_name)


@pytest.mark.parametrize(
    "earlier",
    [
        (("boot", "another boot"), ("at_s", "1.0"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "x"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "1e300"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "-90000000"), ("hsn0 losses", "0")),
        (("boot", BOOT), ("at_s", "nan"), ("hsn0 losses", "0")),
        (("hsn0 losses", "0"),),
        (),
    ],
)
def test_a_look_before_the_boot_or_one_that_makes_no_sense_does_not_count(
    root: Root, monkeypatch: pytest.MonkeyPatch, earlier: tuple[tuple[str, str], ...]
) -> None:
    link = Link(monkeypatch)
    link.add(losses=50)
    assert check_nic_errors(root.context(earlier=earlier)).verdict == "ok"


def test_the_counters_of_this_machine_can_be_read() -> None:
    by_name = {link.name: link for link in link_counters.read_link_counters()}
    assert by_name["lo"].kind == "loopback"
    assert all(link.packets >= 0 and link.losses >= 0 for link in by_name.values())
