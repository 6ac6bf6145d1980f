"""What all that the hosts of a job found comes to. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from saferun.preflight.choice import best_nic, suggested
from saferun.preflight.faults import Scene, fault_results
from saferun.preflight.interfaces import AUTO, is_decoy, loopback_between
from saferun.preflight.links import Column, Uses, columns_of, host_words, label_of, matrix_of, uses_of
from saferun.preflight.results import SEVERITY, CheckResult, HostCard, Preflight, Probe
from saferun.preflight.rounds import again
from saferun.preflight.skew import skew_results
from saferun.preflight.slowness import Slowness, look_for_slowness, without_lost

__all__ = ["judge"]

_SEVERAL = 2
_DOWN_AT_HOME = re.compile(r" names (\S{1,64}), which is down on this host")


def judge(
    cards: Mapping[int, HostCard],
    probes: Sequence[Probe],
    *,
    missing: Mapping[int, str],
    nics: tuple[str, ...],
    remeasured: bool,
    duration_s: float,
) -> Preflight:
    """What is wrong with the hosts of a job and between them, and with which one, over which interface.

    Never raises, whatever the hosts say; takes time in proportion to the number of probes.

    Args:
        cards: what each host says of itself, by its number; with its name in the job.
        probes: all that was measured, the first time and the second. Where a host could not be tried there is none.
        missing: hosts that told nothing of their probes, and why.
        nics: what ``--nic`` named.
        remeasured: whether what looked slow has been measured again. If not, ``again`` names what is to be, and it is
            not told yet.
        duration_s: from the first check on.

    Returns:
        With ``again`` the rest is what is known so far.
    """
    columns = without_lost(_without_ended(columns_of(probes, cards), missing))
    uses = {host: uses_of(card, nics) for host, card in cards.items()}
    slowness = look_for_slowness(columns, cards)
    best = best_nic(columns, cards, sorted({nic for _, nic in slowness.states}))
    if AUTO in nics and best:
        uses = {host: uses_of(card, (best,)) for host, card in cards.items()}
    faults = fault_results(Scene(columns, cards, uses, best))
    blamed = {result.host for result in faults if result.verdict == "fail"}
    told = {host: card for host, card in cards.items() if card.versions or card.nics or card.probed}
    results = [
        *_own_results(cards),
        *faults,
        *(slowness.results if remeasured else ()),
        *_missing_results(columns, cards, missing, blamed),
        *_down_results(told, uses),
        *_decoy_results(told, uses, columns),
        *(loopback_between(cards) if any(_is_on_loopback(card) for card in cards.values()) else ()),
        *skew_results(told, probes),
    ]
    results = _without_consequences(results)
    results.sort(key=lambda result: -SEVERITY.get(result.verdict, 0))
    return Preflight(
        results=tuple(results),
        matrix=matrix_of(columns, cards, slowness.states) if len(cards) > 1 else (),
        duration_s=duration_s,
        again=() if remeasured else _again(slowness, cards, columns, missing),
        nic=suggested(best, cards, nics),
    )


def _without_consequences(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Without what follows from an interface of which its own host says that it is down."""
    down = [
        (result, match[1])
        for result in results
        if result.name == "interfaces" and (match := _DOWN_AT_HOME.search(result.message)) is not None
    ]
    return [
        result
        for result in results
        if result.verdict not in {"warn", "fail"}
        or not any(
            result is not own and result.host == own.host and re.search(rf"\b{re.escape(nic)}\b", result.message)
            for own, nic in down
        )
    ]


def _is_on_loopback(card: HostCard) -> bool:
    return any(nic.kind == "loopback" and nic.name in card.gloo for nic in card.nics) or "lo" in card.gloo


def _without_ended(columns: Mapping[str, Column], missing: Mapping[int, str]) -> dict[str, Column]:
    """The links without those to hosts whose checks have ended early, which is why nobody listens there any more."""
    ended = frozenset({"refused", "silent", "broken", "stranger"})
    return {
        nic: {pair: link for pair, link in column.items() if pair[1] not in missing or link.kind not in ended}
        for nic, column in columns.items()
    }


def _again(
    slowness: Slowness, cards: Mapping[int, HostCard], columns: Mapping[str, Column], missing: Mapping[int, str]
) -> tuple[tuple[int, int], ...]:
    measured = {pair for column in columns.values() for pair in column}
    hosts = sorted(host for host in cards if host not in missing)
    pairs = [pair for pair in slowness.pairs if missing.keys().isdisjoint(pair)]
    return again([host for host in slowness.suspects if host not in missing], pairs, hosts, measured)


