"""The job of docs/checks.md: of four hosts, node3 is not reached over its eth1, which gloo was told to use."""

from __future__ import annotations

from saferun.preflight.checks.all_checks import CHECKS
from saferun.preflight.results import CheckResult, HostInfo, Preflight, Probe
from tests.unit.preflight.preflight_samples import infos_of, judged, probes_of, where

_LATENCY_S = {"eth0": 108e-6, "eth1": 41.7e-6}
_BYTES_S = {"eth0": 231e6, "eth1": 1.56e9}


def infos() -> dict[int, HostInfo]:
    """Four hosts with two networks, node1 to node4."""
    nics = ("eth1", "eth0")
    return {host: info._replace(label=f"node{host + 1}") for host, info in infos_of(4, nics, gloo="eth1").items()}


def found(*shown: CheckResult) -> Preflight:
    """What the hosts found of each other, and the leader of itself. ``shown``: results of its own that the page has."""
    hosts = infos()
    dead = where(touching=2, nic="eth1", kind="timeout")

    def measured(probe: Probe) -> Probe:
        latency_s, bytes_s = (
            _LATENCY_S[probe.nic] * (1 + probe.target / 20),
            _BYTES_S[probe.nic] * (1 + probe.target / 50),
        )
        return probe._replace(latency_s=latency_s, bytes_s=bytes_s, retransmits=0, clock_s=0.0)

    between = judged(hosts, probes_of(4, ("eth1", "eth0"), measured, dead))
    words = {result.name: result.message for result in shown}
    # Hosts send each other what is wrong with them, and nothing else.
    own = [
        CheckResult(name, "ok", words.get(name, "in order"), host="node1")
        for name in sorted(check.name for check in CHECKS)
    ]
    # Two rounds of two tries, of 3.5 s each, and the pauses between them.
    return between._replace(results=(*between.results, *own), duration_s=14.8)
