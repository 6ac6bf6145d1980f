"""The peers of sockets, from /proc and the kernel's socket diagnostics."""

from __future__ import annotations

from collections.abc import Iterator

from saferun.linux.small_files import read_bytes, read_link
from saferun.model import Value

# include/net/tcp_states.h
_TCP_STATES = (
    *("ESTABLISHED", "SYN_SENT", "SYN_RECV", "FIN_WAIT1", "FIN_WAIT2", "TIME_WAIT", "CLOSE", "CLOSE_WAIT"),
    *("LAST_ACK", "LISTEN", "CLOSING", "NEW_SYN_RECV"),
)
_TABLE_LIMIT_BYTES = 16 << 20
_V4_IN_V6 = bytes(10) + b"\xff\xff"


class Socket(Value):
    """One socket.

    Attributes:
        kind: ``tcp``, ``udp`` or ``unix``.
        local: ``10.0.0.1:29500``, ``[::1]:29500``; the path of a Unix socket, empty if it has none.
        remote: the peer's address; empty if there is none.
        state: the TCP state, ``ESTABLISHED``; empty for other kinds.
        peer_inode: the peer's inode if it is on this host and known, else 0.
    """

    kind: str
    local: str
    remote: str
    state: str
    peer_inode: int = 0


class TcpState(Value):
    """A TCP connection with unacknowledged data.

    Attributes:
        local: ``10.0.0.1:29500``, ``[::1]:29500``.
        remote: the peer's address.
        state: ``ESTABLISHED``, ``SYN_SENT`` …
        unsent_bytes: how much is not acknowledged.
        retries: how often the oldest segment was retransmitted.
    """

    local: str
    remote: str
    state: str
    unsent_bytes: int
    retries: int


def socket_text(socket: Socket) -> str:
    """``a connection to 10.0.0.2:29500 (ESTABLISHED)``, ``connections to [::]:29500``, ``the Unix socket /run/x``."""
    if socket.kind == "unix":
        path = socket.local or socket.remote
        return f"the Unix socket {path}" if path else "a Unix socket"
    if socket.kind == "udp":
        return f"a UDP socket on {socket.local}"
    if socket.state == "LISTEN":
        return f"connections to {socket.local}"
    return f"a connection to {socket.remote} ({socket.state})"


