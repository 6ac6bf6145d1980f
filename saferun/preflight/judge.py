"""What all that the hosts of a job found comes to. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from saferun.linux.nic import is_decoy
from saferun.preflight.best_nic import best_nic, suggested
from saferun.preflight.default_nics import AUTO, loopback_between
from saferun.preflight.faults import KnownLinks, doubtful_pairs, fault_results
from saferun.preflight.nic_links import Column, Uses, columns_of, hosts_text, label_of, matrix_of, uses_of
from saferun.preflight.results import SEVERITY, CheckResult, HostInfo, Preflight, Probe
from saferun.preflight.skew import skew_results
from saferun.preflight.slowness import Slowness, again, find_slowness, without_lost

__all__ = ["judge"]

_SEVERAL = 2
# As many as one message of the leader names.
_MOST_AGAIN = 64
# What comes of a host whose checks have ended early.
_ENDED = frozenset({"refused", "silent", "broken", "stranger"})
_WOULD_USE = re.compile(r"gloo would use (\S{1,64}) \(")
_DOWN_AT_HOME = re.compile(r" names (\S{1,64}), which is down on this host")


def judge(
    infos: Mapping[int, HostInfo],
    probes: Sequence[Probe],
    *,
    missing: Mapping[int, str],
    nics: tuple[str, ...],
    remeasured: bool,
    duration_s: float,
    cut: Mapping[int, int] = MappingProxyType({}),
) -> Preflight:
    """What is wrong with the hosts of a job and between them, and with which one, over which interface.

    Never raises, whatever the hosts say; takes time in proportion to the number of probes.

    Args:
        infos: what each host says of itself, by its number; with its name in the job.
        probes: all that was measured, the first time and the second. Where a host could not be tried there is none.
        missing: hosts that reported no probes, and why.
        nics: what ``--nic`` named.
        remeasured: whether what looked slow, or would end the launch and may pass, has been measured again. If not,
            ``again`` names what is to be, and what looked slow is not reported yet.
        duration_s: from the first check on.
        cut: hosts that had more probes than find room in a message, and how many they left out.

    Returns:
        With ``again`` the rest is what is known so far.
    """
    measured = columns_of(probes, infos)
    columns = without_lost(_without_ended(measured, missing))
    uses = {host: uses_of(info, nics) for host, info in infos.items()}
    slowness = find_slowness(columns, infos)
    best = best_nic(columns, infos, sorted({nic for _, nic in slowness.states}))
    if AUTO in nics and best:
        uses = {host: uses_of(info, (best,)) for host, info in infos.items()}
    known = KnownLinks(columns, infos, uses, best, remeasured, is_cut=bool(cut))
    faults = fault_results(known)
    blamed = {result.host for result in faults if result.verdict == "fail"}
    described = {host: info for host, info in infos.items() if info.versions or info.nics or info.probed}
    # Gloo uses what ``--nic auto`` has found.
    may_be_on_loopback = any(_may_be_on_loopback(info) for info in infos.values()) and not (AUTO in nics and best)
    results = [
        *_own_results(infos),
        *faults,
        *(slowness.results if remeasured else ()),
        *_missing_results(measured, infos, uses, missing, blamed),
        *_cut_results(probes, infos, cut),
        *_down_results(described, uses),
        *_decoy_results(described, uses, columns),
        *(loopback_between(infos) if may_be_on_loopback else ()),
        *skew_results(described, probes),
    ]
    results = _without_consequences(results)
    results.sort(key=lambda result: -SEVERITY.get(result.verdict, 0))
    return Preflight(
        results=tuple(results),
        matrix=matrix_of(columns, infos, slowness.states) if len(infos) > 1 else (),
        duration_s=duration_s,
        again=() if remeasured else _again(known, faults, slowness, missing),
        nic=suggested(best, infos, nics),
    )


def _without_consequences(results: Sequence[CheckResult]) -> list[CheckResult]:
    """Without what follows from an interface that its own host calls down, or that fails between hosts."""
    failing = [result.message for result in results if result.verdict == "fail" and result.name == "links"]
    results = [
        result
        for result in results
        if result.verdict != "warn"
        or (match := _WOULD_USE.match(result.message)) is None
        or not any(message.startswith(f"{match[1]} ") for message in failing)
    ]
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


def _may_be_on_loopback(info: HostInfo) -> bool:
    is_certain = any(nic.kind == "loopback" and nic.name in info.gloo for nic in info.nics) or "lo" in info.gloo
    return is_certain or bool(info.unanswered)


def _without_ended(columns: Mapping[str, Column], missing: Mapping[int, str]) -> dict[str, Column]:
    """The links without those to hosts whose checks have ended early, so that no process listens there any more."""
    return {
        nic: {pair: link for pair, link in column.items() if pair[1] not in missing or link.kind not in _ENDED}
        for nic, column in columns.items()
    }


def _again(
    known: KnownLinks, faults: Sequence[CheckResult], slowness: Slowness, missing: Mapping[int, str]
) -> tuple[tuple[int, int], ...]:
    measured = {pair for column in known.columns.values() for pair in column}
    hosts = sorted(host for host in known.infos if host not in missing)
    pairs = [pair for pair in slowness.pairs if missing.keys().isdisjoint(pair)]
    doubtful = doubtful_pairs(known) if any(result.verdict == "fail" for result in faults) else []
    slow = again([host for host in slowness.suspects if host not in missing], pairs, hosts, measured)
    return tuple(dict.fromkeys((*doubtful, *slow)))[:_MOST_AGAIN]


# ------------------------------------------------------------------------------------------------------ of the hosts


def _own_results(infos: Mapping[int, HostInfo]) -> list[CheckResult]:
    """What the hosts found by themselves. Good results of one host alone do not travel: they stand for themselves."""
    return [
        result._replace(host=label_of(infos, host) if len(infos) > 1 else result.host)
        for host, info in sorted(infos.items())
        for result in info.results
        if result.verdict in SEVERITY
    ]


def _missing_results(
    columns: Mapping[str, Column],
    infos: Mapping[int, HostInfo],
    uses: Mapping[int, Uses],
    missing: Mapping[int, str],
    blamed: Collection[str],
) -> list[CheckResult]:
    """Hosts that reported no probes; those that no other host reaches either may be gone.

    A host that refuses is there, and an interface that its ranks do not use may be meant for something else.
    """
    links = [(nic, link) for nic, column in columns.items() for link in column.values()]
    measuring = {link.source for _, link in links}
    reached = {link.target for _, link in links if link.is_ok or link.kind in _ENDED}
    tried = {link.target for nic, link in links if nic in uses[link.target].certain | uses[link.target].possible}
    results = []
    for host, why in sorted(missing.items()):
        info = infos.get(host)
        if info is None or not (info.probed or info.nics):
            # It takes no part in this.
            results.append(CheckResult("links", "skipped", f"not tried: {why}", host=label_of(infos, host)))
            continue
        is_gone = host in tried and host not in reached and label_of(infos, host) not in blamed
        when = " the second time" if host in measuring else ""
        gone = ", and none of them reaches it" if is_gone else ""
        message = f"it reported nothing of the other hosts{when} ({why}){gone}"
        hint = "check whether it is up and not overloaded"
        results.append(CheckResult("links", "warn", message, hint, host=label_of(infos, host)))
    return results


def _cut_results(probes: Sequence[Probe], infos: Mapping[int, HostInfo], cut: Mapping[int, int]) -> list[CheckResult]:
    """What hosts have left out, which came through mostly; of an interface that fails it tells no more."""
    if not cut:
        return []
    left_out = sum(cut.values())
    message = (
        f"{left_out} of {left_out + len(probes)} connections that were tried are not judged: what "
        f"{hosts_text(infos, cut)} found was too much for one message in a job of this size"
    )
    return [CheckResult("links", "skipped", message)]


def _down_results(infos: Mapping[int, HostInfo], uses: Mapping[int, Uses]) -> list[CheckResult]:
    """Interfaces that most hosts can be tried over, and that are down on a few."""
    up: dict[str, int] = {}
    down: dict[str, list[int]] = {}
    for host, info in infos.items():
        for nic in info.nics:
            if nic.name in info.probed:
                up[nic.name] = up.get(nic.name, 0) + 1
            elif not nic.is_up:
                down.setdefault(nic.name, []).append(host)
    results = []
    for name, hosts in down.items():
        others = sorted(infos.keys() - set(hosts))
        is_used = any(name in uses[host].certain | uses[host].possible for host in others)
        if up.get(name, 0) <= len(hosts) and not (is_used and name in up):
            continue
        for host in hosts:
            message = f"{name} is down, which {_many(infos, others, up[name])}"
            hint = f"look at its cable and at `ip link show {name}`, or run with another --nic"
            # Its libraries may take another one there, that leads to the others as well.
            verdict = "fail" if name in uses[host].certain else "warn"
            class_name = "network_interface" if verdict == "fail" else ""
            label = label_of(infos, host)
            results.append(CheckResult("interfaces", verdict, message, hint, class_name=class_name, host=label))
    return results


def _many(infos: Mapping[int, HostInfo], others: Iterable[int], count: int) -> str:
    return f"is up on {count} other hosts" if count > 1 else f"is up on {hosts_text(infos, others)}"


def _decoy_results(
    infos: Mapping[int, HostInfo], uses: Mapping[int, Uses], columns: Mapping[str, Column]
) -> list[CheckResult]:
    """Interfaces for containers that the ranks would use, all with the same address, where no host has probed them."""
    holders: dict[tuple[str, str], list[int]] = {}
    machines: dict[frozenset[str], int] = {}
    for host, info in sorted(infos.items()):
        addresses = frozenset(address for nic in info.nics for address in nic.addresses)
        # Several hosts of the job may be one machine.
        if machines.setdefault(addresses, host) != host:
            continue
        for nic in info.nics:
            if nic.name in uses[host].certain and nic.name not in columns and is_decoy(nic.name):
                for address in nic.addresses[:1]:
                    holders.setdefault((nic.name, address), []).append(host)
    results = []
    for (name, address), hosts in holders.items():
        is_known = any(result.class_name == "network_interface" for host in hosts for result in infos[host].results)
        if len(hosts) >= _SEVERAL and not is_known:
            message = (
                f"{name} has the same address ({address}) on {hosts_text(infos, hosts)}, and the ranks would use it"
            )
            hint = "run with --nic and the interface between the hosts"
            results.append(CheckResult("interfaces", "fail", message, hint, class_name="network_interface"))
    return results
