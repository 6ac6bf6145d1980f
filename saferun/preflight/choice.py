"""Which interface serves all hosts best. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.preflight.interfaces import AUTO
from saferun.preflight.links import Column, median, nic_of
from saferun.preflight.results import HostCard

__all__ = ["best_nic", "suggested"]

# What is measured in a millisecond on a busy machine is no reason for less.
_CLEARLY_FASTER = 2.0


def best_nic(columns: Mapping[str, Column], cards: Mapping[int, HostCard], bad: Sequence[str] = ()) -> str:
    """The interface over which every host that was tried is reached, and the fastest of them; empty: there is none.

    What the drivers say about speeds counts where they know, else what was measured; of equals the one that is most
    hosts' first.

    Args:
        columns: the links.
        cards: of all hosts.
        bad: interfaces that are slow or lossy on some host: only where there is no other.
    """
    firsts = [card.probed for card in cards.values() if card.probed]
    fit = [nic for nic, column in columns.items() if _serves_all(column, cards)]
    fit = [nic for nic in fit if nic not in bad] or fit
    if not fit:
        return ""

    def place(nic: str) -> float:
        return sum(names.index(nic) if nic in names else len(names) for names in firsts)

    best, *rest = sorted(fit, key=lambda nic: (place(nic), nic))
    for nic in rest:
        # Each of them is compared with the best so far, so that the order decides among equals.
        if _speed(nic, columns[nic], cards) >= _CLEARLY_FASTER * max(_speed(best, columns[best], cards), 1.0):
            best = nic
    return best


def suggested(best: str, cards: Mapping[int, HostCard], nics: Sequence[str]) -> tuple[str, ...]:
    """The interfaces to use where that is not clear: several could be used and no variable says which.

    Args:
        best: the one that serves all.
        cards: of all hosts.
        nics: what ``--nic`` named.
    """
    if not best or (nics and tuple(nics) != (AUTO,)):
        return ()
    is_set = any("_SOCKET_IFNAME" in "".join(pair[:1]) for card in cards.values() for pair in card.environ)
    several = any(len(card.probed) > 1 for card in cards.values())
    return (best,) if AUTO in nics or (several and not is_set) else ()


def _serves_all(column: Column, cards: Mapping[int, HostCard]) -> bool:
    """Whether everybody who can be tried takes part, and all who tried came through."""
    reached = {host for pair in column for host in pair}
    wanted = {host for host, card in cards.items() if card.probed}
    return wanted <= reached and all(link.is_ok for link in column.values())


def _speed(nic: str, column: Column, cards: Mapping[int, HostCard]) -> float:
    """Bytes a second."""
    known = [found.speed_bits_s for card in cards.values() if (found := nic_of(card, nic)) is not None]
    if known and min(known) > 0:
        return min(known) / 8
    return median([link.bytes_s for link in column.values() if link.bytes_s])
