"""Which interface serves all hosts best. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.preflight.default_nics import AUTO
from saferun.preflight.nic_links import Column, median, nic_of
from saferun.preflight.results import HostInfo

__all__ = ["best_nic", "suggested"]

# What is measured in a millisecond on a busy machine is no reason for less.
_CLEARLY_FASTER = 2.0


def best_nic(columns: Mapping[str, Column], infos: Mapping[int, HostInfo], bad: Sequence[str] = ()) -> str:
    """The interface over which every host that was tried is reached, and the fastest of them; empty: there is none.

    What the drivers say about speeds counts where they know, else what was measured; of equals the one that is most
    hosts' first.

    Args:
        columns: the links.
        infos: of all hosts.
        bad: interfaces that are slow or lossy on some host: only where there is no other.
    """
    firsts = [info.probed for info in infos.values() if info.probed]
    fit = [nic for nic, column in columns.items() if _serves_all(column, infos)]
    fit = [nic for nic in fit if nic not in bad] or fit
    if not fit:
        return ""

    def position(nic: str) -> float:
        return sum(names.index(nic) if nic in names else len(names) for names in firsts)

    best, *rest = sorted(fit, key=lambda nic: (position(nic), nic))
    for nic in rest:
        # Each of them is compared with the best so far, so that the order decides among equals.
        if _speed(nic, columns[nic], infos) >= _CLEARLY_FASTER * max(_speed(best, columns[best], infos), 1.0):
            best = nic
    return best


def suggested(best: str, infos: Mapping[int, HostInfo], nics: Sequence[str]) -> tuple[str, ...]:
    """The interfaces to use where that is not clear: several could be used and no variable says which.

    Args:
        best: the one that serves all.
        infos: of all hosts.
        nics: what ``--nic`` named.
    """
    if not best or (nics and tuple(nics) != (AUTO,)):
        return ()
    is_set = any("_SOCKET_IFNAME" in "".join(pair[:1]) for info in infos.values() for pair in info.environ)
    several = any(len(info.probed) > 1 for info in infos.values())
    return (best,) if AUTO in nics or (several and not is_set) else ()


def _serves_all(column: Column, infos: Mapping[int, HostInfo]) -> bool:
    """Whether everybody who can be tried has it and was tried over it, and all who tried came through."""
    targets = {target for _, target in column}
    wanted = {host for host, info in infos.items() if info.probed}
    return wanted <= targets and all(link.is_ok for link in column.values())


def _speed(nic: str, column: Column, infos: Mapping[int, HostInfo]) -> float:
    """Bytes a second."""
    known = [found.speed_bits_s for info in infos.values() if (found := nic_of(info, nic)) is not None]
    if known and min(known) > 0:
        return min(known) / 8
    return median([link.bytes_s for link in column.values() if link.bytes_s])
