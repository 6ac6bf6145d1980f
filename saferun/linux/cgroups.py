"""Limits of control groups, and what the kernel's OOM killer has done.

Nothing here raises: what cannot be read is 0 or None. A reading takes well under a millisecond.

Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.max, memory.events), cgroup-v1/memory.rst
(memory.limit_in_bytes, memory.oom_control, memory.failcnt), mm/oom_kill.c; proc_pid_mountinfo(5); cgroups(7).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from saferun.linux.small_files import read_bytes, read_link
from saferun.model import Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.evidence.job_evidence import OomKill

_MOST_LEVELS = 32
# Without a limit v1 has the largest possible number of pages, and v2 has ``max``.
_NO_LIMIT_BYTES = 1 << 60
# Files of version 2 that exist if the controller is enabled.
_SIGNS = {"memory": ("events", "stat"), "pids": ("max", "current"), "cpu": ("max", "stat"), "cgroup": ("events",)}
_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}
_USAGE_FILES = {1: "memory.usage_in_bytes", 2: "memory.current"}
_OOM_FILES = {1: "memory.oom_control", 2: "memory.events"}
# What the kernel reclaims when memory runs short. In version 1 only these include a group's descendants.
_CACHE_COUNTS = {
    1: (b"total_inactive_file", b"total_active_file"),
    2: (b"inactive_file", b"active_file", b"slab_reclaimable"),
}
# What follows the name in a kill's line; some kernels print the user between name and sizes.
_AFTER_NAME = (") total-vm:", ") score ", "), UID")


class MemoryState(Value):
    """How much memory a process's control group may use, and the OOM killer's counters.

    Attributes:
        limit_bytes: the minimum of its limits and those of its ancestors; 0: none.
        oom_kills: how many processes of this control group were killed so far; None if unknown.
        limit_hits: how often its limits and those of its ancestors were hit; only increases mean anything.
        host_oom_kills: how many processes were killed on the whole host so far; None if unknown.
        host_bytes: the host's memory.
    """

    limit_bytes: int
    oom_kills: int | None
    limit_hits: int
    host_oom_kills: int | None
    host_bytes: int


class OomLine(Value):
    """One kill, from the kernel log. ``rss_bytes`` and ``limit_bytes`` are 0 if unknown.

    ``pid`` is that of the host's pid namespace.
    """

    pid: int
    name: str
    rss_bytes: int
    is_cgroup: bool
    limit_bytes: int


def read_memory_state(pid: int = 0) -> MemoryState:
    """The state of a process's control group.

    Args:
        pid: the process; 0: this one.
    """
    version, path, mount_point = _memory_cgroup(pid)
    limits: list[int] = []
    hits = 0
    for directory in _up(path, mount_point):
        limit = _number(f"{directory}/{_LIMIT_FILES[version]}")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            limits.append(limit)
            hits += _limit_hits(version, directory)
    return MemoryState(
        min(limits, default=0), _oom_kills(version, path), hits, _keyed("/proc/vmstat").get(b"oom_kill"), _host_bytes()
    )


def memory_limit_bytes() -> int:
    """How much memory the processes of this control group may use together: its limit, or the host's memory."""
    state = read_memory_state()
    return min(state.limit_bytes or state.host_bytes, state.host_bytes)


def memory_room_bytes(root: str = "/") -> int | None:
    """How much more memory this process's control group may use; None without a limit.

    The page cache counts as room: the kernel reclaims it before it kills a process.

    Args:
        root: the directory that holds /proc and the control groups, with a trailing slash.
    """
    version, directories = _own_directories("memory", root)
    rooms = []
    for directory in directories:
        limit = _number(f"{directory}/{_LIMIT_FILES[version]}")
        if limit is not None and limit < _NO_LIMIT_BYTES:
            counts = _keyed(f"{directory}/memory.stat")
            names = _CACHE_COUNTS[version]
            cache = sum(counts.get(name, 0) for name in names)
            rooms.append(limit - max((_number(f"{directory}/{_USAGE_FILES[version]}") or 0) - cache, 0))
    return max(min(rooms), 0) if rooms else None


