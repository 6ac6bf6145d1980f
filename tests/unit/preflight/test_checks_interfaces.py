"""Which interfaces gloo and NCCL would use by their own rules, which are tried, and what is wrong with those named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from saferun.linux.nic import Nic, is_decoy
from saferun.preflight.checks import interfaces
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.interfaces import check_interfaces
from saferun.preflight.checks.name_resolution import Lookup
from saferun.preflight.default_nics import (
    address_to_reach,
    candidates,
    gloo_choice,
    mpirun_options,
    nccl_choice,
    near_name,
    nic_environ,
    routes,
)
from saferun.preflight.results import CheckResult

LO = Nic("lo", ("127.0.0.1", "::1"), ("127.0.0.1/8", "::1/128"), True, 65536, "loopback")
ETH0 = Nic("eth0", ("10.1.0.1", "fd01::1", "fe80::1"))
ETH1 = Nic("eth1", ("10.2.0.1",), is_up=False)
IB0 = Nic("ib0", ("10.9.0.1",), kind="infiniband", mtu=2044, rdma=("mlx5_0:1",))
SIX = Nic("six", ("fd06::1", "fe80::6"))
BARE = Nic("bare", ("fe80::2",))
EMPTY = Nic("empty")
DOCKER = Nic("docker0", ("172.17.0.1",), kind="bridge")
NETWORK = Nic("br-0123456789ab", ("172.18.0.1",), kind="bridge")
VIRBR = Nic("virbr0", ("192.168.122.1",), kind="bridge")
BMC = Nic("usb0", ("169.254.3.1",))
HSN = tuple(Nic(f"hsn{number}", (f"10.3.{number}.1",), speed_bits_s=200_000_000_000) for number in range(4))

# As they stand on a workstation, a login node with InfiniBand, a node with Slingshot, a laptop without network.
WORKSTATION = (LO, ETH0, ETH1, DOCKER, NETWORK, VIRBR)
CLUSTER = (LO, ETH0, IB0, DOCKER)
SLINGSHOT = (LO, Nic("nmn0", ("10.100.0.1",)), *HSN)
OFFLINE = (LO, DOCKER)


# ---------------------------------------------------------------------------------------------------------------- gloo


@pytest.mark.parametrize(
    ("own", "names", "addresses"),
    [
        (("10.1.0.1",), ("eth0",), ("10.1.0.1",)),
        (("127.0.1.1",), ("lo",), ("127.0.1.1",)),
        (("127.0.1.1", "10.1.0.1"), ("lo",), ("127.0.1.1",)),
        (("::1", "10.1.0.1"), ("lo",), ("::1",)),
        (("10.99.9.9", "10.1.0.1"), ("eth0",), ("10.1.0.1",)),
        (("10.99.9.9",), ("lo",), ("127.0.0.1",)),
        ((), ("lo",), ("127.0.0.1",)),
        (("fd01::1", "10.1.0.1"), ("eth0",), ("fd01::1",)),
        (("10.2.0.1",), ("eth1",), ("10.2.0.1",)),
    ],
)
def test_gloo_listens_on_the_first_address_of_the_hosts_name_that_can_be_bound(
    own: tuple[str, ...], names: tuple[str, ...], addresses: tuple[str, ...]
) -> None:
    """Whatever it is; an interface that is down has its address all the same."""
    choice = gloo_choice(WORKSTATION, {}, own)
    assert (choice.names, choice.addresses, choice.rule) == (names, addresses, "own name")


@pytest.mark.parametrize(
    ("value", "names", "missing"),
    [
        ("eth0", ("eth0",), ()),
        ("eth0,eth1", ("eth0", "eth1"), ()),
        ("eth0,", ("eth0",), ()),
        ("lo", ("lo",), ()),
        ("eth", (), ("eth",)),
        ("=eth0", (), ("=eth0",)),
        (" eth0", (), (" eth0",)),
        (",eth0", ("eth0",), ("",)),
        ("eth0,nope", ("eth0",), ("nope",)),
        ("empty", (), ("empty",)),
    ],
)
def test_gloos_variable_holds_exact_names(value: str, names: tuple[str, ...], missing: tuple[str, ...]) -> None:
    choice = gloo_choice((*WORKSTATION, EMPTY), {"GLOO_SOCKET_IFNAME": value}, ("10.1.0.1",))
    assert (choice.names, choice.missing, choice.rule) == (names, missing, "GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize("value", ["", "e"])
def test_gloo_takes_a_value_of_one_letter_for_none(value: str) -> None:
    assert gloo_choice(WORKSTATION, {"GLOO_SOCKET_IFNAME": value}, ("10.1.0.1",)).rule == "own name"


def test_an_address_may_go_by_another_name_than_its_interface() -> None:
    """An alias, or the name before it was renamed: the C library lists the address under it."""
    nic = ETH0._replace(labels=("eth0:1", "enp1s0"))
    assert gloo_choice((nic,), {"GLOO_SOCKET_IFNAME": "enp1s0"}, ()).names == ("eth0",)
    assert nccl_choice((nic,), {"NCCL_SOCKET_IFNAME": "enp"}).names == ("eth0",)


# ---------------------------------------------------------------------------------------------------------------- NCCL


@pytest.mark.parametrize(
    ("nics", "names"),
    [
        (CLUSTER, ("ib0",)),
        (WORKSTATION, ("eth0", "br-0123456789ab")),
        (SLINGSHOT, ("nmn0", "hsn0", "hsn1", "hsn2", "hsn3")),
        (OFFLINE, ("docker0",)),
        ((LO,), ("lo",)),
        ((LO, VIRBR), ("lo",)),
        ((LO, SIX, ETH0), ("eth0", "six")),
        ((LO, BARE), ("bare",)),
        ((), ()),
    ],
)
def test_ncclls_own_choice(nics: tuple[Nic, ...], names: tuple[str, ...]) -> None:
    """InfiniBand's first; then all but docker, loopback and virbr; then these. IPv4 stands before IPv6."""
    choice = nccl_choice(nics, {})
    assert (choice.names, choice.rule) == (names, "default")


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("eth", ("eth0",)),
        ("eth0", ("eth0",)),
        ("hsn", ()),
        ("=eth0", ("eth0",)),
        ("=eth", ()),
        ("=eth0,docker0", ("eth0", "docker0")),
        ("hsn,eth", ("eth0",)),
        ("^docker,lo", ("eth0", "br-0123456789ab", "virbr0")),
        ("^=docker0,lo", ("eth0", "br-0123456789ab", "virbr0")),
        ("^eth,lo,docker,br,virbr", ()),
        ("eth0:1", ("eth0",)),
        ("lo", ("lo",)),
        ("e", ("eth0", "br-0123456789ab")),  # one letter: its own choice
    ],
)
def test_nccls_variable_holds_prefixes_exact_names_and_exclusions(value: str, names: tuple[str, ...]) -> None:
    """Only what runs counts: eth1 is down."""
    assert nccl_choice(WORKSTATION, {"NCCL_SOCKET_IFNAME": value}).names == names


