"""Processes in /proc. A process that has exited meanwhile is no error."""

from __future__ import annotations

import os
from collections.abc import Collection

from saferun.linux.small_files import has_own_processes, list_directory, read_bytes, read_text
from saferun.model import Value

_RUN_ID = b"SAFERUN_RUN_ID="
_OUTER_RUNS = b"SAFERUN_OUTER_RUNS="
_EXIT_CODE = 49  # among the fields that follow the name
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_THREADS_LIMIT = 20_000  # their states are read in a quarter of a second
_MOUNT_POINT = 4  # which field of mountinfo it is
_RELEASE = os.uname().release.split(".")
_EXEC_IS_WAITED_FOR = tuple(int(part) for part in _RELEASE[:2] if part.isdigit()) < (5, 7)
_ESCAPES = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


class Stat(Value):
    """From /proc/PID/stat: state, parent, CPU time, threads, start time (clock ticks since boot). Source: proc(5)."""

    state: str
    ppid: int
    cpu_s: float
    threads: int
    start_ticks: int


def read_stat(pid: int | str) -> Stat | None:
    """Read /proc/PID/stat; None if the process has exited. ``4711/task/4712`` reads a thread's."""
    return parse_stat(read_bytes(f"/proc/{pid}/stat"))


def has_variable(pid: int, name: str, value: str) -> bool:
    """Whether a process was started with this variable; False where that may not be read."""
    return os.fsencode(f"{name}={value}") in read_bytes(f"/proc/{pid}/environ").split(b"\0")


def parse_stat(content: bytes) -> Stat | None:
    """Parse /proc/PID/stat; None if it is malformed."""
    # The name is in parentheses and may itself hold spaces and parentheses.
    fields = content[content.rfind(b")") + 2 :].split()
    try:
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return Stat(fields[0].decode(), int(fields[1]), cpu_s, int(fields[17]), int(fields[19]))
    except (IndexError, ValueError):
        return None


def zombie_status(pid: int, start_ticks: int) -> int | None:
    """The wait status of a process that has ended and has not been reaped by its parent; None where it is not known.

    Args:
        pid: its number.
        start_ticks: when it started; a number may be another process's by now.

    Source: proc(5), the state and exit_code in /proc/PID/stat, Linux 3.5; the latter is 0 for who may not trace it.
    """
    content = read_bytes(f"/proc/{pid}/stat")
    fields = content[content.rfind(b")") + 2 :].split()
    if len(fields) <= _EXIT_CODE or fields[0] != b"Z" or int(fields[19]) != start_ticks:
        return None
    status = read_bytes(f"/proc/{pid}/status")
    for name, own in ((b"Uid", os.geteuid()), (b"Gid", os.getegid())):
        ids = status.partition(b"\n%s:\t" % name)[2].partition(b"\n")[0].split()
        if set(ids) != {b"%d" % own}:
            return None
    return int(fields[_EXIT_CODE])


def read_name(pid: int) -> str:
    """A process's name; empty if it has exited. Source: proc(5), /proc/PID/comm."""
    return read_bytes(f"/proc/{pid}/comm").rstrip(b"\n").decode(errors="replace")


def main_thread_run_s(pid: int) -> float:
    """How long the main thread of a process has run, in seconds; 0 if it has exited. Source: proc(5), schedstat."""
    fields = read_bytes(f"/proc/{pid}/task/{pid}/schedstat").split()
    return int(fields[0]) / 1e9 if fields else 0.0


def runnable_per_processor() -> float:
    """How many threads of this machine run or wait for a processor, per processor; 0 where unknown.

    Source: proc(5), the fourth field of /proc/loadavg.
    """
    fields = read_bytes("/proc/loadavg").split()
    runnable = fields[3].partition(b"/")[0] if len(fields) > 3 else b""  # noqa: PLR2004
    return int(runnable) / (os.cpu_count() or 1) if runnable.isdigit() else 0.0


def is_core_dumping(pid: int) -> bool:
    """Whether the kernel is writing a process's core. Source: proc(5), CoreDumping in /proc/PID/status."""
    return b"\nCoreDumping:\t1" in read_bytes(f"/proc/{pid}/status")


def tells_core_dumping() -> bool:
    """Whether the kernel tells it (Linux 4.15)."""
    return b"\nCoreDumping:" in read_bytes("/proc/self/status")


def children_of(pid: int) -> list[int]:
    """Direct children of all threads of a process."""
    children: list[int] = []
    try:
        tasks = os.listdir(f"/proc/{pid}/task") if has_own_processes() else []
    except OSError:
        return children
    for task in tasks:
        try:
            with open(f"/proc/{pid}/task/{task}/children", "rb", buffering=0) as file:
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
    """All living descendants of a process except ``leave_out`` and their descendants. Zombies do not count.

    The children of one that is ending do: they are its own until its last thread has ended.
    """
    found: dict[int, None] = {}
    waiting = [pid]
    while waiting:
        for child in children_of(waiting.pop()):
            if child in leave_out or child in found:
                continue
            stat = read_stat(child)
            if stat is None:
                continue
            waiting.append(child)
            if stat.state not in "ZX":
                found[child] = None
    return list(found)


def thread_ids(pid: int) -> list[int]:
    """The threads of a process, its main thread first; none if it has exited."""
    try:
        return [int(tid) for tid in os.listdir(f"/proc/{pid}/task")[:_THREADS_LIMIT]] if has_own_processes() else []
    except OSError:
        return []


