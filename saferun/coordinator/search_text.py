"""What a search for a store has come to, one sentence a cause, and what to do about it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from saferun.coordinator.dial import REFUSED, SILENT, UNKNOWN_NAME, UNREACHABLE, shown
from saferun.coordinator.host_probe import ProbedHost
from saferun.model import Value
from saferun.text.master_port import another_port_hint, is_started_hint, let_through_hint

NO_STORE = "no store"
"""Something accepts connections, and does not answer as a store."""
FOREIGN = "foreign"
"""A store that is not the right one."""

_FEW = 3
# A port without a listener would refuse connections at once, as the host is up.
_DROPS = "a firewall drops connections"


class PortResult(Value):
    """What came of a port: a kind of ``dial``, or one of those above, and the message."""

    kind: str
    message: str


def search_text(
    host: str, ports: Sequence[int], results: Mapping[int, PortResult], here: str, probed: ProbedHost | None
) -> str:
    """Why the store has not been found. What holds for several ports is said once.

    Args:
        host: the name or address at which it is looked for.
        ports: all candidates.
        results: what came of those that have been tried.
        here: the name of this host; empty: it is not said.
        probed: whether the host is up, as far as is known.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for port in ports:
        if port in results:
            kind, message = results[port].kind, results[port].message
            # Without the port: the same cause has the same words then.
            groups.setdefault((kind, message.replace(shown(host, port), host, 1)), []).append(port)
    return "; ".join(_cause(host, ports, found, kind, text, here, probed) for (kind, text), found in groups.items())


def _cause(
    host: str, ports: Sequence[int], found: Sequence[int], kind: str, text: str, here: str, probed: ProbedHost | None
) -> str:
    """A sentence about ports with which the same has happened; ``text``: about the host."""
    if kind == SILENT and probed is not None:
        subject = text.partition(" does not answer")[0]
        asker = f" {here}" if here else ""
        if probed.is_up and len(ports) == 1:
            return f"{subject} answers{asker}, but its port {found[0]} does not: {_DROPS}"
        if probed.is_up:
            return f"{subject} answers{asker}, but not on {_counted(found, ports, 'any')}: {_DROPS}"
        silent = f"{subject.replace(host, shown(host, found[0]), 1)} does not answer{asker}"
        if len(found) > 1:
            silent = f"{subject} does not answer{asker} on {_counted(found, ports, 'any')}"
        return f"{silent}, nor do its ports {' and '.join(map(str, probed.ports))}"
    if host not in text or kind == UNKNOWN_NAME or (kind == UNREACHABLE and len(found) > 1):
        return text
    if len(found) == 1:
        return text.replace(host, shown(host, found[0]), 1)
    return f"{text} on {_counted(found, ports, 'any' if kind == SILENT else 'all')}"


def _counted(found: Sequence[int], ports: Sequence[int], every: str) -> str:
    """``any of the 8 ports tried (20311 to 31023)``."""
    count = f"{every} of the {len(ports)}" if len(found) == len(ports) else f"{len(found)} of the {len(ports)}"
    span = ", ".join(map(str, found)) if len(found) <= _FEW else f"{min(found)} to {max(found)}"
    return f"{count} ports tried ({span})"


def search_hint(
    host: str,
    ports: Sequence[int],
    results: Mapping[int, PortResult],
    here: str,
    probed: ProbedHost | None,
    *,
    source: str,
    hosts_file: Mapping[str, str],
) -> str:
    """What to do about it.

    Args:
        host: the name or address at which the store is looked for.
        ports: all candidates.
        results: what came of those that have been tried.
        here: the name of this host.
        probed: whether the host is up, as far as is known.
        source: where the numbers of the ports come from, one of the constants of ``text.master_port``.
        hosts_file: the addresses of the host in /etc/hosts, each with the file's line.
    """
    kinds = {result.kind for result in results.values()}
    if UNKNOWN_NAME in kinds or not kinds:
        option = "--rdzv-endpoint" if source == "endpoint" else "--master-addr"
        return f"look at the name service and /etc/hosts of {here or 'this host'}, or pass an address as {option}"
    if kinds == {NO_STORE}:
        another = another_port_hint(source, ports[0])
        slow = "which answers when it has imported torch"
        return f"see whether saferun runs on {host}, {slow}, and which program has the port (ss -ltnp), or {another}"
    if kinds == {SILENT} and probed is not None and probed.is_up:
        return let_through_hint(source, host, ports[0])
    if kinds <= {SILENT, UNREACHABLE} and probed is not None and not probed.is_up:
        up = f"see whether {host} is up, and whether a network or a firewall is between"
        if not probed.addresses or host in probed.addresses:
            return up
        listed = ", ".join(probed.addresses)
        origin = " by its /etc/hosts" if any(address in hosts_file for address in probed.addresses) else ""
        return f"{here or 'this host'} takes {host} for {listed}{origin}: see whether that is right; else {up}"
    if kinds == {REFUSED}:
        return f"{host} is up: {is_started_hint(source, host, ports[0], 'rejects connections')}"
    return is_started_hint(source, host, ports[0])


def addresses_in(hosts_file: str, host: str) -> dict[str, str]:
    """The addresses that a hosts file has for a name, each with its line (hosts(5))."""
    found = {}
    for line in hosts_file.splitlines():
        address, *names = line.partition("#")[0].split() or [""]
        if host in names:
            found[address] = line.strip()
    return found
