"""The store's listening socket, this host's name, and who holds a port."""

from __future__ import annotations

import errno
import socket

from saferun.errors import SaferunError
from saferun.linux.procfs import listeners_on, read_cmdline, read_stat

_BACKLOG = 4096
_MOST_ADDRESSES = 16


def hold_port(port: int | None, *, listening: bool = True) -> socket.socket:
    """Bind a TCP port of all addresses, IPv6 and IPv4, as torch's TCPStore does.

    Args:
        port: the port; None or 0: the kernel chooses a free one.
        listening: whether to listen on it as well. A port that is only held can be listened on by a program that
            binds it with SO_REUSEADDR, as torch does, and is given to nobody else.

    Raises:
        SaferunError: the port is taken (the message names the process that holds it, where it can be seen), or may
            not be used.
    """
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if port:
            # Connections of an earlier job may still linger on the port. Not where the kernel chooses: it would take a
            # port that another launch holds in the same way.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port or 0))  # noqa: S104 - as torch's store does
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listening:
            sock.listen(_BACKLOG)
    except OverflowError:
        sock.close()
        raise SaferunError(f"--master-port {port} is not a port", "use a number from 0 to 65535", 2) from None
    except OSError as error:
        sock.close()
        raise _explain(error, port or 0) from None
    return sock


def _explain(error: OSError, port: int) -> SaferunError:
    host = short_host_name()
    if error.errno == errno.EADDRINUSE:
        return SaferunError(
            f"port {port} on {host} is in use by {_holder(port)}",
            "stop that process, or pass another --master-port (without one, a free port is chosen)",
            class_name="port_in_use",
        )
    if error.errno == errno.EACCES:
        return SaferunError(f"port {port} on {host} may not be used by this user", "pass a --master-port above 1023")
    return SaferunError(f"cannot listen on port {port} of {host}: {error.strerror}", "pass another --master-port")


def _holder(port: int) -> str:
    """Who listens on the port, as ``pid 4711 (train.py)``; the honest unknown where it cannot be seen."""
    pids = listeners_on(port)
    if not pids:
        return "a process that this user cannot see"
    # A socket may have been inherited; the oldest of its processes is the one that people know.
    oldest = min(pids, key=lambda pid: (stat.start_ticks if (stat := read_stat(pid)) else 0, pid))
    return f"pid {oldest} ({_program(read_cmdline(oldest))})"


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


def short_host_name() -> str:
    """This host's name up to the first dot."""
    return socket.gethostname().split(".", 1)[0] or "localhost"


def own_addresses() -> list[str]:
    """The addresses of this host's interfaces that others may know it by: not loopback, not link-local."""
    import array
    import fcntl
    import struct

    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # SIOCGIFCONF, netdevice(7): pairs of a name (16 bytes) and a socket address (24 bytes on 64-bit machines).
        buffer = array.array("B", bytes(40 * 256))
        address, _ = buffer.buffer_info()
        try:
            answer = fcntl.ioctl(probe, 0x8912, struct.pack("iL", len(buffer), address))
        except OSError:
            answer = struct.pack("iL", 0, 0)
        size = struct.unpack("iL", answer)[0]
        content = buffer.tobytes()[:size]
    for start in range(0, len(content), 40):
        packed = content[start + 20 : start + 24]
        if packed[:1] != b"\x7f" and packed[:2] != b"\xa9\xfe":
            found.append(socket.inet_ntop(socket.AF_INET, packed))
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as file:
            for line in file:
                digits, _, _, scope, *_ = line.split()
                if scope == "00":  # global
                    found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    except (OSError, ValueError):
        pass
    return list(dict.fromkeys(found))[:_MOST_ADDRESSES]
