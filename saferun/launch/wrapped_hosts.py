"""Hosts that ``--wrap host:NAME:...`` names: whether it is this one, and which the job does not have. Pure.

A host has several names: its own with or without a domain, and the one that the scheduler has for it. Domains do not
count, since the same host may have one for each of its networks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from saferun.cluster.schedulers.host_list import compress_hosts
from saferun.config import HostsConfig, WrapConfig

# In a job on several hosts each of them has these.
_LOOPBACK = frozenset({"localhost", "127.0.0.1"})


def with_own_name(wraps: Sequence[WrapConfig], hosts: HostsConfig, host: str, name: str) -> tuple[WrapConfig, ...]:
    """The same with ``host`` for every name of this host.

    Args:
        wraps: as they were asked for.
        hosts: the hosts of the job, as far as they are known before the hosts meet.
        host: the name under which the job knows this host.
        name: its host name.
    """
    own = {host, name, _scheduler_name(hosts)} - {""}
    if not hosts.may_have_others:
        own |= _LOOPBACK
    found = []
    for wrap in wraps:
        is_own = bool(wrap.ranks.host) and _is_among(wrap.ranks.host, own)
        found.append(wrap._replace(ranks=wrap.ranks._replace(host=host)) if is_own else wrap)
    return tuple(found)


def missing_host_lines(wraps: Iterable[WrapConfig], known: Collection[str]) -> list[str]:
    """A line for each tool of a host that is not among those that have met. ``known``: their names."""
    hosts = compress_hosts(sorted(known))
    names = {*known, *(name.partition(".")[0] for name in known)}
    return [
        f"--wrap: no rank runs under {wrap.name}: {wrap.ranks.host} is none of the hosts {hosts}"
        for wrap in wraps
        if wrap.ranks.host and not _is_among(wrap.ranks.host, names)
    ]


def _scheduler_name(hosts: HostsConfig) -> str:
    number = hosts.node_rank
    return hosts.names[number] if number is not None and 0 <= number < len(hosts.names) else ""


def _is_among(name: str, names: Iterable[str]) -> bool:
    return _comparable(name) in map(_comparable, names)


def _comparable(name: str) -> str:
    """A name without its domain. An address has none, nor has node.1, as a job calls the second of two hosts node."""
    lower = name.lower()
    return lower if lower.rpartition(".")[2].isdigit() else lower.partition(".")[0]
