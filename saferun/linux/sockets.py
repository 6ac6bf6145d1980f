"""The peers of sockets, from /proc and the kernel's socket diagnostics."""

from __future__ import annotations

from collections.abc import Iterator

from saferun.linux.small_files import read_bytes, read_link
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.linux.sock_diag import TcpCounters

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

    def listening(self, pid: int, port: str) -> list[int]:
        """The inodes of the TCP sockets that listen on a port in a process's network namespace."""
        sockets = self._namespace_of(pid).items()
        return [inode for inode, one in sockets if one.state == "LISTEN" and one.local.endswith(f":{port}")]

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
        from saferun.linux.sock_diag import unix_peers

        for inode, peer in unix_peers().items():
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


def tcp_sockets() -> dict[int, TcpCounters]:
    """The TCP sockets of this network namespace, by inode, without what they have carried."""
    from saferun.linux.sock_diag import TcpCounters

    found = {}
    for name in ("tcp", "tcp6"):
        for inode, one in from_inet_table(read_bytes(f"/proc/self/net/{name}", _TABLE_LIMIT_BYTES), "tcp").items():
            found[inode] = TcpCounters(_ends(one.local), _ends(one.remote), one.state == "LISTEN", 0, 0)
    return found


def _ends(text: str) -> tuple[bytes, int]:
    address, _, port = text.rpartition(":")
    return address.encode(), int(port)


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
