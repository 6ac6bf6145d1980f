"""Interfaces, routes and the way to a master as the kernel tells them, in network namespaces made for it."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from saferun.linux.names import known_at_once
from saferun.linux.netlink import Route, read_nics, route_to
from saferun.linux.nic import Nic
from saferun.preflight.checks.all_checks import CHECKS
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.interfaces import check_interfaces
from saferun.preflight.checks.master import check_master
from saferun.preflight.checks.run import run_checks
from saferun.preflight.default_nics import candidates, nccl_choice
from saferun.preflight.results import CheckResult

Answer = TypeVar("Answer")
NEWNET = 0x40000000

in_namespace = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="making network namespaces takes root, and iproute2"
)

DEADLINE_S = 30.0
# A host with a network interface of each sort, and a router behind the first. What a route says of an address is what
# its name says; the router forbids 10.60/16 and swallows 10.70/16.
HOST = """
link set lo up
link add eth0 mtu 1400 type veth peer name eth0 netns {router}
addr add 10.1.0.1/24 dev eth0
addr add 10.1.0.9/24 dev eth0 label eth0:1
addr add fd01::1/64 dev eth0 nodad
link set eth0 up
link add eth1 type veth peer name veth1
addr add 10.2.0.1/24 dev eth1
link add six type veth peer name vethsix
addr add fd06::1/64 dev six nodad
link set six up
link set vethsix up
link add docker0 type bridge
addr add 172.17.0.1/16 dev docker0
link set docker0 up
link add bare type veth peer name vethbare
link set bare up
link set vethbare up
"""
ROUTER = """
link set lo up
addr add 10.1.0.2/24 dev eth0
link set eth0 up
route add prohibit 10.60.0.0/16
route add blackhole 10.70.0.0/16
"""
ROUTES = """
route add 10.50.0.0/16 via 10.1.0.2 mtu 1300
route add 10.60.0.0/16 via 10.1.0.2
route add 10.70.0.0/16 via 10.1.0.2
route add prohibit 10.80.0.0/16
route add unreachable 10.81.0.0/16
route add blackhole 10.82.0.0/16
"""


class Namespace:
    """A network namespace: that of a thread, with which it ends."""

    def __init__(self, *, looks_for_duplicates: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1)
        self.number = self.run(self._leave)
        # IPv6 asks whether somebody has an address already: forever, or not at all.
        asks = "1" if looks_for_duplicates else "0"
        for name, value in (("all/accept_dad", asks), ("default/accept_dad", asks), ("default/dad_transmits", "1000")):
            self.run(write, f"/proc/sys/net/ipv6/conf/{name}", value)

    @staticmethod
    def _leave() -> int:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(NEWNET):
            raise OSError(ctypes.get_errno(), "unshare")
        return threading.get_native_id()

    def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        return self._thread.submit(function, *arguments).result(60)

    def ip(self, batch: str) -> None:
        self.run(lambda: subprocess.run(["ip", "-batch", "-"], input=batch, text=True, check=True, timeout=30))

    def close(self) -> None:
        self._thread.shutdown()


@pytest.fixture(scope="module")
def host() -> Iterator[Namespace]:
    router, one = Namespace(), Namespace()
    try:
        one.ip(HOST.format(router=router.number))
        router.ip(ROUTER)
        one.ip(ROUTES)
        router.run(write, "/proc/sys/net/ipv4/ip_forward", "1")  # that of the thread's own namespace
        yield one
    finally:
        one.close()
        router.close()


def write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def by_name(nics: tuple[Nic, ...]) -> dict[str, Nic]:
    return {nic.name: nic for nic in nics}


def as_ip_tells() -> dict[str, set[str]]:
    """Names and addresses as another program reads them."""
    told = subprocess.run(["ip", "-j", "addr"], capture_output=True, text=True, check=True, timeout=30).stdout
    return {
        link["ifname"]: {f"{one['local']}/{one['prefixlen']}" for one in link["addr_info"] if "local" in one}
        for link in json.loads(told)
        if "ifname" in link
    }


def test_this_hosts_interfaces_are_those_that_others_see() -> None:
    """Without root, and in any container: the loopback interface and all names that the C library knows."""
    nics = by_name(read_nics())
    assert set(nics) == {name for _, name in socket.if_nameindex()}
    assert nics["lo"].kind == "loopback"
    assert "127.0.0.1" in nics["lo"].addresses


@in_namespace
def test_names_and_addresses_are_those_that_ip_shows(host: Namespace) -> None:
    nics, told = host.run(lambda: (read_nics(), as_ip_tells()))
    assert {nic.name: set(nic.networks) for nic in nics} == told


@in_namespace
def test_each_interface_is_read_with_all_that_counts(host: Namespace) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while True:
        nics = by_name(host.run(read_nics))
        eth0 = nics["eth0"]
        # The kernel adds the link-local address some time after both ends of the link are up.
        if eth0.addresses[-1].startswith("fe80:") or time.monotonic() > give_up_at:
            break
        time.sleep(0.02)
    assert eth0.addresses[:3] == ("10.1.0.1", "10.1.0.9", "fd01::1")
    assert eth0.networks[0] == "10.1.0.1/24"
    assert eth0.addresses[-1].startswith("fe80:")
    assert (eth0.is_up, eth0.mtu, eth0.kind, eth0.labels) == (True, 1400, "virtual", ("eth0:1",))
    assert (nics["eth1"].is_up, nics["eth1"].addresses) == (False, ("10.2.0.1",))
    assert nics["docker0"].kind == "bridge"


@in_namespace
def test_what_sysfs_says_of_another_namespace_is_not_believed(host: Namespace) -> None:
    """/sys belongs to whoever mounted it: its eth0 may be another machine's."""
    assert all(nic.speed_bits_s == 0 and nic.rdma == () for nic in host.run(read_nics))


