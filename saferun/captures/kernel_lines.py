"""Lines of the kernel log that explain why a rank died or hangs. Pure.

Sources: Linux, mm/oom_kill.c, arch/x86/mm/fault.c, kernel/hung_task.c, drivers/gpu/drm/amd/amdgpu.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.diagnosis.gpu_errors import GpuError, error_in, meaning_of

_LINE_LIMIT = 500
# The most lines of one kind that are shown; further ones are counted.
_SHOWN_OF_A_KIND = 4
_SHOWN = 40

# Kernel messages by kind; the first kind that matches counts. ``oom_detail`` only goes to the file. Messages about
# recoveries are excluded if they resemble those about failures.
_NIC = r"(?:mlx[45]|\bib\d|\beth\d|\ben[opsx]\w+|\bbond\d|hfi1|\befa|bnxt|\bice |irdma|infiniband)"
_PATTERNS: dict[str, tuple[str, ...]] = {
    "xid": (
        r"NVRM: Xid \(",
        r"SXid \(",
        r"NVRM: .*(?:fallen off the bus|RmInitAdapter failed|GPU is probably locked|heartbeat timed out)",
        r"NVRM: .*(?:API mismatch|version mismatch)",
        r"nvidia-modeset: ERROR",
    ),
    "amdgpu": (
        r"amdgpu.*(?:page fault|GPU reset|GPU recovery|VRAM is lost|HW exception|device wedged|hardware is hung)",
        r"amdgpu.*(?:[Pp]oison|RAS.*(?:error|threshold)|lost from bus|[Bb]ad page|[Ff]ailed to evict)",
        r"amdgpu.*(?<!no )(?<!\b0 )uncorrectable hardware errors",
        r"ring \S+ timeout(?!, but soft recovered)",
        r"qcm fence wait loop timeout",
        r"kfd.*(?:HWS hang|[Ff]ailed to evict)",
    ),
    "oom": (r"[Oo]ut of memory: Kill", r"[Oo]ut of memory and no killable processes", r"Out of memory \(oom_kill"),
    "oom_detail": (
        r"invoked oom-killer",
        r"oom-kill:constraint=",
        r"oom_reaper: reaped",
        r"memory(?:\+swap)?: usage \d+kB",
    ),
    "limits": (r"fork rejected by pids controller", r"page allocation failure", r"RLIMIT_CORE"),
    "crash": (
        r"\[\d+\]: segfault at ",
        r"\[\d+\] (?:general protection|trap )",
        r"\[\d+\]: (?:bus error|unhandled signal|undefined instruction)",
        r"hardware memory corruption",
    ),
    "lockup": (r"blocked for more than \d+ seconds", r"soft lockup", r"hard LOCKUP", r"(?:self-)?detected stalls? on"),
    "kernel_bug": (
        r"kernel BUG at",
        r"BUG: (?:unable to|kernel|sleeping)",
        r"Oops: ",
        r"Kernel panic - ",
        r"^general protection fault",
    ),
    "hardware": (
        r"\[Hardware Error\]",
        r"EDAC .*\bUE\b",
        r"Memory failure: 0x",
        r"AER: .*(?:Uncorrect|[Ff]atal)",
        r"DMAR: .*fault",
        r"IO_PAGE_FAULT",
        r"pciehp.*Link Down",
        r"temperature above threshold",
    ),
    "network": (
        rf"{_NIC}.*(?:[Ll]ink (?:is )?(?:[Dd]own|DOWN)|link status definitely down|bad device|health)",
        rf"{_NIC}.*(?:[Ff]atal|[Tt]imeout|timed out)",
        r"NETDEV WATCHDOG",
        r"nf_conntrack: table full",
        r"Possible SYN flooding",
    ),
    "file_system": (
        r"server \S+ (?:not responding|OK)",
        r"EXT4-fs (?:error|\(.*Remounting)",
        r"XFS \(.*(?:error|[Ss]hut|[Cc]orrupt)",
        r"BTRFS.*(?:error|critical)",
        r"LustreError",
        r"Lustre:.*lost",
        r"libceph: .*(?:down|closed)",
        r"ceph: .*(?:hung|lost|timed)",
        r"I/O error",
        r"rejecting I/O",
        r"nvme\S* .*(?:timeout|controller is down|Abort)",
    ),
}
_KINDS = re.compile("|".join(f"(?P<{kind}>{'|'.join(patterns)})" for kind, patterns in _PATTERNS.items()))
# Its options may match the patterns.
_COMMAND_LINE = ("Command line: ", "Kernel command line: ")


def kind_of(line: str) -> str:
    """The kind of a line of the kernel log; empty if it is not relevant to a dead or hanging rank."""
    match = None if line.startswith(_COMMAND_LINE) else _KINDS.search(line)
    return str(match.lastgroup) if match else ""


def relevant(lines: Iterable[str]) -> list[str]:
    """The relevant lines in order, safe to print."""
    return [line for raw in lines if kind_of(line := tidy(raw))]


def shown(lines: Iterable[str]) -> tuple[str, ...]:
    """The relevant lines to show: a few of each kind, with Xids explained, and how many more there were."""
    result: list[str] = []
    counts: dict[str, int] = {}
    for line in lines:
        kind = kind_of(line)
        error = error_in(line)
        if kind == "oom_detail":
            continue
        if error is not None and error.number:
            kind = _number_of(error)
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _SHOWN_OF_A_KIND and len(result) < _SHOWN:
            result.append(explain(line) if counts[kind] == 1 else line)
    for kind, count in counts.items():
        if count > _SHOWN_OF_A_KIND:
            name = kind if "Xid" in kind else kind.replace("_", " ")
            result.append(f"{count - _SHOWN_OF_A_KIND} more kernel lines like these ({name})")
    return tuple(result)


def explain(line: str) -> str:
    """The line, followed by the meaning of its Xid number and what to do."""
    error = error_in(line)
    meaning = meaning_of(error) if error is not None else None
    return f"{line} [{_number_of(error)}: {meaning.meaning}; {meaning.advice}]" if error and meaning else line


def _number_of(error: GpuError) -> str:
    return f"{'SXid' if error.is_switch else 'Xid'} {error.number}"


def tidy(raw: str) -> str:
    """One printable line of bounded length: names of processes in it are untrusted."""
    short = raw if len(raw) <= _LINE_LIMIT else f"{raw[: _LINE_LIMIT - 1]}…"
    return "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in short)
