"""Which setting prevents one process from tracing another.

Sources: ptrace(2), "Ptrace access mode checking"; Documentation/admin-guide/LSM/Yama.rst; proc(5), hidepid.
"""

from __future__ import annotations

import os

from saferun.linux.small_files import read_line, read_pairs, read_text

_CAP_SYS_PTRACE = 19
_YAMA = {
    1: "Yama allows it to ancestors only (kernel.yama.ptrace_scope=1)",
    2: "Yama allows it to CAP_SYS_PTRACE only (kernel.yama.ptrace_scope=2)",
    3: "Yama allows it to no process (kernel.yama.ptrace_scope=3)",
}
_NEEDS_CAPABILITY = 2
_NO_PROCESS = 3


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