@pytest.mark.parametrize(
    ("family", "names", "addresses"),
    [
        ("AF_INET", ("eth0",), ("10.1.0.1",)),
        ("AF_INET6", ("six", "eth0"), ("fd06::1", "fd01::1")),
        ("ipv4", ("eth0", "six"), ("10.1.0.1", "fd06::1")),
    ],
)
def test_nccls_family_leaves_out_the_other_addresses(
    family: str, names: tuple[str, ...], addresses: tuple[str, ...]
) -> None:
    """What it does not know, it ignores."""
    choice = nccl_choice((LO, SIX, ETH0), {"NCCL_SOCKET_FAMILY": family})
    assert (choice.names, choice.addresses) == (names, addresses)


# ------------------------------------------------------------------------------------------- what is tried, what is set


@pytest.mark.parametrize(
    "name",
    [
        *("docker0", "docker_gwbridge", "br-0123456789ab", "virbr0", "cni0", "veth12ab", "podman1", "lxdbr0"),
        *("flannel.1", "cali1234", "vxlan.calico", "cilium_host", "kube-ipvs0", "nodelocaldns", "tunl0", "tmfifo_net0"),
    ],
)
def test_interfaces_of_containers_and_virtual_machines_are_known_by_their_names(name: str) -> None:
    assert is_decoy(name)


