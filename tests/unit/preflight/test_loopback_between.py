"""Hosts whose ranks would listen on loopback with gloo, as only a comparison with the other hosts shows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from saferun.linux.nic import Nic
from saferun.preflight import default_nics
from saferun.preflight.default_nics import candidates, loopback_between
from saferun.preflight.host_messages import decode_host_info, encode_host_info
from saferun.preflight.judge import judge
from saferun.preflight.outcome import outcome_of, unusable_hosts
from saferun.preflight.results import CheckResult, HostInfo, Probe

LO = Nic("lo", ("127.0.0.1", "::1"), ("127.0.0.1/8", "::1/128"), True, 65536, "loopback")
ETH0 = Nic("eth0", ("10.1.0.1", "fd01::1", "fe80::1"))
IB0 = Nic("ib0", ("10.9.0.1",), kind="infiniband", mtu=2044, rdma=("mlx5_0:1",))
DOCKER = Nic("docker0", ("172.17.0.1",), kind="bridge")
CLUSTER = (LO, ETH0, IB0, DOCKER)


def info(label: str, nics: tuple[Nic, ...], gloo: tuple[str, ...], **more: Any) -> HostInfo:
    return HostInfo(label, nics=nics, gloo=gloo, probed=candidates(nics, {}))._replace(**more)


def other(nics: tuple[Nic, ...], number: int) -> tuple[Nic, ...]:
    return tuple(
        nic if nic.kind in {"loopback", "bridge"} else nic._replace(addresses=(f"10.77.0.{number}",)) for nic in nics
    )


def test_loopback_between_hosts_is_told_of_those_that_have_it() -> None:
    """The first host cannot know by itself that its own name misleads gloo."""
    infos = {0: info("node0", other(CLUSTER, 1), ("lo",)), 1: info("node1", other(CLUSTER, 2), ("eth0",))}
    results = loopback_between({host: one._replace(backend="gloo") for host, one in infos.items()})
    assert [(result.host, result.verdict) for result in results] == [("node0", "fail")]
    assert "--nic eth0" in results[0].hint
    assert [result.verdict for result in loopback_between(infos)] == ["warn"], "nobody may ask gloo"


@pytest.mark.parametrize(
    ("name", "address", "is_reached"),
    [
        (("10.99.0.{}",), "10.99.0.{}", True),
        (("10.66.6.6", "10.99.0.{}"), "10.99.0.{}", True),
        (("127.0.1.1",), "10.99.0.{}", False),
        (("127.0.1.1", "10.99.0.{}"), "10.99.0.{}", False),
        (("127.0.1.1",), "10.99.9.9", False),
        (("10.99.9.9",), "10.99.9.9", False),
        ((), "10.99.0.{}", False),
    ],
)
@pytest.mark.parametrize("unnumbered", [False, True])
def test_an_address_on_loopback_that_is_announced_to_others_is_reached(
    name: tuple[str, ...], address: str, *, is_reached: bool, unnumbered: bool
) -> None:
    """Hosts of a routed network have the address of their name there. A virtual address of a service is another one.

    Gloo listens on the first address of the name that it can use. An address that all hosts have leads each to itself.
    """
    infos = {}
    for number in range(2):
        own = (f"node{number}", *(one.format(number) for one in name))
        rest = other(CLUSTER[1:], number)
        if unnumbered:
            rest = tuple(nic._replace(addresses=(f"fe80::{number}",)) for nic in rest)
        nics = (LO._replace(addresses=("127.0.0.1", address.format(number))), *rest)
        names = (own, ("master", "10.99.0.0"))
        infos[number] = info(f"node{number}", nics, ("lo",), backend="gloo", names=names)
    is_one_machine = unnumbered and "{}" not in address  # as far as can be known
    expected = [] if is_reached or is_one_machine else ["fail", "fail"]
    assert [result.verdict for result in loopback_between(infos)] == expected


def test_many_hosts_are_compared_in_proportion_to_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader's loop does nothing else meanwhile."""
    compared = []

    class Addresses(set[str]):
        def isdisjoint(self, other: Iterable[Any]) -> bool:
            compared.append(1)
            return super().isdisjoint(other)

    infos = {}
    for number in range(300):
        addresses = (f"10.{number}.0.1",)
        names = ((f"node{number}", *addresses),)
        nics = (LO._replace(addresses=("127.0.0.1", *addresses)), ETH0._replace(addresses=(f"10.{number}.0.2",)))
        infos[number] = info(f"node{number}", nics, ("lo",), backend="gloo", names=names)
    real = default_nics._addresses_of_machine
    monkeypatch.setattr(default_nics, "_addresses_of_machine", lambda info: Addresses(real(info)))
    assert loopback_between(infos) == ()
    assert len(compared) <= 2 * len(infos)


def test_several_saferuns_of_one_machine_meet_on_loopback() -> None:
    infos = {number: info("vm", CLUSTER, ("lo",)) for number in range(2)}
    assert loopback_between(infos) == ()
    assert loopback_between({number: info("vm", (LO,), ("lo",)) for number in range(2)}) == ()


