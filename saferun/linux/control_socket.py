"""The socket at which a launch answers saferunctl: a Unix socket that only the user who started the launch can use.

It lies in the run's private directory in memory, where nothing can hang. Where there is no such directory it has an
abstract name, which begins with a zero byte; in run.json that is an ``@``. The kernel says who is at the other end of a
connection, and whoever has another user id is refused, root too: root can become that user.

Source: unix(7), abstract, SO_PEERCRED.
"""

from __future__ import annotations

import os
import struct
from _socket import SO_PEERCRED, SOCK_STREAM, SOL_SOCKET

from saferun.errors import suppress
from saferun.linux.bare_socket import AF_UNIX, Socket
from saferun.model import Value

LONGEST_PATH_BYTES = 107
_BACKLOG = 64
_CREDENTIALS = struct.Struct("=iII")


class PeerProcess(Value):
    """The process at the other end of a connection."""

    pid: int
    uid: int


def listen(directory: str, run_id: str) -> tuple[Socket, str]:
    """A listening socket and its path.

    Args:
        directory: a private directory of this user's; empty, or too long for a socket: the name is abstract.
        run_id: the run's.

    Raises:
        OSError: it cannot be made.
    """
    path = f"{directory}/control.{os.getpid()}"
    if directory and len(os.fsencode(path)) <= LONGEST_PATH_BYTES:
        with suppress(OSError):
            return _listen(path), path
    name = f"saferun-{run_id}-{os.getpid()}"
    return _listen(f"\0{name}"), f"@{name}"


def _listen(path: str) -> Socket:
    listener = Socket(AF_UNIX, SOCK_STREAM)
    try:
        # Permissions before bind: afterwards the path might lead to another file.
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def accept(listener: Socket) -> tuple[Socket, PeerProcess]:
    """The next connection, which does not block.

    Raises:
        OSError: there is none, or no more descriptors.
    """
    fd, _ = listener._accept()  # type: ignore[attr-defined]  # noqa: SLF001 - as the module socket does
    connection = Socket(fileno=fd)
    try:
        connection.setblocking(False)
        return connection, peer_of(connection)
    except BaseException:
        connection.close()
        raise


def connect(path: str, timeout_s: float) -> Socket:
    """A connection to a launch of this user's, in blocking mode with a timeout.

    Args:
        path: as ``listen`` returned it.
        timeout_s: for each call.

    Raises:
        OSError: no process of this user listens there.
    """
    connection = Socket(AF_UNIX, SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(f"\0{path[1:]}" if path.startswith("@") else path)
        _check_owner(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_owner(connection: Socket, path: str) -> None:
    if peer_of(connection).uid != os.geteuid():
        raise PermissionError(1, "the process that listens there is another user's", path)


def peer_of(connection: Socket) -> PeerProcess:
    """Who is at the other end of a connection.

    Raises:
        OSError: the kernel cannot be asked.
    """
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(SOL_SOCKET, SO_PEERCRED, _CREDENTIALS.size))
    return PeerProcess(pid, uid)