@in_namespace
def test_with_nonlocal_binds_only_an_address_of_an_interface_is_this_hosts() -> None:
    """Any host could bind any other address: each would take the endpoint of a c10d rendezvous for itself."""
    one = Namespace()
    try:
        one.ip("link set lo up\naddr add 10.1.0.1/32 dev lo\naddr add fd01::1/128 dev lo nodad")
        for family in ("ipv4", "ipv6"):
            one.run(write, f"/proc/sys/net/{family}/ip_nonlocal_bind", "1")
        addresses = ("10.1.0.1", "127.0.0.1", "fd01::1", "10.1.0.2", "fd01::2")
        assert one.run(lambda: [known_at_once(address) for address in addresses]) == [True, True, True, False, False]
    finally:
        one.close()


@in_namespace
def test_more_addresses_than_one_answer_holds_are_all_read() -> None:
    """The kernel answers in parts."""
    crowded = Namespace()
    try:
        crowded.ip("link set lo up\n" + "".join(f"addr add 10.{n // 200}.{n % 200}.1/32 dev lo\n" for n in range(2000)))
        assert len(crowded.run(read_nics)[0].addresses) >= 2001
    finally:
        crowded.close()


@in_namespace
def test_an_address_that_cannot_be_bound_yet_is_left_out() -> None:
    """IPv6 asks first whether somebody else has it."""
    asking = Namespace(looks_for_duplicates=True)
    try:
        asking.ip(
            "link add eth0 type veth peer name peer\nlink set eth0 up\nlink set peer up\naddr add fd01::1/64 dev eth0"
        )
        assert by_name(asking.run(read_nics))["eth0"].addresses == ()
        asking.ip("addr add fd01::2/64 dev eth0 nodad")
        assert by_name(asking.run(read_nics))["eth0"].addresses == ("fd01::2",)
    finally:
        asking.close()


@in_namespace
@pytest.mark.parametrize(
    ("address", "route"),
    [
        ("10.1.0.7", Route("eth0", "10.1.0.1", "", 1400)),
        ("10.50.0.1", Route("eth0", "10.1.0.1", "10.1.0.2", 1300)),
        ("10.1.0.1", Route("lo", "10.1.0.1", "", 65536)),
        ("fd01::7", Route("eth0", "fd01::1", "", 1400)),
        ("10.99.0.1", Route(error=errno.ENETUNREACH)),
        ("10.80.0.1", Route(error=errno.EACCES)),
        ("10.81.0.1", Route(error=errno.EHOSTUNREACH)),
        ("10.82.0.1", Route(error=errno.EINVAL)),
    ],
)
def test_a_route_names_its_interface_or_why_there_is_none(host: Namespace, address: str, route: Route) -> None:
    assert host.run(route_to, address) == route


