"""What a host hands in of its probes, and what the leader makes of a host whose check process has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from saferun.preflight.results import Preflight, Probe
from tests.unit.preflight.preflight_samples import infos_of, lines, probes_of, where

HOSTS = 4


def assignment(*, leads: bool, probes: bool = True) -> Assignment:
    placement = Placement(0, HOSTS, HOSTS, 1, (), "node0", 29500, "job", restarts=0)
    infos = tuple(HostInfoText(encode_host_info(info), "") for info in infos_of(HOSTS).values())
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


def checks(text: str) -> HostChecks:
    """Checks whose process says this of its probes; empty: it is lost."""

    def probe(_host: int, _endpoints: object, _within_s: float, on_probed: Callable[[str], None]) -> None:
        on_probed(text)

    return cast("HostChecks", SimpleNamespace(probe=probe, results=[], duration_s=0.1))


def shared(text: str, *, probes: bool = True) -> str:
    """What a host that does not lead hands in."""
    found: list[str] = []
    job: Any = SimpleNamespace(host=2, share=lambda _name, text: found.append(text))
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