@pytest.mark.parametrize("name", ["eth0", "br0", "br-ex", "bond0", "hsn0", "ib0", "enp1s0", "lan0", "vlan7", "wlan0"])
def test_what_may_lead_to_other_hosts_is_no_decoy(name: str) -> None:
    """br-ex is how OpenStack and OpenShift reach the world."""
    assert not is_decoy(name)


@pytest.mark.parametrize(
    ("nics", "environ", "wanted", "names"),
    [
        (WORKSTATION, {}, (), ("eth0",)),
        (CLUSTER, {}, (), ("eth0", "ib0")),
        (CLUSTER, {}, ("auto",), ("eth0", "ib0")),
        (CLUSTER, {}, ("ib0",), ("ib0",)),
        (CLUSTER, {"NCCL_SOCKET_IFNAME": "ib"}, (), ("ib0", "eth0")),
        (CLUSTER, {"GLOO_SOCKET_IFNAME": "docker0"}, (), ("docker0", "eth0", "ib0")),
        (CLUSTER, {}, ("docker0",), ("docker0",)),
        (CLUSTER, {"NCCL_SOCKET_IFNAME": "^lo"}, (), ("eth0", "ib0")),
        (CLUSTER, {"GLOO_SOCKET_IFNAME": "lo"}, (), ("eth0", "ib0")),
        ((LO, ETH0, BMC), {}, (), ("eth0",)),
        ((LO, BMC), {}, (), ("usb0",)),
        ((LO, ETH0, BMC), {}, ("usb0",), ("usb0",)),
        ((LO, ETH1, BARE, EMPTY), {}, (), ()),
        ((LO, SIX), {}, (), ("six",)),
        (SLINGSHOT, {}, (), ("nmn0", "hsn0", "hsn1", "hsn2", "hsn3")),
        (CLUSTER, {}, ("hsn0",), ()),
    ],
)
def test_what_is_worth_a_try(
    nics: tuple[Nic, ...], environ: Mapping[str, str], wanted: tuple[str, ...], names: tuple[str, ...]
) -> None:
    """Up, with an address, no decoy, unless somebody named it; the network to the service processor leads nowhere."""
    assert candidates(nics, environ, wanted) == names


def test_an_interface_is_reached_at_its_first_address_that_says_enough() -> None:
    """A link-local IPv6 address says nothing without the other host's interface."""
    assert address_to_reach(ETH0) == "10.1.0.1"
    assert address_to_reach(SIX) == "fd06::1"
    assert address_to_reach(BARE) == ""
    assert address_to_reach(Nic("eth0", ("169.254.3.1", "10.1.0.1"))) == "10.1.0.1"
    assert routes(WORKSTATION, ("eth0", "six", "docker0")) == (("eth0", "10.1.0.1"), ("docker0", "172.17.0.1"))


def test_the_variables_of_a_chosen_interface() -> None:
    """Exact names for NCCL, which else would take every eth1x for eth1."""
    assert nic_environ(("eth0",), CLUSTER, {}) == {
        "GLOO_SOCKET_IFNAME": "eth0",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "UCX_NET_DEVICES": "eth0",
    }
    both = nic_environ(("ib0", "eth0"), CLUSTER, {"UCX_NET_DEVICES": "all"})
    assert both == {
        "GLOO_SOCKET_IFNAME": "ib0,eth0",
        "NCCL_SOCKET_IFNAME": "=ib0,eth0",
        "TP_SOCKET_IFNAME": "ib0",
    }
    assert nic_environ(("ib0",), CLUSTER, {})["UCX_NET_DEVICES"] == "mlx5_0:1,ib0"
    assert nic_environ((), CLUSTER, {}) == {}


