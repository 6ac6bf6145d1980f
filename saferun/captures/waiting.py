"""A description of what a process waits for: the other end of its system call's descriptor.

``quick`` never blocks on the process. The rest reads the process's memory (the lists of poll and select, a path), which
blocks while one of its threads holds the lock of its address space.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterable

from saferun.linux.procfs import read_name
from saferun.linux.small_files import has_own_processes, list_directory, read_bytes, read_link
from saferun.linux.sockets import Socket, SocketTables, socket_text
from saferun.linux.syscalls import SystemCall, descriptor_of

_SHOWN = 3
_POLLED_LIMIT = 64
_PATH_LIMIT_BYTES = 4096
_FDS_LIMIT = 1024
_HOLDERS_LIMIT = 2048
_PORTS_LIMIT = 1024
HELD_LIMIT = 16384
"""Of how many descriptors of a process it is looked up what they are: a rank may have one for every other rank."""
_HELD_BY_ALL_LIMIT = 1 << 17
_HELD_BY_ALL_S = 2.0
PATH_CALLS = {"open": 0, "openat": 1, "openat2": 1, "creat": 0, "stat": 0, "lstat": 0, "newfstatat": 1, "statx": 1}
PATH_CALLS |= {"access": 0, "faccessat": 1, "faccessat2": 1, "mkdir": 0, "mkdirat": 1, "unlink": 0, "unlinkat": 1}
PATH_CALLS |= {"rename": 0, "renameat": 1, "renameat2": 1, "rmdir": 0, "link": 0, "linkat": 1, "symlink": 1}
PATH_CALLS |= {"symlinkat": 2, "readlink": 0, "readlinkat": 1, "chmod": 0, "fchmodat": 1, "fchmodat2": 1, "utimes": 0}
PATH_CALLS |= {"utimensat": 1, "setxattr": 0, "getxattr": 0, "lgetxattr": 0, "listxattr": 0, "statfs": 0}
PATH_CALLS |= {"truncate": 0, "execve": 0}
"""Calls with a path, and the index of that argument."""
_POLLS = frozenset({"poll", "ppoll", "select", "pselect6"})
# Kernel functions in which opening a FIFO waits for its other end.
_FIFO_OPENING = ("wait_for_partner", "fifo_open")


class Ends:
    """Resolves descriptors of the job's processes, and which processes have the other end.

    Args:
        processes: rank, pid and name of every process of the job.
    """

    def __init__(self, processes: Iterable[tuple[int, int, str]] = ()) -> None:
        self._sockets = SocketTables()
        self._processes = tuple(processes)[:_HOLDERS_LIMIT]
        self.pids = frozenset(pid for _, pid, _ in self._processes)
        self._holders: dict[str, list[tuple[int, int, str]]] | None = None
        self._has_all = len(self._processes) < _HOLDERS_LIMIT  # whether all descriptors could be read

    def socket(self, pid: int, inode: int) -> Socket | None:
        """The socket of an inode that a process has open; None if it is of another kind, or closed."""
        return self._sockets.find(pid, inode)

    def holders(self, link: str) -> list[int]:
        """The processes of the job that have an end of a pipe, or a socket, open: ``pipe:[4711]``."""
        return [pid for _, pid, _ in self._held_by(link)]

    def listeners(self, pid: int, port: str) -> list[int]:
        """The processes of the job that listen on a port, in the network namespace of one of them."""
        found = (self.holders(f"socket:[{inode}]") for inode in self._sockets.listening(pid, port))
        return [holder for holders in found for holder in holders]

    def ports(self) -> tuple[tuple[int, ...], bool]:
        """The ports that processes of the job have, the lowest ones, and whether these are all of them."""
        self._held_by("")
        ports: set[int] = set()
        for link, holders in (self._holders or {}).items():
            kind, _, rest = link.partition(":[")
            found = self._sockets.find(holders[0][1], int(rest[:-1])) if kind == "socket" else None
            port = found.local.rpartition(":")[2] if found is not None and found.kind != "unix" else ""
            if port.isdigit() and port != "0":
                ports.add(int(port))
        return tuple(sorted(ports))[:_PORTS_LIMIT], self._has_all and len(ports) <= _PORTS_LIMIT

    def describe(self, pid: int, fd: int, wchan: str = "", *, holders: bool = False) -> str:
        """Describe a descriptor; empty if it is not readable. ``holders``: with the processes at its other end."""
        link = read_link(f"/proc/{pid}/fd/{fd}")
        kind, _, rest = link.partition(":[")
        inode = int(rest[:-1]) if rest[:-1].isdigit() else 0
        if kind == "socket":
            found = self._sockets.find(pid, inode)
            if found is None:
                return "a socket"
            peer = f"socket:[{found.peer_inode}]" if holders and found.peer_inode else ""
            return socket_text(found) + (self._holders_text(peer, pid) if peer else "")
        if kind == "pipe":
            return "a pipe" + (self._holders_text(link, pid) if holders else "")
        if link.startswith("anon_inode:"):
            return f"an {link.removeprefix('anon_inode:').strip('[]')} descriptor"
        if link.startswith(("/dev/pts/", "/dev/tty")):
            return f"the terminal {link}"
        if link.startswith("/dev/") and not link.startswith("/dev/shm/"):  # noqa: S108 - only compared
            return f"the device {link}"
        if link.startswith("/"):
            return f"the {'FIFO' if 'pipe' in wchan else 'file'} {link}"
        return ""

    def _held_by(self, link: str) -> list[tuple[int, int, str]]:
        if self._holders is None:
            self._holders = {}
            room, until = _HELD_BY_ALL_LIMIT, time.monotonic() + _HELD_BY_ALL_S
            for process in self._processes:
                if time.monotonic() >= until:
                    self._has_all = False
                    break
                fds = list_fds(process[1], min(room, HELD_LIMIT))
                room -= len(fds)
                # One without any has ended, or may not be read.
                self._has_all &= 0 < len(fds) < HELD_LIMIT and room > 0
                for fd in fds:
                    held = read_link(f"/proc/{process[1]}/fd/{fd}")
                    if not held.startswith(("socket:", "pipe:")):
                        continue
                    holders = self._holders.setdefault(held, [])
                    # (One that has it open twice was the last to be added.)
                    if not holders or holders[-1] is not process:
                        holders.append(process)
        return self._holders.get(link, [])

    def _holders_text(self, link: str, pid: int) -> str:
        others = [process for process in self._held_by(link) if process[1] != pid]
        if not others:
            return ""
        shown = ", ".join(f"{name} (pid {number}) of rank {rank}" for rank, number, name in others[:_SHOWN])
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        return f", shared with {shown}{more}"

    def quick(self, pid: int, call: SystemCall | None, wchan: str) -> str:
        """What a process waits for, from what can be read without blocking; empty if unknown."""
        if any(name in wchan for name in _FIFO_OPENING):
            return "a FIFO to be opened at its other end"
        if call is None:
            return ""
        if call.name.startswith("epoll_"):
            return self._list(pid, _epoll_targets(pid, call.arguments[0]))
        if call.name in {"fcntl", "flock"}:
            text = self.describe(pid, call.arguments[0])
            return f"a lock on {text}" if text else "a lock on a file"
        if call.name in {"wait4", "waitid"}:
            return _awaited_child(call)
        fd = descriptor_of(call)
        return self.describe(pid, fd, wchan) if fd is not None else ""

    def deep(self, pid: int, call: SystemCall | None, wchan: str) -> str:
        """As ``quick``, with the process's memory and a search through the job's processes."""
        if call is None:
            return self.quick(pid, call, wchan)
        if call.name in PATH_CALLS:
            path = _read_path(pid, call.arguments[PATH_CALLS[call.name]])
            if not path:
                return self.quick(pid, call, wchan)
            return f"the {'FIFO' if any(name in wchan for name in _FIFO_OPENING) else 'file'} {path}"
        if call.name in _POLLS or call.name.startswith("epoll_"):
            return self._list(pid, polled_by(pid, call), holders=True)
        fd = descriptor_of(call)
        if fd is not None and call.name not in {"fcntl", "flock"}:
            return self.describe(pid, fd, wchan, holders=True)
        return self.quick(pid, call, wchan)

    def _list(self, pid: int, fds: list[int], *, holders: bool = False) -> str:
        found = list(dict.fromkeys(filter(None, (self.describe(pid, fd, holders=holders) for fd in fds))))
        # Wake-up descriptors of a loop are left out if there are others.
        telling = [text for text in found if not text.startswith("an event")] or found
        more = f" and {len(telling) - _SHOWN} more" if len(telling) > _SHOWN else ""
        return ", or ".join(telling[:_SHOWN]) + more


def list_fds(pid: int, limit: int = _FDS_LIMIT) -> list[int]:
    """The open descriptors of a process, the first so many; empty if they are not readable."""
    return sorted(map(int, list_directory(f"/proc/{pid}/fd")))[:limit]


def awaited_child(call: SystemCall) -> int:
    """The child whose end a call of wait4 or waitid waits for; 0: any of them."""
    first, second = call.arguments[0], call.arguments[1]
    if call.name == "wait4":
        pid = first & 0xFFFFFFFF
        return pid if pid < 1 << 31 else 0
    return second if first == os.P_PID else 0


def _awaited_child(call: SystemCall) -> str:
    pid = awaited_child(call)
    if not pid:
        return "one of its children to end"
    name = read_name(pid).strip()
    return f"process {pid} ({name}) to end" if name else f"process {pid} to end"


def _epoll_targets(pid: int, epoll_fd: int) -> list[int]:
    """The descriptors that an epoll descriptor watches. Source: proc_pid_fdinfo(5)."""
    lines = [line.split() for line in read_bytes(f"/proc/{pid}/fdinfo/{epoll_fd}", 1 << 16).splitlines()]
    return [int(fields[1]) for fields in lines if fields[:1] == [b"tfd:"]][:_POLLED_LIMIT]


def polled_by(pid: int, call: SystemCall) -> list[int]:
    """The descriptors that a call of poll, select, epoll and their like waits for."""
    if call.name in {"poll", "ppoll"}:
        return _polled(pid, *call.arguments[:2])
    if call.name in {"select", "pselect6"}:
        return _selected(pid, *call.arguments[:3])
    return _epoll_targets(pid, call.arguments[0])


def read_memory(pid: int, address: int, size_bytes: int) -> bytes:
    """A piece of a process's memory; empty where it cannot be read. May wait for the lock of its address space."""
    if not address or not has_own_processes():
        return b""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), size_bytes, address)
    except (OSError, OverflowError):
        return b""


def _read_path(pid: int, address: int) -> str:
    # Only up to the end of the page: the next one may not be mapped.
    size_bytes = _PATH_LIMIT_BYTES - address % _PATH_LIMIT_BYTES
    content, end, _ = read_memory(pid, address, size_bytes).partition(b"\0")
    return content.decode(errors="replace") if end else ""


def _polled(pid: int, address: int, count: int) -> list[int]:
    content = read_memory(pid, address, 8 * min(count, _POLLED_LIMIT))
    fds = [fd for fd, _, _ in struct.iter_unpack("=ihh", content[: len(content) // 8 * 8])]
    return [fd for fd in fds if fd >= 0]


def _selected(pid: int, count: int, *sets: int) -> list[int]:
    found: set[int] = set()
    for address in sets:
        bits = int.from_bytes(read_memory(pid, address, (min(count, _FDS_LIMIT) + 7) // 8), "little")
        found.update(fd for fd in range(min(count, _FDS_LIMIT)) if bits >> fd & 1)
    return sorted(found)[:_POLLED_LIMIT]
