"""The names of the hosts: what a check says of where they lead, and what it does not."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.checks import name_resolution
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import Lookup, check_names, is_elsewhere, resolve
from saferun.preflight.results import CheckResult

LO = Nic("lo", ("127.0.0.1", "::1"), kind="loopback", mtu=65536)
ETH0 = Nic("eth0", ("10.1.0.3",))
HOSTS = ("node0", "node1", "node2", "node3")


class Resolver:
    """A name service: names to addresses, or to an error."""

    def __init__(self, **known: Sequence[str] | int) -> None:
        self.known = known

    def __call__(self, host: bytes, _port: None, **_: Any) -> list[Any]:
        answer = self.known.get(host.decode(), socket.EAI_NONAME)
        if host[:1].isdigit():
            answer = (host.decode(),)
        if isinstance(answer, int):
            raise socket.gaierror(answer, "no")
        return [(2, 1, 6, "", (address, 0)) for address in answer for _ in "twice"]


def names_check(
    monkeypatch: pytest.MonkeyPatch,
    own: Sequence[str] | int,
    leader: Sequence[str] | int = ("10.1.0.1",),
    *,
    backend: str = "gloo",
    **more: Any,
) -> CheckResult:
    """The check of node3, which looks for node0."""
    monkeypatch.setattr("saferun.preflight.checks.name_resolution.known_backend", lambda _context: backend)
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(node3=own, node0=leader))
    monkeypatch.setattr(socket, "gethostname", lambda: "node3")
    monkeypatch.setattr("saferun.linux.netlink.read_nics", lambda _root: (LO, ETH0))
    context = CheckContext(spans_hosts=True, serves=False, master="node0", hosts=HOSTS, node_rank=3)
    return check_names(context._replace(**more))


def test_names_that_lead_where_they_should_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    result = names_check(monkeypatch, ("10.1.0.3",))
    assert (result.verdict, result.message) == ("ok", "node3 is 10.1.0.3, node0 is 10.1.0.1")


def test_one_host_needs_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none is looked up: a name service that hangs is no reason to wait."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(socket, "getaddrinfo", never)
    result = check_names(CheckContext())
    assert (result.verdict, result.message) == ("ok", "only one host: no names are needed")


@pytest.mark.parametrize(
    ("own", "says"),
    [
        (("127.0.1.1",), "its own name node3 resolves to 127.0.1.1, so that gloo would listen on loopback"),
        (("127.0.1.1", "10.1.0.3"), "its own name node3 resolves to 127.0.1.1, so that"),
        (("10.66.6.6",), "its own name node3 resolves to 10.66.6.6, which none of its interfaces has, so that"),
        (socket.EAI_NONAME, "its own name node3 cannot be resolved, so that gloo would listen on loopback"),
    ],
)
def test_an_own_name_that_leads_gloo_to_loopback_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, own: Sequence[str] | int, says: str
) -> None:
    """Debian's installer gives a host's name 127.0.1.1."""
    result = names_check(monkeypatch, own)
    assert (result.verdict, result.class_name) == ("fail", "network_interface")
    assert result.message.startswith(says)
    assert result.hint == "give the host's name its address in /etc/hosts, or run with --nic eth0"


@pytest.mark.parametrize("backend", ["", "nccl"])
def test_where_gloo_may_not_be_asked_it_is_a_warning(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """MPI, NCCL, TPUs, Gaudi, Ascend and programs without torch do not care for names."""
    assert names_check(monkeypatch, ("127.0.1.1",), backend=backend).verdict == "warn"


@pytest.mark.parametrize(
    "more", [{"environ": {"GLOO_SOCKET_IFNAME": "eth0"}}, {"nics": ("eth0",)}, {"nics": ("auto",)}]
)
def test_with_an_interface_that_is_named_the_own_name_does_not_matter(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    assert names_check(monkeypatch, ("127.0.1.1",), **more).verdict == "ok"


def test_where_all_may_be_on_one_machine_loopback_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several saferuns on a laptop."""
    result = names_check(monkeypatch, ("127.0.0.1",), master="127.0.0.1", hosts=())
    assert (result.verdict, result.message) == (
        "ok",
        "its own name node3 resolves to 127.0.0.1, which does no harm on one machine",
    )


@pytest.mark.parametrize(
    ("leader", "says"),
    [
        (socket.EAI_NONAME, "the master's name node0 is unknown on this host"),
        (socket.EAI_AGAIN, "the master's name node0 cannot be resolved on this host: no name server answers"),
    ],
)
def test_a_master_whose_name_does_not_resolve_yet_is_told(
    monkeypatch: pytest.MonkeyPatch, leader: int, says: str
) -> None:
    """A pod's name comes when the pod does, a container's with the container: the hosts wait for each other."""
    result = names_check(monkeypatch, ("10.1.0.3",), leader)
    assert (result.verdict, result.message) == ("warn", says)
    assert (result.class_name, result.transient) == ("name_resolution", True)


