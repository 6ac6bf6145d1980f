"""Which lines of the kernel log tell why a rank died or hangs, and what NVIDIA's Xid numbers mean. Pure.

Sources: NVIDIA, "Xid Errors", docs.nvidia.com/deploy/xid-errors; Linux, mm/oom_kill.c, arch/x86/mm/fault.c,
kernel/hung_task.c, drivers/gpu/drm/amd/amdgpu.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from saferun.model import Value

_LINE_LIMIT = 500
# So many lines of one kind are shown; the first tell what happened, the rest how often.
_SHOWN_OF_A_KIND = 4
_SHOWN = 40


class Xid(Value):
    """What a number means, and what to do, in a few words each."""

    words: str
    advice: str


_APPLICATION = "look for the bug in the program: compute-sanitizer, CUDA_LAUNCH_BLOCKING=1"
_RESET = "reset the GPU or reboot the host before it is used again"
_REPAIR = "drain the host; if it comes back after a reboot, have the GPU checked"
_LINK = "reset the GPUs; if it comes back, have the NVLink connection and the fabric manager checked"
_FIRMWARE = "reset the GPU; update the driver if it comes back"

XIDS: dict[int, Xid] = {
    13: Xid("a kernel made the GPU's compute engine fail, mostly by an access out of bounds", _APPLICATION),
    31: Xid("the GPU touched memory that is not mapped (illegal address)", _APPLICATION),
    32: Xid("the GPU was given a corrupted command buffer", "suspect driver, PCIe or system memory, in this order"),
    38: Xid("the driver's firmware failed", "update the driver; restart the job"),
    43: Xid("the GPU stopped the work of a program that had made an error", _APPLICATION),
    45: Xid("the GPU's work was cancelled because its program ended or because of an earlier error",
            "look for the first error: another Xid above, or whoever killed the process"),
    46: Xid("the GPU stopped processing", _RESET),
    48: Xid("uncorrectable memory error (double-bit ECC)", _RESET),
    61: Xid("the GPU's internal controller reported a breakpoint or warning", _RESET),
    62: Xid("the GPU's internal controller halted", _RESET),
    63: Xid("a bad memory page or row was recorded for retirement", "reset the GPU when the job is over"),
    64: Xid("a bad memory page or row could not be recorded for retirement", _REPAIR),
    66: Xid("an illegal access by the driver", "update the driver"),
    68: Xid("the video decoder failed", _FIRMWARE),
    69: Xid("the GPU's compute engine was given an invalid command", _APPLICATION),
    74: Xid("NVLink error", _LINK),
    79: Xid("the GPU has fallen off the PCIe bus", "reboot the host; check power, cooling and seating of the GPU"),
    92: Xid("many corrected single-bit memory errors", "watch this GPU; have it checked if uncorrectable ones follow"),
    93: Xid("the GPU's configuration memory (InfoROM) is corrupted", _REPAIR),
    94: Xid("uncorrectable memory error, contained to one program", "restart the job; reset the GPU when it is idle"),
    95: Xid("uncorrectable memory error, not contained: other programs may be hit too", _RESET),
    109: Xid("the GPU did not switch to another program's work in time", _RESET),
    110: Xid("security fault in the GPU", _FIRMWARE),
    119: Xid("the GPU's system processor (GSP) did not answer the driver in time", _FIRMWARE),
    120: Xid("the GPU's system processor (GSP) failed", _FIRMWARE),
    121: Xid("corrected error on the link between CPU and GPU (C2C)", "none needed unless it is frequent"),
    136: Xid("an NVLink could not be trained", _LINK),
    137: Xid("illegal access to another GPU's memory over NVLink",
             "look for the bug in the program; if several programs are hit, suspect the NVLink fabric"),
    140: Xid("uncorrectable memory error that the driver could not recover from", _RESET),
    143: Xid("the GPU could not be initialised", _REPAIR),
    154: Xid("the driver has changed what must be done before this GPU can be used again",
             "do what the line names: reset the GPU, reboot the host, or drain it first"),
    155: Xid("NVLink error", _LINK),
    156: Xid("a part of the GPU was retired", _REPAIR),
    157: Xid("a part of the GPU could not be retired", _REPAIR),
    158: Xid("the GPU did not answer in time", _RESET),
    171: Xid("uncorrectable error in the GPU's main memory (see Xid 48)", _RESET),
    172: Xid("uncorrectable error in the GPU's caches or registers (see Xid 48)", _REPAIR),
    **{number: Xid("NVLink error", _LINK) for number in range(144, 151)},
}  # fmt: skip

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]+)\): (?P<number>\d+)\b")

# What the kernel says, by kind; the first kind that matches counts. ``oom_detail`` is for those who read on: it is not
# shown. What tells of something that went well again is left out where it looks like its opposite.
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
# It lists options whose names sound like trouble.
_COMMAND_LINE = ("Command line: ", "Kernel command line: ")


def kind_of(line: str) -> str:
    """What a line of the kernel log is about; empty where it tells nothing about a dead or hanging rank."""
    match = None if line.startswith(_COMMAND_LINE) else _KINDS.search(line)
    return str(match.lastgroup) if match else ""


def relevant(lines: Iterable[str]) -> list[str]:
    """The lines that may matter, in their order, made fit to be shown."""
    return [line for raw in lines if kind_of(line := tidy(raw))]


def shown(lines: Iterable[str]) -> tuple[str, ...]:
    """Of relevant lines those to be shown: a few of each kind, Xids explained, and how many more there were."""
    result: list[str] = []
    counts: dict[str, int] = {}
    for line in lines:
        kind = kind_of(line)
        xid = _XID.search(line)
        if kind == "oom_detail":
            continue
        if xid is not None:
            kind = f"Xid {xid['number']}"
        counts[kind] = counts.get(kind, 0) + 1
        if counts[kind] <= _SHOWN_OF_A_KIND and len(result) < _SHOWN:
            result.append(explain(line) if counts[kind] == 1 else line)
    for kind, count in counts.items():
        if count > _SHOWN_OF_A_KIND:
            words = kind if kind.startswith("Xid") else kind.replace("_", " ")
            result.append(f"{count - _SHOWN_OF_A_KIND} more kernel lines like these ({words})")
    return tuple(result)


def explain(line: str) -> str:
    """The line, with what its Xid number means and what to do behind it."""
    match = _XID.search(line)
    meaning = XIDS.get(int(match["number"])) if match and len(match["number"]) <= 4 else None  # noqa: PLR2004
    return f"{line} [Xid {match['number']}: {meaning.words}; {meaning.advice}]" if match and meaning else line


def tidy(raw: str) -> str:
    """One line without control characters, of bounded length: names of processes in it are anybody's choice."""
    short = raw if len(raw) <= _LINE_LIMIT else f"{raw[: _LINE_LIMIT - 1]}…"
    return "".join(char if char.isprintable() else " " if char == "\t" else "?" for char in short)
