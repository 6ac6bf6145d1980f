"""What the driver of a GPU writes into the kernel log: Xid and SXid numbers, whose fault they are, whose GPU. Pure.

Sources: NVIDIA, "Xid Errors", docs.nvidia.com/deploy/xid-errors; NVIDIA, "Fabric Manager User Guide" (SXid); Linux,
drivers/gpu/drm/amd/amdgpu.
"""

from __future__ import annotations

from collections.abc import Iterable

from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.gpu_evidence import RankGpu
from saferun.model import Value

APPLICATION, DRIVER, HARDWARE, INFORMATION = "application", "driver", "hardware", "information"


class Xid(Value):
    """What an Xid or SXid means, whose fault it is in most cases, and what to do, in a few words each.

    ``blame``: ``application``, ``driver``, ``hardware``, or ``information`` where nothing has failed by it.
    """

    meaning: str
    advice: str
    blame: str = HARDWARE


class GpuError(Value):
    """One line of the kernel log.

    Attributes:
        number: the Xid or SXid; 0 where the line has none.
        pci: the GPU's or the switch's address, as :func:`pci_address` writes it; empty where the line has none.
        pid: the process that it names; 0: none.
        is_switch: whether it is an NVSwitch's.
        is_fatal: whether a GPU, a switch or a link can no longer be used, and no program is to blame for that.
        line: the line.
    """

    number: int
    pci: str
    pid: int
    is_switch: bool
    is_fatal: bool
    line: str


_PROGRAM = "look for the bug in the program: compute-sanitizer, CUDA_LAUNCH_BLOCKING=1"
_RESET = "reset the GPU or reboot the host before it is used again"
_REPAIR = "drain the host; if it comes back after a reboot, have the GPU checked"
_LINK = "reset the GPUs; if it comes back, have the NVLink connection and the fabric manager checked"
_FIRMWARE = "reset the GPU; update the driver if it comes back"

XIDS: dict[int, Xid] = {
    13: Xid("a kernel made the GPU's compute engine fail, mostly by an access out of bounds", _PROGRAM, APPLICATION),
    31: Xid("the GPU touched memory that is not mapped (illegal address)", _PROGRAM, APPLICATION),
    32: Xid("the GPU was given a corrupted command buffer", "suspect driver, PCIe or system memory, in this order",
            DRIVER),
    38: Xid("the driver's firmware failed", "update the driver; restart the job", DRIVER),
    43: Xid("the GPU stopped the work of a program that had made an error", _PROGRAM, APPLICATION),
    45: Xid("the GPU's work was cancelled because its program ended or because of an earlier error",
            "look for the first error: another Xid above, or whoever killed the process", INFORMATION),
    46: Xid("the GPU stopped processing", _RESET),
    48: Xid("uncorrectable memory error (double-bit ECC)", _RESET),
    61: Xid("the GPU's internal controller reported a breakpoint or warning", _RESET, DRIVER),
    62: Xid("the GPU's internal controller halted", _RESET),
    63: Xid("a bad memory page or row was recorded for retirement", "reset the GPU when the job is over", INFORMATION),
    64: Xid("a bad memory page or row could not be recorded for retirement", _REPAIR),
    66: Xid("an illegal access by the driver", "update the driver", DRIVER),
    68: Xid("the video decoder failed", _FIRMWARE, DRIVER),
    69: Xid("the GPU's compute engine was given an invalid command", _PROGRAM, APPLICATION),
    74: Xid("NVLink error", _LINK),
    79: Xid("the GPU has fallen off the PCIe bus", "reboot the host; check power, cooling and seating of the GPU"),
    92: Xid("many corrected single-bit memory errors", "watch this GPU; have it checked if uncorrectable ones follow",
            INFORMATION),
    93: Xid("the GPU's configuration memory (InfoROM) is corrupted", _REPAIR, INFORMATION),
    94: Xid("uncorrectable memory error, contained to one program", "restart the job; reset the GPU when it is idle"),
    95: Xid("uncorrectable memory error, not contained: other programs may be hit too", _RESET),
    109: Xid("the GPU did not switch to another program's work in time", _RESET),
    110: Xid("security fault in the GPU", _FIRMWARE),
    119: Xid("the GPU's system processor (GSP) did not answer the driver in time", _FIRMWARE),
    120: Xid("the GPU's system processor (GSP) failed", _FIRMWARE),
    121: Xid("corrected error on the link between CPU and GPU (C2C)", "none needed unless it is frequent", INFORMATION),
    136: Xid("an NVLink could not be trained", _LINK),
    137: Xid("illegal access to another GPU's memory over NVLink",
             "look for the bug in the program; if several programs are hit, suspect the NVLink fabric", APPLICATION),
    140: Xid("uncorrectable memory error that the driver could not recover from", _RESET),
    143: Xid("the GPU could not be initialised", _REPAIR),
    154: Xid("the driver has changed what must be done before this GPU can be used again",
             "do what the line names: reset the GPU, reboot the host, or drain it first", INFORMATION),
    155: Xid("NVLink error", _LINK),
    156: Xid("a part of the GPU was retired", _REPAIR),
    157: Xid("a part of the GPU could not be retired", _REPAIR),
    158: Xid("the GPU did not answer in time", _RESET),
    171: Xid("uncorrectable error in the GPU's main memory (see Xid 48)", _RESET),
    172: Xid("uncorrectable error in the GPU's caches or registers (see Xid 48)", _REPAIR),
    **{number: Xid("NVLink error", _LINK) for number in range(144, 151)},
}  # fmt: skip

