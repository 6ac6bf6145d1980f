"""Sockets as Python's C module has them: no launch waits for the enumerations of the module ``socket``.

Making those takes a tenth of all imports of a start. A ``socket.socket`` is a ``Socket`` as well; a ``Socket`` lacks
``accept``, ``makefile``, ``dup`` and ``with``.
"""

from __future__ import annotations

import os
import struct
from _socket import (
    AF_INET,
    AF_INET6,
    AF_UNIX,
    CMSG_LEN,
    IPPROTO_IPV6,
    IPV6_V6ONLY,
    MSG_DONTWAIT,
    MSG_NOSIGNAL,
    MSG_PEEK,
    SCM_RIGHTS,
    SO_REUSEADDR,
    SO_SNDBUF,
    SOCK_SEQPACKET,
    SOCK_STREAM,
    SOL_SOCKET,
    gethostname,
    has_ipv6,
    socketpair,
)
from _socket import socket as Socket  # noqa: N812 - a class
from collections.abc import Sequence

from saferun.errors import suppress

__all__ = [
    "AF_INET6",
    "AF_UNIX",
    "MSG_DONTWAIT",
    "MSG_NOSIGNAL",
    "MSG_PEEK",
    "SOCK_SEQPACKET",
    "SOL_SOCKET",
    "SO_REUSEADDR",
    "SO_SNDBUF",
    "Socket",
    "accept_connection",
    "dual_stack_socket",
    "inet_socket",
    "receive_fds",
    "send_fds",
    "short_host_name",
    "socketpair",
]

_FD = struct.Struct("@i")


def send_fds(connection: Socket, content: bytes | memoryview, fds: Sequence[int], flags: int = 0) -> int:
    """Send descriptors over a Unix socket. Returns how many bytes of the content were sent.

    ``socket.send_fds`` ignores its flags (Python 3.11).
    """
    rights = b"".join(map(_FD.pack, fds))
    return connection.sendmsg([content], [(SOL_SOCKET, SCM_RIGHTS, rights)], flags)


def receive_fds(connection: Socket, size_bytes: int, most: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """Receive from a Unix socket: the content, and at most so many descriptors, which no program inherits.

    ``socket.recv_fds`` ignores its flags (Python 3.11).
    """
    content, control, _, _ = connection.recvmsg(size_bytes, CMSG_LEN(most * _FD.size), flags)
    fds: list[int] = []
    for level, kind, rights in control:
        if (level, kind) == (SOL_SOCKET, SCM_RIGHTS):
            whole = len(rights) // _FD.size * _FD.size
            fds += (fd for (fd,) in _FD.iter_unpack(rights[:whole]))
    for fd in fds:
        os.set_inheritable(fd, False)
    return content, fds


def dual_stack_socket() -> Socket:
    """A TCP socket for IPv6 and IPv4; for IPv4 alone where this host has no IPv6."""
    if has_ipv6:
        with suppress(OSError):
            dual = Socket(AF_INET6, SOCK_STREAM)
            try:
                dual.setsockopt(IPPROTO_IPV6, IPV6_V6ONLY, 0)
            except OSError:
                dual.close()
                raise
            return dual
    return Socket(AF_INET, SOCK_STREAM)


def inet_socket(address: str) -> Socket:
    """A TCP socket of the family that a numeric address belongs to."""
    return Socket(AF_INET6 if ":" in address else AF_INET, SOCK_STREAM)


def accept_connection(listener: Socket) -> Socket:
    """A connection that has come, which does not block and no program inherits.

    Raises:
        OSError: there is none, or it cannot be taken.
    """
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - as socket.accept does it
    connection = Socket(fileno=fd)
    connection.setblocking(False)
    return connection


def short_host_name() -> str:
    """This host's name up to the first dot."""
    return gethostname().split(".", 1)[0] or "localhost"
