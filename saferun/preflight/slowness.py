"""Which host is slow, or loses packets. Pure.

Slow is what is so compared with the others, by a factor and by an amount that matters, and what is still so when it is
measured again: a busy machine is slow for a moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from saferun.model import Value
from saferun.preflight.nic_links import Column, NicLink, hosts_text, label_of, median
from saferun.preflight.results import CheckResult, HostInfo

__all__ = ["Slowness", "again", "find_slowness", "without_lost"]

_FACTOR = 2.0
# Less than this is a scheduler's doing, on a machine with ten times as much to run as it has processors.
_LATENCY_LOST_S = 0.02
_BYTES_LOST_S = 50e6
# Likewise, of the large message, which has 1 MiB.
_MESSAGE_BYTES = 1 << 20
_TIME_LOST_S = 0.03
# A pair alone may be a busy moment of two busy hosts: it takes more to be reported, in one direction alone much more.
_PAIR_FACTOR = 4.0
_ONE_WAY_FACTOR = 20.0
_LOSS = 0.01
_FEWEST_RETRANSMITS = 3
# Where so much is lost elsewhere, a connection that does not come through at all is no riddle.
_HEAVY_LOSS = 0.03
_LOST_KINDS = frozenset({"timeout", "broken", "silent", "black_hole"})
_SHARE = 0.6
# Of what is measured again.
_MOST_SUSPECTS = 8
_BAD_EACH = 4
_OTHERS_EACH = 2
_SEVERAL = 2
_MOST_REPORTED = 8


class Slowness(Value):
    """What was found.

    Attributes:
        results: one for each host, or pair, that is slow or loses packets.
        states: ``slow`` or ``lossy``, by host and interface.
        suspects: hosts to be measured again, the worst first; ``pairs``: all that look bad.
    """

    results: tuple[CheckResult, ...]
    states: dict[tuple[int, str], str]
    suspects: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]


class _Fault(Value):
    """A way to be bad.

    Attributes:
        state: ``slow`` or ``lossy``.
        is_bad: of a link.
        is_bad_alone: of a link of hosts that are well otherwise; the second argument: in this direction only.
        message: of some bad links and the median of a good one.
        pair_words: the same of the way between two hosts.
        hint: what to do about a host's interface.
    """

    state: str
    is_bad: Callable[[NicLink], bool]
    is_bad_alone: Callable[[NicLink, bool], bool]
    message: Callable[[Sequence[NicLink]], str]
    hint: str


def without_lost(columns: Mapping[str, Column]) -> dict[str, Column]:
    """The links, with what did not come through between hosts that lose many packets marked as lost."""
    return {nic: _without_lost(column) for nic, column in columns.items()}


def _without_lost(column: Column) -> Column:
    heavy: Counter[int] = Counter()
    sound: Counter[int] = Counter()
    for pair, link in column.items():
        if link.is_ok:
            (heavy if _is_lossy(link) and link.loss >= _HEAVY_LOSS else sound).update(pair)
    if not heavy:
        return column
    lossy = {host for host in heavy if heavy[host] > sound[host]}
    return {
        pair: link._replace(kind="lost") if link.kind in _LOST_KINDS and not lossy.isdisjoint(pair) else link
        for pair, link in column.items()
    }


def find_slowness(columns: Mapping[str, Column], infos: Mapping[int, HostInfo]) -> Slowness:
    """The hosts and pairs that are slow, or lose packets, over each interface.

    Results are of what was measured more than once; ``suspects`` and ``pairs`` are of all.
    """
    results: list[CheckResult] = []
    states: dict[tuple[int, str], str] = {}
    suspects: Counter[int] = Counter()
    pairs: dict[tuple[int, int], None] = {}
    for nic, column in columns.items():
        explained: set[tuple[int, int]] = set()
        for fault in _faults(nic, column):
            bad = {pair: link for pair, link in column.items() if pair not in explained and fault.is_bad(link)}
            pairs.update(dict.fromkeys(bad))
            suspects.update(host for pair in bad for host in pair)
            found, hosts = _blame(nic, column, bad, fault, infos)
            results += found
            states.update({(host, nic): fault.state for host in hosts if (host, nic) not in states})
            explained |= set(bad)
            # What else is the matter with a host that has been named already.
            explained |= {pair for pair in column if not {*pair}.isdisjoint(hosts)}
    worst = sorted(suspects, key=lambda host: (-suspects[host], host))
    # Who is slow has several bad links; who only met it has one.
    several = [host for host in worst if suspects[host] > 1] or worst
    return Slowness(tuple(results), states, tuple(several), tuple(pairs))


# ------------------------------------------------------------------------------------------------------- what is bad


def _faults(nic: str, column: Column) -> list[_Fault]:
    latency_s, bytes_s = _usual(column)

    def is_late(link: NicLink, factor: float = _FACTOR) -> bool:
        return link.is_ok and link.latency_s > max(factor * latency_s, latency_s + factor / _FACTOR * _LATENCY_LOST_S)

    def is_narrow(link: NicLink, factor: float = _FACTOR) -> bool:
        if not link.is_ok or not link.bytes_s or link.bytes_s * factor > bytes_s:
            return False
        lost_s = _MESSAGE_BYTES / link.bytes_s - _MESSAGE_BYTES / bytes_s
        return bytes_s - link.bytes_s >= _BYTES_LOST_S and lost_s >= factor / _FACTOR * _TIME_LOST_S

    def is_late_alone(link: NicLink, one_way: bool) -> bool:  # noqa: FBT001 - as the type says
        return is_late(link, _ONE_WAY_FACTOR if one_way else _PAIR_FACTOR)

    def is_narrow_alone(link: NicLink, one_way: bool) -> bool:  # noqa: FBT001
        return is_narrow(link, _ONE_WAY_FACTOR if one_way else _PAIR_FACTOR)

    def late_text(links: Sequence[NicLink]) -> str:
        own = median([link.latency_s for link in links])
        return f"a round trip takes {_time_text(own)}, elsewhere {_time_text(latency_s)}"

    def narrow_text(links: Sequence[NicLink]) -> str:
        own = median([link.bytes_s for link in links])
        return f"{_speed_text(own)}, elsewhere {_speed_text(bytes_s)}"

    slow_hint = f"look at the speed that {nic} has negotiated (ethtool {nic}), its errors (ip -s link), and who uses it"
    lossy_hint = f"look at the errors of {nic} (ip -s link, ethtool -S {nic}), its cable and its switch port"
    return [
        _Fault("lossy", _is_lossy, lambda link, _: _is_lossy(link), _loss_text, lossy_hint),
        _Fault("slow", is_late, is_late_alone, late_text, slow_hint),
        _Fault("slow", is_narrow, is_narrow_alone, narrow_text, slow_hint),
    ]


def _usual(column: Column) -> tuple[float, float]:
    """The usual latency and throughput: the middle of what each host has with its best partner.

    Of few hosts one slow host makes most of the links slow; but no other host's best.
    """
    latency_s: dict[int, float] = {}
    bytes_s: dict[int, float] = {}
    for pair, link in column.items():
        for host in pair if link.is_ok else ():
            if link.latency_s:
                latency_s[host] = min(latency_s.get(host, link.latency_s), link.latency_s)
            bytes_s[host] = max(bytes_s.get(host, 0.0), link.bytes_s)
    # Of two middle ones the better.
    return median(list(latency_s.values())), -median([-speed for speed in bytes_s.values()])


def _is_lossy(link: NicLink) -> bool:
    return link.kind == "lost" or (link.is_ok and link.loss >= _LOSS and link.retransmits >= _FEWEST_RETRANSMITS)


def _loss_text(links: Sequence[NicLink]) -> str:
    lost = sum(link.kind == "lost" for link in links)
    loss = median([link.loss for link in links if link.is_ok])
    message = f"{loss:.0%} was retransmitted" if loss >= _LOSS else ""
    through = f"{lost} of {len(links)} connections did not come through" if lost else ""
    return ", ".join(filter(None, (message, through)))


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1g} ms"  # noqa: PLR2004 - 10 ms


def _speed_text(bytes_s: float) -> str:
    return f"{bytes_s / 1e9:.1f} GB/s" if bytes_s >= 1e9 else f"{bytes_s / 1e6:.3g} MB/s"  # noqa: PLR2004 - 1 GB/s


# ------------------------------------------------------------------------------------------------------- whose it is


def _blame(
    nic: str, column: Column, bad: Column, fault: _Fault, infos: Mapping[int, HostInfo]
) -> tuple[list[CheckResult], list[int]]:
    """Hosts whose links are bad, whoever is at the other end; then pairs."""
    results: list[CheckResult] = []
    hosts: list[int] = []
    left = dict(bad)
    touching: dict[int, list[NicLink]] = {}
    for pair, link in column.items():
        for host in pair:
            touching.setdefault(host, []).append(link)
    while left and len(results) < _MOST_REPORTED:
        counts = Counter(host for pair in left for host in pair)
        host = max(sorted(counts), key=lambda host: (counts[host], counts[host] / len(touching[host])))
        mine = [link for link in touching[host] if (link.source, link.target) in left]
        peers = {link.source + link.target - host for link in mine}
        if len(peers) < _SEVERAL or _share(host, mine, touching[host]) < _SHARE:
            break
        for link in mine:
            del left[link.source, link.target]
        if sum(link.times >= _SEVERAL for link in mine) < _SEVERAL:
            continue
        all_peers = {link.source + link.target - host for link in touching[host]}
        message = f"{nic} {_verb(fault.state)} with {len(peers)} of {len(all_peers)} hosts: {fault.message(mine)}"
        facts = _facts(mine)
        results.append(CheckResult("links", "warn", message, fault.hint, facts, host=label_of(infos, host)))
        hosts.append(host)
    sure = {pair: link for pair, link in left.items() if link.times >= _SEVERAL}
    alone = [link for (a, b), link in sure.items() if fault.is_bad_alone(link, (b, a) not in sure)]
    return [*results, *_pair_results(nic, alone, fault, infos)], hosts


def _share(host: int, bad: Sequence[NicLink], links: Sequence[NicLink]) -> float:
    """How much of what a host receives, or sends, or both, is bad: the worst of these."""
    shares = [len(bad) / len(links)]
    for side in ("target", "source"):
        whole = [link for link in links if getattr(link, side) == host]
        if len(whole) >= _SEVERAL:
            shares.append(sum(getattr(link, side) == host for link in bad) / len(whole))
    return max(shares)


def _pair_results(
    nic: str, links: Sequence[NicLink], fault: _Fault, infos: Mapping[int, HostInfo]
) -> list[CheckResult]:
    pairs: dict[frozenset[int], list[NicLink]] = {}
    for link in links:
        pairs.setdefault(frozenset((link.source, link.target)), []).append(link)
    if len(pairs) > _MOST_REPORTED:
        message = f"{nic} {_verb(fault.state)} between {len(pairs)} pairs of hosts: {fault.message(links)}"
        return [CheckResult("links", "warn", message, fault.hint, _facts(links))]
    results = []
    for pair, found in pairs.items():
        if len(found) > 1:
            between = f"between {hosts_text(infos, pair)}"
        else:
            between = f"from {label_of(infos, found[0].source)} to {label_of(infos, found[0].target)}"
        message = f"{nic} {_verb(fault.state)} {between}: {fault.message(found)}"
        results.append(CheckResult("links", "warn", message, fault.hint, _facts(found)))
    return results


def _verb(state: str) -> str:
    return "loses packets" if state == "lossy" else "is slow"


def _facts(links: Sequence[NicLink]) -> tuple[tuple[str, str], ...]:
    return tuple(
        (
            f"{link.source}>{link.target}",
            f"{link.nic} {link.latency_s * 1e3:.3f} ms, {link.bytes_s / 1e6:.1f} MB/s, {link.loss:.1%} retransmitted",
        )
        for link in links[:16]
    )


# ---------------------------------------------------------------------------------------------- what is measured again


def again(
    suspects: Sequence[int],
    pairs: Collection[tuple[int, int]],
    hosts: Sequence[int],
    measured: Collection[tuple[int, int]],
) -> tuple[tuple[int, int], ...]:
    """The pairs to be measured again, so that a slow host is distinguished from a slow pair.

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
        begin = next((index for index, host in enumerate(sound) if host > suspect), 0)
        found = 0
        for index in range(len(sound)):
            other = sound[(begin + index) % len(sound)]
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
