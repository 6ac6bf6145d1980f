"""The port that the ranks' store listens on, and the process that holds a port."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from saferun.errors import EXIT_USAGE, SaferunError
from saferun.linux.bare_socket import AF_INET6, SO_REUSEADDR, SOL_SOCKET, Socket, dual_stack_socket, short_host_name
from saferun.linux.procfs import read_cmdline, read_stat
from saferun.linux.small_files import list_directory, read_link, read_text

_BACKLOG = 4096
_LISTENING = "0A"  # TCP_LISTEN in include/net/tcp_states.h
_INODE_FIELD = 9


def hold_port(port: int | None, *, listening: bool = True, source: str = "needless") -> Socket:
    """Bind a TCP port of all addresses, IPv6 and IPv4, as torch's TCPStore does.

    Args:
        port: the port; None or 0: the kernel chooses a free one.
        listening: whether to listen on it as well. A port that is only bound can be listened on by a program that binds
            it with SO_REUSEADDR, as torch does, and by no other.
        source: where the number comes from, one of the constants of ``text.master_port``, for the hint.

    Raises:
        SaferunError: the port is in use (the message names the process that holds it, if visible), or not permitted.
    """
    sock = dual_stack_socket()
    try:
        if port:
            # Connections of an earlier job may linger on the port. Not if the kernel chooses: it could choose a port
            # that another launch holds in the same way.
            sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        sock.bind(("::" if sock.family == AF_INET6 else "0.0.0.0", port or 0))  # noqa: S104 - as torch's store does
        sock.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        if listening:
            sock.listen(_BACKLOG)
    except OverflowError:
        sock.close()
        raise SaferunError(f"--master-port {port} is not a port", "use a number from 0 to 65535", EXIT_USAGE) from None
    except OSError as error:
        sock.close()
        raise _explain(error, port or 0, source) from None
    return sock


def hold_first(ports: Sequence[int], source: str = "needless") -> Socket:
    """A listening socket on the first of these ports that can be had.

    Raises:
        SaferunError: none can; it tells of the first.
    """
    first: SaferunError | None = None
    for port in ports:
        try:
            return hold_port(port, source=source)
        except SaferunError as error:
            first = first or error
    assert first is not None  # noqa: S101 - there is a port
    raise first


def _explain(error: OSError, port: int, source: str) -> SaferunError:
    from saferun.text.master_port import another_port_hint, port_in_use_hint

    host = short_host_name()
    if error.errno == errno.EADDRINUSE:
        return SaferunError(
            f"port {port} on {host} is in use by {port_holder(port)}",
            port_in_use_hint(source, port),
            class_name="port_in_use",
        )
    if error.errno == errno.EACCES:
        return SaferunError(f"this user cannot use port {port} on {host}", "pass a --master-port above 1023")
    return SaferunError(f"cannot listen on port {port} of {host}: {error.strerror}", another_port_hint(source, port))


def port_holder(port: int) -> str:
    """The process that listens on the port, as ``pid 4711 (train.py)``, or that it is not visible."""
    pids = _listeners_on(port)
    if not pids:
        return "a process that this user cannot see"
    # A socket may have been inherited; users know the oldest of its processes.
    oldest = min(pids, key=lambda pid: (stat.start_ticks if (stat := read_stat(pid)) else 0, pid))
    return f"pid {oldest} ({_program(read_cmdline(oldest))})"


def _listeners_on(port: int) -> list[int]:
    """The visible processes that have a TCP socket listening on a port.

    psutil returns one of the processes that have inherited a socket, and not the first.

    Source: proc(5), /proc/net/tcp and /proc/PID/fd.
    """
    lines = [line.split() for table in ("tcp", "tcp6") for line in read_text(f"/proc/net/{table}").splitlines()[1:]]
    listening = (fields for fields in lines if len(fields) > _INODE_FIELD and fields[3] == _LISTENING)
    sockets = {f"socket:[{one[_INODE_FIELD]}]" for one in listening if int(one[1].rpartition(":")[2], 16) == port}
    pids = [int(name) for name in list_directory("/proc") if name.isdigit()] if sockets else []
    return [pid for pid in pids if any(read_link(fd) in sockets for fd in _descriptors(pid))]


def _descriptors(pid: int) -> list[str]:
    return [f"/proc/{pid}/fd/{name}" for name in list_directory(f"/proc/{pid}/fd")]


def _program(cmdline: list[str]) -> str:
    """The script or module of an interpreter's command line, else the program."""
    names = [part.rsplit("/", 1)[-1] for part in cmdline]
    if not names or not names[0].startswith("python"):
        return names[0] if names else "gone meanwhile"
    for i, name in enumerate(names[1:], 1):
        if name == "-m" and i + 1 < len(names):
            return names[i + 1]
        if name == "-c":
            return f"{names[0]} -c"
        if not name.startswith("-"):
            return name
    return names[0]
