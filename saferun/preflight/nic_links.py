"""What the probes of a job found, merged by interface: who reaches whom over which. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from saferun.linux.nic import Nic
from saferun.model import Value
from saferun.preflight.default_nics import AUTO
from saferun.preflight.results import Cell, HostInfo, MatrixRow, Probe

__all__ = ["Column", "NicLink", "Uses", "columns_of", "hosts_text", "matrix_of", "median", "uses_of"]

_SHOWN_HOSTS = 3
# What of a host's probes is worst, in a cell of the matrix.
_WORST = (
    *("self", "stranger", "timeout", "silent", "refused", "no_route", "unreachable", "black_hole", "broken"),
    *("lossy", "slow", "ok"),
)


class NicLink(Value):
    """What is known of the way from one host to another's interface, of all that was measured.

    Attributes:
        source, target: host numbers.
        nic: the target's interface; ``address``: its address.
        kind: as in ``Probe``; ``lost``: it does not come through, and these hosts lose packets elsewhere too.
        latency_s, bytes_s: the best; 0: unknown.
        loss: the part of the segments that were retransmitted, where it was least.
        retransmits: how many those were.
        times: how often it was measured.
    """

    source: int
    target: int
    nic: str
    address: str
    kind: str
    latency_s: float = 0.0
    bytes_s: float = 0.0
    loss: float = 0.0
    retransmits: int = 0
    times: int = 1

    @property
    def is_ok(self) -> bool:
        """Whether it comes through."""
        return self.kind == "ok"


Column = dict[tuple[int, int], NicLink]
"""The links over the interfaces of one name, by source and target."""


class Uses(Value):
    """The interfaces that the ranks of a host will use.

    Attributes:
        certain: without these there is no job.
        possible: others that a library may use.
        by_all_pairs: whether each rank connects to each other over them, as gloo's do.
        connects: whether the ranks are known to connect to those of other hosts at all.
    """

    certain: frozenset[str] = frozenset()
    possible: frozenset[str] = frozenset()
    by_all_pairs: bool = False
    connects: bool = False


def columns_of(probes: Iterable[Probe], infos: Mapping[int, HostInfo]) -> dict[str, Column]:
    """The links by the name of the target's interface.

    Of several addresses of an interface the first one counts, as for the libraries; of several probes the best.
    """
    # (index of the address, what is known) of each link.
    found: dict[str, dict[tuple[int, int], tuple[int, NicLink]]] = {}
    indexes: dict[tuple[int, str], int] = {}
    for host, info in infos.items():
        for nic in info.nics:
            indexes.update({(host, address): index for index, address in enumerate(nic.addresses)})
    for probe in probes:
        if probe.source == probe.target or probe.source not in infos or probe.target not in infos:
            continue
        index = indexes.get((probe.target, probe.address), len(indexes))
        column = found.setdefault(probe.nic, {})
        before = column.get((probe.source, probe.target))
        if before is None or index < before[0]:
            column[probe.source, probe.target] = index, _link(probe)
        elif index == before[0] and probe.address == before[1].address:
            column[probe.source, probe.target] = index, _best(before[1], _link(probe))
    return {nic: {pair: link for pair, (_, link) in column.items()} for nic, column in found.items()}


def _link(probe: Probe) -> NicLink:
    loss = probe.retransmits / probe.segments if probe.segments > 0 and probe.retransmits > 0 else 0.0
    return NicLink(
        probe.source,
        probe.target,
        probe.nic,
        probe.address,
        probe.kind,
        _plausible(probe.latency_s),
        _plausible(probe.bytes_s),
        min(loss, 1.0),
        max(probe.retransmits, 0),
    )


def _plausible(number: float) -> float:
    return number if math.isfinite(number) and number > 0.0 else 0.0


def _best(a: NicLink, b: NicLink) -> NicLink:
    if a.is_ok != b.is_ok:
        return (a if a.is_ok else b)._replace(times=a.times + b.times)
    least = a if a.loss <= b.loss else b
    return b._replace(
        latency_s=min(a.latency_s, b.latency_s) or max(a.latency_s, b.latency_s),
        bytes_s=max(a.bytes_s, b.bytes_s),
        loss=least.loss,
        retransmits=least.retransmits,
        times=a.times + b.times,
    )


# ---------------------------------------------------------------------------------------------------- what is used


def uses_of(info: HostInfo, nics: Sequence[str]) -> Uses:
    """The interfaces that the ranks of a host will use.

    Where NCCL is certain to connect them, it does so by the first of its interfaces at least; gloo by all of its own.
    Where the backend is unknown (MPI, a TPU's, none at all), they may use what these would, and nothing is certain.

    Args:
        info: the host's.
        nics: what ``--nic`` named.
    """
    named = frozenset(nics) - {AUTO}
    has_gpus = any(pair[:1] == ("driver",) for pair in info.versions)
    connects = info.backend in {"gloo", "nccl"}
    by_all_pairs = info.backend == "gloo"
    if named:
        return Uses(named if connects else frozenset(), named, by_all_pairs, connects)
    possible = frozenset((*info.nccl, *info.gloo)) if has_gpus else frozenset(info.gloo)
    certain = {"gloo": info.gloo, "nccl": info.nccl[:1]}.get(info.backend, ())
    return Uses(frozenset(certain), possible, by_all_pairs, connects)


def nic_of(info: HostInfo | None, name: str) -> Nic | None:
    """A host's interface."""
    return next((nic for nic in info.nics if nic.name == name), None) if info is not None else None


# ---------------------------------------------------------------------------------------------------------- the matrix


def matrix_of(
    columns: Mapping[str, Column], infos: Mapping[int, HostInfo], states: Mapping[tuple[int, str], str]
) -> tuple[MatrixRow, ...]:
    """A row for each host: how the others reach its interfaces.

    Args:
        columns: the links.
        infos: of all hosts.
        states: what was found out about (host, interface) besides: ``lossy``, ``slow``.
    """
    reaching: dict[tuple[int, str], list[NicLink]] = {}
    for nic, column in columns.items():
        for (_, target), link in column.items():
            reaching.setdefault((target, nic), []).append(link)
    rows = []
    for host in sorted(infos):
        info = infos[host]
        names = dict.fromkeys((*info.probed, *(nic for nic in columns if (host, nic) in reaching)))
        cells = tuple(_cell(nic, reaching.get((host, nic), ()), states.get((host, nic), "ok")) for nic in names)
        rows.append(MatrixRow(label_of(infos, host), cells))
    return tuple(rows)


def _cell(nic: str, links: Sequence[NicLink], state: str) -> Cell:
    if not links:
        return Cell(nic, "untested", 0, 0)
    kinds = {"lossy" if link.kind == "lost" else link.kind for link in links} | {state}
    worst = next((kind for kind in _WORST if kind in kinds), "broken")
    ok = [link for link in links if link.is_ok]
    latency_s = median([link.latency_s for link in ok if link.latency_s])
    return Cell(nic, worst, len(ok), len(links), latency_s, median([link.bytes_s for link in ok if link.bytes_s]))


# --------------------------------------------------------------------------------------------------------------- words


def label_of(infos: Mapping[int, HostInfo], host: int) -> str:
    """A host's name."""
    info = infos.get(host)
    return (info.label if info is not None else "") or f"host {host}"


def hosts_text(infos: Mapping[int, HostInfo], hosts: Iterable[int]) -> str:
    """``node2``; ``node1 and node2``; ``node1, node2 and node3``; ``node1, node2, … (200 hosts)``."""
    labels = [label_of(infos, host) for host in sorted(set(hosts))]
    if len(labels) > _SHOWN_HOSTS:
        return f"{', '.join(labels[: _SHOWN_HOSTS - 1])}, … ({len(labels)} hosts)"
    return " and ".join(filter(None, (", ".join(labels[:-1]), *labels[-1:])))


def median(values: Sequence[float]) -> float:
    """The middle one; the lower of two, so that it is one that was measured; 0 of none."""
    return sorted(values)[(len(values) - 1) // 2] if values else 0.0
