"""What the kernel's socket diagnosis says of all sockets of this network namespace; no privilege is needed.

It may load a kernel module when it is first used, which waits for a file system: only for processes that may hang.

Sources: sock_diag(7), tcp(7); include/uapi/linux/inet_diag.h, unix_diag.h and tcp.h of Linux.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

from saferun.model import Value

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_HEADER = struct.Struct("=IHHII")
_HEADER_BYTES = 16
_ATTRIBUTE = struct.Struct("=HH")
_TIMEOUT_S = 0.5
_LIMIT_BYTES = 64 << 20
_READ_BYTES = 1 << 16

_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_PEER = 2
_UNIX_REQUEST = struct.Struct("=BBHIIIII")
_UNIX_MESSAGE_BYTES = 16

_INET_DIAG_INFO = 2
_INET_REQUEST = struct.Struct("=BBBBI48x")
_INET_MESSAGE = struct.Struct("=4BHH16s16s12xIIIII")
# include/net/tcp_states.h: ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK and LISTEN.
_TCP_LISTEN = 10
_TCP_STATES = sum(1 << state for state in (1, 4, 5, 8, 9, _TCP_LISTEN))
# In struct tcp_info: tcpi_last_data_sent and tcpi_last_data_recv in ms, tcpi_bytes_acked and tcpi_bytes_received.
_TCP_AGES = struct.Struct("=I4xI")
_TCP_AGES_AT = 44
_TCP_BYTES = struct.Struct("=QQ")
_TCP_BYTES_AT = 120
_V4_IN_V6 = bytes(10) + b"\xff\xff"


class TcpCounters(Value):
    """One TCP socket.

    Attributes:
        local: its address, of four or sixteen bytes, and its port.
        remote: the same of its other end.
        is_listening: whether it takes in connections.
        sent_bytes: how much the other end has acknowledged.
        taken_bytes: how much has been received and read by a process.
        waiting_bytes: how much the other end has yet to acknowledge.
        quiet_s: how long ago data was sent or received, to keep the connection alive aside; 0 where unknown.
    """

    local: tuple[bytes, int]
    remote: tuple[bytes, int]
    is_listening: bool
    sent_bytes: int
    taken_bytes: int
    waiting_bytes: int = 0
    quiet_s: float = 0.0


def tcp_counters() -> dict[int, TcpCounters] | None:
    """Every TCP socket that a process may have open, by inode; None where the kernel does not tell."""
    found: dict[int, TcpCounters] = {}

    def take(message: bytes, attributes: dict[int, bytes]) -> None:
        (family, state, _, _, local_port, remote_port, local, remote, _, unread, unsent, _, inode) = (
            _INET_MESSAGE.unpack_from(message)
        )
        info = attributes.get(_INET_DIAG_INFO, b"")
        sent = received = quiet_ms = 0
        if len(info) >= _TCP_AGES_AT + _TCP_AGES.size:
            quiet_ms = min(_TCP_AGES.unpack_from(info, _TCP_AGES_AT))
        if len(info) >= _TCP_BYTES_AT + _TCP_BYTES.size:
            sent, received = _TCP_BYTES.unpack_from(info, _TCP_BYTES_AT)
        is_listening = state == _TCP_LISTEN
        if inode:
            found[inode] = TcpCounters(
                (_plain(family, local), socket.ntohs(local_port)),
                (_plain(family, remote), socket.ntohs(remote_port)),
                is_listening,
                sent,
                0 if is_listening else max(0, received - unread),
                0 if is_listening else unsent,
                quiet_ms / 1000,
            )

    has_answered = False
    for asked in (socket.AF_INET, socket.AF_INET6):
        request = _INET_REQUEST.pack(asked, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 0, _TCP_STATES)
        has_answered = _dump(request, _INET_MESSAGE.size, take) or has_answered
    return found if has_answered else None


def _plain(family: int, address: bytes) -> bytes:
    """An address; an IPv4 one in four bytes also where an IPv6 socket has it."""
    if family == socket.AF_INET:
        return address[:4]
    return address.removeprefix(_V4_IN_V6)


def unix_peers() -> dict[int, int]:
    """Inode of a connected Unix socket -> inode of its peer; empty where not to be had."""
    peers: dict[int, int] = {}

    def take(message: bytes, attributes: dict[int, bytes]) -> None:
        peer = attributes.get(_UNIX_DIAG_PEER)
        if peer is not None:
            peers[struct.unpack_from("=I", message, 4)[0]] = struct.unpack_from("=I", peer)[0]

    _dump(
        _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF),
        _UNIX_MESSAGE_BYTES,
        take,
    )
    return peers


def _dump(request: bytes, message_bytes: int, take: Callable[[bytes, dict[int, bytes]], None]) -> bool:
    """Ask for all sockets of a kind; False where the kernel does not answer to the end.

    Args:
        request: what follows the netlink header.
        message_bytes: how long the fixed part of an answer is.
        take: takes the fixed part and the attributes of one socket.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(_TIMEOUT_S)
            length = _HEADER_BYTES + len(request)
            link.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request)
            read_bytes = 0
            while read_bytes < _LIMIT_BYTES:
                content = link.recv(_READ_BYTES)
                read_bytes += len(content)
                end = _take_datagram(content, message_bytes, take)
                if end is not None:
                    return end
    except (OSError, struct.error):
        pass
    return False


_NLMSG_DONE = 3


def _take_datagram(content: bytes, message_bytes: int, take: Callable[[bytes, dict[int, bytes]], None]) -> bool | None:
    """Take one datagram of answers. Returns None where more follow, True after the last, False after an error."""
    while len(content) >= _HEADER_BYTES:
        length, kind = struct.unpack_from("=IH", content)
        if kind != _SOCK_DIAG_BY_FAMILY or not _HEADER_BYTES + message_bytes <= length <= len(content):
            return bool(kind == _NLMSG_DONE)
        take(
            content[_HEADER_BYTES : _HEADER_BYTES + message_bytes],
            _attributes(content[_HEADER_BYTES + message_bytes : length]),
        )
        content = content[(length + 3) & ~3 :]
    return None


def _attributes(content: bytes) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while len(content) >= _ATTRIBUTE.size:
        size, kind = _ATTRIBUTE.unpack_from(content)
        found[kind] = content[_ATTRIBUTE.size : size]
        content = content[max(_ATTRIBUTE.size, (size + 3) & ~3) :]
    return found
