"""A port of its own for a test, among all test processes of this machine."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

# Ports that were handed out are held until this process ends: tests run side by side, and each is to have its own.
_held: list[socket.socket] = []
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
# torch's own defaults, and numbers that tests name.
_NAMED = range(29400, 29600)


def _candidates() -> list[int]:
    """Ports that the kernel gives to nobody who did not ask for them by number."""
    ports = [port for port in range(20000, 32000) if port not in _NAMED]
    try:
        first, last = map(int, _RANGE.read_text().split())
    except (OSError, ValueError):
        return ports
    return [port for port in ports if not first <= port <= last] or ports


def own_port() -> int:
    """A port that nobody listens on, and that neither another test nor the kernel hands out.

    A test process holds each number it has given out, under a name of the host's network: no two tests have the same.
    Nothing but a program that asks for this very number can take it before the test does.
    """
    for port in _candidates():
        hold = socket.socket(socket.AF_UNIX)
        try:
            hold.bind(f"\0saferun-test-port-{port}")
        except OSError:
            hold.close()
            continue
        _held.append(hold)
        if _is_free(port):
            return port
    raise AssertionError("no port is free")


def _is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET) as probe:
        probe.bind(("", port))
        if not socket.has_ipv6:
            return True
        with socket.socket(socket.AF_INET6) as second:
            second.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            second.bind(("::", port))
        return True
    return False