# ------------------------------------------------------------------------------------------------------ of the hosts


def _own_results(cards: Mapping[int, HostCard]) -> list[CheckResult]:
    """What the hosts found at home. Good results of one host alone are not told by it: they stand for themselves."""
    return [
        result._replace(host=label_of(cards, host) if len(cards) > 1 else result.host)
        for host, card in sorted(cards.items())
        for result in card.results
        if result.verdict in SEVERITY
    ]


def _missing_results(
    columns: Mapping[str, Column],
    cards: Mapping[int, HostCard],
    missing: Mapping[int, str],
    blamed: Collection[str],
) -> list[CheckResult]:
    """Hosts that said nothing of their probes; those that nobody reaches either may be gone."""
    reached = {target for column in columns.values() for (_, target), link in column.items() if link.is_ok}
    tried = {target for column in columns.values() for _, target in column}
    results = []
    for host, why in sorted(missing.items()):
        card = cards.get(host)
        if card is None or not (card.probed or card.nics):
            # It takes no part in this.
            results.append(CheckResult("links", "skipped", f"not tried: {why}", host=label_of(cards, host)))
            continue
        is_gone = host in tried and host not in reached and label_of(cards, host) not in blamed
        words = f"it reported nothing of the other hosts ({why}){', and none of them reaches it' if is_gone else ''}"
        hint = "check whether it is up and not overloaded"
        results.append(CheckResult("links", "warn", words, hint, host=label_of(cards, host)))
    return results


def _down_results(cards: Mapping[int, HostCard], uses: Mapping[int, Uses]) -> list[CheckResult]:
    """Interfaces that most hosts can be tried over, and that are down on a few."""
    up: dict[str, int] = {}
    down: dict[str, list[int]] = {}
    for host, card in cards.items():
        for nic in card.nics:
            if nic.name in card.probed:
                up[nic.name] = up.get(nic.name, 0) + 1
            elif not nic.is_up:
                down.setdefault(nic.name, []).append(host)
    results = []
    for name, hosts in down.items():
        others = sorted(cards.keys() - set(hosts))
        is_used = any(name in uses[host].certain | uses[host].possible for host in others)
        if up.get(name, 0) <= len(hosts) and not (is_used and name in up):
            continue
        for host in hosts:
            words = f"{name} is down, which {_many(cards, others, up[name])}"
            hint = f"look at its cable and at `ip link show {name}`, or run with another --nic"
            # Its libraries may take another one there, that leads to the others as well.
            verdict = "fail" if name in uses[host].certain else "warn"
            class_name = "network_interface" if verdict == "fail" else ""
            label = label_of(cards, host)
            results.append(CheckResult("interfaces", verdict, words, hint, class_name=class_name, host=label))
    return results


def _many(cards: Mapping[int, HostCard], others: Iterable[int], count: int) -> str:
    return f"is up on {count} other hosts" if count > 1 else f"is up on {host_words(cards, others)}"


def _decoy_results(
    cards: Mapping[int, HostCard], uses: Mapping[int, Uses], columns: Mapping[str, Column]
) -> list[CheckResult]:
    """Interfaces for containers that the ranks would use, all with the same address, where nobody has tried them."""
    holders: dict[tuple[str, str], list[int]] = {}
    machines: dict[frozenset[str], int] = {}
    for host, card in sorted(cards.items()):
        addresses = frozenset(address for nic in card.nics for address in nic.addresses)
        # Several hosts of the job may be one machine.
        if machines.setdefault(addresses, host) != host:
            continue
        for nic in card.nics:
            if nic.name in uses[host].certain and nic.name not in columns and is_decoy(nic.name):
                for address in nic.addresses[:1]:
                    holders.setdefault((nic.name, address), []).append(host)
    results = []
    for (name, address), hosts in holders.items():
        told = any(result.class_name == "network_interface" for host in hosts for result in cards[host].results)
        if len(hosts) >= _SEVERAL and not told:
            words = f"{name} has the same address ({address}) on {host_words(cards, hosts)}, and the ranks would use it"
            hint = "run with --nic and the interface between the hosts"
            results.append(CheckResult("interfaces", "fail", words, hint, class_name="network_interface"))
    return results