def test_the_option_wins_over_variables_and_a_suggestion_does_not() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth"}
    assert nic_environ(("ib0",), CLUSTER, environ)["GLOO_SOCKET_IFNAME"] == "ib0"
    assert set(nic_environ(("ib0",), CLUSTER, environ, override=False)) == {"TP_SOCKET_IFNAME", "UCX_NET_DEVICES"}


def test_mpirun_is_given_the_same_interfaces() -> None:
    words = mpirun_options(("hsn0", "hsn1"))
    assert "--mca btl_tcp_if_include hsn0,hsn1" in words
    assert "-iface hsn0" in words


@pytest.mark.parametrize(
    ("name", "near"),
    [("eht0", "eth0"), ("eth", "eth0"), ("ib", "ib0"), (" eth0", "eth0"), ("=ib0", "ib0"), ("wlp3s0", ""), ("lo0", "")],
)
def test_the_name_that_was_meant(name: str, near: str) -> None:
    assert near_name(name, CLUSTER) == near


# ----------------------------------------------------------------------------------------------------------- the check


def check(
    monkeypatch: pytest.MonkeyPatch,
    there: tuple[Nic, ...],
    environ: Mapping[str, str] | None = None,
    *,
    own: tuple[str, ...] = ("10.1.0.1",),
    elsewhere: bool = True,
    backend: str = "gloo",
    **context: Any,
) -> CheckResult:
    monkeypatch.setattr(interfaces, "known_backend", lambda _context: backend)
    monkeypatch.setattr(interfaces, "read_nics", lambda _root: there)
    monkeypatch.setattr(interfaces, "resolve", lambda names: tuple(Lookup(name, own) for name in names))
    monkeypatch.setattr(interfaces, "is_elsewhere", lambda *_: elsewhere)
    values = {"spans_hosts": True, "environ": environ or {}, "root": "/nowhere/", **context}
    return check_interfaces(CheckContext(**values))


@pytest.mark.parametrize("nics", [WORKSTATION[:4], CLUSTER, SLINGSHOT, (LO, ETH0), (LO, ETH0, BMC)])
@pytest.mark.parametrize("vendor", ["none", "nvidia"])
def test_a_healthy_host_is_told_nothing(monkeypatch: pytest.MonkeyPatch, nics: tuple[Nic, ...], vendor: str) -> None:
    own = nics[1].addresses[:1]
    assert check(monkeypatch, nics, own=own, vendor=vendor).verdict == "ok"
    assert check(monkeypatch, nics, own=("127.0.1.1",), vendor=vendor, spans_hosts=False).verdict == "ok"


@pytest.mark.parametrize("nics", [(LO,), OFFLINE])
def test_a_laptop_without_network_is_told_nothing(monkeypatch: pytest.MonkeyPatch, nics: tuple[Nic, ...]) -> None:
    """On one host loopback is enough, and several saferuns on one machine are no reason either."""
    for spans_hosts in (False, True):
        result = check(monkeypatch, nics, own=("127.0.0.1",), vendor="nvidia", spans_hosts=spans_hosts, elsewhere=False)
        assert result.verdict == "ok"


def test_a_misspelt_name_is_told_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "eht0"})
    assert (result.verdict, result.class_name) == ("fail", "network_interface")
    assert result.message == "GLOO_SOCKET_IFNAME names eht0, which this host does not have"
    assert result.hint == "did you mean eth0? this host has eth0 and ib0"


def test_gloo_is_told_that_its_names_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "=eth0"})
    assert result.verdict == "fail"
    assert "only NCCL knows ^ and =" in result.hint


def test_a_blank_in_a_name_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "eth0 "})
    assert result.message == 'GLOO_SOCKET_IFNAME names "eth0 ", which this host does not have'
    assert result.hint.startswith("did you mean eth0?")


