"""This host's network interfaces, and its route to an address, by netlink.

Netlink and not sysfs: /sys shows the interfaces of the network namespace in which it was mounted, which may be another
one than the container's. Sources: netlink(7), rtnetlink(7).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from saferun.linux.nic import Nic, has_services, is_decoy
from saferun.linux.small_files import list_directory, read_line
from saferun.model import Value

_ANSWER_TIMEOUT_S = 1.0
_BUFFER_BYTES = 1 << 17
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr
_LINK = struct.Struct("=BxHiII")  # struct ifinfomsg
_ADDRESS = struct.Struct("=BBBBI")  # struct ifaddrmsg
_ROUTE = struct.Struct("=BBBBBBBBI")  # struct rtmsg
_ATTRIBUTE = struct.Struct("=HH")  # struct rtattr
_NUMBER = struct.Struct("=I")

# include/uapi/linux/netlink.h and rtnetlink.h
_REQUEST, _DUMP = 0x1, 0x300
_ERROR, _DONE = 2, 3
_NEWLINK, _GETLINK, _NEWADDR, _GETADDR, _NEWROUTE, _GETROUTE = 16, 18, 20, 22, 24, 26
_TYPE_MASK = 0x3FFF  # of an attribute: the two bits above are flags
_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MTU, _IFLA_LINKINFO, _IFLA_EXT_MASK = 1, 3, 4, 18, 29
_INFO_KIND = 1
_SKIP_STATS = 1 << 3
_IFA_ADDRESS, _IFA_LOCAL, _IFA_LABEL, _IFA_FLAGS = 1, 2, 3, 8
_DAD_FAILED, _TENTATIVE = 0x08, 0x40
_RTA_DST, _RTA_OIF, _RTA_GATEWAY, _RTA_PREFSRC, _RTA_METRICS, _RTA_VIA = 1, 4, 5, 7, 8, 18
_RTAX_MTU = 2
# include/uapi/linux/if.h, if_arp.h
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
_ARPHRD_ETHER, _ARPHRD_INFINIBAND = 1, 32
_KINDS = {
    "bridge": "bridge",
    "openvswitch": "bridge",
    "bond": "bond",
    "team": "bond",
    "vlan": "vlan",
    "tun": "tunnel",
    "vxlan": "tunnel",
    "geneve": "tunnel",
    "gre": "tunnel",
    "gretap": "tunnel",
    "ipip": "tunnel",
    "sit": "tunnel",
    "ip6tnl": "tunnel",
    "wireguard": "tunnel",
}
_LINK_LOCAL_V6 = ("fe8", "fe9", "fea", "feb")
# Loopback and link-local addresses, of both families.
_LOCAL = ("127.", "169.254.", "::1", *_LINK_LOCAL_V6)
_MOST_ADDRESSES = 16


class Route(Value):
    """The route of packets to an address.

    Attributes:
        nic: the outgoing interface; empty if there is no route.
        source: their source address; empty: unknown.
        gateway: the next router; empty: the address is on the interface's own network.
        mtu: the path MTU as far as this host knows it, in bytes; 0: unknown.
        error: why there is no route, as an errno: ``errno.ENETUNREACH``, or ``errno.EACCES`` by a rule; 0 if there is
            one.
    """

    nic: str = ""
    source: str = ""
    gateway: str = ""
    mtu: int = 0
    error: int = 0


class Link(Value):
    """An interface as netlink shows it."""

    number: int
    name: str
    flags: int
    mtu: int
    kind: str
    hardware_address: str

    @property
    def is_up(self) -> bool:
        """Whether it is up and has a carrier."""
        return self.flags & (_IFF_UP | _IFF_RUNNING) == _IFF_UP | _IFF_RUNNING


class _Address(Value):
    link: int
    family: int
    text: str
    prefix_bits: int
    label: str


def read_nics(root: str = "/") -> tuple[Nic, ...]:
    """All network interfaces of this network namespace, in the kernel's order.

    Args:
        root: the root directory, for the speed and the RDMA devices in sysfs. They are left out if that sysfs shows
            another namespace's interfaces.

    Raises:
        OSError: the kernel cannot be asked.
    """
    with open_connection() as connection:
        links = list(_read_links(connection))
        addresses = list(_read_addresses(connection))
    nics = []
    for link in links:
        own = sorted((one for one in addresses if one.link == link.number), key=_order)
        speed_bits_s, rdma = _read_sysfs(root, link)
        nics.append(
            Nic(
                link.name,
                tuple(one.text for one in own),
                tuple(f"{one.text}/{one.prefix_bits}" for one in own),
                link.is_up,
                link.mtu,
                link.kind,
                speed_bits_s,
                tuple(dict.fromkeys(one.label for one in own if one.label not in {"", link.name})),
                rdma,
            )
        )
    return tuple(nics)


def own_addresses() -> list[str]:
    """The addresses of this host's interfaces that other hosts may use: not loopback, not link-local."""
    try:
        nics = read_nics()
    except OSError:
        return []
    own = [nic for nic in nics if not has_services(nic.name)]
    usable = [(nic, address) for nic in own for address in nic.addresses if not address.startswith(_LOCAL)]
    # Bridges of containers on this host: elsewhere their addresses are another host's, or any router answers for them.
    found = [address for nic, address in usable if nic.kind != "bridge" or not is_decoy(nic.name)]
    found = found or [address for _, address in usable]
    found.sort(key=lambda address: ":" in address)
    return list(dict.fromkeys(found))[:_MOST_ADDRESSES]