def waits_uninterruptibly(pid: int) -> bool:
    """Whether a thread of a process is in uninterruptible sleep (state D).

    Such a thread may hold the lock of the process's memory map, for instance while it maps a file of a network file
    system that does not respond. Reading ``cmdline``, ``environ`` or ``maps`` then blocks on that lock.

    Sources: proc(5); Linux, mm/memory.c, __access_remote_vm.
    """
    stats = (read_stat(f"{pid}/task/{task}") for task in list_directory(f"/proc/{pid}/task"))
    return any(stat is not None and stat.state == "D" for stat in stats)


def may_wait_for_exec(pid: int, state: str) -> bool:
    """Whether reading ``io``, ``syscall`` or ``stack`` of a process may block, for as long as its main thread does.

    Before Linux 5.7 they take a lock that exec holds while it reads the program's file, from a file system that may not
    respond. Whether the process is in exec is not shown; whether it waits for a file system is.

    Args:
        pid: the process.
        state: of its main thread, the letter of proc(5).

    Source: cred_guard_mutex in fs/proc/base.c and fs/exec.c of Linux 5.6.
    """
    if not _EXEC_IS_WAITED_FOR or state == "R":
        return False
    return state == "D" or is_fuse_wait(read_bytes(f"/proc/{pid}/wchan", 64))


def is_fuse_wait(wchan: bytes) -> bool:
    """Whether a thread that sleeps there waits for a file system whose server is a process: often not in state D."""
    # The server itself waits for requests in fuse_dev_read.
    return wchan == b"request_wait_answer" or (b"fuse" in wchan and not wchan.startswith(b"fuse_dev"))


def living_processes() -> list[int]:
    """All other processes of this host. Zombies do not count."""
    mine = os.getpid()
    return [
        pid for pid in _all_pids() if pid != mine and (stat := read_stat(pid)) is not None and stat.state not in "ZX"
    ]


def belongs_to_run(pid: int, run_id: str) -> bool | None:
    """Whether a process belongs to the run by its environment; None: reading that might block."""
    if waits_uninterruptibly(pid):
        return None
    return _belongs(read_bytes(f"/proc/{pid}/environ"), run_id.encode())


def read_environ_entry(pid: int, name: str) -> str:
    """A variable of a process's initial environment.

    Empty if there is none, or reading it might block.
    """
    return read_environ_entries(pid, (name,)).get(name, "")


def read_environ_entries(pid: int, names: Collection[str]) -> dict[str, str]:
    """Some variables of a process's initial environment: those that it has; none where reading it might block."""
    found = dict[str, str]()
    if waits_uninterruptibly(pid):
        return found
    for entry in read_bytes(f"/proc/{pid}/environ").split(b"\0"):
        name, is_variable, value = entry.decode(errors="replace").partition("=")
        if is_variable and name in names:
            found.setdefault(name, value)
    return found


def _belongs(environ: bytes, run_id: bytes) -> bool:
    if run_id not in environ:
        return False
    for entry in environ.split(b"\0"):
        if entry.startswith(_RUN_ID) and entry[len(_RUN_ID) :] == run_id:
            return True
        if entry.startswith(_OUTER_RUNS) and run_id in entry[len(_OUTER_RUNS) :].split(b":"):
            return True
    return False


def mounts_of(pid: int) -> list[tuple[str, str]]:
    """Mount points with the types of their file systems, as a process sees them.

    Source: proc_pid_mountinfo(5).
    """
    return parse_mounts(read_text(f"/proc/{pid}/mountinfo"))


def own_mounts() -> list[tuple[str, str]]:
    """The same as this process sees them, also where /proc shows no other one."""
    return parse_mounts(read_text("/proc/self/mountinfo"))


def parse_mounts(mountinfo: str) -> list[tuple[str, str]]:
    """Parse mountinfo, in mount order."""
    found = []
    for line in mountinfo.splitlines():
        about, _, file_system = line.partition(" - ")
        fields = about.split(" ")
        if file_system and len(fields) > _MOUNT_POINT:
            found.append((without_escapes(fields[_MOUNT_POINT]), file_system.partition(" ")[0]))
    return found


def without_escapes(mount_point: str) -> str:
    """A mount point as mountinfo has it, with its spaces, tabs, newlines and backslashes."""
    for escaped, plain in _ESCAPES:
        mount_point = mount_point.replace(escaped, plain)
    return mount_point


def file_system_of(path: str, mounts: list[tuple[str, str]]) -> tuple[str, str]:
    """The mount point of a path, and the type of its file system; empty texts if it is on none of these.

    Of file systems that are mounted over each other the last one is seen.

    Args:
        path: absolute, without links.
        mounts: as of ``mounts_of``.
    """
    found = ("", "")
    for point, kind in mounts:
        if (point in {"/", path} or path.startswith(f"{point}/")) and len(point) >= len(found[0]):
            found = (point, kind)
    return found


def mount_of(path: str, mounts: list[tuple[str, str]]) -> str:
    """The mount point of a path."""
    return file_system_of(path, mounts)[0]


def read_cmdline(pid: int) -> list[str]:
    """A process's command line; only its name if reading that might block; empty if it has exited."""
    if waits_uninterruptibly(pid):
        return [read_name(pid)]
    return [part.decode(errors="replace") for part in read_bytes(f"/proc/{pid}/cmdline").split(b"\0") if part]


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()] if has_own_processes() else []
