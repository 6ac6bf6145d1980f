"""Plain TCP connections to other hosts, with messages for people where they fail."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Container, Iterable

_CONNECT_TIMEOUT_S = 5.0

# A name server that is silent for so long does not answer; a failure that comes sooner is no silence.
NAME_S = 3.0
_SILENCE_S = 0.5

# Why nothing leads there: the kinds that a liveness probe tells apart.
CONNECTED = "connected"
REFUSED = "refused"
SILENT = "silent"
UNREACHABLE = "unreachable"
UNKNOWN_NAME = "unknown name"
_KINDS = {
    errno.ECONNREFUSED: REFUSED,
    errno.ECONNRESET: REFUSED,
    errno.ETIMEDOUT: SILENT,
    errno.EAGAIN: SILENT,
    errno.EHOSTUNREACH: UNREACHABLE,
    errno.EHOSTDOWN: UNREACHABLE,
    errno.ENETUNREACH: UNREACHABLE,
    errno.ENETDOWN: UNREACHABLE,
}


def shown(host: str, port: int) -> str:
    """``node1:29500``, ``[fd00::1]:29500``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def addresses_elsewhere(theirs: Iterable[str], own: Container[str]) -> list[str]:
    """Another host's addresses, but for those that this host has as well (docker0): they lead to itself from here."""
    return [address for address in theirs if address not in own]


def plain(host: str) -> str:
    """An address without the brackets that IPv6 addresses have in URLs."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def kind_of(error: OSError) -> str:
    """What an error of ``connect`` says about the way: one of the constants above, or the error's own message."""
    if isinstance(error, TimeoutError):
        return SILENT
    if isinstance(error, socket.gaierror):
        return UNKNOWN_NAME
    return _KINDS.get(error.errno or 0, error.strerror or type(error).__name__)


def unanswered_text(host: str, seconds: float, here: str = "") -> str:
    """The message about a name server that does not answer; ``here``: the name of this host, if it is to be said."""
    return f"the name server does not answer for {host} ({seconds:.0f} s){f', asked by {here}' if here else ''}"


def dial(
    host: str,
    port: int,
    timeout_s: float = _CONNECT_TIMEOUT_S,
    *,
    here: str = "",
    on_resolved: Callable[[], None] = lambda: None,
) -> tuple[socket.socket | None, str, str]:
    """A plain connection to a port.

    Args:
        host: name or address.
        port: the port.
        timeout_s: for each address. The name service has its own time.
        here: the name of this host, where the message is read beside those of others; else it is "this host".
        on_resolved: called when the name service has answered, whatever the answer is.

    Returns:
        The connected socket or None; the kind of what happened; and a message, without the port's own name where
        the message has a subject of its own: ``node1:29500 refuses connections``.
    """
    where = shown(host, port)
    began_at = time.monotonic()
    try:
        # As bytes: text would import the IDNA codec.
        infos = socket.getaddrinfo(host.encode(), port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        on_resolved()
        seconds = time.monotonic() - began_at
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN and seconds > _SILENCE_S:
            return None, UNKNOWN_NAME, unanswered_text(host, seconds, here)
        return None, UNKNOWN_NAME, f"the name {host} cannot be resolved on {here or 'this host'}"
    on_resolved()
    kind, message = UNREACHABLE, f"{where} has no address"
    is_tried = False
    for family, type_, proto, _, address in infos:
        numeric = str(address[0])
        subject = where if numeric == host else f"{where} ({numeric})"
        connection: socket.socket | None = None
        try:
            # The kernel may have no sockets of this family (IPv6), or none left.
            connection = socket.socket(family, type_, proto)
            connection.settimeout(timeout_s)
            connection.connect(address)
        except OSError as error:
            if connection is not None:
                connection.close()
            elif is_tried:
                continue  # what became of the other address says more
            is_tried = True
            kind = kind_of(error)
            message = _message_of(kind, error, subject, here)
            continue
        return connection, CONNECTED, f"{subject} accepts connections"
    return None, kind, message


def _message_of(kind: str, error: OSError, subject: str, here: str) -> str:
    from_here = f" from {here}" if here else ""
    if kind == REFUSED:
        return f"{subject} refuses connections{from_here}"
    if kind == SILENT:
        return f"{subject} does not answer{f' {here}' if here else ''}"
    if error.errno in {errno.ENETUNREACH, errno.ENETDOWN}:
        return f"no network of {here or 'this host'} leads to {subject}"
    if kind == UNREACHABLE:
        return f"{subject} cannot be reached{from_here} (no route to host)"
    return f"{subject} cannot be reached{from_here} ({kind})"
