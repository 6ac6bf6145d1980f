"""What a host says of the interfaces that its ranks would use, and under which addresses it can be probed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from saferun.linux.nic import Nic
from saferun.preflight.checks import common, host_info, interfaces, server
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.host_info import gather_host_info, probe_routes
from saferun.preflight.checks.name_resolution import Lookup
from saferun.preflight.default_nics import loopback_between
from saferun.preflight.results import HostInfo

LO = Nic("lo", ("127.0.0.1",), ("127.0.0.1/8",), kind="loopback")
ETH0 = Nic("eth0", ("10.1.0.5", "fd01::5"), ("10.1.0.5/24", "fd01::5/64"))
ETH1 = Nic("eth1", ("10.2.0.5",), ("10.2.0.5/24",))
NICS = (LO, ETH0, ETH1)
OWN = "node5"


def context(root: Path, **changed: Any) -> CheckContext:
    known = {"spans_hosts": True, "master": "node0", "environ": {"HOME": str(root)}, "root": f"{root}/"}
    return CheckContext(**{**known, **changed})


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> dict[str, Lookup]:
    """What names resolve to; the host has ``NICS``."""
    known = {OWN: Lookup(OWN, ("10.1.0.5",)), "node0": Lookup("node0", ("10.1.0.1",))}

    def resolve(names: Any, _deadline_s: float = 0.0) -> tuple[Lookup, ...]:
        return tuple(known[name] for name in names)

    for module in (host_info, interfaces):
        monkeypatch.setattr(module, "read_nics", lambda _root: NICS)
        monkeypatch.setattr(module, "resolve", resolve)
        monkeypatch.setattr(module.socket, "gethostname", lambda: OWN)
    return known


@pytest.mark.parametrize(
    ("error", "why"), [("late", "takes long to resolve"), ("unanswered", "cannot be resolved now")]
)
def test_where_the_own_name_gets_no_answer_it_is_not_known_what_gloo_would_use(
    tmp_path: Path, lookups: dict[str, Lookup], error: str, why: str
) -> None:
    """Gloo waits longer for a name server that is slow, and asks when torch has been imported."""
    lookups[OWN] = Lookup(OWN, error=error)
    info = gather_host_info(context(tmp_path))
    assert info.gloo == ()
    other = HostInfo("node1", nics=(LO, Nic("eth0", ("10.1.0.6",))), gloo=("eth0",), backend="gloo")
    verdicts = [one.verdict for one in loopback_between({0: info._replace(label=OWN, backend="gloo"), 1: other})]
    assert verdicts == (["warn"] if error == "unanswered" else [])
    result = interfaces.check_interfaces(context(tmp_path))
    assert (result.message, dict(result.facts)["gloo"]) == (f"gloo would use the interface of node5, which {why}", "")
    environ = {"HOME": str(tmp_path), "GLOO_SOCKET_IFNAME": "eth1"}
    named = gather_host_info(context(tmp_path, environ=environ))
    assert (named.gloo, named.unanswered) == (("eth1",), ""), "the name does not matter"
    assert gather_host_info(context(tmp_path, nics=("eth1",))).unanswered == ""
    is_noted = gather_host_info(context(tmp_path, nics=("auto",))).unanswered == OWN
    assert is_noted == (error == "unanswered"), "it may find none"


def test_an_own_name_that_is_unknown_leads_gloo_to_loopback(tmp_path: Path, lookups: dict[str, Lookup]) -> None:
    """Torch takes any error of the resolver for that, and one that knows of no such name has said so for good."""
    lookups[OWN] = Lookup(OWN, error="unknown")
    info = gather_host_info(context(tmp_path))
    assert info.gloo == ("lo",)
    other = HostInfo("node1", nics=(LO, Nic("eth0", ("10.1.0.6",))), gloo=("eth0",), backend="gloo")
    (result,) = loopback_between({0: info._replace(label=OWN, backend="gloo"), 1: other})
    assert (result.verdict, result.host) == ("fail", OWN)


@pytest.mark.parametrize(
    ("file", "vendor"),
    [("etc/nccl.conf", "nvidia"), (".nccl.conf", "nvidia"), ("etc/rccl.conf", "amd"), (".rccl.conf", "amd")],
)
def test_what_nccls_own_files_say_is_what_other_hosts_learn(
    tmp_path: Path, lookups: dict[str, Lookup], file: str, vendor: str
) -> None:
    """The same as the host's own check finds: a site names the interfaces there, and no rank uses another."""
    assert lookups
    (tmp_path / "etc").mkdir()
    (tmp_path / file).write_text("NCCL_SOCKET_IFNAME=eth1\n")
    launch = context(tmp_path, vendor=vendor)
    info = gather_host_info(launch)
    facts = dict(interfaces.check_interfaces(launch).facts)
    assert (info.nccl, info.probed) == (("eth1",), ("eth1", "eth0"))
    assert (facts["nccl"], facts["probed"]) == ("eth1", "eth1,eth0")


