"""The store's port on the host that serves it."""

from __future__ import annotations

import errno
import socket

from saferun.linux.small_files import read_text
from saferun.preflight.checks.answers import failure, ok, warning
from saferun.preflight.checks.common import list_of_numbers
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.checks.name_resolution import is_loopback_name
from saferun.preflight.results import CheckResult
from saferun.text.master_port import another_port_hint, port_in_use_hint

_DEFAULTS = frozenset({29400, 29500})  # torchrun's, not the user's choice
_FREE = "free"
_FIRST_FOR_USERS = 1024


def check_ports(context: CheckContext) -> CheckResult:
    """Whether the store's port is free, may be used, and is not one that the kernel gives to outgoing connections.

    Only the host that serves the store is asked. A port that saferun holds already is not checked: no other process
    can have it.
    """
    if not context.serves:
        return ok("the store is on another host")
    ports = [port for port in context.ports if port]
    if not ports:
        return ok("the kernel chooses the store's port")
    held = [port for port in ports if port in context.bound]
    states = {} if held else {port: _state(port) for port in ports}
    port = next(iter(held or [port for port, state in states.items() if state == _FREE]), 0)
    if not port:
        return _none_free(ports, states, context.port_source)
    return _in_range(context, port) or ok(
        f"port {port} is {'held for the store' if held else _FREE}", (("port", str(port)),)
    )


def _state(port: int) -> str:
    """``free``, ``in use``, ``forbidden``, or the system's words."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            probe.bind(("", port))
            # Another socket that is bound and does not listen lets this one bind, and not listen.
            probe.listen(1)
        except OverflowError:
            return "not a port"
        except OSError as error:
            known = {errno.EADDRINUSE: "in use", errno.EACCES: "forbidden"}
            return known.get(error.errno or 0, error.strerror or "unusable")
    return _FREE


def _none_free(ports: list[int], states: dict[int, str], source: str) -> CheckResult:
    port = ports[0]
    facts = tuple((f"port {port}", state) for port, state in states.items())
    if states[port] == "forbidden":
        message = f"this user cannot use port {port}"
        return failure(message, "pass a --master-port above 1023", facts, class_name="port_forbidden")
    if states[port] != "in use":
        message = f"port {port} cannot be listened on: {states[port]}"
        return failure(message, another_port_hint(source, port), facts)
    from saferun.linux.listen_port import port_holder

    message = f"port {port} is in use by {port_holder(port)}"
    if len(ports) > 1:
        message = f"none of the {len(ports)} ports that the job may use is free: {message}"
    return failure(message, port_in_use_hint(source, port), facts, class_name="port_in_use", transient=True)


def _in_range(context: CheckContext, port: int) -> CheckResult | None:
    """A port that the user chose from among those that outgoing connections get: some day it is taken."""
    chosen = len(context.ports) == 1 and port not in _DEFAULTS
    if not context.spans_hosts or not chosen or is_loopback_name(context.master):
        return None
    sysctl = context.path("proc", "sys", "net", "ipv4")
    bounds = [int(word) for word in read_text(f"{sysctl}/ip_local_port_range").split() if word.isdecimal()]
    if len(bounds) != 2 or not bounds[0] <= port <= bounds[1]:  # noqa: PLR2004 - the lowest and the highest
        return None
    if port in list_of_numbers(read_text(f"{sysctl}/ip_local_reserved_ports")):
        return None
    low, high = bounds
    message = f"port {port} is an ephemeral port ({low} to {high}): an outgoing connection may take it"
    reserve = "reserve it with the sysctl net.ipv4.ip_local_reserved_ports"
    hint = f"pass a --master-port below {low}, or {reserve}" if low > _FIRST_FOR_USERS else reserve
    return warning(message, hint, (("port", str(port)),))