def test_an_interface_that_is_down_is_told_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host its address works all the same."""
    result = check(monkeypatch, WORKSTATION, {"GLOO_SOCKET_IFNAME": "eth1"})
    assert (result.verdict, result.transient) == ("fail", False)
    assert result.message == "GLOO_SOCKET_IFNAME names eth1, which is down on this host"
    assert "this host has eth0; eth1 is down" in result.hint
    assert check(monkeypatch, WORKSTATION, {"GLOO_SOCKET_IFNAME": "eth1"}, spans_hosts=False).verdict == "ok"


@pytest.mark.parametrize("given", [{"environ": {"GLOO_SOCKET_IFNAME": "eth1"}}, {"nics": ("eth1",)}])
def test_an_interface_that_is_down_ends_no_launch_that_may_be_on_one_machine(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """Two saferuns that meet at 127.0.0.1: its address works there. One without an address works nowhere."""
    assert check(monkeypatch, WORKSTATION, elsewhere=False, **given).verdict == "warn"
    bare = tuple(nic._replace(addresses=()) if nic.name == "eth1" else nic for nic in WORKSTATION)
    assert check(monkeypatch, bare, elsewhere=False, **given).verdict == "fail"


@pytest.mark.parametrize("backend", ["", "nccl"])
@pytest.mark.parametrize("name", ["eht0", "lo"])
def test_what_a_variable_names_stops_nobody_who_may_not_read_it(
    monkeypatch: pytest.MonkeyPatch, backend: str, name: str
) -> None:
    """A cluster's module sets it for all jobs: those of MPI, of a TPU, of one rank, and `saferun echo hello`."""
    assert check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": name}, backend=backend).verdict == "warn"
    assert check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": name}, backend=backend, spans_hosts=False).verdict in {
        "ok",
        "warn",
    }


@pytest.mark.parametrize(
    ("value", "words", "hint"),
    [
        ("hsn", "NCCL_SOCKET_IFNAME=hsn fits no interface of this host", "this host has eth0"),
        ("=eht0", "NCCL_SOCKET_IFNAME==eht0 fits no interface of this host", "did you mean eth0?"),
        ("=eth1", "NCCL_SOCKET_IFNAME==eth1 fits eth1 alone, which is down on this host", "cables"),
        ("^lo,eth,docker,br,virbr", "NCCL_SOCKET_IFNAME=^lo,eth,docker,br,virbr leaves no interface for NCCL", "eth0"),
    ],
)
def test_a_value_that_leaves_nccl_nothing_is_told(
    monkeypatch: pytest.MonkeyPatch, value: str, words: str, hint: str
) -> None:
    for vendor in ("nvidia", "amd"):
        result = check(monkeypatch, WORKSTATION, {"NCCL_SOCKET_IFNAME": value}, vendor=vendor)
        assert (result.verdict, result.message) == ("warn", words)
        assert hint in result.hint


def test_without_gpus_nobody_reads_nccls_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites set them for all their nodes."""
    assert check(monkeypatch, WORKSTATION, {"NCCL_SOCKET_IFNAME": "hsn"}).verdict == "ok"


def test_a_family_without_addresses_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    result = check(monkeypatch, CLUSTER, environ, vendor="nvidia")
    assert result.message == "NCCL_SOCKET_IFNAME=ib0 fits no interface with an address of NCCL_SOCKET_FAMILY=AF_INET6"
    assert result.hint == "unset NCCL_SOCKET_FAMILY, or name another interface"


def test_one_name_of_a_list_is_enough_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sites have one list for nodes of different makes."""
    assert check(monkeypatch, WORKSTATION, {"NCCL_SOCKET_IFNAME": "hsn,eth"}, vendor="nvidia").verdict == "ok"


def test_the_option_names_interfaces_that_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, WORKSTATION, nics=("hsn0",), backend="")
    assert (result.verdict, result.message) == ("fail", "--nic names hsn0, which this host does not have")
    assert check(monkeypatch, WORKSTATION, nics=("eth1",), backend="").verdict == "warn", "it is there, and down"
    assert check(monkeypatch, WORKSTATION, nics=("eth0",)).verdict == "ok"
    assert check(monkeypatch, WORKSTATION, nics=("auto",)).verdict == "ok"


