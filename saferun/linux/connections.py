"""The TCP connections that processes have open, by whom they lead to; and who listens on a port.

Only /proc is read, which waits for nothing, unlike the kernel's socket diagnosis (``sock_diag``): a fork asks that over
which connections nothing moves. Addresses stay as /proc has them: to format them takes modules that may not be imported
while ranks run.

Sources: proc_pid_fd(5); proc_pid_net(5); tcp(7); include/net/tcp_states.h of Linux.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping

from saferun.linux.procfs import read_environ_entry, read_stat
from saferun.linux.quiet_sockets import quiet_sockets
from saferun.linux.small_files import read_bytes, read_link
from saferun.model import Value

# Connections over which something may still come or go: being made, made, or with one direction ended. Where the other
# end has closed (CLOSE_WAIT), nothing is waited for.
_OPEN = frozenset({b"01", b"02", b"04", b"05"})  # ESTABLISHED, SYN_SENT, FIN_WAIT1, FIN_WAIT2
_LISTEN = b"0A"
_TABLES = ("tcp", "tcp6")
_V4_IN_V6 = b"0000000000000000FFFF0000"
_MOST_DESCRIPTORS = 4096
# Of one table: parsed at once, 20,000 take 36 ms, and the caller waits. Listening sockets come first.
_MOST_LINES = 20_000
_LINE_BYTES = 180  # a line of tcp6 has more than one of tcp
_PORT_DIGITS = 5
_HEXADECIMAL = frozenset(b"0123456789abcdefABCDEF")
# NVIDIA's DCGM serves its monitoring clients here: nv-hostengine(1).
_MONITORING_PORTS = frozenset({5555})


class _Socket(Value):
    """One line of a table: its ends, in hexadecimal digits, and its state."""

    local: bytes
    remote: bytes
    state: bytes


class _Table(Value):
    """The TCP sockets of a network namespace, by inode, and these by their ends; ``is_whole``: there are no others."""

    sockets: dict[int, _Socket]
    inodes: dict[tuple[bytes, bytes], int]
    is_whole: bool


Tables = dict[str, _Table]


class Connections(Value):
    """Who is connected.

    Attributes:
        outside: processes that are connected to another host, or to a process of this one that was not named.
        pairs: those that are connected to each other.
    """

    outside: frozenset[int]
    pairs: frozenset[tuple[int, int]]


def connections_of(pids: Collection[int], others: Iterable[int] = ()) -> Connections:
    """The TCP connections of these processes, without those to the job's store and to monitoring services.

    A connection to a port on which one of the processes listens is left out as well: a server waits for clients (a
    browser, Prometheus), which may stay connected forever; and one over which nothing moves, such as ssh's tunnels. A
    process of which it is unknown counts as connected, such as one under sudo, whose descriptors may not be read.

    Args:
        pids: the processes.
        others: processes of the same job; a connection to one of them leads nowhere.
    """
    found = {pid: _socket_inodes(pid) for pid in {*pids, *others, os.getpid()}}
    held = {pid: inodes or set[int]() for pid, inodes in found.items()}
    holders: dict[int, set[int]] = {}
    for pid, inodes in held.items():
        for inode in inodes:
            holders.setdefault(inode, set()).add(pid)
    ports = {pid: {_number(read_environ_entry(pid, "MASTER_PORT")), *_MONITORING_PORTS} for pid in pids}
    tables: Tables = {}
    outside, pairs = {pid for pid in pids if found[pid] is None and _is_alive(pid)}, set[tuple[int, int]]()
    table_of = {pid: _table_of(pid, tables) for pid in pids if found[pid] is not None}
    served_in = _served_ports(table_of, held)
    leading: dict[int, set[int]] = {}  # each connection that leads outside -> who has it open
    for pid, table in table_of.items():
        served = served_in[id(table)]
        if not table.is_whole and not held[pid] <= table.sockets.keys():
            outside.add(pid)
        for inode in held[pid] & table.sockets.keys():
            one = table.sockets[inode]
            if one.state not in _OPEN or not ports[pid].isdisjoint((_port(one.local), _port(one.remote))):
                continue
            partners = holders.get(table.inodes.get((one.remote, one.local), 0), set())
            pairs |= {(pid, partner) for partner in partners if partner in ports and partner != pid}
            if not partners and _port(one.local) not in served:
                leading.setdefault(inode, set()).add(pid)
    for inode in leading.keys() - quiet_sockets(leading):
        outside |= leading[inode]
    return Connections(frozenset(outside), frozenset(pairs))


def _served_ports(table_of: Mapping[int, _Table], held: Mapping[int, set[int]]) -> dict[int, set[int]]:
    """The ports on which any of the processes listens, by the identity of the table of its network namespace."""
    served: dict[int, set[int]] = {id(table): set() for table in table_of.values()}
    for pid, table in table_of.items():
        sockets = (table.sockets[inode] for inode in held[pid] & table.sockets.keys())
        served[id(table)].update(_port(one.local) for one in sockets if one.state == _LISTEN)
    return served


def listens_on(pid: int, port: str, tables: Tables) -> bool:
    """Whether a process listens on a TCP port.

    Args:
        pid: the process.
        port: the port.
        tables: those that have been read at this moment; more are added.
    """
    number = _number(port)
    inodes = _socket_inodes(pid) if number > 0 else None
    if not inodes:
        return False
    table = _table_of(pid, tables).sockets
    return any(table[inode].state == _LISTEN and _port(table[inode].local) == number for inode in inodes & table.keys())


def _table_of(pid: int, tables: Tables) -> _Table:
    """The TCP sockets of a process's network namespace; each table is read once."""
    namespace = read_link(f"/proc/{pid}/ns/net") or f"that of {pid}"
    if namespace not in tables:
        found: dict[int, _Socket] = {}
        is_whole = True
        for name in _TABLES:
            content = read_bytes(f"/proc/{pid}/net/{name}", _MOST_LINES * _LINE_BYTES)
            is_whole = is_whole and content.count(b"\n") <= _MOST_LINES and len(content) < _MOST_LINES * _LINE_BYTES
            found |= _parsed(content[: content.rfind(b"\n") + 1])
        tables[namespace] = _Table(found, {(one.local, one.remote): inode for inode, one in found.items()}, is_whole)
    return tables[namespace]


