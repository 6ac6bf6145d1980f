"""Which of a host's own interfaces leads to another host's, and what the kernel knows about an address."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from saferun.linux.nic import Nic

NO_SOURCE = ""
"""The system chooses the address that a connection comes from."""

# An error that comes this late was not sent by a host: the kernel waited for an answer on the link.
_LATE_S = 0.5


def source_for(nic: str, address: str, nics: Sequence[Nic]) -> tuple[str, str]:
    """The own interface, and the address of it, that a connection to another host's interface is to come from.

    The one whose network the address is in; of several, and where there is none, the one of the same name, as the
    libraries take it.

    Args:
        nic: the name of the other host's interface.
        address: its address.
        nics: the own interfaces.

    Returns:
        Empty strings: the system is to choose.
    """
    is_v6 = ":" in address
    linked: list[tuple[str, str]] = []
    named: list[tuple[str, str]] = []
    for own in nics:
        for number, network in enumerate(own.networks):
            if (":" in network) != is_v6 or not own.is_up:
                continue
            pair = (own.name, own.addresses[number] if number < len(own.addresses) else network.partition("/")[0])
            if contains(network, address):
                linked.append(pair)
            if own.name == nic:
                named.append(pair)
    if linked:
        return next((pair for pair in linked if pair[0] == nic), linked[0])
    return named[0] if named else ("", NO_SOURCE)


def contains(network: str, address: str) -> bool:
    """Whether an address is in a network: ``10.0.0.1/24``. What is neither is not."""
    base, _, length = network.partition("/")
    family = socket.AF_INET6 if ":" in network else socket.AF_INET
    try:
        a = socket.inet_pton(family, base.partition("%")[0])
        b = socket.inet_pton(family, address.partition("%")[0])
        shift = len(a) * 8 - int(length)
    except (OSError, ValueError):
        return False
    return 0 <= shift <= len(a) * 8 and int.from_bytes(a, "big") >> shift == int.from_bytes(b, "big") >> shift


def holders_of(address: str, nics: Sequence[Nic]) -> list[str]:
    """The own interfaces that have an address."""
    return [nic.name for nic in nics if address in nic.addresses]


def is_unanswered(address: str, took_s: float) -> bool:
    """Whether "no route to host" means that no host on the link answered, rather than that a router said so.

    Args:
        address: where a connection was tried to.
        took_s: how long that took.
    """
    if took_s >= _LATE_S:
        return True
    try:
        with open("/proc/net/arp", encoding="ascii", errors="replace") as file:
            for line in file:
                known, _, flags, *_ = (*line.split(), "", "", "")
                # Without its "complete" flag (include/uapi/linux/if_arp.h) the kernel has asked in vain.
                if known == address:
                    return not int(flags, 16) & 0x2
    except (OSError, ValueError):
        pass
    return False