@in_namespace
def test_a_link_local_route_goes_over_the_interface_that_is_named(host: Namespace) -> None:
    assert host.run(route_to, "fe80::7%six").nic == "six"
    assert host.run(route_to, "fe80::7%eth0").nic == "eth0"


@in_namespace
def test_what_leads_nowhere_is_not_tried(host: Namespace) -> None:
    """Down, without an address, of containers, or loopback."""
    nics = host.run(read_nics)
    assert candidates(nics, {}) == ("eth0", "six")
    assert nccl_choice(nics, {}).names[0] == "eth0"


# ------------------------------------------------------------------------------------------------- the way to a master


def to_master(address: str, port: int = 29500) -> CheckContext:
    return CheckContext(spans_hosts=True, serves=False, master=address, ports=(port,))


@in_namespace
def test_a_master_that_listens_answers(host: Namespace) -> None:
    def listen_and_check() -> CheckResult:
        with socket.create_server(("10.1.0.1", 0)) as listener:
            return check_master(to_master("10.1.0.1", listener.getsockname()[1]))

    result = host.run(listen_and_check)
    assert result.verdict == "ok"
    assert "answers" in result.message


@in_namespace
@pytest.mark.parametrize(("address", "says"), [("10.1.0.2", "refuses connections"), ("10.70.0.1", "does not answer")])
def test_a_master_that_is_not_there_yet_is_no_failure(host: Namespace, address: str, says: str) -> None:
    """The hosts wait for each other; the way there is told all the same."""
    result = host.run(check_master, to_master(address))
    assert result.verdict == "skipped"
    assert f"{address}:29500 {says}: not there yet; eth0 " in result.message
    assert ("nic", "eth0") in result.facts


@in_namespace
def test_a_firewall_that_forbids_the_connection_is_told_from_silence(host: Namespace) -> None:
    """Its ICMP message comes at once, where a host that is off is silent."""
    result = host.run(check_master, to_master("10.60.0.1"))
    assert (result.verdict, result.class_name, result.transient) == ("warn", "master_unreachable", True)
    assert result.message == "a firewall rejects connections to 10.60.0.1:29500, over eth0"


@in_namespace
def test_a_network_that_this_host_has_no_way_to_is_told(host: Namespace) -> None:
    """What is down is named."""
    result = host.run(check_master, to_master("10.99.0.1"))
    assert result.message == "no network of this host leads to the master 10.99.0.1"
    assert "ip route get 10.99.0.1" in result.hint
    result = host.run(check_master, to_master("10.80.0.1"))
    assert result.message == "a route of this host prohibits the connection to the master 10.80.0.1"


# -------------------------------------------------------------------------------------------------- what variables name


@in_namespace
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("eht0", "GLOO_SOCKET_IFNAME names eht0, which this host does not have"),
        ("eth1", "GLOO_SOCKET_IFNAME names eth1, which is down on this host"),
        ("bare", "GLOO_SOCKET_IFNAME names bare, which has no address that other hosts reach"),
        ("eth0,six", ""),
        ("eth0:1", ""),
    ],
)
def test_gloos_variable_is_held_against_the_real_interfaces(host: Namespace, value: str, words: str) -> None:
    context = CheckContext(spans_hosts=True, serves=True, environ={"GLOO_SOCKET_IFNAME": value})
    result = host.run(check_interfaces, context)
    assert result.verdict == ("warn" if words else "ok"), "who may not use gloo is not stopped"
    if words:
        assert result.message == words


NETWORK = {"names", "ports", "interfaces", "fabric", "rdma", "master"}


def test_this_machine_is_healthy() -> None:
    """A healthy machine is told nothing: alone, and where several saferuns run on it."""
    for context in (
        CheckContext(ports=(29500,), bound=(29500,)),
        CheckContext(spans_hosts=True, serves=True, master="127.0.0.1", ports=(29500,), bound=(29500,)),
        CheckContext(spans_hosts=True, serves=False, master="localhost", ports=(29500,)),
        CheckContext(spans_hosts=True, serves=False, master=socket.gethostname(), ports=(29500,), vendor="nvidia"),
    ):
        results: list[CheckResult] = []
        run_checks([check for check in CHECKS if check.name in NETWORK], context, results.append)
        assert {result.name for result in results} == NETWORK
        assert [result for result in results if result.verdict in {"warn", "fail"}] == []