def process_room(root: str = "/") -> int | None:
    """How many more processes and threads this process's control group may have; None without a limit.

    Source: Linux, Documentation/admin-guide/cgroup-v1/pids.rst: ``pids.max``, ``pids.current``, the same in both.
    """
    rooms = []
    for directory in _own_directories("pids", root)[1]:
        limit = _number(f"{directory}/pids.max")
        if limit is not None:
            rooms.append(limit - (_number(f"{directory}/pids.current") or 0))
    return max(min(rooms), 0) if rooms else None


def cpu_quota(root: str = "/") -> float | None:
    """How many CPUs' time this process's control group gets; None without a limit.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cpu.cfs_quota_us).
    """
    version, directories = _own_directories("cpu", root)
    quotas = []
    for directory in directories:
        if version == 1:
            pair = [read_bytes(f"{directory}/cpu.cfs_quota_us"), read_bytes(f"{directory}/cpu.cfs_period_us")]
        else:
            pair = read_bytes(f"{directory}/cpu.max").split()
        numbers = [int(word) for word in pair if word.strip().isdigit()]
        if len(numbers) == 2 and numbers[1]:  # noqa: PLR2004 - -1 and max mean no quota
            quotas.append(numbers[0] / numbers[1])
    return min(quotas, default=None)


def is_frozen(pid: int) -> bool:
    """Whether a process's control group is frozen, as container engines do that pause, and schedulers that suspend.

    Sources: Linux, Documentation/admin-guide/cgroup-v2.rst (cgroup.events), cgroup-v1/freezer-subsystem.rst.
    """
    version, path, _ = _cgroup_of("cgroup", f"/proc/{pid}", "/proc/self")
    if version == 2 and _keyed(f"{path}/cgroup.events").get(b"frozen") == 1:  # noqa: PLR2004
        return True
    version, path, _ = _cgroup_of("freezer", f"/proc/{pid}", "/proc/self")
    return version == 1 and read_bytes(f"{path}/freezer.state").strip() in (b"FROZEN", b"FREEZING")


def _own_directories(controller: str, root: str) -> tuple[int, tuple[str, ...]]:
    """Version of a controller, and this process's directory in it with its ancestors."""
    base = root.rstrip("/")
    version, path, mount_point = _cgroup_of(controller, f"{base}/proc/self", f"{base}/proc/self", base)
    return version, tuple(_up(path, mount_point))


