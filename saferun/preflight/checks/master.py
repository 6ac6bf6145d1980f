"""The way to the master: which interface leads there, and whether its port answers."""

from __future__ import annotations

import errno
import select
import socket
import time
from collections.abc import Iterable

from saferun.linux.netlink import Route, read_nics, route_to
from saferun.preflight.checks.answers import ok, skipped, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import resolve
from saferun.preflight.results import CheckResult
from saferun.text.master_port import another_port_hint

ANSWER_TIMEOUT_S = 1.0
"""How long the master's port has to answer."""

_MOST_TRIES = 16  # addresses times ports

# What came of a connection, the best first.
_CONNECTED, _REFUSED, _SILENT, _PROHIBITED, _NO_ROUTE = "connected", "refused", "silent", "prohibited", "no route"
_BEST_FIRST = (_CONNECTED, _REFUSED, _SILENT, _PROHIBITED, _NO_ROUTE)
_KINDS = {
    0: _CONNECTED,
    errno.ECONNREFUSED: _REFUSED,
    errno.ECONNRESET: _REFUSED,
    errno.ETIMEDOUT: _SILENT,
    # A firewall's ICMP message comes at once; the kernel's own finding, that no host has the address, takes seconds.
    errno.EHOSTUNREACH: _PROHIBITED,
    errno.EACCES: _PROHIBITED,
    errno.EPERM: _PROHIBITED,
    errno.ENETUNREACH: _NO_ROUTE,
    errno.ENETDOWN: _NO_ROUTE,
}


def check_master(context: CheckContext) -> CheckResult:
    """Whether this host can reach the master, as far as is known before the hosts have met.

    A master that refuses or does not answer may not be there yet, and the hosts wait for each other: that is no failure
    here, nor is one that a firewall forbids or that no network leads to: both may come up with the hosts.
    """
    if not context.spans_hosts:
        return ok("only one host: no route is needed")
    if context.serves:
        return ok("this host serves the store")
    if not context.master:
        return ok("no host serves the store")
    found = resolve((context.master,))[0]
    if not found.addresses:
        return skipped(f"the name {context.master} does not resolve")
    routes = {address: _route(address) for address in found.addresses}
    ports = [port for port in context.ports if port]
    if all(route.error for route in routes.values()):
        return _no_way(context, found.addresses[0], routes[found.addresses[0]])
    tries = [(address, port) for port in ports for address, route in routes.items() if not route.error][:_MOST_TRIES]
    results = try_ports(tries, ANSWER_TIMEOUT_S)
    if not results:
        address = next(address for address, route in routes.items() if not route.error)
        return ok(_route_text(address, routes[address]), _facts(routes[address], address))
    address, port = min(results, key=lambda one: _BEST_FIRST.index(results[one]))
    kind, route = results[address, port], routes[address]
    facts = (("answer", kind), *_facts(route, address))
    where = _where(context.master, address, port)
    if kind == _CONNECTED:
        return ok(f"{where} answers; {_route_text(address, route)}", facts)
    if kind in {_REFUSED, _SILENT}:
        answer = "refuses connections" if kind == _REFUSED else "does not answer"
        return skipped(f"{where} {answer}: not there yet; {_route_text(address, route)}", facts)
    if kind == _NO_ROUTE:
        return _no_way(context, address, route)
    message = f"a firewall rejects connections to {where}, over {route.nic}"
    hint = f"let TCP port {port} through here, on the way and there, or {another_port_hint(context.port_source, port)}"
    return warning(message, hint, facts, class_name="master_unreachable", transient=True)


def try_ports(tries: Iterable[tuple[str, int]], timeout_s: float) -> dict[tuple[str, int], str]:
    """What comes of plain TCP connections, all tried at the same time; over when one is connected.

    Args:
        tries: addresses and ports.
        timeout_s: how long they have, in seconds.
    """
    results: dict[tuple[str, int], str] = {}
    pending: dict[int, tuple[socket.socket, tuple[str, int]]] = {}
    poller = select.poll()
    try:
        for one in tries:
            connection = socket.socket(socket.AF_INET6 if ":" in one[0] else socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            number = connection.connect_ex(one)
            if number == errno.EINPROGRESS:
                pending[connection.fileno()] = (connection, one)
                poller.register(connection, select.POLLOUT)
                continue
            connection.close()
            results[one] = _KINDS.get(number, _NO_ROUTE)
        until = time.monotonic() + timeout_s
        while pending and _CONNECTED not in results.values():
            ready = poller.poll(max(until - time.monotonic(), 0) * 1000)
            if not ready:
                break
            for fd, _ in ready:
                connection, one = pending.pop(fd)
                poller.unregister(fd)
                number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                connection.close()
                results[one] = _KINDS.get(number, _NO_ROUTE)
    finally:
        for connection, _ in pending.values():
            connection.close()
    return results | {one: _SILENT for _, one in pending.values()}


def _route(address: str) -> Route:
    try:
        return route_to(address)
    except OSError:
        return Route()  # unknown: the connection tells


def _no_way(context: CheckContext, address: str, route: Route) -> CheckResult:
    forbidden = route.error in {errno.EACCES, errno.EHOSTUNREACH, errno.EINVAL}
    why = "a route of this host prohibits the connection" if forbidden else "no network of this host leads"
    target = address if address == context.master else f"{context.master} ({address})"
    down = [
        nic.name for nic in read_nics(context.root) if not nic.is_up and nic.kind in {"ethernet", "infiniband", "bond"}
    ]
    hint = f"look at `ip route get {address}`, and at --master-addr"
    if down:
        hint += f"; {', '.join(down[:4])} {'is' if len(down) == 1 else 'are'} down"
    facts = (("answer", _NO_ROUTE), ("address", address))
    return warning(f"{why} to the master {target}", hint, facts, class_name="master_unreachable", transient=True)


def _where(name: str, address: str, port: int) -> str:
    shown = f"[{address}]" if ":" in address else address
    return f"{shown}:{port}" if name == address else f"{name}:{port} ({address})"


def _route_text(address: str, route: Route) -> str:
    if not route.nic:
        return f"the way to {address} is not known"
    gateway = f" through {route.gateway}" if route.gateway else ""
    return f"{route.nic}{gateway} leads to {address} (MTU {route.mtu})"


def _facts(route: Route, address: str) -> tuple[tuple[str, str], ...]:
    return (
        ("address", address),
        ("nic", route.nic),
        ("source", route.source),
        ("gateway", route.gateway),
        ("mtu", str(route.mtu)),
    )