def test_where_a_home_directory_does_not_answer_it_is_not_known_what_nccl_would_use(
    tmp_path: Path, lookups: dict[str, Lookup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's file there wins over the system's, and NCCL waits for it. A variable wins over both."""
    assert lookups
    answers = threading.Event()

    def read(paths: Sequence[str]) -> dict[str, str]:
        if paths == [str(tmp_path / ".nccl.conf")]:
            assert answers.wait(60), "it is waited for"
        return {"NCCL_SOCKET_IFNAME": "eth1"}

    monkeypatch.setattr(common, "variables_in_nccl_files", read)
    monkeypatch.setattr(common, "_FILES_S", 0.01)
    info = gather_host_info(context(tmp_path, vendor="nvidia"))
    assert (info.nccl, info.probed) == ((), ("eth1", "eth0"))
    result = interfaces.check_interfaces(context(tmp_path, vendor="nvidia"))
    assert (result.message, dict(result.facts)["nccl"]) == (
        "gloo would use eth0, NCCL what ~/.nccl.conf may name, which cannot be read now",
        "",
    )
    environ = {"HOME": str(tmp_path), "NCCL_SOCKET_IFNAME": "eth0"}
    assert gather_host_info(context(tmp_path, vendor="nvidia", environ=environ)).nccl == ("eth0",)
    answers.set()


@pytest.mark.parametrize(
    ("own", "environ", "vendor", "expected"),
    [
        ("10.1.0.5", {}, "none", "10.1.0.5"),
        ("fd01::5", {}, "none", "fd01::5"),
        ("fd01::5", {"GLOO_SOCKET_IFNAME": "eth0"}, "none", "10.1.0.5"),
        ("10.1.0.5", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "nvidia", "fd01::5"),
        ("fd01::5", {}, "nvidia", "10.1.0.5"),
        ("10.1.0.5", {"NCCL_SOCKET_FAMILY": "AF_INET6"}, "none", "10.1.0.5"),
        ("127.0.1.1", {}, "none", "10.1.0.5"),
    ],
)
def test_a_host_is_probed_at_the_address_that_its_ranks_would_use(
    tmp_path: Path, lookups: dict[str, Lookup], own: str, environ: dict[str, str], vendor: str, expected: str
) -> None:
    """An interface may have addresses of both families, of which one leads nowhere."""
    lookups[OWN] = Lookup(OWN, (own,))
    launch = context(tmp_path, environ={"HOME": str(tmp_path), **environ}, vendor=vendor)
    assert probe_routes(launch, gather_host_info(launch)) == (("eth0", expected), ("eth1", "10.2.0.5"))


def test_a_host_without_another_thread_takes_no_part_in_the_probes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own checks go on."""

    def start(_thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    side = server._HostSide(context(tmp_path))
    side.begin()
    info, endpoint = side.finish([])
    assert (bool(info), endpoint) == (True, "")
    side.close()
