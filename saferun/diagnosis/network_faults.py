"""What is wrong between hosts that all live: who cannot reach whom. Pure.

When the network fails, every rank reports that another one did not come, and the first to give up closes its
connections, so that the next blame it. The evidence is in connections that are silent or refused, and in their
addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from saferun.diagnosis.causes.failure import Failure, shortened
from saferun.diagnosis.collectives import CollectiveFindings
from saferun.diagnosis.job_hosts import Hosts, addresses_in, hosts_text
from saferun.diagnosis.judgement import Judgement
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import HostView, StuckLink
from saferun.model import Value
from saferun.text.wording import ranks_text

NETWORK_CLASSES = frozenset({"network_between_hosts", "network_cut", "network_interface"})
"""Causes that no rank brings about."""
_SILENT = LazyPattern(
    r"[Cc]onnection timed out|[Nn]o route to host|(?:Network|Host) is (?:unreachable|down)|timed out connecting"
    r"|Got completion from peer \S{1,120} with (?:error |status=)(?:IBV_WC_\w{1,20}\()?12\b"
    r"|\bETIMEDOUT\b|\bEHOSTUNREACH\b|\bENETUNREACH\b"
)
_REFUSED = LazyPattern(r"[Cc]onnection refused|\bECONNREFUSED\b")
_CLOSED = LazyPattern(r"Connection reset|Connection closed|Broken pipe|Socket closed")
# Of torch's loggers, as of a rank that tries once more to reach the store when the job starts.
_WARNING = "[W"
_CHARS_AROUND = 100
_PART_OF_ADDRESS = re.compile(r"[\w.:%-]{1,64}")
_SILENCE, _REFUSAL, _CLOSING = "silent", "refused", "closed"
_NETWORK_ADVICE = (
    "look at the network that the ranks use between {hosts}: interface, cable, switch port, firewall, MTU; "
    "`ping` and `nc` show whether it carries traffic"
)
_ONE_HOST_ADVICE = (
    "look at the network of {hosts} that the ranks use: interface, cable, switch port, firewall, MTU; `ping` and `nc` "
    "tell whether it carries anything"
)
_FIREWALL_ADVICE = "look at the firewall of {hosts}: it must let the ranks connect to each other at any port"
_INTERFACE_ADVICE = (
    "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to the interface between the hosts: `ip addr` shows them"
)
_NAME_ADVICE = (
    "/etc/hosts gives the host's own name a loopback address: take that line out, or set GLOO_SOCKET_IFNAME to the "
    "interface between the hosts"
)
_FEWEST = 2


class Complaint(Value):
    """A rank cannot reach an address, by its output or its connections.

    ``kind``: ``silent``, ``refused`` or ``closed``. ``at``: seconds since the epoch.
    """

    at: float
    rank: int
    address: str
    kind: str
    line: str


def complaints_of(failures: Iterable[tuple[float, Failure]]) -> list[Complaint]:
    """The addresses in the messages of failed ranks, in the order of time.

    Args:
        failures: when they failed, and of what.
    """
    found = []
    for at, failure in failures:
        closing = (line for line in failure.closing_lines if not line.startswith(_WARNING))
        for line in (*failure.messages, *failure.context, *closing):
            for kind, pattern in ((_REFUSAL, _REFUSED), (_SILENCE, _SILENT), (_CLOSING, _CLOSED)):
                match = pattern.search(line)
                if match is None:
                    continue
                # Of several addresses the one next to the message is meant: its own stands before.
                addresses = addresses_in(match[0]) or addresses_in(_around(line, match))
                if addresses:
                    found.append(Complaint(at, failure.end.rank, addresses[-1], kind, line.strip()))
                break
    return sorted(found)


def _around(line: str, match: re.Match[str]) -> str:
    """A match and what stands near it, with no address cut: the beginning of one may be another host's address."""
    start, end = max(match.start() - _CHARS_AROUND, 0), match.end() + _CHARS_AROUND
    before, behind = _PART_OF_ADDRESS.match(line[:start][::-1]), _PART_OF_ADDRESS.match(line, end)
    start -= len(before[0]) if before is not None else 0
    end += len(behind[0]) if behind is not None else 0
    return line[start:end]


def refusals(complaints: Iterable[Complaint]) -> list[Complaint]:
    """Those among them in which the connection was refused."""
    return [complaint for complaint in complaints if complaint.kind == _REFUSAL]


def link_complaints(links: Iterable[StuckLink]) -> list[Complaint]:
    """The same of connections with unacknowledged data."""
    return [
        Complaint(0.0, link.rank, link.remote.rpartition(":")[0], _SILENCE, _link_text(link))
        for link in links
        if link.remote
    ]


def _link_text(link: StuckLink) -> str:
    if link.state == "SYN_SENT":
        return f"rank {link.rank} cannot connect from {link.local} to {link.remote}: no answer"
    return (
        f"rank {link.rank} has sent to {link.remote} from {link.local} and gets no answer: {link.unsent_bytes} bytes "
        f"unacknowledged, {link.retries} retransmits"
    )


# -------------------------------------------------------------------------------------------------------- own addresses


def wrong_interface(complaints: Sequence[Complaint], hosts: Hosts) -> Cause | None:
    """Ranks announce an address that is theirs only on their own host."""
    for complaint in complaints:
        if complaint.kind == _CLOSING or not hosts.are_several or not hosts.is_shared(complaint.address):
            continue
        # Ranks of one host may meet at such an address.
        is_loopback = complaint.address.rpartition(":")[2].startswith("127.") or complaint.address == "::1"
        message = f"the ranks exchange the address {complaint.address}, which is not unique to one host"
        advice = _NAME_ADVICE if is_loopback else _INTERFACE_ADVICE
        return Cause("network_interface", message, (), shortened(complaint.line), advice)
    return None


