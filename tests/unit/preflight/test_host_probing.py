"""What a host hands in of its probes, and what the leader makes of a host whose check process has ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from saferun.cluster.job_values import Assignment
from saferun.cluster.join_messages import HostInfoText, Peer, ProbeTarget
from saferun.linux.poller import Poller
from saferun.model import Placement
from saferun.preflight.check_process import HostChecks
from saferun.preflight.host_messages import decode_probes, encode_host_info, encode_probes
from saferun.preflight.host_probing import HostProbing, LeaderProbing
from saferun.preflight.results import HostInfo, Preflight, Probe
from tests.unit.preflight.preflight_samples import infos_of, lines, probes_of, where

HOSTS = 4


def assignment(*, leads: bool, probes: bool = True, known: Mapping[int, HostInfo] | None = None) -> Assignment:
    known = infos_of(HOSTS) if known is None else known
    placement = Placement(0, len(known), len(known), 1, (), "node0", 29500, "job", restarts=0)
    infos = tuple(HostInfoText(encode_host_info(info), "") for info in known.values())
    endpoints = (ProbeTarget(1, "node1", "there"),) if probes else ()
    return Assignment(
        placement,
        0,
        leads=leads,
        may_leave=False,
        files="",
        checked=True,
        host_infos=infos if leads else (),
        probe_endpoints=endpoints,
    )


def checks(found: str | Sequence[Probe]) -> HostChecks:
    """Checks whose process says this of its probes, or has these; empty: it is lost."""

    def probe(
        _host: int, _endpoints: object, _within_s: float, on_probed: Callable[[str], None], *, limit_bytes: int
    ) -> None:
        on_probed(found if isinstance(found, str) else encode_probes(found, limit_bytes))

    return cast("HostChecks", SimpleNamespace(probe=probe, results=[], duration_s=0.1))


def shared(text: str, *, probes: bool = True) -> str:
    """What a host that does not lead hands in."""
    found: list[str] = []
    job: Any = SimpleNamespace(host=2, chunk_limit_bytes=1 << 16, share=lambda _name, text: found.append(text))
    HostProbing(assignment(leads=False, probes=probes), checks(text), job).begin()
    return found[0]


def judged(found: Sequence[Probe], *lost: int) -> Preflight:
    """What the leader makes of it where the check processes of these hosts are lost."""
    texts = {host: encode_probes([probe for probe in found if probe.source == host]) for host in range(HOSTS)}
    chunks = [SimpleNamespace(host=host, evidence=shared("" if host in lost else texts[host])) for host in (1, 2, 3)]
    verdicts: list[Preflight] = []
    leaders: list[LeaderProbing] = []
    job: Any = SimpleNamespace(
        host=0,
        peers={host: Peer(host, f"node{host}", (), host, 1) for host in range(HOSTS)},
        collect=lambda _name, _s, on_chunks, *, hosts: hosts and on_chunks(chunks),
        broadcast_preflight=lambda message: leaders[0].probe_again(()) if message["again"] else None,
    )
    own = checks("" if 0 in lost else texts[0])
    probing = LeaderProbing(assignment(leads=True), own, job, nics=(), on_judged=verdicts.append)
    leaders.append(probing)
    probing.begin()
    return verdicts[0]


@pytest.mark.parametrize("kind", ["refused", "stranger", "broken"])
@pytest.mark.parametrize("lost", [0, 3])
def test_a_host_whose_check_process_is_lost_has_no_firewall(kind: str, lost: int) -> None:
    """It was killed for want of memory, for instance: nothing listens there any more, and the network is in order."""
    verdict = judged(probes_of(HOSTS, ("eth0", "eth1"), where(target=lost, kind=kind)), lost)
    assert verdict.verdict == "warn"
    assert lines(verdict) == [f"warn node{lost}: it reported nothing of the other hosts (its check process ended)"]


def test_where_no_process_is_lost_the_same_is_a_failure() -> None:
    assert judged(probes_of(HOSTS, ("eth0", "eth1"), where(target=3, kind="refused"))).verdict == "fail"


def test_a_lost_process_is_told_from_nobody_to_probe() -> None:
    """Another release that leads reads no probes in either."""
    assert shared("", probes=False) == ""
    assert shared("") not in {"", encode_probes([])}
    assert decode_probes(shared(""), 2) == ()


def test_a_host_whose_check_process_is_lost_before_the_hosts_meet_is_not_probed() -> None:
    """What its checks have found still counts."""
    said: list[str] = []
    own = HostChecks(Poller(), on_done=lambda: None, warn=said.append)
    own.info, own.endpoint, own.deadline = "known", "there", 1.0
    own.tick(2.0)
    assert (own.info, own.endpoint) == ("known", "")
    assert said == ["preflight checks: the checks took too long"]


# --------------------------------------------------------------------------------------------------------------------
# More probes than find room in one message

MANY = 64
NICS = ("eth0", "eth1", "eth2")


def judged_of_many(found: Sequence[Probe], limit_bytes: int) -> Preflight:
    """What the leader makes of it where the coordinators take no longer messages."""
    known = infos_of(MANY, NICS, backend="nccl")
    of_host: dict[int, list[Probe]] = {host: [] for host in range(MANY)}
    for probe in found:
        of_host[probe.source].append(probe)
    chunks = []
    for host in range(1, MANY):

        def share(_name: str, text: str, host: int = host) -> None:
            if len(json.dumps({"time": 1.8e9, "moved": False, "stopped": False, "evidence": text})) <= limit_bytes:
                chunks.append(SimpleNamespace(host=host, evidence=text))

        job: Any = SimpleNamespace(host=host, chunk_limit_bytes=limit_bytes - 256, share=share)
        HostProbing(assignment(leads=False), checks(of_host[host]), job).begin()
    verdicts: list[Preflight] = []
    leader: Any = SimpleNamespace(
        host=0,
        peers={host: Peer(host, f"node{host}", (), host, 1) for host in range(MANY)},
        collect=lambda _name, _s, on_chunks, *, hosts: on_chunks(chunks if len(hosts) == MANY else []),
        chunk_limit_bytes=limit_bytes - 256,
    )
    probing = LeaderProbing(
        assignment(leads=True, known=known), checks(of_host[0]), leader, nics=(), on_judged=verdicts.append
    )
    leader.broadcast_preflight = lambda _message: probing.probe_again([])
    probing.begin()
    return verdicts[-1]


def test_hosts_whose_messages_are_cut_are_not_silent() -> None:
    """Each of them would be named, in a job in which nothing is wrong."""
    verdict = judged_of_many(probes_of(MANY, NICS, full=True), 8 << 10)
    assert lines(verdict) == []
    (said,) = [result for result in verdict.results if result.name == "links" and result.verdict == "skipped"]
    total = MANY * (MANY - 1) * len(NICS)
    left_out = int(said.message.split()[0])
    assert said.message == (
        f"{left_out} of {total} connections that were tried are not judged: what node1, node2, … (63 hosts) found was "
        "too much for one message in a job of this size"
    )
    assert total / 4 < left_out < total
    whole = judged_of_many(probes_of(MANY, NICS, full=True), 4 << 20)
    assert [result for result in whole.results if result.verdict == "skipped"] == []


@pytest.mark.parametrize("limit_bytes", [8 << 10, 4 << 20])
def test_an_interface_that_fails_is_named_though_messages_are_cut(limit_bytes: int) -> None:
    """What fails is what is wanted, and that another interface of the same host works."""
    verdict = judged_of_many(
        probes_of(MANY, NICS, where(touching=7, nic="eth1", kind="refused"), full=True), limit_bytes
    )
    (line,) = lines(verdict)
    assert "node7: eth1" in line
    assert "its eth0 works" in line


@pytest.mark.parametrize("limit_bytes", [2 << 10, 8 << 10, 4 << 20])
def test_a_few_ways_that_fail_do_not_stop_a_launch_because_messages_are_cut(limit_bytes: int) -> None:
    """With NCCL a host that some others do not reach is a warning: those that do may be left out."""
    changes = [where(source=source, target=7, kind="refused") for source in (0, *range(6, MANY, 8))]
    verdict = judged_of_many(probes_of(MANY, NICS, *changes, full=True), limit_bytes)
    assert verdict.verdict == "warn"
    assert all(line.startswith("warn node7: ") for line in lines(verdict))