_RESET_ALL = "reset all GPUs and NVSwitches of the host; check the log of nvidia-fabricmanager"
_NONE_NEEDED = "none needed unless it is frequent"
_SWITCH = Xid("NVSwitch error", _RESET_ALL)
_SWITCH_NOT_FATAL = Xid("NVSwitch error that is not fatal", _NONE_NEEDED, INFORMATION)
_CORRECTED = Xid("corrected memory error of an NVSwitch", _NONE_NEEDED, INFORMATION)
_SWITCH_PORT = Xid("a port of an NVSwitch failed", _RESET_ALL)
_SWITCH_MEMORY = Xid("uncorrectable memory error in an NVSwitch", _RESET_ALL)
_SWITCH_FAILED = Xid("an NVSwitch failed as a whole", f"reboot the host, or {_RESET_ALL}")
_DISCONNECTED = Xid("an NVLink was lost, or shut down at one end",
                    "check the NVLink connection, unless a GPU or the host was being reset", INFORMATION)  # fmt: skip

SXIDS: dict[int, Xid] = {
    10001: Xid("the driver could not access an NVSwitch", "look for a fatal SXid that follows", INFORMATION),
    10002: Xid("an NVSwitch did not answer the driver in time", "look for a fatal SXid that follows", INFORMATION),
    10003: _SWITCH_FAILED,
    10004: Xid("an NVSwitch is too hot, and may slow its NVLinks down", "check the cooling of the host", INFORMATION),
    10005: Xid("an NVSwitch has cooled down again", "check the cooling of the host", INFORMATION),
    11004: Xid("an NVSwitch has no route for a GPU's traffic", "check the partitions of the fabric manager", DRIVER),
    12028: Xid("an NVSwitch rejected an access; the NVLink traffic of that GPU stops", _RESET_ALL),
    19084: Xid("the heartbeat of an NVSwitch's port was lost", _RESET_ALL),
    20001: Xid("packets were sent again over an NVLink", _NONE_NEEDED, INFORMATION),
    20012: _DISCONNECTED,
    20034: Xid("an NVLink of an NVSwitch went down",
               "reset the GPUs; if it comes back, check the NVLink connection and the log of nvidia-fabricmanager"),
    22012: _DISCONNECTED,
    22013: Xid("a controller of NVLinks sent a request", "none needed", INFORMATION),
    24007: _SWITCH_PORT,
    **dict.fromkeys((11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065,
                     19068, 19071, 24001, 24002, 24003), _CORRECTED),
    **dict.fromkeys((11001, 11009, 11020, 12001, 12002, 12025, 12026, 12027, 12030, 12031, 12032, 14017, 15001, 15006,
                     15010, 15013), _SWITCH_PORT),
    **dict.fromkeys((11013, 11018, 11019, 12022, 12024, 15009, 15012, 19047, 19048, 19054, 19056, 19058, 19060, 19061,
                     19063, 19064, 19066, 19067, 19069, 19070, 24004, 24005, 24006), _SWITCH_MEMORY),
    **dict.fromkeys((12020, 22003, 22011, *range(23001, 23018)), _SWITCH_FAILED),
}  # fmt: skip
# On these the line itself says whether it is fatal; most of them are not, and are recovered from.
_MARKED = frozenset(range(144, 151))
_MARKED_FATAL = LazyPattern(r"\bFatal\b")

_XID = LazyPattern(r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})\): (?P<number>\d{1,4})\b")
_SXID = LazyPattern(r"\bSXid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})\): (?P<number>\d{1,6})\b")
_PID = LazyPattern(r"\bpid='?(\d{1,10})\b")
_OFF_THE_BUS = LazyPattern(r"NVRM: .{0,200}fallen off the bus")
_AMD = LazyPattern(
    r"amdgpu (?P<pci>[0-9a-fA-F:.]{4,20}): .{0,80}"
    r"(?:(?<!no )(?<!\b0 )uncorrectable hardware error|lost from bus|HW exception|device wedged)"
)
_ANY_GPU = LazyPattern(r"NVRM: Xid|\bSXid \(|amdgpu.{0,80}(?:page fault|GPU reset|ring .{1,40} timeout|hardware error)")
_PCI = LazyPattern(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-9a-f])?$")


