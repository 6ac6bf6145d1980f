"""Whether a host's own hardware or system is at fault, so that a job is better off without it. Pure.

A host is blamed on evidence of its own only: its kernel log, its GPUs, its interfaces, what its checks found, or that
it does not answer. What half of the hosts or more have alike (a storage server that hangs, a full shared disk, a
program that takes too much memory everywhere) is no single host's fault, and a bug in the script is none at all.

Sources: NVIDIA, "Xid Errors"; Linux, mm/memory-failure.c, drivers/acpi/apei/ghes.c, arch/x86/kernel/cpu/mce,
drivers/edac, drivers/pci/pcie/aer.c, fs/ext4/super.c, fs/xfs/xfs_fsops.c, fs/btrfs/messages.c, block/blk-core.c.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from saferun.diagnosis.gpu_errors import GpuError, GpuOwners, error_in, failure_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.model import Value

if TYPE_CHECKING:
    from saferun.evidence.diagnosis_values import Cause, Diagnosis
    from saferun.evidence.job_evidence import Evidence, HostView, OomKill

KINDS = ("gpu", "machine", "lost", "file_system", "link", "stuck", "memory", "clock")
"""The worst first: ``gpu`` (a GPU, or what connects GPUs), ``machine`` (processors, memory, buses, the kernel),
``lost`` (it does not answer, or its saferun makes no progress), ``file_system`` (read-only, broken or not answering),
``link`` (a network interface), ``stuck`` (processes that cannot be killed), ``memory`` (the host ran out of it),
``clock``."""

_MAY_PASS = frozenset({"link"})
# A program, a server or a setting is the likelier cause of these where most hosts have them.
_SHARED = frozenset({"clock", "file_system", "link", "memory", "stuck"})
_LONGEST_LINE = 1000
_MOST_LINES = 4096  # of one host
_LONGEST_PROOF = 200


class HostFault(Value):
    """What is wrong with one host.

    Attributes:
        label: its name in the job.
        kind: one of :data:`KINDS`.
        reason: to follow the name: ``GPU 0000:3b:00 has fallen off the PCIe bus (Xid 79)``.
        host: its number in the job; -1: not known.
        proof: the line that shows it; empty: there is none.
        unusable: whether it is known before the ranks are started that they cannot work there.
    """

    label: str
    kind: str
    reason: str
    host: int = -1
    proof: str = ""
    unusable: bool = False

    @property
    def may_pass(self) -> bool:
        """Whether it is often transient, as with a link that flaps: only the second one shows a bad host."""
        return self.kind in _MAY_PASS


class HostFinding(Value):
    """What a check found of a host.

    Attributes:
        label: the host's name in the job; empty where there is one host.
        check: the check's name.
        class_name: of the cause; may be empty.
        message: as it is printed.
        host: its number; -1: not known.
        unusable: whether ranks cannot work on the host as long as this is so.
    """

    label: str
    check: str
    class_name: str
    message: str
    host: int = -1
    unusable: bool = False


class BadHost(Value):
    """A host that was found bad, as the report has it.

    Attributes:
        time: seconds since the epoch.
        attempt: before or in which it was found, 0 for the first.
        host: its name in the job.
        kind: one of :data:`KINDS`.
        reason: as in :class:`HostFault`.
        found_by: ``checks`` (before that attempt) or ``failure`` (what ended it).
        proof: as in :class:`HostFault`.
        clock: the time as it is to be shown; empty where that is not wanted.
    """

    time: float
    attempt: int
    host: str
    kind: str
    reason: str
    found_by: str
    proof: str = ""
    clock: str = ""


def host_faults(
    evidence: Evidence, diagnosis: Diagnosis | None = None, findings: Iterable[HostFinding] = ()
) -> tuple[HostFault, ...]:
    """The hosts whose own hardware or system is at fault in a failed or hanging attempt.

    Args:
        evidence: of all hosts, or of the only one.
        diagnosis: what was concluded from it; None: nothing.
        findings: what the checks before the attempt found.

    Returns:
        The worst first, at most one of a kind for each host. Empty: no host is known to be at fault.
    """
    cause = diagnosis.cause if diagnosis is not None else None
    hosts = evidence.hosts or (_alone(evidence, diagnosis),)
    found = [fault for host in hosts for fault in _of_host(host, evidence, cause)]
    found += _lost(evidence)
    found += _of_cause(cause, hosts)
    return _concluded([*found, *_of_findings(findings, len(hosts))], len(hosts))


def found_faults(findings: Iterable[HostFinding], hosts: int, *, is_launch: bool = True) -> tuple[HostFault, ...]:
    """The hosts whose own hardware or system is at fault by what checks have found.

    Args:
        findings: warnings and failures of checks.
        hosts: how many hosts were checked.
        is_launch: whether they were checked for a launch, whose settings may be wrong.

    Returns:
        As ``host_faults`` does.
    """
    return _concluded(_of_findings(findings, hosts, is_launch=is_launch), hosts)


def _concluded(found: Iterable[HostFault], hosts: int) -> tuple[HostFault, ...]:
    """Each fault once, without those that most hosts share."""
    kept: dict[tuple[str, str], HostFault] = {}
    for fault in sorted(found, key=lambda fault: not fault.unusable):
        kept.setdefault((fault.label, fault.kind), fault)
    counts = Counter(fault.kind for fault in kept.values())
    own = [fault for fault in kept.values() if fault.kind not in _SHARED or _is_of_few(counts[fault.kind], hosts)]
    return tuple(sorted(own, key=lambda fault: (KINDS.index(fault.kind), fault.host, fault.label)))


def _is_of_few(count: int, hosts: int) -> bool:
    return count <= 1 or 2 * count < hosts


def _alone(evidence: Evidence, diagnosis: Diagnosis | None) -> HostView:
    """The only host, as one of several is described."""
    from saferun.evidence.job_evidence import HostView

    abandoned = diagnosis.abandoned if diagnosis is not None else evidence.abandoned
    return HostView(
        0,
        evidence.host,
        evidence.ranks or tuple(end.rank for end in evidence.ends),
        has_evidence=True,
        oom=evidence.oom,
        kernel_lines=evidence.kernel_lines,
        abandoned_ranks=abandoned,
    )


# --------------------------------------------------------------------------------------------- by a host's own evidence

# A job that ends because of these may have been ended by a link that flapped.
_OF_NETWORKS = frozenset(
    {
        *("collective_timeout", "communicator_aborted", "connection_lost", "fabric_error", "hang_all_in_collective"),
        *("hang_missing_collective", "hang_stuck_collective", "hang_unknown", "nccl_error", "nccl_system_error"),
        *("nccl_timeout", "network_between_hosts", "network_cut", "network_interface", "peer_lost"),
        *("rendezvous_store_failure", "ssh_unreachable", "store_lost", "unknown"),
    }
)
_OF_MEMORY = frozenset({"data_loader_worker_killed", "host_oom_kill", "host_out_of_memory"})


def _of_host(host: HostView, evidence: Evidence, cause: Cause | None) -> Iterable[HostFault]:
    lines = [line[:_LONGEST_LINE] for line in host.kernel_lines[-_MOST_LINES:]]
    yield from _gpu_faults(host, lines, evidence)
    class_name = cause.class_name if cause is not None else ""
    for line in lines:
        kind = kernel_fault(line)
        if kind and (kind != "link" or class_name in _OF_NETWORKS or not class_name):
            yield _fault(host, kind, f"its kernel reports: {_shown(line)}", line)
    if host.oom is not None and class_name in _OF_MEMORY and _ran_out(host.oom):
        yield _fault(host, "memory", "the host, and not the job's own limit, ran out of memory", host.oom.source)
    if host.abandoned_ranks:
        count = len(host.abandoned_ranks)
        what = "a rank" if count == 1 else f"{count} ranks"
        yield _fault(host, "stuck", f"{what} could not be killed: a driver or a file system does not answer")


def _ran_out(oom: OomKill) -> bool:
    return oom.scope == "host" and oom.kills > 0


def _gpu_faults(host: HostView, lines: Sequence[str], evidence: Evidence) -> Iterable[HostFault]:
    errors = [error for line in lines if (error := error_in(line)) is not None and error.is_fatal]
    if not errors:
        return
    ranks = {*host.ranks}
    capture = evidence.capture
    processes = [(one.rank, one.pid) for one in capture.processes if one.rank in ranks]
    processes += [(one.rank, one.pid) for one in evidence.ends if one.rank in ranks]
    owners = GpuOwners(processes, [gpu for gpu in capture.gpus if gpu.rank in ranks])
    for error in errors:
        # The GPUs of another job on the same host are none of this job's business.
        if not ranks or any(owners.may_be_of(error, rank) for rank in ranks):
            yield _fault(host, "gpu", _gpu_text(error), error.line)


def _gpu_text(error: GpuError) -> str:
    what, _ = failure_text(error)
    device = "NVSwitch" if error.is_switch else "GPU"
    name = f"{device} {error.pci}" if error.pci else f"a {device}"
    if what.startswith("the GPU "):
        return what.replace("the GPU", name, 1)
    if error.is_switch and error.pci and "an NVSwitch" in what:
        return what.replace("an NVSwitch", name, 1)
    return f"{name}: {what or _shown(error.line)}"


_NIC = (
    r"(?:mlx[45]_\w{1,8}|\bib\d{1,3}|\bhsn\d{1,3}|\beth\d{1,3}|\ben[opsx]\w{1,14}|\bbond\d{1,3}|\bhfi1|\befa|\bbnxt_en"
    r"|\bice|\birdma)\b"
)
_KERNEL: tuple[tuple[str, LazyPattern], ...] = (
    (
        "machine",
        LazyPattern(
            r"Machine Check Exception|\[Hardware Error\]: event severity: (?:fatal|recoverable)|EDAC .{0,80}\bUE\b"
            r"|hardware memory corruption|Memory failure: 0x[0-9a-f]{1,16}: .{0,60}(?:[Kk]ill|unrecoverable|Failed)"
            r"|AER: .{0,60}Uncorrect\w{0,6}.{0,20}(?<![Nn]on-)\bFatal|Kernel panic - |kernel BUG at "
            r"|BUG: unable to handle|hard LOCKUP|pciehp .{0,60}Link Down"
        ),
    ),
    (
        "file_system",
        LazyPattern(
            r"EXT4-fs .{0,60}(?:Remounting filesystem read-only|error )|XFS \(.{0,40}(?:[Cc]orruption|shut down)"
            r"|BTRFS.{0,80}(?:forced readonly|: critical)|I/O error, dev (?:nvme|sd|vd|xvd|md|dm-)\w{1,16}"
            r"|nvme nvme\d{1,3}: (?:Removing after probe failure|Disabling device|Device not ready; aborting)"
        ),
    ),
    (
        "link",
        LazyPattern(
            rf"{_NIC}.{{0,100}}(?:[Ll]ink (?:is )?(?:[Dd]own|DOWN)\b|link status definitely down|Fatal error detected)"
            r"|NETDEV WATCHDOG: "
        ),
    ),
)
_NO_FAULTS = LazyPattern(
    r"[Cc]ommand line: |\bno (?:fatal|uncorrect)|I/O error, dev (?:sr|fd|loop)"
    # ext4 repeats each day what it once counted, until the next fsck: print_daily_error_info() of fs/ext4/super.c.
    r"|EXT4-fs \(.{0,40}\): (?:error count since last fsck|(?:initial|last) error at)"
)


def kernel_fault(line: str) -> str:
    """The kind of a host's fault that a line of its kernel log shows, GPUs excepted; empty: it shows none.

    What was corrected, or recovered from, is no fault; nor is what was counted long ago, or a device that is merely
    empty.
    """
    line = line[:_LONGEST_LINE]
    if _NO_FAULTS.search(line):
        return ""
    return next((kind for kind, pattern in _KERNEL if pattern.search(line)), "")


# ------------------------------------------------------------------------------------------------------ by other hosts

_LOSSES = {
    "unreachable": ("lost", "none of its addresses answers"),
    "unknown": ("lost", "no heartbeat is received from it"),
    "frozen": ("lost", "the saferun process on it makes no progress"),
    "cut": ("link", "its network is cut"),
}
"""By the reason of the loss. Not ``gone``: saferun was killed there, which does not mean that the host is bad."""


def _lost(evidence: Evidence) -> list[HostFault]:
    """Hosts that are silent. If every other host is silent, the judging host is the one cut off."""
    lost = [host for host in evidence.hosts if host.lost_reason in _LOSSES]
    others = [host for host in evidence.hosts if host.label != evidence.host]
    if len(lost) == len(others) > 1:
        judging = next((host for host in evidence.hosts if host.label == evidence.host), None)
        reason = f"it reaches none of the other {len(others)} hosts"
        return [] if judging is None else [_fault(judging, "link", reason, lost[0].lost_message)]
    faults = []
    for host in lost:
        kind, reason = _LOSSES[host.lost_reason]
        faults.append(_fault(host, kind, reason, host.lost_message))
    return faults


def _of_cause(cause: Cause | None, hosts: Sequence[HostView]) -> list[HostFault]:
    """The faults of single hosts that the diagnosis found."""
    if cause is None or not cause.ranks:
        return []
    ranks = {*cause.ranks}
    theirs = [host for host in hosts if ranks & {*host.ranks}]
    if cause.class_name in {"gpu_hardware_error", "hang_gpu"}:
        return [_fault(host, "gpu", cause.message, cause.proof) for host in theirs]
    if cause.class_name == "network_cut" and len(theirs) == 1 and len(hosts) > 1:
        return [_fault(theirs[0], "link", cause.message, cause.proof)]
    return []


def _fault(host: HostView, kind: str, reason: str, proof: str = "") -> HostFault:
    return HostFault(host.label, kind, reason, host.host, _shown(proof))


def _shown(line: str) -> str:
    return line if len(line) <= _LONGEST_PROOF else f"{line[: _LONGEST_PROOF - 1]}…"


# ----------------------------------------------------------------------------------------------------------- by checks

_BY_CHECK: dict[tuple[str, str], str] = {
    ("clock", ""): "clock",
    ("compute", "gpu_hardware_error"): "gpu",
    ("compute", "machine_fault"): "machine",
    ("disk", "disk_full"): "file_system",
    ("fabric", "fabric_degraded"): "link",
    ("gpus", "gpu_fabric"): "gpu",
    ("gpus", "gpu_hardware_error"): "gpu",
    ("gpus", "missing_gpu"): "gpu",
    ("interfaces", "network_interface"): "link",
    ("kernel_log", "gpu_hardware_error"): "gpu",
    ("kernel_log", "machine_fault"): "machine",
    ("kernel_log", "file_system_error"): "file_system",
    ("links", "network_between_hosts"): "link",
    ("memory", "host_out_of_memory"): "memory",
    ("nic_errors", "network_interface"): "link",
    ("nic_errors", "fabric_degraded"): "link",
    ("storage", "file_system_error"): "file_system",
}
"""The kind of fault that a check's finding shows, by check and class. Settings, and GPUs in use by others, are none."""


