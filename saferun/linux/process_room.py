"""Whether the user or the control group may be short of processes: a quick check at every start.

Sources: getrlimit(2), RLIMIT_NPROC; Linux, Documentation/admin-guide/cgroup-v1/pids.rst.
"""

from __future__ import annotations

import os
import resource

from saferun.linux.small_files import read_bytes

# More than the threads of a rank; the preflight checks are more precise.
_ROOM_PER_RANK = 64
_MANY_PROCESSES = 32768
_MOST_LEVELS = 16
_MOUNT = "/sys/fs/cgroup"


def may_be_short_of_processes(ranks: int, root: str = "") -> bool:
    """Whether this many ranks might not fit into the limits. False if no limit can be read.

    Args:
        ranks: the number of ranks on this host.
        root: the root directory.
    """
    try:
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    except OSError:  # a filter of system calls
        soft = resource.RLIM_INFINITY
    if soft != resource.RLIM_INFINITY and soft < _MANY_PROCESSES and os.geteuid() != 0:
        return True
    wanted = ranks * _ROOM_PER_RANK
    for line in read_bytes(f"{root}/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        if controllers and b"pids" not in controllers.split(b","):
            continue
        mount = f"{root}{_MOUNT}/pids" if controllers else f"{root}{_MOUNT}"
        if _is_short(mount, os.fsdecode(path), wanted):
            return True
    return False


def _is_short(mount: str, path: str, wanted: int) -> bool:
    # In a container the path may begin at the host's root while only the container's subtree is mounted.
    directory = f"{mount}{path}".rstrip("/")
    if not os.path.isdir(directory):
        directory = mount
    for _ in range(_MOST_LEVELS):
        maximum = read_bytes(f"{directory}/pids.max").strip()
        if maximum.isdigit():
            current = read_bytes(f"{directory}/pids.current").strip()
            if int(maximum) - (int(current) if current.isdigit() else 0) < wanted:
                return True
        if directory == mount or not directory.startswith(mount):
            return False
        directory = os.path.dirname(directory)
    return False