class SocketTables:
    """The sockets of this host's network namespaces; each table is read once, when first needed."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[int, Socket]] = {}

    def find(self, pid: int, inode: int) -> Socket | None:
        """The socket of an inode that a process has open; None if it is of another kind, or closed.

        Never blocks on the process. Source: proc_pid_net(5).
        """
        return self._namespace_of(pid).get(inode)

    def _namespace_of(self, pid: int) -> dict[int, Socket]:
        namespace = read_link(f"/proc/{pid}/ns/net") or f"that of {pid}"
        own = namespace == read_link("/proc/self/ns/net")
        if namespace not in self._by_namespace:
            self._by_namespace[namespace] = _read_tables(pid, own=own)
        return self._by_namespace[namespace]


def _read_tables(pid: int, *, own: bool) -> dict[int, Socket]:
    sockets: dict[int, Socket] = {}
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        sockets.update(from_inet_table(read_bytes(f"/proc/{pid}/net/{kind}", _TABLE_LIMIT_BYTES), kind[:3]))
    inodes = {(socket.kind, socket.local, socket.remote): inode for inode, socket in sockets.items()}
    for inode, socket in sockets.items():
        peer = inodes.get((socket.kind, socket.remote, socket.local), 0)
        if peer and socket.state != "LISTEN":
            sockets[inode] = socket._replace(peer_inode=peer)
    unix = from_unix_table(read_bytes(f"/proc/{pid}/net/unix", _TABLE_LIMIT_BYTES))
    if own and unix:
        for inode, peer in _unix_peers().items():
            if inode in unix:
                remote = unix[peer].local if peer in unix else ""
                unix[inode] = unix[inode]._replace(peer_inode=peer, remote=remote)
    return sockets | unix


def from_inet_table(content: bytes, kind: str) -> dict[int, Socket]:
    """Parse /proc/PID/net/tcp and the like, by inode; malformed lines are skipped."""
    return {
        inode: Socket(kind, local, remote, _tcp_state(number) if kind == "tcp" else "")
        for inode, local, remote, number, _, _ in _inet_rows(content)
    }


def _inet_rows(content: bytes) -> Iterator[tuple[int, str, str, int, int, int]]:
    """Inode, local and remote address, state, unacknowledged bytes and retransmissions. Source: proc_pid_net(5)."""
    for line in content.splitlines()[1:]:
        fields = line.split()
        try:
            inode, state = int(fields[9]), int(fields[3], 16)
            unsent_bytes, retries = int(fields[4].partition(b":")[0], 16), int(fields[6], 16)
            local, remote = _address(fields[1]), _address(fields[2])
        except (IndexError, ValueError):
            continue
        if inode:
            yield inode, local, remote, state, unsent_bytes, retries


def _tcp_state(number: int) -> str:
    return _TCP_STATES[number - 1] if 0 < number <= len(_TCP_STATES) else ""


def sending_again(pid: int, least_retries: int) -> dict[int, TcpState]:
    """The connections in a process's network namespace that retransmit, by inode.

    Args:
        pid: the process.
        least_retries: the minimum number of retransmissions.
    """
    found: dict[int, TcpState] = {}
    for name in ("tcp", "tcp6"):
        found |= from_tcp_table(read_bytes(f"/proc/{pid}/net/{name}", _TABLE_LIMIT_BYTES), least_retries)
    return found


def from_tcp_table(content: bytes, least_retries: int) -> dict[int, TcpState]:
    """Parse retransmitting connections from /proc/PID/net/tcp; malformed lines are skipped."""
    return {
        inode: TcpState(local, remote, state, unsent_bytes, retries)
        for inode, local, remote, number, unsent_bytes, retries in _inet_rows(content)
        if retries >= least_retries and (state := _tcp_state(number))
    }


def from_unix_table(content: bytes) -> dict[int, Socket]:
    """Parse /proc/PID/net/unix, by inode; malformed lines are skipped."""
    sockets = {}
    for line in content.splitlines()[1:]:
        fields = line.split(None, 7)
        try:
            inode = int(fields[6])
        except (IndexError, ValueError):
            continue
        path = fields[7].decode(errors="replace") if len(fields) > 7 else ""  # noqa: PLR2004
        sockets[inode] = Socket("unix", path, "", "")
    return sockets


def _address(field: bytes) -> str:
    """``0100007F:7350`` -> ``127.0.0.1:29520``: 32-bit words in host byte order, here little-endian."""
    digits, _, port = field.partition(b":")
    swapped = bytes.fromhex(digits.decode("ascii"))
    packed = b"".join(swapped[start : start + 4][::-1] for start in range(0, len(swapped), 4))
    packed = packed.removeprefix(_V4_IN_V6)
    if len(packed) == 4:  # noqa: PLR2004
        return f"{'.'.join(map(str, packed))}:{int(port, 16)}"
    import socket

    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"


# --------------------------------------------------------------------------------------- the other ends of Unix sockets

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_PEER = 2
_HEADER_BYTES = 16
_UNIX_MESSAGE_BYTES = 16


def _unix_peers() -> dict[int, int]:
    """Inode of a connected Unix socket -> inode of its peer, in this network namespace; empty if unavailable.

    Source: sock_diag(7).
    """
    import socket
    import struct

    peers: dict[int, int] = {}
    request = struct.pack("=IHHII", 40, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
    request += struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0xFFFFFFFF, 0xFFFFFFFF)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as link:
            link.settimeout(0.5)
            link.send(request)
            read_bytes = 0
            while read_bytes < _TABLE_LIMIT_BYTES:
                content = link.recv(1 << 16)
                read_bytes += len(content)
                if not _add_peers(content, peers):
                    break
    except (OSError, struct.error):
        pass
    return peers


def _add_peers(content: bytes, peers: dict[int, int]) -> bool:
    """Parse one datagram of answers; False if it was the last."""
    import struct

    while len(content) >= _HEADER_BYTES:
        length, kind = struct.unpack_from("=IH", content)
        if kind != _SOCK_DIAG_BY_FAMILY or not _HEADER_BYTES <= length <= len(content):
            return False
        message = content[_HEADER_BYTES:length]
        (inode,) = struct.unpack_from("=I", message, 4)
        attributes = message[_UNIX_MESSAGE_BYTES:]
        while len(attributes) >= 4:  # noqa: PLR2004
            size, attribute = struct.unpack_from("=HH", attributes)
            if attribute == _UNIX_DIAG_PEER:
                peers[inode] = struct.unpack_from("=I", attributes, 4)[0]
            attributes = attributes[max(4, (size + 3) & ~3) :]
        content = content[(length + 3) & ~3 :]
    return True
