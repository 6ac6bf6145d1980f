"""What the kernel counts of each network interface: packets, errors, and how often it has lost its carrier.

Source: rtnetlink(7); Linux, include/uapi/linux/if_link.h (struct rtnl_link_stats64, IFLA_CARRIER_DOWN_COUNT).
"""

from __future__ import annotations

import struct

from saferun.linux import netlink
from saferun.model import Value

_MASTER, _STATS64, _CARRIER_CHANGES, _CARRIER_DOWN_COUNT = 10, 23, 35, 48
_FIRST = struct.Struct("=6Q")  # rx_packets, tx_packets, rx_bytes, tx_bytes, rx_errors, tx_errors
_MOST_LINKS = 512


class LinkCounters(Value):
    """The counters of an interface since it was made.

    Attributes:
        name: ``eth0``.
        kind: as that of ``Nic``.
        is_up: whether it is up and has a carrier.
        packets: received and sent.
        errors: of receiving and sending.
        losses: how often it has lost its carrier, or was set down.
        master: the bond or the bridge that it is a port of; empty: none.
    """

    name: str
    kind: str
    is_up: bool
    packets: int
    errors: int
    losses: int
    master: str = ""


def read_link_counters() -> tuple[LinkCounters, ...]:
    """The counters of all interfaces of this network namespace.

    Raises:
        OSError: the kernel cannot be asked.
    """
    found, names, masters = [], dict[int, str](), list[int]()
    with netlink.open_connection() as connection:
        for link, attributes in netlink.links_with_attributes(connection, statistics=True):
            names[link.number] = link.name
            counts = attributes.get(_STATS64, b"")
            if len(counts) < _FIRST.size:
                continue
            received, sent, _, _, bad_received, bad_sent = _FIRST.unpack_from(counts)
            if _CARRIER_DOWN_COUNT in attributes:
                losses = netlink.number(attributes[_CARRIER_DOWN_COUNT])
            else:
                losses = netlink.number(attributes.get(_CARRIER_CHANGES)) // 2  # Linux before 4.16
            masters.append(netlink.number(attributes.get(_MASTER)))
            found.append(
                LinkCounters(link.name, link.kind, link.is_up, received + sent, bad_received + bad_sent, losses)
            )
    with_masters = [link._replace(master=names.get(index, "")) for link, index in zip(found, masters, strict=True)]
    return tuple(with_masters[:_MOST_LINKS])
