"""Which setting prevents one process from tracing another.

Sources: ptrace(2), "Ptrace access mode checking"; Documentation/admin-guide/LSM/Yama.rst; proc(5), hidepid.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

from saferun.linux.children import fork
from saferun.linux.descriptors import close_all_but
from saferun.linux.prctl import set_name
from saferun.linux.procfs import read_stat
from saferun.linux.small_files import read_line, read_pairs, read_text

_CAP_SYS_PTRACE = 19
_YAMA = {
    1: "Yama allows it to ancestors only (kernel.yama.ptrace_scope=1)",
    2: "Yama allows it to CAP_SYS_PTRACE only (kernel.yama.ptrace_scope=2)",
    3: "Yama allows it to no process (kernel.yama.ptrace_scope=3)",
}
_NEEDS_CAPABILITY = 2
_NO_PROCESS = 3
# A debugger that was killed lets go of a process once the kernel has ended it, which then stops a moment later.
_QUIET_S = 1.0
_LONGEST_WATCH_S = 30.0
_WATCH_AGAIN_S = 0.05


def ptrace_denial(pid: int) -> str:
    """Why this process may not ptrace another, in one line. Only for a process for which it was denied."""
    if not os.path.exists(f"/proc/{pid}"):
        hidden = "hidepid=" in read_text("/proc/self/mounts")
        return "ptrace is denied: /proc hides the process (mounted with hidepid)" if hidden else "the process is gone"
    return f"ptrace is denied: {_reason(read_pairs('/proc/self/status'), read_pairs(f'/proc/{pid}/status'), pid)}"


def tracer_of(pid: int) -> int:
    """The process that traces another one; 0: there is none."""
    tracer = read_pairs(f"/proc/{pid}/status").get("TracerPid", "0")
    return int(tracer) if tracer.isdigit() else 0


def resume_if_stopped(pid: int, *, was_stopped: bool) -> None:
    """Continue a process that a tool left stopped when it was killed."""
    stat = read_stat(pid)
    if not was_stopped and stat is not None and stat.state == "T":
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def resumed_if_killed(pids: Collection[int]) -> Iterator[None]:
    """Continue what a tool leaves stopped, also where this process is killed along with the tool, or is interrupted.

    A process of its own waits for that, and ends with the block. Without room for one the block runs all the same.

    Args:
        pids: processes that the tools in this block may stop. Those that are stopped already stay so.
    """
    running = {pid: stat.start_ticks for pid in pids if (stat := read_stat(pid)) is not None and stat.state != "T"}
    wait_end, own_end = os.pipe()
    watching = -1

    def watch() -> None:
        set_name("sr-resume")
        close_all_but(wait_end, low=0)
        if not os.read(wait_end, 1):
            _resume(running)

    try:
        with suppress(OSError):
            watching = fork(watch)
        yield
        os.write(own_end, b".")  # never SIGPIPE: its other end is open here as well
    finally:
        os.close(own_end)
        os.close(wait_end)
    if watching >= 0:
        with suppress(ChildProcessError):
            os.waitpid(watching, 0)


def _resume(running: dict[int, int]) -> None:
    """Continue each of these processes that stops within a second after no tool holds one of them any more.

    Args:
        running: when each was started, in ticks: another process may get its number.
    """
    now = time.monotonic()
    quiet_at, until = now + _QUIET_S, now + _LONGEST_WATCH_S
    while now < min(quiet_at, until):
        for pid, start_ticks in running.items():
            stat = read_stat(pid)
            if stat is None or stat.start_ticks != start_ticks:
                continue
            if tracer_of(pid):
                quiet_at = now + _QUIET_S
            elif stat.state == "T":
                with suppress(OSError):
                    os.kill(pid, signal.SIGCONT)
        time.sleep(_WATCH_AGAIN_S)
        now = time.monotonic()


def _reason(own: dict[str, str], target: dict[str, str], pid: int) -> str:
    privileged = bool(_mask(own, "CapEff") >> _CAP_SYS_PTRACE & 1)
    scope = _yama_scope()
    if target.get("TracerPid", "0") not in {"0", ""}:
        return f"process {target['TracerPid']} traces it already"
    if scope == _NO_PROCESS or (scope == _NEEDS_CAPABILITY and not privileged):
        return _YAMA[scope]
    if not privileged and (reason := _unlike_us(own, target, pid)):
        return reason
    if scope == 1 and not privileged:
        return _YAMA[1]
    if read_text("/sys/fs/selinux/booleans/deny_ptrace").startswith("1"):
        return "SELinux forbids it (deny_ptrace)"
    if own.get("Seccomp", "0") == "2":
        return "a seccomp filter, as of a container, forbids it"
    if not privileged and _is_confined():
        return "a security module, as of a container, forbids it"
    return "the kernel gives no reason; a container needs CAP_SYS_PTRACE"


def _unlike_us(own: dict[str, str], target: dict[str, str], pid: int) -> str:
    """Why the kernel denies it before it asks any security module; empty if it does not."""
    owner, me = target.get("Uid", "").split(), own.get("Uid", "").split()
    if owner and me and set(owner[:3]) != {me[1]}:
        return f"the process belongs to user {owner[1]}"
    if _mask(target, "CapPrm") & ~_mask(own, "CapPrm"):
        return "the process has capabilities that saferun lacks"
    try:
        # Reading this needs the same permission as ptrace, without Yama and seccomp.
        os.readlink(f"/proc/{pid}/exe")
    except PermissionError:
        return "the process is not dumpable (PR_SET_DUMPABLE=0, or its program may not be read)"
    except OSError:
        pass
    return ""


def _is_confined() -> bool:
    profile = read_text("/proc/self/attr/current").strip("\0\n ")
    return profile not in {"", "unconfined"}


def _yama_scope() -> int:
    content = read_line("/proc/sys/kernel/yama/ptrace_scope")
    return int(content) if content.isdigit() else 0


def _mask(status: dict[str, str], name: str) -> int:
    try:
        return int(status.get(name, "0"), 16)
    except ValueError:
        return 0