def test_a_masters_name_that_leads_to_this_host_itself_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copied /etc/hosts."""
    result = names_check(monkeypatch, ("10.1.0.3",), ("127.0.1.1",))
    assert result.verdict == "fail"
    assert result.message == "the master's name node0 resolves to 127.0.1.1 on this host, which is this host itself"
    assert names_check(monkeypatch, ("10.1.0.3",), ("127.0.1.1",), serves=True).verdict == "ok"
    assert names_check(monkeypatch, ("10.1.0.3",), ("127.0.1.1",), backend="").verdict == "warn"


@pytest.mark.parametrize(
    ("master_name", "addresses", "hosts", "serves", "elsewhere"),
    [
        ("node0", ("10.1.0.1",), (), False, True),
        ("node0", ("10.1.0.3",), (), False, False),
        ("node0", ("127.0.1.1",), (), False, False),
        ("node0", (), (), False, False),
        ("node0", ("10.1.0.1",), (), True, False),
        ("node0", ("127.0.1.1",), HOSTS, True, True),
        ("node0", (), ("node3.example.org", "node1.example.org"), True, True),
        ("localhost", ("127.0.0.1",), HOSTS, False, False),
        ("127.0.0.1", ("127.0.0.1",), HOSTS, False, False),
        ("node0", ("127.0.0.1",), ("node1", "node2"), True, False),
        ("node0", ("127.0.0.1",), ("node3", "localhost"), True, False),
        ("node0", ("127.0.0.1",), ("127.0.0.1", "127.0.0.2"), True, False),
    ],
)
def test_that_there_are_other_machines_must_be_certain(
    monkeypatch: pytest.MonkeyPatch,
    master_name: str,
    addresses: tuple[str, ...],
    hosts: tuple[str, ...],
    serves: bool,
    elsewhere: bool,
) -> None:
    """A list of hosts that does not hold this one is somebody else's, or made up."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node3")
    context = CheckContext(spans_hosts=True, serves=serves, master=master_name, hosts=hosts)
    assert is_elsewhere(context, Lookup(master_name, addresses), (LO, ETH0)) is elsewhere


def test_a_name_service_that_hangs_is_waited_for_no_longer_than_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver's own patience is 5 s and more, for each server; the other name is told all the same."""
    never = threading.Event()

    def hang(host: bytes, _port: None, **_: Any) -> list[Any]:
        if host == b"slow":
            assert never.wait(600)
        return [(2, 1, 6, "", ("10.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    assert resolve(("slow", "fast"), 0.05) == (Lookup("slow", error="late"), Lookup("fast", ("10.0.0.1",)))
    assert not never.is_set(), "nobody has waited for the answer"
    never.set()


def test_the_deadline_counts_for_all_names_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that takes longer than it says is skipped, and what it knows is lost."""
    now, waits = [100.0], []

    class Clocked(threading.Semaphore):
        """Each answer comes after 30 s of virtual time."""

        def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
            waits.append(timeout)
            now[0] += 30.0
            return super().acquire(blocking, 60)

    monkeypatch.setattr(name_resolution, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("threading.Semaphore", Clocked)
    monkeypatch.setattr(socket, "getaddrinfo", Resolver(node3=("10.1.0.3",), node0=("10.1.0.1",), node1=("10.1.0.2",)))
    assert len(resolve(("node3", "node0", "node1"), 50.0)) == len(waits)
    assert waits == [50.0, 20.0, 0.0]


def test_a_name_that_no_name_server_answers_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is overloaded as thousands of hosts start has enough to do; each start would wait."""
    asked: list[bytes] = []

    def answer(host: bytes, _port: None, **_: Any) -> list[Any]:
        asked.append(host)
        raise socket.gaierror(socket.EAI_AGAIN, "no")

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    assert resolve(("node3",), 60.0) == (Lookup("node3", error="unanswered"),)
    assert asked == [b"node3"]


def test_a_slow_name_service_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    late = (Lookup("node3", ("10.1.0.3",)), Lookup("node0", error="late"))
    monkeypatch.setattr(name_resolution, "resolve", lambda _names: late)
    monkeypatch.setattr("saferun.linux.netlink.read_nics", lambda _root: (LO, ETH0))
    result = check_names(CheckContext(spans_hosts=True, serves=False, master="node0"))
    assert (result.verdict, result.transient) == ("warn", True)
    assert result.message == "the master's name node0 takes longer than 2 s to resolve on this host"


def test_a_name_of_any_kind_is_looked_up_without_breaking() -> None:
    assert resolve(("127.0.0.1",)) == (Lookup("127.0.0.1", ("127.0.0.1",)),)
    assert resolve(("a\0b",))[0].error == "unknown"
    assert resolve(("x" * 300,))[0].error in {"unknown", "unanswered"}
    assert resolve(("\udc80",))[0].error == "unknown"
    assert resolve(()) == ()


def test_an_own_name_that_no_name_server_answers_now_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name server that is being restarted: gloo asks later, and may get an answer by then."""
    result = names_check(monkeypatch, socket.EAI_AGAIN)
    assert (result.verdict, result.class_name, result.transient) == ("warn", "name_resolution", True)
    assert result.message.startswith("its own name node3 cannot be resolved now (no name server answers): if it still ")
