"""Who probes whom. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

__all__ = ["again", "partners"]

_MOST_SUSPECTS = 8
_BAD_EACH = 4
_OTHERS_EACH = 2


def partners(host: int, hosts: int, *, full: bool = False) -> tuple[int, ...]:
    """The hosts that a host probes, in order.

    Those one, two, four, eight … further on, as in a dissemination barrier (Hensgen, Finkel, Manber 1988): in each
    round every host probes one and is probed by one, and after the last, whose number is the logarithm of the hosts',
    each has been probed by as many.

    Args:
        host: its number.
        hosts: how many there are.
        full: all others, each host beginning with the next.
    """
    steps: Iterable[int] = range(1, hosts) if full else (1 << k for k in range(max(hosts - 1, 0).bit_length()))
    return tuple((host + step) % hosts for step in steps)


def again(
    suspects: Sequence[int],
    pairs: Collection[tuple[int, int]],
    hosts: Sequence[int],
    measured: Collection[tuple[int, int]],
) -> tuple[tuple[int, int], ...]:
    """The pairs to be measured again, so that a slow host is told from a slow pair.

    Args:
        suspects: hosts that look bad, the worst first.
        pairs: pairs (source, target) that look bad.
        hosts: all that can be asked.
        measured: all pairs that have been measured.

    Returns:
        Some bad pairs of each suspect, and it with hosts that it has not met, in both directions: at most 64, so that
        they do not disturb each other.
    """
    chosen: dict[tuple[int, int], None] = {}
    doubtful = set(suspects)
    sound = [host for host in hosts if host not in doubtful] or list(hosts)
    bad: dict[int, list[tuple[int, int]]] = {}
    for source, target in pairs:
        for host in {source, target} & doubtful:
            bad.setdefault(host, []).append((source, target))
    for suspect in suspects[:_MOST_SUSPECTS]:
        for source, target in sorted(bad.get(suspect, ()))[:_BAD_EACH]:
            chosen[source, target] = None
        # Those that follow it, around the circle: every suspect gets others.
        begin = next((place for place, host in enumerate(sound) if host > suspect), 0)
        found = 0
        for place in range(len(sound)):
            other = sound[(begin + place) % len(sound)]
            new = {(other, suspect), (suspect, other)} - set(measured)
            if other == suspect or not new:
                continue
            chosen.update(dict.fromkeys(sorted(new)))
            found += 1
            if found == _OTHERS_EACH:
                break
    if not suspects:
        chosen.update(dict.fromkeys(sorted(pairs)[: _MOST_SUSPECTS * _BAD_EACH]))
    return tuple(chosen)
