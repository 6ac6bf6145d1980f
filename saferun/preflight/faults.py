"""Whose fault it is that hosts do not reach each other: a host's interface, its firewall, a pair, a cut. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest

from saferun.model import Value
from saferun.preflight.fault_text import FROM_HOST, NO_HOST, ONE_WAY, TO_HOST, TWO, hint_of, sentence
from saferun.preflight.nic_links import Column, NicLink, Uses, hosts_text, label_of, nic_of
from saferun.preflight.results import CheckResult, HostInfo

__all__ = ["KnownLinks", "doubtful_pairs", "fault_results"]

_MOST_REPORTED = 8
_SEVERAL = 2
_CLASS = "network_between_hosts"
# What also comes of a network that is away for some seconds, and is believed when it has been measured twice.
_PASSING = frozenset({"timeout", "no_route"})
# What comes of a listener that gets no processor: the network is there, and the ranks have processes of their own.
_STARVED = "silent"
# What these hosts lose elsewhere too.
_LOST = "lost"


class KnownLinks(Value):
    """All that is known of the links.

    Attributes:
        columns: the links by the name of the interface.
        infos: of all hosts.
        uses: what the ranks will use, by host.
        nic: the interface to be suggested instead; empty: none.
        remeasured: whether what is doubtful has been measured again.
        is_cut: whether hosts have left out links of which most come through.
    """

    columns: Mapping[str, Column]
    infos: Mapping[int, HostInfo]
    uses: Mapping[int, Uses]
    nic: str = ""
    remeasured: bool = True
    is_cut: bool = False

    def is_lasting(self, link: NicLink) -> bool:
        """Whether what does not come through is a fault of the network that lasts, as far as has been measured."""
        is_away = self.remeasured and link.kind in _PASSING and link.times == 1
        return not is_away and link.kind not in {_STARVED, _LOST}

    def lasting(self, links: Iterable[NicLink]) -> list[tuple[int, int]]:
        """The pairs of those that do not come through for a fault that lasts."""
        return [(link.source, link.target) for link in links if self.is_lasting(link)]

    def is_cut_off(self, nic: str, pairs: Collection[tuple[int, int]], others: Sequence[str]) -> bool:
        """Whether the ranks cannot work without what does not come through over an interface, if that lasts.

        Ranks are reached over what their own host uses, whatever the others use. Where that is another interface, which
        was not tried or could not be measured, it may lead there.

        Args:
            nic: the interface.
            pairs: what does not come through over it; none: nothing is cut off.
            others: the interfaces that do come through.
        """
        if not pairs:
            return False
        is_certain = any(nic in self.uses[target].certain for _, target in pairs)
        return is_certain or (not others and all(self._fails(pair) for pair in pairs))

    def _fails(self, pair: tuple[int, int]) -> bool:
        """Whether all that the ranks of the second host use fails from the first one as well."""
        use = self.uses[pair[1]]
        links = [self.columns.get(nic, {}).get(pair) for nic in use.certain]
        is_measured = use.connects and bool(links)
        return is_measured and all(link and not link.is_ok and self.is_lasting(link) for link in links)

    def is_used(self, nic: str, hosts: Iterable[int]) -> bool:
        """Whether the ranks of one of these hosts may use it."""
        return any(nic in self.uses[host].certain | self.uses[host].possible for host in hosts)

    def others(self, nic: str, pairs: Iterable[tuple[int, int]]) -> list[str]:
        """The other interfaces over which all these pairs that were tried come through; the one to suggest is first."""
        wanted = list(pairs)
        found = []
        for name, column in self.columns.items():
            links = [column[pair] for pair in wanted if pair in column] if name != nic else []
            if links and all(link.is_ok for link in links):
                found.append(name)
        return sorted(found, key=lambda name: name != self.nic)


def fault_results(known: KnownLinks) -> list[CheckResult]:
    """What is wrong between the hosts, one result a fault; nothing of interfaces that lead nowhere and are not used."""
    results: list[CheckResult] = []
    alike: dict[tuple[str, ...], int] = {}  # where among them a sentence stands that is true of one interface
    for nic, column in known.columns.items():
        for result in _column_results(known, nic, column):
            texts = (result.message, result.hint)
            key = (result.verdict, result.host, *(re.sub(rf"\b{re.escape(nic)}\b", "{nic}", one) for one in texts))
            if key not in alike:
                alike[key] = len(results)
                results.append(result)
            else:
                first = results[alike[key]]
                joined = ", " if "; the same over " in first.message else "; the same over "
                facts = (*first.facts, *result.facts)
                results[alike[key]] = first._replace(message=f"{first.message}{joined}{nic}", facts=facts)
    return results


def doubtful_pairs(known: KnownLinks) -> list[tuple[int, int]]:
    """The pairs of hosts without which the ranks cannot work, and whose network may have been away for a moment.

    Those of one target are not next to each other, so that the first ones are of many.
    """
    doubtful = [
        (nic, pair) for nic, column in known.columns.items() for pair in column if column[pair].kind in _PASSING
    ]
    needed = [pair for nic, pair in doubtful if known.is_cut_off(nic, [pair], known.others(nic, [pair]))]
    of_target: dict[int, list[tuple[int, int]]] = {}
    # Each may have another way where there is none for all of them.
    for pair in sorted(set(needed or (pair for _, pair in doubtful))):
        of_target.setdefault(pair[1], []).append(pair)
    return [pair for turn in zip_longest(*of_target.values()) for pair in turn if pair is not None]


def _column_results(known: KnownLinks, nic: str, column: Column) -> list[CheckResult]:
    bad = {pair: link for pair, link in column.items() if not link.is_ok}
    # What is lost is reported with the packets that are lost elsewhere.
    bad = {pair: link for pair, link in bad.items() if link.kind != _LOST}
    if not bad:
        return []
    hosts = {host for pair in column for host in pair}
    if len(bad) == len(column) and len(hosts) > _SEVERAL:
        return _dead_network(known, nic, bad, hosts)
    if len(bad) == len(column) and not known.is_used(nic, hosts) and known.others(nic, column):
        return []
    results: list[CheckResult] = []
    parts = _parts(column)
    if len(parts) > 1:
        part_of = {host: number for number, part in enumerate(parts) for host in part}
        between = [pair for pair in bad if part_of.keys() >= set(pair)]
        cut = [pair for pair in between if part_of[pair[0]] != part_of[pair[1]]]
        results += _partition(known, nic, parts, {pair: bad.pop(pair) for pair in cut})
    return [*results, *_host_results(known, nic, column, bad)]


# ------------------------------------------------------------------------------------------------------ all or halves


def _dead_network(known: KnownLinks, nic: str, bad: Column, hosts: set[int]) -> list[CheckResult]:
    """No host reaches another. An interface that no rank uses may not be meant for it."""
    others = known.others(nic, bad)
    if not known.is_used(nic, hosts) and others:
        return []
    kind = _commonest(bad.values())
    message = f"{sentence(NO_HOST, kind, nic, address=_address(bad.values()))}{_works(others)}"
    is_fatal = known.is_cut_off(nic, known.lasting(bad.values()), others)
    hint = hint_of(kind, nic, "all hosts", _instead(known, nic, others))
    return [_result(message, hint, bad.values(), is_fatal=is_fatal)]


def _parts(column: Column) -> list[set[int]]:
    """The groups of two and more hosts that reach each other, directly or through others of the group."""
    leader: dict[int, int] = {}

    def find(host: int) -> int:
        while leader.setdefault(host, host) != host:
            leader[host] = leader[leader[host]]
            host = leader[host]
        return host

    for (source, target), link in column.items():
        if link.is_ok:
            leader[find(source)] = find(target)
    groups: dict[int, set[int]] = {}
    for host in leader:
        groups.setdefault(find(host), set()).add(host)
    return sorted(
        (group for group in groups.values() if len(group) >= _SEVERAL), key=lambda group: (-len(group), min(group))
    )


def _partition(known: KnownLinks, nic: str, parts: Sequence[set[int]], cut: Column) -> list[CheckResult]:
    """Groups of hosts that do not reach each other: a switch, a VLAN, a cable between switches."""
    hosts = {host for pair in cut for host in pair}
    others = known.others(nic, cut)
    if not cut or (not known.is_used(nic, hosts) and others):
        return []
    kind = _commonest(cut.values())
    groups = " / ".join(hosts_text(known.infos, part) for part in parts[:_MOST_REPORTED])
    message = f"{sentence(TWO, kind, nic, who='some groups of hosts')}: {groups}{_works(others)}"
    hint = f"look at what lies between them: switches, VLANs, subnet managers{_or_nic(_instead(known, nic, others))}"
    is_fatal = known.is_cut_off(nic, known.lasting(cut.values()), others)
    return [_result(message, hint, cut.values(), is_fatal=is_fatal)]


# --------------------------------------------------------------------------------------------------- hosts and pairs


def _host_results(known: KnownLinks, nic: str, column: Column, bad: Column) -> list[CheckResult]:
    """The hosts whose links explain most, one after the other, until all is explained."""
    left = dict(bad)
    touching: dict[int, list[tuple[int, int]]] = {}
    for pair in column:
        for host in pair:
            touching.setdefault(host, []).append(pair)
    results: list[CheckResult] = []
    while left and len(results) < _MOST_REPORTED:
        counts = Counter(host for pair in left for host in pair)

        def weight(host: int, counts: Mapping[int, int] = counts) -> tuple[int, float, int]:
            # Of two that explain as much, the one that has more of its own links broken; then the one that is tried.
            of_target = sum(pair[1] == host for pair in left if host in pair) if len(left) <= _SEVERAL else 0
            return counts[host], counts[host] / len(touching[host]), of_target

        host = max(sorted(counts), key=weight)
        mine = [pair for pair in touching[host] if pair in left]
        peers = {other for pair in mine for other in pair} - {host}
        if len(peers) == 1:
            results += [_pair_result(known, nic, column, links) for links in _alike([left[pair] for pair in mine])]
        else:
            results.append(_host_result(known, nic, host, [column[pair] for pair in touching[host]], mine))
        for pair in mine:
            del left[pair]
    if left:
        message = f"{len(left)} more connections over {nic} fail"
        results.append(_result(message, "begin with those that are named", left.values()))
    return results


def _host_result(
    known: KnownLinks, nic: str, host: int, links: Sequence[NicLink], bad: Sequence[tuple[int, int]]
) -> CheckResult:
    label = label_of(known.infos, host)
    broken = set(bad)
    incoming = [link for link in links if link.target == host]
    outgoing = [link for link in links if link.source == host]
    bad_in = [link for link in incoming if (link.source, link.target) in broken]
    bad_out = [link for link in outgoing if (link.source, link.target) in broken]
    others = known.others(nic, bad)
    kind = _commonest(bad_in or bad_out)
    address = _address(bad_in or bad_out)
    does = "does" if kind == "timeout" and bad_in else "works"
    works = f"; its {others[0]} {does}" if others else ""
    direction = ""
    if not bad_in:
        message = sentence(FROM_HOST, kind, nic, of=_of(known, bad_out, outgoing, out=True), address=address)
        if incoming:
            message, direction = f"{message}, while others reach it", "out"
    else:
        message = sentence(TO_HOST, kind, nic, of=_of(known, bad_in, incoming), address=address)
        if not bad_out and any(link.is_ok for link in outgoing):
            message, direction = f"{message}, while it reaches others itself", "in"
    mtu = _mtu_text(known, nic, host)
    hint = hint_of(kind, nic, label, _instead(known, nic, others), direction=direction, mtu=mtu)
    message += works
    peers = {other for pair in bad for other in pair} - {host}
    # NCCL connects neighbours in rings and trees: a few links less may not be missed. Some may have been left out that
    # come through.
    is_whole = (bad_in and len(bad_in) == len(incoming)) or (bad_out and len(bad_out) == len(outgoing))
    is_whole = is_whole and not known.is_cut
    needed = is_whole or any(known.uses[one].by_all_pairs for one in (host, *peers))
    # Of a way on which all fail, one that lasts is enough: a listener that gets no processor is behind the same cable.
    certain = any(
        known.lasting(way) and all(known.is_cut_off(nic, [(link.source, link.target)], others) for link in way)
        for way in (bad_in, bad_out)
    )
    lasting = known.lasting((*bad_in, *bad_out))
    certain = certain or (known.uses[host].by_all_pairs and known.is_cut_off(nic, lasting, others))
    return _result(message, hint, (*bad_in, *bad_out), is_fatal=bool(needed and certain), host=label)


def _alike(links: Sequence[NicLink]) -> list[list[NicLink]]:
    """The links of a pair; each way alone where a listener got no processor on one of them: the network is there."""
    is_mixed = len({link.kind == _STARVED for link in links}) > 1
    return [[link] for link in links] if is_mixed else [list(links)]


def _pair_result(known: KnownLinks, nic: str, column: Column, bad: Sequence[NicLink]) -> CheckResult:
    """Two hosts, and each of them gets on with the others; or there are no others."""
    first = bad[0]
    a, b = first.source, first.target
    source, target = label_of(known.infos, a), label_of(known.infos, b)
    kind = _commonest(bad)
    others = known.others(nic, [(a, b), (b, a)])
    instead = _instead(known, nic, others)
    other_way = column.get((b, a))
    if len(bad) > 1:
        who = hosts_text(known.infos, (a, b))
        message = f"{sentence(TWO, kind, nic, who=who, address=first.address)}{_works(others)}"
        hint = hint_of(kind, nic, f"{source} and {target}", instead, mtu=_mtu_text(known, nic, a, b))
    else:
        tail = "; the other way round works" if other_way is not None and other_way.is_ok else ""
        message = sentence(ONE_WAY, kind, nic, who=target, source=source, address=first.address)
        message += f"{tail}{_works(others)}"
        hint = hint_of(kind, nic, target, instead, direction="pair", source=source)
    uses = [known.uses[host] for host in (a, b)]
    needed = any(use.by_all_pairs for use in uses) or len(known.infos) == _SEVERAL
    certain = known.is_cut_off(nic, known.lasting(bad), others)
    return _result(message, hint, bad, is_fatal=needed and certain)


def _of(known: KnownLinks, bad: Sequence[NicLink], links: Sequence[NicLink], *, out: bool = False) -> str:
    """``3 of 3 hosts``; ``2 of 6 hosts (node1 and node4)``."""
    named = (
        "" if len(bad) == len(links) else f" ({hosts_text(known.infos, [x.target if out else x.source for x in bad])})"
    )
    return f"{len(bad)} of {len(links)} hosts{named}"


# ------------------------------------------------------------------------------------------------------------- wording


def _address(links: Iterable[NicLink]) -> str:
    """The address that was tried, of the first."""
    return next((link.address for link in links), "")


def _commonest(links: Iterable[NicLink]) -> str:
    """The commonest kind."""
    counts = Counter(link.kind for link in links)
    return max(sorted(counts), key=counts.__getitem__, default="timeout")


def _works(others: Sequence[str]) -> str:
    return f"; {others[0]} works" if others else ""


def _instead(known: KnownLinks, nic: str, others: Sequence[str]) -> str:
    """The interface to be used instead: one that serves all hosts, else none."""
    return known.nic if known.nic != nic and (not others or known.nic in others) else ""


def _or_nic(instead: str) -> str:
    return f", or run with --nic {instead}" if instead else ""


def _mtu_text(known: KnownLinks, nic: str, *hosts: int) -> str:
    """``MTU 9000 on node3, 1500 on the others``; empty where they are equal."""
    mtus: dict[int, list[int]] = {}
    for host, info in known.infos.items():
        found = nic_of(info, nic)
        if found is not None and found.mtu:
            mtus.setdefault(found.mtu, []).append(host)
    common = max(mtus, key=lambda mtu: len(mtus[mtu]), default=0)
    odd = [(mtu, [host for host in mtus[mtu] if host in hosts]) for mtu in sorted(mtus) if mtu != common]
    parts = [f"{mtu} on {hosts_text(known.infos, found)}" for mtu, found in odd if found]
    return f"{', '.join(parts)}, {common} on the others" if parts else ""


def _result(
    message: str, hint: str, links: Iterable[NicLink], *, is_fatal: bool = False, host: str = ""
) -> CheckResult:
    found = sorted(links, key=lambda link: (link.source, link.target))[:16]
    facts = tuple((f"{link.source}>{link.target}", f"{link.nic} {link.address} {link.kind}") for link in found)
    verdict, class_name = ("fail", _CLASS) if is_fatal else ("warn", "")
    return CheckResult("links", verdict, message, hint, facts, class_name=class_name, host=host)