def _parsed(content: bytes) -> dict[int, _Socket]:
    """Parse /proc/PID/net/tcp, by inode; malformed lines are skipped, and sockets that no process has open."""
    found = {}
    for line in content.split(b"\n", _MOST_LINES + 1)[1 : _MOST_LINES + 1]:
        fields = line.split()
        if len(fields) > 9 and fields[9].isdigit() and fields[9] != b"0":  # noqa: PLR2004
            local, remote = (field.removeprefix(_V4_IN_V6) for field in fields[1:3])
            found[int(fields[9])] = _Socket(local, remote, fields[3])
    return found


def _socket_inodes(pid: int) -> set[int] | None:
    """The sockets that a process has open; None where they may not be read, none of one that has ended."""
    inodes = set[int]()
    try:
        for name in sorted(os.listdir(f"/proc/{pid}/fd"))[:_MOST_DESCRIPTORS]:
            kind, _, number = _link(f"/proc/{pid}/fd/{name}").partition(":[")
            if kind == "socket" and number[:-1].isdigit():
                inodes.add(int(number[:-1]))
    except PermissionError:
        return None
    except OSError:
        pass
    return inodes


def _link(path: str) -> str:
    """The target of a link; empty if it is not there any more."""
    try:
        return os.readlink(path)
    except PermissionError:
        raise
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state not in "ZX"


def _port(end: bytes) -> int:
    digits = end.rpartition(b":")[2]
    return int(digits, 16) if len(digits) == 4 and _HEXADECIMAL.issuperset(digits) else -1  # noqa: PLR2004


def _number(port: str) -> int:
    return int(port) if port.isascii() and port.isdigit() and len(port) <= _PORT_DIGITS else -1