def error_in(line: str) -> GpuError | None:
    """What a line of the kernel log says of a GPU or an NVSwitch; None where it is about neither."""
    line = line[:1000]
    match = _XID.search(line)
    if match is not None:
        number = int(match["number"])
        known = XIDS.get(number)
        is_fatal = known is not None and known.blame == HARDWARE
        if number in _MARKED:
            is_fatal = _MARKED_FATAL.search(line) is not None
        pid = _PID.search(line)
        return GpuError(number, pci_address(match["pci"]), int(pid[1]) if pid else 0, False, is_fatal, line)
    match = _SXID.search(line)
    if match is not None:
        is_fatal = _MARKED_FATAL.search(line) is not None
        return GpuError(int(match["number"]), pci_address(match["pci"]), 0, True, is_fatal, line)
    if _OFF_THE_BUS.search(line):
        return GpuError(79, "", 0, False, True, line)
    match = _AMD.search(line)
    return GpuError(0, pci_address(match["pci"]), 0, False, True, line) if match is not None else None


def meaning_of(error: GpuError) -> Xid | None:
    """What its number means; None where that is not known."""
    if error.is_switch:
        return SXIDS.get(error.number, _SWITCH if error.is_fatal else _SWITCH_NOT_FATAL)
    return XIDS.get(error.number)


def failure_text(error: GpuError) -> tuple[str, str]:
    """What has failed, ``uncorrectable memory error (Xid 48)``, and what to do; empty where that is not known."""
    meaning = meaning_of(error)
    if meaning is None:
        return "", ""
    number = f" ({'SXid' if error.is_switch else 'Xid'} {error.number})" if error.number else ""
    return f"{meaning.meaning}{number}", meaning.advice


def gpu_lines(lines: Iterable[str]) -> list[str]:
    """The lines of the kernel log about GPUs."""
    return [line for line in lines if _ANY_GPU.search(line[:600])]


def pci_address(text: str) -> str:
    """``0000:3b:00`` for ``00000000:3B:00.0`` and the like; empty where it is no such address."""
    match = _PCI.match(text.lower())
    if match is None:
        return ""
    return f"{int(match[1] or '0', 16):04x}:{int(match[2], 16):02x}:{int(match[3], 16):02x}"


# ------------------------------------------------------------------------------------------------------- whose GPU


class GpuOwners:
    """Which rank of a host a GPU belongs to.

    Args:
        processes: rank and pid of the host's processes, of dead ranks and of living ones.
        gpus: the GPUs that ranks were seen to use; those that had died before are not among them.
    """

    def __init__(self, processes: Iterable[tuple[int, int]], gpus: Iterable[RankGpu]) -> None:
        self._rank_of_pid = {pid: rank for rank, pid in processes}
        self._by_pci: dict[str, set[int]] = {}
        for one in gpus:
            if address := pci_address(one.pci):
                self._by_pci.setdefault(address, set()).add(one.rank)

    def rank_of(self, error: GpuError) -> int | None:
        """The rank that had that GPU; None where that is not certain."""
        named = self._rank_of_pid.get(error.pid) if error.pid else None
        if named is not None:
            return named
        users = self._by_pci.get(error.pci, set())
        if users:
            return next(iter(users)) if len(users) == 1 else None
        possible = [rank for rank in {*self._rank_of_pid.values()} if self.is_probably_of(error, rank)]
        return possible[0] if len(possible) == 1 and self._by_pci and error.pci and not error.is_switch else None

    def is_probably_of(self, error: GpuError, rank: int) -> bool:
        """The same as :meth:`may_be_of`, but of a process of no rank only where this rank is known to have the GPU.

        It may be another job's. In a container it may also be the rank itself, by its number on the host.
        """
        is_foreign = bool(error.pid) and error.pid not in self._rank_of_pid
        return self.may_be_of(error, rank) and (not is_foreign or rank in self._by_pci.get(error.pci, ()))

    def may_be_of(self, error: GpuError, rank: int) -> bool:
        """Whether the error may be of that rank's GPU. An NVSwitch's is of all ranks of its host."""
        if error.is_switch or not error.pci:
            return True
        named = self._rank_of_pid.get(error.pid) if error.pid else None
        if named is not None:
            return named == rank
        users = self._by_pci.get(error.pci)
        if users is not None:
            return rank in users
        if any(rank in others for others in self._by_pci.values()):
            return False
        # Local ranks take the GPUs in the order of their addresses, unless the program chooses otherwise.
        known = sorted((next(iter(ranks)), pci) for pci, ranks in self._by_pci.items() if len(ranks) == 1)
        if [pci for _, pci in known] != sorted(pci for _, pci in known):
            return True
        return all((other < rank) == (pci < error.pci) for other, pci in known)
