"""Jobs before their start: what hosts say of themselves, and what they measured, as real ones would."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from saferun.coordinator.assignments import partners
from saferun.linux.nic import Nic
from saferun.preflight.judge import judge
from saferun.preflight.results import CheckResult, HostInfo, Preflight, Probe

Change = Callable[[Probe], Probe | None]

VERSIONS = (("saferun", "0.1.0"), ("python", "3.11.7"), ("torch", "2.13.0"), ("nccl", "2.27.3"))


def address_of(host: int, nic: str) -> str:
    """10.0.0.1 is node0's eth0, 10.1.0.1 its eth1; docker0 is the same everywhere."""
    if nic == "docker0":
        return "172.17.0.1"
    return f"10.{int(nic[-1])}.{(host + 1) // 250}.{(host + 1) % 250}"


def infos_of(
    hosts: int, nics: tuple[str, ...] = ("eth0", "eth1"), *, gloo: str = "eth0", backend: str = "gloo"
) -> dict[int, HostInfo]:
    """Hosts without GPUs, all alike, with a docker0 that all have, whose ranks are known to use gloo."""
    infos = {}
    for host in range(hosts):
        own = tuple(
            Nic(name, (address_of(host, name),), (f"{address_of(host, name)}/16",)) for name in (*nics, "docker0")
        )
        infos[host] = HostInfo(
            label=f"node{host}",
            time=1.8e9,
            nics=own,
            gloo=(gloo,),
            nccl=nics,
            probed=nics,
            versions=VERSIONS,
            script="5c1f" * 16,
            names=(("node0", address_of(0, nics[0])),),
            backend=backend,
        )
    return infos


def probes_of(
    hosts: int,
    nics: Iterable[str] = ("eth0", "eth1"),
    *changes: Change,
    full: bool = False,
    seed: int = 0,
    latency_s: float = 1e-4,
    bytes_s: float = 1.1e9,
) -> list[Probe]:
    """What all hosts measured: healthy and noisy, then changed."""
    chance = random.Random(seed)  # noqa: S311 - a sample, no secret
    found: list[Probe] = []
    for source in range(hosts):
        for target in partners(source, hosts, full=full):
            for nic in nics:
                # Mostly a little, now and then a scheduler that takes its time.
                noise = chance.expovariate(1.0) + (30 if chance.random() < 0.03 else 0)
                probe: Probe | None = Probe(
                    source,
                    target,
                    nic,
                    address_of(target, nic),
                    nic,
                    latency_s=latency_s * (1 + noise / 2),
                    bytes_s=bytes_s / (1 + noise / 3),
                    segments=724,
                    retransmits=1 if chance.random() < 0.02 else 0,
                    clock_s=chance.uniform(-0.02, 0.02),
                )
                for change in changes:
                    probe = change(probe) if probe is not None else None
                if probe is not None:
                    found.append(probe)
    return found


def probes_from(source: int, hosts: int, nics: Iterable[str], *changes: Change, full: bool) -> list[Probe]:
    """What one of many hosts measured, all of it alike, then changed."""
    found = []
    for target in partners(source, hosts, full=full):
        for nic in nics:
            probe: Probe | None = Probe(
                *(source, target, nic, address_of(target, nic), nic),
                latency_s=3.41234e-05,
                bytes_s=1234567890,
                retransmits=12,
                segments=34567,
                clock_s=0.0012,
            )
            for change in changes:
                probe = change(probe) if probe is not None else None
            if probe is not None:
                found.append(probe)
    return found


def where(
    *,
    source: int | None = None,
    target: int | None = None,
    touching: int | None = None,
    nic: str = "",
    **values: object,
) -> Change:
    """A change of the probes that fit."""

    def change(probe: Probe) -> Probe:
        fits = (
            (source is None or probe.source == source)
            and (target is None or probe.target == target)
            and (touching is None or touching in {probe.source, probe.target})
            and (not nic or probe.nic == nic)
        )
        if not fits:
            return probe
        changed = probe._replace(**values)  # type: ignore[arg-type]
        # What does not come through has no numbers.
        return (
            changed if changed.kind == "ok" else changed._replace(latency_s=0.0, bytes_s=0.0, segments=0, clock_s=0.0)
        )

    return change


def judged(
    infos: dict[int, HostInfo],
    probes: list[Probe],
    *,
    missing: dict[int, str] | None = None,
    nics: tuple[str, ...] = (),
    remeasured: bool = True,
) -> Preflight:
    """The verdict. What does not come through and may pass is measured twice, and is the same the second time."""
    if remeasured:
        first = judge(infos, probes, missing=missing or {}, nics=nics, remeasured=False, duration_s=0.1)
        again = [p for p in probes if (p.source, p.target) in first.again and p.kind in {"timeout", "no_route"}]
        probes = [*probes, *again]
    return judge(infos, probes, missing=missing or {}, nics=nics, remeasured=remeasured, duration_s=0.5)


def told(preflight: Preflight) -> list[CheckResult]:
    """What is told on the console."""
    return [result for result in preflight.results if result.verdict in {"warn", "fail"}]


def lines(preflight: Preflight) -> list[str]:
    """The same in words: ``fail node3: eth1 …``."""
    return [f"{r.verdict} {r.host + ': ' if r.host else ''}{r.message}" for r in told(preflight)]
