"""Limits on open files, on processes and threads, on locked memory, and on cores.

Source: getrlimit(2), proc_pid_limits(5), capabilities(7).
"""

from __future__ import annotations

import os
import threading
import time

from saferun.linux.procfs import parse_stat
from saferun.linux.small_files import list_directory, read_bytes, read_pairs, read_text
from saferun.preflight.checks.answers import failure, ok, warning
from saferun.preflight.checks.common import MIB, is_switched_on
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult, Pairs
from saferun.text.wording import count_text, size_text

_UNLIMITED = -1
# Python with torch and its libraries has some forty files open before it does anything, gloo and NCCL some sockets for
# each neighbour, a data loader two pipes and a queue for each worker. The kernel's default is 1024.
_FEW_FILES = 256
# What the supervisor opens for itself, and for each rank: two streams, two files, a pidfd.
_OWN_FILES, _OWN_FILES_PER_RANK = 48, 5
# What every other host opens at the first one, for saferun's messages: three connections, and another one for evidence.
_CONNECTIONS_PER_HOST = 4
# torch starts some ten threads where OMP_NUM_THREADS is 1, NCCL and CUDA about as many.
_THREADS_PER_RANK = 32
# Above this no job runs into the limit, and counting the user's threads would cost more than it tells.
_MANY_PROCESSES = 32768
_READINGS, _READ_AGAIN_S = 3, 0.1
# NCCL registers buffers of 4 MiB (NCCL_BUFFSIZE) and more for each channel to each neighbour, in both directions; its
# manual and that of the InfiniBand drivers ask for no limit at all.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html
_LITTLE_LOCKED_BYTES = 64 * MIB
_CAP_SYS_RESOURCE, _CAP_SYS_ADMIN, _CAP_IPC_LOCK = 24, 21, 14


def check_open_files(context: CheckContext) -> CheckResult:
    """Whether the ranks may open as many files and connections as training needs."""
    soft, hard = _limit(context, "Max open files")
    facts = (("soft", _limit_text(soft)), ("hard", _limit_text(hard)))
    if soft is None or soft == _UNLIMITED:
        return ok("open files are not limited", facts)
    message = f"a process may open {soft} files"
    own = _OWN_FILES + _OWN_FILES_PER_RANK * context.nproc
    hint = _raise_hint("-n", 65536, hard, "--ulimit nofile=65536", "LimitNOFILE=")
    if hard is not None and hard != _UNLIMITED and hard < own:
        message += f", at most, and saferun takes up to {own} for {count_text(context.nproc, 'rank')}"
        return warning(message, hint, facts, class_name="too_many_open_files")
    world_size = context.nproc * max(context.host_count, len(context.hosts))
    served = _OWN_FILES + _CONNECTIONS_PER_HOST * context.host_count + world_size
    if context.spans_hosts and context.serves and hard is not None and hard != _UNLIMITED and hard < served:
        # The coordinator raises its own limit as far as it may; what finds no room there cannot join, and waits.
        message = f"a process may open {hard} files, at most, and the leader of {context.host_count} hosts may need"
        return warning(f"{message} {served} for its stores", hint, facts, class_name="too_many_open_files")
    # A full mesh, as gloo builds it, is a connection to every other rank.
    needed = max(_FEW_FILES, _OWN_FILES + world_size)
    if soft < needed:
        message += f", and {count_text(world_size, 'rank')} may need more"
        return warning(message, hint, facts, class_name="too_many_open_files")
    return ok(message, facts)


def check_processes(context: CheckContext) -> CheckResult:
    """Whether the ranks' processes and threads can be started, by the user's limit and the control group's.

    Other checks, and other jobs that start, have threads for a moment: too little room has to be seen several times.
    """
    for _ in range(_READINGS - 1):
        result = _room_result(context)
        if result.verdict != "fail":
            return result
        time.sleep(_READ_AGAIN_S)
    return _room_result(context)


def _room_result(context: CheckContext) -> CheckResult:
    from saferun.linux.cgroups import process_room

    soft, hard = _limit(context, "Max processes")
    cgroup_room = process_room(context.root)
    facts: Pairs = (("soft", _limit_text(soft)), ("hard", _limit_text(hard)))
    rooms: list[tuple[int, str, str]] = []
    if cgroup_room is not None:
        facts = (*facts, ("cgroup_room", str(cgroup_room)))
        hint = "raise the limit of the container or job (docker --pids-limit, Kubernetes podPidsLimit, pids.max)"
        rooms.append((cgroup_room, "this control group", hint))
    # The user's limit does not hold for who may exceed it.
    if soft is not None and 0 <= soft < _MANY_PROCESSES and not _is_unlimited_user(context):
        used = _own_threads(context)
        facts = (*facts, ("used", str(used)))
        hint = _raise_hint("-u", _MANY_PROCESSES, hard, "--ulimit nproc=-1", "LimitNPROC=")
        rooms.append((max(soft - used, 0), "this user", hint))
    if not rooms:
        return ok("processes and threads are not limited", facts)
    room, whose, hint = min(rooms)
    message = f"{whose} may start {room} more processes and threads"
    # The threads of the checks themselves are gone when the ranks start.
    if room + threading.active_count() < context.nproc:
        message += f", and there are to be {context.nproc} ranks"
        return failure(message, hint, facts)
    if room < _THREADS_PER_RANK * context.nproc:
        message += f", and {count_text(context.nproc, 'rank')} may need {_THREADS_PER_RANK * context.nproc}"
        return warning(message, hint, facts)
    return ok(message, facts)


