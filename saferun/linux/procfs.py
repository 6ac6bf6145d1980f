"""What /proc tells about processes. Processes come and go meanwhile: a missing one is no error."""

from __future__ import annotations

import os

from saferun.model import Value

_RUN_ID = b"SAFERUN_RUN_ID="
_OUTER_RUNS = b"SAFERUN_OUTER_RUNS="
_LISTENING = b"0A"  # TCP_LISTEN in include/net/tcp_states.h
_INODE_FIELD = 9


class Stat(Value):
    """The fields of /proc/PID/stat that are used here. Source: proc(5)."""

    state: str
    ppid: int
    start_ticks: int


def read_stat(pid: int) -> Stat | None:
    """State, parent and start time (clock ticks since boot) of a process; None where it is gone."""
    content = _read(f"/proc/{pid}/stat")
    # The name stands in parentheses and may itself hold spaces and parentheses.
    fields = content[content.rfind(b")") + 2 :].split()
    try:
        return Stat(fields[0].decode(), int(fields[1]), int(fields[19]))
    except (IndexError, ValueError):
        return None


def read_name(pid: int) -> str:
    """What a process calls itself; empty where it is gone. Source: proc(5), /proc/PID/comm."""
    return _read(f"/proc/{pid}/comm").rstrip(b"\n").decode(errors="replace")


def main_thread_run_s(pid: int) -> float:
    """How long the main thread of a process has run, in seconds; 0 where it is gone. Source: proc(5), schedstat."""
    fields = _read(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(fields[0]) / 1e9 if fields else 0.0


def is_core_dumping(pid: int) -> bool:
    """Whether the kernel is writing a process's core. Source: proc(5), CoreDumping in /proc/PID/status."""
    return b"\nCoreDumping:\t1" in _read(f"/proc/{pid}/status")


def children_of(pid: int) -> list[int]:
    """Direct children of all threads of a process."""
    children: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return children
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                children.extend(map(int, file.read().split()))
        except FileNotFoundError:
            if task == tasks[0] and not os.path.exists("/proc/thread-self/children"):
                return _children_by_scan(pid)
        except OSError:
            continue
    return children


def _children_by_scan(pid: int) -> list[int]:
    # Kernels without CONFIG_PROC_CHILDREN have no list of children.
    return [other for other in _all_pids() if (stat := read_stat(other)) is not None and stat.ppid == pid]


def descendants_of(pid: int, leave_out: frozenset[int] = frozenset()) -> list[int]:
    """All living descendants of a process, those of ``leave_out`` and below apart. Zombies do not count."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            if child in leave_out or child in found:
                continue
            stat = read_stat(child)
            if stat is None or stat.state in "ZX":
                continue
            found.append(child)
            waiting.append(child)
    return found


def waits_uninterruptibly(pid: int) -> bool:
    """Whether a thread of a process is in an uninterruptible sleep (state D).

    Such a thread may hold the lock on the process's memory map, as one does that maps a file of a network file system
    which does not answer. Whoever reads ``cmdline``, ``environ`` or ``maps`` then waits for that lock, and as long.

    Sources: proc(5); Linux, mm/memory.c, __access_remote_vm.
    """
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    contents = (_read(f"/proc/{pid}/task/{task}/stat") for task in tasks)
    return any(content[content.rfind(b")") + 2 :][:1] == b"D" for content in contents)


def processes_of_run(run_id: str) -> list[int]:
    """Processes anywhere on this host whose environment says that they belong to the run, this one apart."""
    return [pid for pid in living_processes() if belongs_to_run(pid, run_id)]


def living_processes() -> list[int]:
    """Every process of this host but this one. Zombies do not count."""
    mine = os.getpid()
    return [
        pid for pid in _all_pids() if pid != mine and (stat := read_stat(pid)) is not None and stat.state not in "ZX"
    ]


def belongs_to_run(pid: int, run_id: str) -> bool | None:
    """Whether a process's environment says that it belongs to the run; None: it cannot be read now without waiting."""
    if waits_uninterruptibly(pid):
        return None
    return _belongs(_read(f"/proc/{pid}/environ"), run_id.encode())


def read_environ_entry(pid: int, name: str) -> str:
    """A variable of a process's environment, as it was when its program started.

    Empty where there is none, or it cannot be read now without waiting.
    """
    if waits_uninterruptibly(pid):
        return ""
    beginning = f"{name}=".encode()
    for entry in _read(f"/proc/{pid}/environ").split(b"\0"):
        if entry.startswith(beginning):
            return entry[len(beginning) :].decode(errors="replace")
    return ""


def _belongs(environ: bytes, run_id: bytes) -> bool:
    if run_id not in environ:
        return False
    for entry in environ.split(b"\0"):
        if entry.startswith(_RUN_ID) and entry[len(_RUN_ID) :] == run_id:
            return True
        if entry.startswith(_OUTER_RUNS) and run_id in entry[len(_OUTER_RUNS) :].split(b":"):
            return True
    return False


def read_cmdline(pid: int) -> list[str]:
    """A process's command line; its name alone where that cannot be read without waiting; empty where it is gone."""
    if waits_uninterruptibly(pid):
        return [read_name(pid)]
    return [part.decode(errors="replace") for part in _read(f"/proc/{pid}/cmdline").split(b"\0") if part]


def listeners_on(port: int) -> list[int]:
    """The processes that have a TCP socket listening on a port, as far as this user may see them.

    Source: proc(5), /proc/net/tcp and /proc/PID/fd.
    """
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _read(table).splitlines()[1:]:
            fields = line.split()
            if (
                len(fields) > _INODE_FIELD
                and fields[3] == _LISTENING
                and int(fields[1].rpartition(b":")[2], 16) == port
            ):
                sockets.add(f"socket:[{fields[_INODE_FIELD].decode()}]")
    return [pid for pid in _all_pids() if sockets and _has_open(pid, sockets)]


def _has_open(pid: int, targets: set[str]) -> bool:
    try:
        fds = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return False
    for fd in fds:
        try:
            if os.readlink(f"/proc/{pid}/fd/{fd}") in targets:
                return True
        except OSError:
            continue
    return False


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