def bridge_addresses() -> list[str]:
    """The addresses of the bridges of containers on this host, which are addresses of other hosts as well."""
    nics = read_nics()
    found = [address for nic in nics if nic.kind == "bridge" and is_decoy(nic.name) for address in nic.addresses]
    return [address for address in dict.fromkeys(found) if not address.startswith(_LOCAL)][:_MOST_ADDRESSES]


def route_to(address: str) -> Route:
    """The route of packets to an address; nothing is sent.

    Args:
        address: IPv4 or IPv6, in numbers; a link-local one with its interface (``fe80::1%eth0``).

    Raises:
        OSError: the kernel cannot be asked.
    """
    plain, _, scope = address.partition("%")
    family = socket.AF_INET6 if ":" in plain else socket.AF_INET
    packed = socket.inet_pton(family, plain)
    body = _ROUTE.pack(family, len(packed) * 8, 0, 0, 0, 0, 0, 0, 0) + _attribute(_RTA_DST, packed)
    if scope:
        body += _attribute(_RTA_OIF, _NUMBER.pack(_index_of(scope)))
    with open_connection() as connection:
        try:
            answer = next(_ask(connection, _GETROUTE, body, _NEWROUTE), b"")
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            return Route(error=error.errno or errno.ENETUNREACH)
        attributes = dict(_attributes(answer[_ROUTE.size :]))
        index = number(attributes.get(_RTA_OIF))
        name, link_mtu = next(
            ((link.name, link.mtu) for link in _read_links(connection) if link.number == index), ("", 0)
        )
    path_mtu = number(dict(_attributes(attributes.get(_RTA_METRICS, b""))).get(_RTAX_MTU))
    gateway = attributes.get(_RTA_GATEWAY) or attributes.get(_RTA_VIA, b"")[2:]  # of another family: after its number
    return Route(
        name,
        _text(attributes.get(_RTA_PREFSRC, b"")),
        _text(gateway),
        min(path_mtu or link_mtu, link_mtu) if link_mtu else path_mtu,
        0 if name else errno.ENETUNREACH,
    )


# ------------------------------------------------------------------------------------------------------------- netlink


def open_connection() -> socket.socket:
    """A connection to the kernel. It waits for an answer for a second at most."""
    connection = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)  # 0: NETLINK_ROUTE
    connection.settimeout(_ANSWER_TIMEOUT_S)
    return connection


def _ask(connection: socket.socket, request: int, body: bytes, answer: int, flags: int = 0) -> Iterator[bytes]:
    """The bodies of the messages of one type in the kernel's answer.

    Raises:
        OSError: it refuses, or does not respond.
    """
    size = _HEADER.size + len(body)
    connection.sendall(_HEADER.pack(size, request, _REQUEST | flags, 0, 0) + body)
    while True:
        for kind, content in _messages(connection.recv(_BUFFER_BYTES)):
            if kind == _ERROR:
                number = -struct.unpack_from("=i", content)[0]
                if number:
                    raise OSError(number, os.strerror(number))
                return
            if kind == _DONE:
                return
            if kind == answer:
                yield content
                if not flags & _DUMP:
                    return