def test_a_decoy_that_gloo_would_take_is_told_where_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, own=("172.17.0.1",))
    assert result.verdict == "warn"
    assert result.message.startswith("gloo would use docker0 (its own name resolves to 172.17.0.1), which belongs to")
    assert result.hint == "run with --nic eth0"
    assert check(monkeypatch, CLUSTER, own=("172.17.0.1",), elsewhere=False).verdict == "ok"
    assert check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "docker0"}).verdict == "warn"


@pytest.mark.parametrize(("name", "kind"), [("dummy0", "virtual"), ("gre1", "tunnel")])
def test_an_address_that_was_given_to_the_host_s_own_name_is_no_container_s(
    monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """A routing protocol announces it, or a tunnel leads to it."""
    nics = (*CLUSTER, Nic(name, ("10.99.0.1",), kind=kind))
    assert check(monkeypatch, nics, own=("10.99.0.1",)).verdict == "ok"


def test_loopback_that_a_variable_names_leads_to_no_other_host(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "lo"})
    assert (result.verdict, result.message) == ("fail", "GLOO_SOCKET_IFNAME names lo, which leads to no other host")
    assert check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "lo"}, elsewhere=False).verdict == "ok"


def test_the_networks_of_containers_are_told_where_nccl_would_send_over_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With RDMA it only starts over the first interface."""
    result = check(monkeypatch, WORKSTATION, vendor="nvidia")
    assert result.verdict == "warn"
    assert result.message.startswith("NCCL would use br-0123456789ab (by its own rules), which belongs to containers")
    rdma = (LO, ETH0._replace(rdma=("mlx5_0:1",)), NETWORK)
    assert check(monkeypatch, rdma, vendor="nvidia").verdict == "ok"


def test_what_nccls_own_file_says_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Administrators write there what users leave out."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/nccl.conf").write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME==eth0\n")
    home = {"HOME": str(tmp_path)}
    result = check(monkeypatch, WORKSTATION, home, vendor="nvidia", root=f"{tmp_path}/")
    assert (result.verdict, dict(result.facts)["nccl"]) == ("ok", "eth0")
    assert result.message.endswith(", NCCL eth0 (NCCL_SOCKET_IFNAME of /etc/nccl.conf)")
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=nope\n")
    result = check(monkeypatch, WORKSTATION, home, vendor="nvidia", root=f"{tmp_path}/")
    assert result.message == "NCCL_SOCKET_IFNAME=nope (from ~/.nccl.conf) fits no interface of this host"
    environ = {**home, "NCCL_SOCKET_IFNAME": "eth0"}
    assert check(monkeypatch, WORKSTATION, environ, vendor="nvidia", root=f"{tmp_path}/").verdict == "ok"


def test_what_is_wrong_with_nccls_own_file_is_said_of_that_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Who has not set the variable cannot unset it."""
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=docker0\n")
    home = {"HOME": str(tmp_path)}
    result = check(monkeypatch, WORKSTATION, home, vendor="nvidia", root=f"{tmp_path}/")
    assert result.message == (
        "NCCL would use docker0 (NCCL_SOCKET_IFNAME of ~/.nccl.conf names it), which belongs to containers of this host"
    )
    (tmp_path / ".nccl.conf").write_text("NCCL_SOCKET_IFNAME=ib0\nNCCL_SOCKET_FAMILY=AF_INET6\n")
    result = check(monkeypatch, CLUSTER, home, vendor="nvidia", root=f"{tmp_path}/")
    assert result.hint == "take NCCL_SOCKET_FAMILY out of ~/.nccl.conf, or name another interface"


def test_what_a_variable_holds_cannot_write_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    result = check(monkeypatch, CLUSTER, {"GLOO_SOCKET_IFNAME": "e\x1b[31m\n" + "x" * 500})
    assert result.message.isprintable()
    assert len(result.message) < 200