_FAULT_IF_MINORITY = frozenset(
    {
        *(("gpus", "gpu_fabric"), ("gpus", "missing_gpu")),
        *(("interfaces", "network_interface"), ("memory", "host_out_of_memory")),
    }
)
"""At a launch, faults only on hosts that are a minority with them: a wrong setting shows on most hosts, as an
interface's name that none of them has."""
_ALWAYS_COMPARED = frozenset({("disk", "disk_full"), ("fabric", "fabric_degraded"), ("memory", "host_out_of_memory")})
"""The same also without a launch (``saferunctl health``), so that they are never a fault of a host alone: it may have
been built so, as with a port that has no cable, or a job that runs there may take the memory or fill the disk."""


def _of_findings(findings: Iterable[HostFinding], hosts: int, *, is_launch: bool = True) -> list[HostFault]:
    known = [(finding, (finding.check, finding.class_name)) for finding in findings]
    relative = _FAULT_IF_MINORITY | _ALWAYS_COMPARED if is_launch else _ALWAYS_COMPARED
    counts = {key: len({finding.label for finding, other in known if other == key}) for key in relative}
    doubtful = {key for key, count in counts.items() if not (hosts > 1 and _is_of_few(count, hosts))}
    return [
        HostFault(finding.label, _BY_CHECK[key], finding.message, finding.host, unusable=finding.unusable)
        for finding, key in known
        if key in _BY_CHECK and key not in doubtful
    ]
