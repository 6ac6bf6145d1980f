"""Who is at the other end of what the threads of a process wait for: a process of the job, or something outside it.

A rank that waits for something outside the job may go on at any moment, however long nothing moves. What is not of the
job is only what is known not to be: sockets, pipes and file locks whose other end no process of the job has, files,
terminals and clocks.
"""

from __future__ import annotations

import math
import os
import signal
import stat
import time
from collections.abc import Sequence

from saferun.captures.waiting import HELD_LIMIT, PATH_CALLS, Ends, awaited_child, list_fds, polled_by
from saferun.evidence.wait_evidence import ThreadWait
from saferun.linux.signals import caught_signals
from saferun.linux.small_files import list_directory, read_bytes, read_link, read_pairs, read_text
from saferun.linux.stuck import is_file_system_wait
from saferun.linux.syscalls import SystemCall, before_restart, descriptor_of, read_syscall
from saferun.model import Value

_THREADS_LIMIT = 1024
# Libraries have dozens of threads on connections to other ranks; those of Python's began later.
_KEPT_THREADS = 128
_KEPT_PIDS = 16
_KEPT_ADDRESSES = 4
_LOCKS_LIMIT_BYTES = 1 << 20
# A tool that takes stacks stops a thread for milliseconds.
_TRACED_TRIES = 5
_TRACED_PAUSE_S = 0.02
_LOCK_TRIES = 10
_SLEEPS = frozenset({"nanosleep", "clock_nanosleep"})
_RESTARTED = "restart_syscall"
_HELD = "ptrace_stop"  # the kernel function in which a thread that is traced stands still
# What waits for the file system has no descriptor yet.
_OF_FILE_SYSTEMS = frozenset({"sync", *PATH_CALLS})
# They write what a file holds back, as an upload to an object store. Their descriptor is gone by then.
_CLOSES = frozenset({"close", "close_range", "dup2", "dup3", "msync"})
_UNKNOWN_WCHAN = ("", "0")
# They return after a signal that has a handler. Of these every rank may have one: Python's, faulthandler's, torch's.
_FOR_HANDLERS = frozenset({"pause", "rt_sigsuspend"})
_OF_EVERY_RANK = frozenset(
    {
        *(signal.SIGINT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGCHLD),
        *(32, 33, signal.SIGRTMAX - 1),  # the C library's, and the one by which saferun asks for stacks
    }
)
# Signals that are waited for, and what System V and POSIX have for messages between any processes.
_FROM_ANY_PROCESS = frozenset(
    ("rt_sigtimedwait", "msgrcv", "msgsnd", "semop", "semtimedop", "mq_timedreceive", "mq_timedsend")
)
_LOCK_CALLS = frozenset({"flock", "fcntl"})
# The index of the argument with the timeout, in milliseconds or as the address of one.
_TIMEOUT_MS = {"poll": 2, "epoll_wait": 3, "epoll_pwait": 3}
_TIMEOUT_AT = {"ppoll": 2, "select": 4, "pselect6": 4, "epoll_pwait2": 3, "futex": 3, "rt_sigtimedwait": 2}
_POLLS = frozenset({"poll", "ppoll", "select", "pselect6", "epoll_wait", "epoll_pwait", "epoll_pwait2"})
# A futex that only threads of one process share has this in its operation. Source: futex(2).
_PRIVATE_FUTEX = 128
_MAPS_LIMIT_BYTES = 8 << 20
_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - only listed; where the C library keeps named semaphores
_ZEROMQ = "ZMQbg"
_READABLE, _WRITABLE = stat.S_IRUSR, stat.S_IWUSR
_CLOCKS_AND_FILES = ("anon_inode:[timerfd]", "anon_inode:inotify", "anon_inode:[signalfd]")


class _End(Value):
    """The other end of one descriptor, as :class:`ThreadWait` has it."""

    outside: bool = False
    pids: tuple[int, ...] = ()
    address: str = ""