def test_a_link_local_address_that_all_hosts_have_makes_them_no_single_machine() -> None:
    """That of a management controller's USB interface. Where there is no other address, it tells the hosts apart."""
    usb = Nic("usb0", ("169.254.3.1",))
    infos = {number: info(f"node{number}", (LO, usb, *other((ETH0,), number)), ("lo",)) for number in range(2)}
    assert [result.host for result in loopback_between(infos)] == ["node0", "node1"]
    for same in (True, False):
        cable = [Nic("eth0", (f"169.254.3.{1 if same else number}",)) for number in range(2)]
        infos = {number: info(f"node{number}", (LO, cable[number]), ("lo",)) for number in range(2)}
        assert len(loopback_between(infos)) == (0 if same else 2)


def test_what_a_host_has_said_itself_is_not_said_twice() -> None:
    said = CheckResult("names", "fail", "its own name …", class_name="network_interface")
    infos = {
        0: info("node0", other(CLUSTER, 1), ("lo",), results=(said,)),
        1: info("node1", other(CLUSTER, 2), ("eth0",)),
    }
    assert loopback_between(infos) == ()


@pytest.mark.parametrize("backend", ["gloo", "", "nccl"])
def test_an_own_name_that_no_name_server_answers_now_is_a_warning_that_blames_no_host(backend: str) -> None:
    """A name server that is being restarted: the ranks ask for the name later, and torchrun's would find it."""
    infos = {}
    for number in range(4):
        names = ((f"node{number}", f"10.77.0.{number}"), ("node0", "10.77.0.0"))
        infos[number] = info(f"node{number}", other(CLUSTER, number), ("eth0",), backend=backend, names=names)
    infos[2] = infos[2]._replace(gloo=(), names=(("node2",), ("node0", "10.77.0.0")), unanswered="node2")
    decoded = {host: decode_host_info(encode_host_info(one)) for host, one in infos.items()}
    assert decoded == infos
    probes = [
        Probe(a, b, "eth0", f"10.77.0.{b}", "eth0", latency_s=1e-4, bytes_s=1e9) for a in infos for b in infos if a != b
    ]
    found = judge(infos, probes, missing={}, nics=(), remeasured=True, duration_s=0.1)
    outcome = outcome_of(found, infos, nics=(), only_warn=False)
    assert (outcome.failure, outcome.faults, unusable_hosts(outcome)) == (None, (), ())
    expected = (
        "its own name node2 cannot be resolved now (no name server answers): if it still cannot be when the ranks "
        "meet, gloo listens on loopback, where no other host reaches it"
    )
    warnings = [(one.host, one.message, one.hint) for one in found.results if one.verdict == "warn"]
    hint = "give the host's name its address in /etc/hosts, or run with --nic eth0"
    assert warnings == ([("node2", expected, hint)] if backend != "nccl" else [])


def test_an_own_name_that_is_not_answered_on_one_machine_is_no_warning() -> None:
    """Containers without a network of their own, several saferuns of a laptop."""
    infos = {number: info("vm", CLUSTER, (), backend="gloo", unanswered="vm") for number in range(2)}
    assert loopback_between(infos) == ()


@pytest.mark.parametrize(
    ("verdict", "message", "class_name"),
    [
        ("fail", "its own name node0 …", "network_interface"),
        ("warn", "its own name node0 cannot be resolved now …", "name_resolution"),
    ],
)
def test_what_a_host_has_said_of_a_name_that_is_not_answered_is_not_said_twice(
    verdict: str, message: str, class_name: str
) -> None:
    said = CheckResult("names", verdict, message, class_name=class_name)
    infos = {
        0: info("node0", other(CLUSTER, 1), (), backend="gloo", unanswered="node0", results=(said,)),
        1: info("node1", other(CLUSTER, 2), ("eth0",), backend="gloo"),
    }
    assert loopback_between(infos) == ()


@pytest.mark.parametrize("nics", [(), ("auto",)])
def test_what_auto_has_found_is_what_gloo_is_told_to_use(nics: tuple[str, ...]) -> None:
    """No refusal because of what own names would have led it to."""
    infos = {
        number: info(f"node{number}", other(CLUSTER, number + 1), ("lo",), backend="gloo", nccl=("eth0",))
        for number in range(2)
    }
    probes = [
        Probe(a, b, nic, f"10.77.0.{b + 1}", nic, latency_s=1e-4, bytes_s=1e9)
        for a, b in ((0, 1), (1, 0))
        for nic in ("eth0", "ib0")
    ]
    found = judge(infos, probes, missing={}, nics=nics, remeasured=True, duration_s=0.1)
    refused = [result.message for result in found.results if result.verdict == "fail"]
    if nics:
        assert refused == []
        assert found.nic
    else:
        assert set(refused) == {"gloo would listen on loopback, where no other host reaches it"}