# ---------------------------------------------------------------------------------------------------------------- paths


class _Route(Value):
    """From a host to another, and the complaint about it."""

    source: HostView
    target: HostView
    complaint: Complaint


def broken_between(
    complaints: Sequence[Complaint], hosts: Hosts, findings: CollectiveFindings, *, timed_out: bool
) -> Judgement | None:
    """Where the network is broken; None where there is no evidence of it.

    Args:
        complaints: what ranks could not reach, in the order of time.
        hosts: the hosts of the job.
        findings: of the Flight Recorders.
        timed_out: whether ranks waited too long; else they only lost connections.
    """
    if not hosts.are_several:
        return None
    for kind in (_SILENCE, _REFUSAL):
        routes = _routes(complaints, kind, hosts)
        if routes:
            return _broken_routes(routes, kind, len(hosts.all))
    if not timed_out:
        routes = _routes(complaints, _CLOSING, hosts)
        return _first_broken(routes) if routes else None
    return _stuck_collective(findings, hosts)


def _routes(complaints: Iterable[Complaint], kind: str, hosts: Hosts) -> list[_Route]:
    routes = []
    for complaint in complaints:
        source, target = hosts.of(complaint.rank), hosts.at_address(complaint.address)
        if complaint.kind == kind and source is not None and target is not None and source.host != target.host:
            routes.append(_Route(source, target, complaint))
    return routes


def _broken_routes(routes: Sequence[_Route], kind: str, count: int) -> Judgement:
    pairs = {frozenset((route.source.host, route.target.host)) for route in routes}
    known = {host.host: host for route in routes for host in (route.source, route.target)}
    proof = shortened(routes[0].complaint.line)
    verb = "refuse connections" if kind == _REFUSAL else "do not reach each other"
    common = frozenset.intersection(*pairs)
    if len(pairs) == 1:
        both = sorted(next(iter(pairs)))
        names = " and ".join(known[number].label for number in both)
        if kind == _REFUSAL:
            target = routes[0].target
            message = f"{target.label} refuses the connections of {routes[0].source.label}"
            return _broken("network_between_hosts", message, [target], proof, _FIREWALL_ADVICE)
        message = f"the ranks of {names} {verb}"
        if count > _FEWEST:
            message += "; no other connection is seen to fail"
        return _broken("network_between_hosts", message, [known[number] for number in both], proof, _NETWORK_ADVICE)
    if len(common) == 1:
        host = known[next(iter(common))]
        others = [known[number] for number in sorted(known) if number != host.host]
        if kind == _REFUSAL:
            message = f"{host.label} refuses the connections of {hosts_text(others)}"
            return _broken("network_cut", message, [host], proof, _FIREWALL_ADVICE)
        message = f"nothing gets through between {host.label} and {hosts_text(others)}: its network is cut"
        return _broken("network_cut", message, [host], proof, _ONE_HOST_ADVICE)
    some = [known[number] for number in sorted(known)]
    message = f"the ranks of {hosts_text(some)} {verb}"
    advice = _FIREWALL_ADVICE if kind == _REFUSAL else _NETWORK_ADVICE
    return _broken("network_between_hosts", message, some, proof, advice)


def _first_broken(routes: Sequence[_Route]) -> Judgement:
    """Connections were closed, and no rank had failed before: the first one closed shows where."""
    first = routes[0]
    names = f"{first.source.label} and {first.target.label}"
    message = f"a connection between {names} broke first; no earlier rank failure is known"
    proof = shortened(first.complaint.line)
    return _broken("network_between_hosts", message, [first.source, first.target], proof, _NETWORK_ADVICE)


def _stuck_collective(findings: CollectiveFindings, hosts: Hosts) -> Judgement | None:
    """All ranks have come to a collective, and it does not end on any host."""
    for stuck in findings.stuck:
        theirs = hosts.of_ranks(stuck.waiting)
        if len(theirs) >= _FEWEST and not stuck.unknown and not findings.missing and not findings.mismatched:
            op = f"{stuck.op} ({stuck.seq} of group {stuck.group})" if stuck.op else f"collective {stuck.seq}"
            between = hosts_text(theirs)
            message = f"all ranks have come to {op}, and it does not end; it goes over the network between {between}"
            return _broken("network_between_hosts", message, theirs, stuck.message, _NETWORK_ADVICE)
    return None


def _broken(class_name: str, message: str, hosts: Sequence[HostView], proof: str, advice: str) -> Judgement:
    amiss = [host for host in hosts if host.nics]
    if len(amiss) == 1:
        # Its own host has seen that, and it explains the rest.
        what = f"{amiss[0].label}: {', '.join(amiss[0].nics[:_FEWEST])}"
        message, hosts, class_name = f"{what}; {message}", amiss, "network_cut"
        advice = (
            "look at the cable, the switch port and the driver of {hosts}'s interface: dmesg, ethtool, `ip -s link`"
        )
    ranks = hosts[0].ranks if len(hosts) == 1 else ()
    cause = Cause(class_name, message, ranks, proof, advice.format(hosts=hosts_text(hosts)))
    tail = f" ({ranks_text(ranks)})" if ranks else ""
    return Judgement(cause, f"{message}{tail}")