def check_locked_memory(context: CheckContext) -> CheckResult:
    """Whether RDMA can lock the memory it needs. Matters between hosts, where there are RDMA devices and GPUs."""
    soft, hard = _limit(context, "Max locked memory")
    facts = (("soft", _limit_text(soft)), ("hard", _limit_text(hard)))
    message = "locked memory is not limited"
    if soft is not None and soft != _UNLIMITED:
        message = f"a process may lock {size_text(soft)} of memory"
    if soft is None or soft == _UNLIMITED or soft >= _LITTLE_LOCKED_BYTES:
        return ok(message, facts)
    devices = list_directory(context.path("sys/class/infiniband"))
    matters = devices and context.spans_hosts and context.vendor != "none"
    if not matters or is_switched_on(context.environ, "NCCL_IB_DISABLE") or _has_capability(context, _CAP_IPC_LOCK):
        return ok(message, facts)
    return warning(
        f"{message}, and RDMA over {devices[0]} needs more",
        _raise_hint("-l", "unlimited", hard, "--ulimit memlock=-1", "LimitMEMLOCK=infinity"),
        (*facts, ("devices", ",".join(devices))),
    )


def check_cores(context: CheckContext) -> CheckResult:
    """Whether a rank that crashes will leave a core. Never a reason to worry before a launch."""
    from saferun.linux.core_limits import why_no_cores

    soft, hard = _limit(context, "Max core file size")
    facts = (("soft", _limit_text(soft)), ("hard", _limit_text(hard)))
    against = why_no_cores(os.getcwd(), context.nproc)
    message = f"the limit on cores stays as it is: {against}" if against else "a rank that crashes leaves a core"
    return ok(message, facts)


def _limit(context: CheckContext, name: str) -> tuple[int | None, int | None]:
    """A limit of this process, which its children inherit: soft and hard; -1: none, None: unknown."""
    for line in read_text(context.path("proc/self/limits")).splitlines():
        if line.startswith(name):
            soft, hard = [*line[len(name) :].split(), "", ""][:2]
            return _limit_value(soft), _limit_value(hard)
    return None, None


def _limit_value(word: str) -> int | None:
    if word == "unlimited":
        return _UNLIMITED
    return int(word) if word.isdigit() else None


def _limit_text(limit: int | None) -> str:
    return "unknown" if limit is None else "unlimited" if limit == _UNLIMITED else str(limit)


def _raise_hint(option: str, wanted: int | str, hard: int | None, docker: str, unit: str) -> str:
    enough = hard == _UNLIMITED or (isinstance(wanted, int) and hard is not None and hard >= wanted)
    if enough:
        return f"run `ulimit {option} {wanted}` before saferun"
    return f"raise the hard limit (limits.conf; {docker} in docker; {unit} of the scheduler's service)"


def _is_unlimited_user(context: CheckContext) -> bool:
    """Whether the limit on a user's processes does not hold. Source: kernel/fork.c, copy_process."""
    if _has_capability(context, _CAP_SYS_RESOURCE) or _has_capability(context, _CAP_SYS_ADMIN):
        return True
    # The root user of the host, whatever its capabilities; within a user namespace another user goes by this number.
    is_host = read_text(context.path("proc/self/uid_map"), 4096).split()[:2] == ["0", "0"]
    return is_host and os.getuid() == 0


def _has_capability(context: CheckContext, number: int) -> bool:
    try:
        mask = int(read_pairs(context.path("proc/self/status")).get("CapEff", "0"), 16)
    except ValueError:
        return False
    return bool(mask >> number & 1)


def _own_threads(context: CheckContext) -> int:
    """Threads of all processes of this user, as far as they can be seen from here."""
    proc = context.path("proc")
    user = os.getuid()
    threads = 0
    for name in os.listdir(proc):
        if not name.isdigit():
            continue
        try:
            if os.stat(f"{proc}/{name}").st_uid != user:
                continue
        except OSError:
            continue
        stat = parse_stat(read_bytes(f"{proc}/{name}/stat"))
        threads += stat.threads if stat is not None else 0
    return threads