def _messages(content: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start + _HEADER.size <= len(content):
        size, kind, _, _, _ = _HEADER.unpack_from(content, start)
        if size < _HEADER.size:
            return
        yield kind, content[start + _HEADER.size : start + size]
        start += -(-size // 4) * 4


def _attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start + _ATTRIBUTE.size <= len(content):
        size, kind = _ATTRIBUTE.unpack_from(content, start)
        if size < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, content[start + _ATTRIBUTE.size : start + size]
        start += -(-size // 4) * 4


def _attribute(kind: int, content: bytes) -> bytes:
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(content), kind) + content


def number(content: bytes | None) -> int:
    """The value of an attribute of 32 bits; 0 where it is none."""
    return _NUMBER.unpack(content)[0] if content is not None and len(content) == _NUMBER.size else 0


def _name(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


def _text(packed: bytes) -> str:
    if len(packed) == 4:  # noqa: PLR2004 - bytes of an IPv4 address
        return socket.inet_ntop(socket.AF_INET, packed)
    return socket.inet_ntop(socket.AF_INET6, packed) if len(packed) == 16 else ""  # noqa: PLR2004 - of an IPv6 one


def _index_of(name: str) -> int:
    return int(name) if name.isdecimal() else socket.if_nametoindex(name)


# ------------------------------------------------------------------------------------------------ links and addresses


def _read_links(connection: socket.socket) -> Iterator[Link]:
    for link, _ in links_with_attributes(connection):
        yield link


def links_with_attributes(
    connection: socket.socket, *, statistics: bool = False
) -> Iterator[tuple[Link, dict[int, bytes]]]:
    """All interfaces, with what else the kernel says of each (IFLA_…).

    Args:
        connection: to the kernel.
        statistics: whether the counters are among it, which cost more.
    """
    skipped = b"" if statistics else _attribute(_IFLA_EXT_MASK, _NUMBER.pack(_SKIP_STATS))
    body = _LINK.pack(socket.AF_UNSPEC, 0, 0, 0, 0) + skipped
    for answer in _ask(connection, _GETLINK, body, _NEWLINK, _DUMP):
        _, hardware, index, flags, _ = _LINK.unpack_from(answer)
        attributes = dict(_attributes(answer[_LINK.size :]))
        info = dict(_attributes(attributes.get(_IFLA_LINKINFO, b"")))
        link = Link(
            index,
            _name(attributes.get(_IFLA_IFNAME, b"")),
            flags,
            number(attributes.get(_IFLA_MTU)),
            kind_of(flags, hardware, _name(info.get(_INFO_KIND, b""))),
            attributes.get(_IFLA_ADDRESS, b"").hex(":"),
        )
        yield link, attributes


def kind_of(flags: int, hardware: int, driver: str) -> str:
    """The kind of an interface, in the terms of ``Nic.kind``.

    Args:
        flags: ``IFF_…``.
        hardware: ``ARPHRD_…``.
        driver: the kernel's name of its kind: ``bridge``, ``veth``; empty for hardware.
    """
    if flags & _IFF_LOOPBACK:
        return "loopback"
    if hardware == _ARPHRD_INFINIBAND:
        return "infiniband"
    if driver:
        return _KINDS.get(driver, "virtual")
    return "ethernet" if hardware == _ARPHRD_ETHER else "tunnel"


def _read_addresses(connection: socket.socket) -> Iterator[_Address]:
    """All addresses that can be bound."""
    for answer in _ask(connection, _GETADDR, _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0), _NEWADDR, _DUMP):
        family, prefix_bits, flags, _, index = _ADDRESS.unpack_from(answer)
        attributes = dict(_attributes(answer[_ADDRESS.size :]))
        # On a point-to-point link, the other address is the peer's.
        text = _text(attributes.get(_IFA_LOCAL) or attributes.get(_IFA_ADDRESS, b""))
        flags = number(attributes.get(_IFA_FLAGS)) or flags
        if text and not flags & (_DAD_FAILED | _TENTATIVE):
            yield _Address(index, family, text, prefix_bits, _name(attributes.get(_IFA_LABEL, b"")))


def _order(address: _Address) -> tuple[bool, bool]:
    """IPv4, then IPv6, then link-local addresses."""
    return address.family != socket.AF_INET, address.text.startswith(_LINK_LOCAL_V6)


def _read_sysfs(root: str, link: Link) -> tuple[int, tuple[str, ...]]:
    """The speed in bit/s (0: unknown), and RDMA devices with their ports (``mlx5_0:1``)."""
    folder = os.path.join(root, "sys/class/net", link.name)
    if not link.is_up or link.kind not in {"ethernet", "infiniband"}:
        return 0, ()
    if read_line(f"{folder}/ifindex") != str(link.number) or read_line(f"{folder}/address") != link.hardware_address:
        return 0, ()  # this sysfs is another namespace's
    speed = read_line(f"{folder}/speed")  # in Mbit/s; -1: unknown
    rdma = []
    for device in list_directory(f"{folder}/device/infiniband"):
        ports = list_directory(f"{folder}/device/infiniband/{device}/ports")
        port = read_line(f"{folder}/dev_port") if len(ports) > 1 else "0"
        rdma.append(f"{device}:{int(port) + 1 if port.isdecimal() else 1}")
    return int(speed) * 1_000_000 if speed.isdecimal() else 0, tuple(rdma)