def oom_kill_between(
    before: MemoryState,
    after: MemoryState,
    rss_bytes: int = 0,
    kernel_lines: Iterable[str] = (),
    pids: Iterable[int] = (),
) -> OomKill | None:
    """The OOM killer's effect on this control group between two readings.

    Args:
        before: the reading when the ranks had been started.
        after: the reading after one of them was killed by SIGKILL.
        rss_bytes: the last known memory use of the killed rank; 0: unknown.
        kernel_lines: lines of the kernel log since the ranks were started, if readable.
        pids: the ranks that were killed by SIGKILL, in the host's pid namespace.

    Returns:
        None if it killed nothing, or nothing that can have affected these ranks.
    """
    from saferun.evidence.job_evidence import OomKill  # not needed at start-up
    from saferun.linux.container import INITIAL_PID_NAMESPACE

    lines = parse_oom_lines(kernel_lines)
    wanted = set(pids)
    ours = [line for line in lines if line.pid in wanted]
    counted = after.oom_kills is not None and before.oom_kills is not None
    kills = (after.oom_kills or 0) - (before.oom_kills or 0) if counted else _host_kills(before, after)
    if kills <= 0 and not ours:
        return None
    if not ours and counted:
        return _own_kill(before, after, rss_bytes, lines, kills)
    if not ours and lines:
        # All kills of the host count. In a container its processes have other numbers than in the log.
        is_complete = len(lines) >= kills and read_link("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE
        if is_complete:
            return None
        of_host = tuple(dict.fromkeys(line.pid for line in lines if not line.is_cgroup))
        if not of_host:  # the host did not run out of memory
            return OomKill("cgroup", 0, rss_bytes, (), kills, "/proc/vmstat")
        return OomKill("host", after.host_bytes, rss_bytes, of_host, kills, "/proc/vmstat")
    is_cgroup = bool(ours) and ours[-1].is_cgroup
    limits = [after.limit_bytes, *(line.limit_bytes for line in ours)]
    return OomKill(
        "cgroup" if is_cgroup else "host",
        min((limit for limit in limits if limit), default=0) if is_cgroup else after.host_bytes,
        max((line.rss_bytes for line in ours), default=0) or rss_bytes,
        tuple(dict.fromkeys(line.pid for line in ours)),
        max(kills, len(ours)),
        "kernel log" if ours else "/proc/vmstat",
    )


def _own_kill(before: MemoryState, after: MemoryState, rss_bytes: int, lines: list[OomLine], kills: int) -> OomKill:
    """What this control group has counted. Which lines are about it is not certain: the log has those of all others.

    In a container its processes have other numbers than in the log.
    """
    from saferun.evidence.job_evidence import OomKill  # not needed at start-up

    of_host = [line for line in lines if not line.is_cgroup]
    own = [line for line in lines if line.is_cgroup and line.limit_bytes and line.limit_bytes == after.limit_bytes]
    if not after.limit_bytes and len(lines) == 1 and not of_host:
        own = lines  # a limit that is not seen in the container
    is_cgroup = bool(own) or (not of_host and (bool(lines) or after.limit_hits > before.limit_hits))
    is_one = len(own) == kills == 1
    limit_bytes = after.limit_bytes or (own[0].limit_bytes if is_one else 0)
    return OomKill(
        "cgroup" if is_cgroup else "host",
        limit_bytes if is_cgroup else after.host_bytes,
        own[0].rss_bytes if is_one else rss_bytes,
        () if is_cgroup else tuple(dict.fromkeys(line.pid for line in of_host)),
        kills,
        "memory cgroup",
    )


def _host_kills(before: MemoryState, after: MemoryState) -> int:
    if after.host_oom_kills is None or before.host_oom_kills is None:
        return 0
    return after.host_oom_kills - before.host_oom_kills


# ------------------------------------------------------------------------------------------------------ the kernel log


def parse_oom_lines(lines: Iterable[str]) -> list[OomLine]:
    """Parse the kills from lines of the kernel log, each once. Pure.

    ``Memory cgroup out of memory: Killed process 71 (python) total-vm:90kB, anon-rss:60kB, file-rss:5kB, …``
    """
    kills: dict[int, OomLine] = {}
    limit_bytes = 0
    constrained: set[int] = set()
    for line in lines:
        if "memory: usage " in line and ", limit " in line:
            limit_bytes = _number_after(line, ", limit ") * 1024
        elif "oom-kill:constraint=CONSTRAINT_MEMCG" in line:
            constrained.add(_number_after(line, ",pid="))
        elif "illed process " in line or "Kill process " in line:
            kill = _killed(line)
            # Older kernels log a kill in one line and its size in the next.
            if kill is not None and (kill.pid not in kills or kill.rss_bytes):
                earlier = kills.get(kill.pid)
                is_cgroup = kill.is_cgroup or kill.pid in constrained or bool(earlier and earlier.is_cgroup)
                kills[kill.pid] = kill._replace(is_cgroup=is_cgroup, limit_bytes=limit_bytes if is_cgroup else 0)
                limit_bytes = 0
    return list(kills.values())


def _killed(line: str) -> OomLine | None:
    for start in ("Killed process ", "killed process ", "Kill process "):
        head, found, rest = line.partition(start)
        if found:
            break
    else:
        return None
    digits, _, rest = rest.partition(" ")
    pid = digits.rstrip(",")
    if not pid.isdecimal():
        return None
    # The name may hold anything, even closing parentheses; what follows it begins with a known word.
    end = max(rest.rfind(ending) for ending in _AFTER_NAME)
    name = rest[rest.find("(") + 1 : end] if end > 0 else ""
    sizes = rest[max(end, 0) :]
    rss_kilobytes = sum(_number_after(sizes, key) for key in ("anon-rss:", "file-rss:", "shmem-rss:"))
    return OomLine(int(pid), name[:64], rss_kilobytes * 1024, "emory cgroup" in head, 0)


def _number_after(text: str, key: str) -> int:
    """The number after the last such key; 0: there is none."""
    _, found, rest = text.rpartition(key)
    digits = ""
    for char in rest if found else "":
        if not char.isdecimal() or len(digits) > 18:  # noqa: PLR2004 - more than any size
            break
        digits += char
    return int(digits) if digits else 0


# ------------------------------------------------------------------------------------------------------ control groups


def _memory_cgroup(pid: int) -> tuple[int, str, str]:
    """Version of the memory controller, the process's directory in it, and where it is mounted; (0, "", ""): none."""
    return _cgroup_of("memory", f"/proc/{pid}" if pid else "/proc/self", "/proc/self")


def _cgroup_of(controller: str, proc: str, own_proc: str, root: str = "") -> tuple[int, str, str]:
    """Version of a controller, a process's directory in it, and where it is mounted; (0, "", ""): none.

    In a container the path may begin at the host's root while only the container's subtree is mounted.
    """
    paths: dict[int, str] = {}
    for line in read_bytes(f"{proc}/cgroup").splitlines():
        number, controllers, path = [*os.fsdecode(line).split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            paths[1] = path
        elif number == "0" and not controllers:
            paths[2] = path
    mounts = _cgroup_mounts(controller, own_proc)
    # If both are mounted, the one with the controller counts: then the process has a v1 line for it.
    for version in (1, 2):
        if version not in paths or version not in mounts:
            continue
        top, mount_point = mounts[version]
        mount_point = f"{root}{mount_point}"
        path = paths[version]
        within = path[len(top) :] if path == top or path.startswith(f"{top.rstrip('/')}/") else ""
        directory = f"{mount_point}/{within.strip('/')}".rstrip("/")
        if not os.path.isdir(directory):
            directory = mount_point
        signs = _SIGNS.get(controller, ())
        if version == 1 or any(os.path.exists(f"{directory}/{controller}.{name}") for name in signs):
            return version, directory, mount_point
    return 0, "", ""


def _cgroup_mounts(controller: str, own_proc: str) -> dict[int, tuple[str, str]]:
    """Version of a controller -> root within the hierarchy and mount point."""
    mounts: dict[int, tuple[str, str]] = {}
    for line in read_bytes(f"{own_proc}/mountinfo").splitlines():
        if b" - cgroup" not in line:
            continue
        fields, _, rest = line.partition(b" - ")
        fields_before, fields_after = os.fsdecode(fields).split(" "), os.fsdecode(rest).split(" ")
        if len(fields_before) < 5 or len(fields_after) < 3:  # noqa: PLR2004
            continue
        top, mount_point = (word.replace("\\040", " ") for word in fields_before[3:5])
        if fields_after[0] == "cgroup2":
            mounts.setdefault(2, (top, mount_point))
        elif fields_after[0] == "cgroup" and controller in fields_after[2].split(","):
            mounts.setdefault(1, (top, mount_point))
    return mounts


def _up(path: str, mount_point: str) -> Iterator[str]:
    for _ in range(_MOST_LEVELS):
        if not path:
            return
        yield path
        if path == mount_point:
            return
        path = os.path.dirname(path)


def _oom_kills(version: int, path: str) -> int | None:
    return _keyed(f"{path}/{_OOM_FILES[version]}").get(b"oom_kill") if version else None


def _limit_hits(version: int, path: str) -> int:
    if version == 2:  # noqa: PLR2004
        return _keyed(f"{path}/memory.events").get(b"oom", 0)
    return _number(f"{path}/memory.failcnt") or 0


def _host_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _number(path: str) -> int | None:
    content = read_bytes(path).strip()
    return int(content) if content.isdigit() else None


def _keyed(path: str) -> dict[bytes, int]:
    """A file of lines of a name and a number."""
    values: dict[bytes, int] = {}
    for line in read_bytes(path).splitlines():
        key, _, number = line.partition(b" ")
        if number.strip().isdigit():
            values[key] = int(number)
    return values