class OtherEnds:
    """Finds the other ends of what processes wait for.

    Args:
        ends: resolves descriptors of the job's processes.
    """

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._locks: list[list[str]] = []
        self._lock_tries = _LOCK_TRIES
        self._modes: dict[int, dict[str, int]] = {}  # of the pipes that a process has open
        self._messengers: dict[int, bool] = {}
        self._shared: dict[int, tuple[range, ...]] = {}  # the memory of a process that any other one could map
        self._found: dict[tuple[int, int], _End] = {}  # by process and descriptor: threads poll the same ones

    def of_process(self, pid: int, *, is_readable: bool, deadline: float = math.inf) -> tuple[ThreadWait, ...]:
        """The waits of the threads of a process, the main thread's first.

        Of the other threads only those of which something is known.

        Args:
            pid: the process.
            is_readable: whether reading its memory cannot block.
            deadline: in monotonic seconds; no further thread is examined after it.
        """
        found: list[ThreadWait] = []
        timed: list[ThreadWait] = []
        tids = sorted(map(int, list_directory(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))
        tries = _TRACED_TRIES
        for tid in tids[:_THREADS_LIMIT]:
            call = _call_of(pid, tid)
            while call is not None and call.name == _RESTARTED and tries:
                # A tool that takes stacks has stopped it for the second time: which call it is shows a moment later.
                tries -= 1
                time.sleep(_TRACED_PAUSE_S)
                call = _call_of(pid, tid)
            if call is None:
                continue
            if call.name == _RESTARTED and _wchan(pid, tid).startswith(_HELD):
                # The tool still holds it. What is restarted has a timeout, and it is not known what it waits for.
                wait = ThreadWait(tid, outside=True, timed=True, sleeps=True)
            else:
                wait = self.of_call(pid, tid, call, is_readable=is_readable)
            if tid == pid or wait.outside or wait.addresses or wait.pids:
                found.append(wait)
            elif wait.timed:
                timed.append(wait)
            if len(found) >= _KEPT_THREADS or time.monotonic() >= deadline:
                break
        return (*found, *timed)[:_KEPT_THREADS]

    def of_call(self, pid: int, tid: int, call: SystemCall, *, is_readable: bool) -> ThreadWait:
        """The same of one system call."""
        wait = ThreadWait(tid, timed=_is_timed(call))
        if call.name in _SLEEPS:
            return wait._replace(outside=True, timed=True, sleeps=True)
        if call.name in _OF_FILE_SYSTEMS or call.name in _FROM_ANY_PROCESS or _is_of_file_system(pid, tid, call):
            return wait._replace(outside=True)
        if call.name in _FOR_HANDLERS:
            return wait._replace(outside=bool(caught_signals(pid) - _OF_EVERY_RANK))
        if call.name in _LOCK_CALLS:
            return self._of_lock(wait, pid)
        if call.name == "futex" and is_readable and not call.arguments[1] & _PRIVATE_FUTEX:
            return wait._replace(outside=any(call.arguments[0] in memory for memory in self._shared_memory(pid)))
        if call.name in {"wait4", "waitid"}:
            child = awaited_child(call)
            return _with_pids(wait, [child]) if child in self._ends.pids else wait
        if call.name in _POLLS:
            # The lists of poll and select are in the process's memory.
            if not is_readable and not call.name.startswith("epoll_"):
                return wait
            for fd in polled_by(pid, call):
                wait = self._with(wait, pid, fd)
            return wait._replace(outside=wait.outside or (wait.timed and not wait.pids and not wait.addresses))
        only = descriptor_of(call)
        return self._with(wait, pid, only) if only is not None else wait

    def _with(self, wait: ThreadWait, pid: int, fd: int) -> ThreadWait:
        """Add the other end of a descriptor."""
        end = self._found.get((pid, fd))
        if end is None:
            end = self._found[pid, fd] = self._end_of(pid, fd)
        wait = _with_pids(wait, end.pids) if end.pids else wait
        if end.address:
            wait = wait._replace(addresses=tuple(dict.fromkeys((*wait.addresses, end.address)))[:_KEPT_ADDRESSES])
        return wait._replace(outside=True, by_descriptor=True) if end.outside else wait

    def _end_of(self, pid: int, fd: int) -> _End:
        link = read_link(f"/proc/{pid}/fd/{fd}")
        kind, _, rest = link.partition(":[")
        if kind == "socket":
            return self._end_of_socket(pid, int(rest[:-1]) if rest[:-1].isdigit() else 0)
        if kind == "pipe":
            return self._end_of_pipe(pid, fd, link)
        if link == "anon_inode:[pidfd]":
            child = read_pairs(f"/proc/{pid}/fdinfo/{fd}").get("Pid", "")
            return _End(pids=(int(child),)) if child.isdigit() else _End()
        if link == "anon_inode:[eventfd]" and self._has_messenger(pid):
            return _End(outside=True)
        is_device = link.startswith("/dev/") and not link.startswith(("/dev/pts/", "/dev/tty", "/dev/shm/"))  # noqa: S108
        return _End(outside=link.startswith(_CLOCKS_AND_FILES) or (link.startswith("/") and not is_device))

    def _has_messenger(self, pid: int) -> bool:
        """Whether ZeroMQ receives in threads of its own, which wake the others by eventfds."""
        found = self._messengers.get(pid)
        if found is None:
            tids = list_directory(f"/proc/{pid}/task")[:_THREADS_LIMIT]
            names = (read_text(f"/proc/{pid}/task/{tid}/comm") for tid in tids)
            found = self._messengers[pid] = any(name.startswith(_ZEROMQ) for name in names)
        return found

    def _shared_memory(self, pid: int) -> tuple[range, ...]:
        """What a process shares by files that still have a name, as named semaphores do.

        Those of multiprocessing have none any more: only the processes of the job have them.
        """
        if pid not in self._shared:
            lines = (line.split(maxsplit=5) for line in read_bytes(f"/proc/{pid}/maps", _MAPS_LIMIT_BYTES).splitlines())
            shared = [line for line in lines if line[5:] and line[1][3:4] == b"s" and line[5].startswith(b"/")]
            # Who makes a semaphore maps it under another name first, which is deleted.
            named = _inodes_of(_SHARED_MEMORY) if shared else ()
            # (Other memory without a name has inodes of another file system.)
            found = [
                line
                for line in shared
                if not line[5].endswith(b" (deleted)")
                or (line[5].startswith(f"{_SHARED_MEMORY}/".encode()) and int(line[4]) in named)
            ]
            bounds = [line[0].split(b"-") for line in found]
            self._shared[pid] = tuple(range(int(begin, 16), int(end, 16)) for begin, end in bounds)
        return self._shared[pid]

    def _end_of_socket(self, pid: int, inode: int) -> _End:
        found = self._ends.socket(pid, inode)
        if found is None or found.state == "LISTEN":
            return _End(outside=True)
        holders = self._ends.holders(f"socket:[{found.peer_inode}]") if found.peer_inode else []
        here, _, _ = found.local.rpartition(":")
        there, _, port = found.remote.rpartition(":")
        if not holders and found.kind == "tcp" and here == there:
            # A connection that has not been accepted yet.
            holders = self._ends.listeners(pid, port)
        if holders:
            return _End(pids=tuple(holder for holder in holders if holder != pid))
        if found.kind == "unix" or not found.remote or found.remote.endswith(":0"):
            return _End(outside=True)
        return _End(address=found.remote)

    def _end_of_pipe(self, pid: int, fd: int, link: str) -> _End:
        """Who has the other end of a pipe open: a process may have both ends, and its children inherit them."""
        other_mode = _WRITABLE if _mode_of(pid, fd) & _READABLE else _READABLE
        holders = [holder for holder in self._ends.holders(link) if self._modes_of(holder).get(link, 0) & other_mode]
        return _End(outside=not holders, pids=tuple(holder for holder in holders if holder != pid))

    def _modes_of(self, pid: int) -> dict[str, int]:
        """How a process has its pipes open. Read once: a process may poll dozens, each open in all of its workers."""
        if pid not in self._modes:
            modes = self._modes[pid] = {}
            for fd in list_fds(pid, HELD_LIMIT):
                link = read_link(f"/proc/{pid}/fd/{fd}")
                if link.startswith("pipe:"):
                    modes[link] = modes.get(link, 0) | _mode_of(pid, fd)
        return self._modes[pid]

    def _lock_waits(self, pid: int) -> set[str]:
        """The numbers of the locks that a process waits for."""
        if not self._locks:
            content = read_bytes("/proc/locks", _LOCKS_LIMIT_BYTES).decode("ascii", "replace")
            self._locks = [line.split() for line in content.splitlines()]
        # 1: FLOCK  ADVISORY  WRITE 4711 fd:01:1234 0 EOF
        # 1: -> FLOCK  ADVISORY  WRITE 4712 fd:01:1234 0 EOF
        return {row[0] for row in self._locks if row[1:2] == ["->"] and row[5:6] == [str(pid)]}

    def _of_lock(self, wait: ThreadWait, pid: int) -> ThreadWait:
        """Who holds a file lock. Source: proc_locks(5); asking the file itself could hang."""
        numbers = self._lock_waits(pid)
        while not numbers and self._lock_tries:
            # While a tool that takes stacks stops it, it waits for no lock; others are not in the table.
            self._lock_tries -= 1
            time.sleep(_TRACED_PAUSE_S)
            self._locks = []
            numbers = self._lock_waits(pid)
        holders = {int(row[4]) for row in self._locks if row[0] in numbers and row[4:5] and row[4].isdigit()}
        own = self._ends.pids.intersection(holders)
        return _with_pids(wait, sorted(own - {pid})) if own else wait._replace(outside=True)


def _call_of(pid: int, tid: int) -> SystemCall | None:
    """The system call of a thread; None where it is not known."""
    return before_restart(read_syscall(pid, tid), _wchan(pid, tid))


def _inodes_of(directory: str) -> frozenset[int]:
    try:
        with os.scandir(directory) as entries:
            return frozenset(entry.inode() for entry in entries)
    except OSError:
        return frozenset()


def _wchan(pid: int, tid: int) -> str:
    return read_text(f"/proc/{pid}/task/{tid}/wchan").rstrip("\n")


def _mode_of(pid: int, fd: int) -> int:
    """How a descriptor is open, by the link in /proc; 0 where that cannot be read."""
    try:
        return os.lstat(f"/proc/{pid}/fd/{fd}").st_mode & (_READABLE | _WRITABLE)
    except OSError:
        return 0


def _is_of_file_system(pid: int, tid: int, call: SystemCall) -> bool:
    """Whether a call without a descriptor waits for a file system: it closes or unmaps a file, or has no name here.

    What waits for a socket (SO_LINGER) or a driver in such a call does so in other functions of the kernel.
    """
    if descriptor_of(call) is not None:
        return False
    wchan = _wchan(pid, tid)
    return is_file_system_wait(wchan) or (call.name in _CLOSES and wchan in _UNKNOWN_WCHAN)


def _is_timed(call: SystemCall) -> bool:
    """Whether a call ends by itself."""
    if call.name in _TIMEOUT_MS:
        timeout_ms = call.arguments[_TIMEOUT_MS[call.name]] & 0xFFFFFFFF
        return timeout_ms < 1 << 31
    return call.name in _TIMEOUT_AT and call.arguments[_TIMEOUT_AT[call.name]] != 0


def _with_pids(wait: ThreadWait, pids: Sequence[int]) -> ThreadWait:
    return wait._replace(pids=tuple(dict.fromkeys((*wait.pids, *pids)))[:_KEPT_PIDS])
