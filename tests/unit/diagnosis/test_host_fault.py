"""Whether a host's own hardware or system is at fault: what counts, and what does not."""

from __future__ import annotations

from typing import Any

import pytest

from saferun.diagnosis.host_fault import KINDS, HostFault, HostFinding, found_faults, host_faults, kernel_fault
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.gpu_evidence import RankGpu
from saferun.evidence.job_evidence import Capture, Evidence, HostView, OomKill

OFF_THE_BUS = "NVRM: Xid (PCI:0000:43:00): 79, pid=101, name=python, GPU has fallen off the bus."
SWITCH = "nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 20034, Fatal, Link 12 LTSSM Fault Up"
READ_ONLY = "EXT4-fs (nvme0n1p2): Remounting filesystem read-only"
LINK_DOWN = "mlx5_core 0000:12:00.0 hsn0: Link down"
MACHINE = "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 4: b200000000070f0f"
OF_HOST, OF_CGROUP = (OomKill(scope, 0, 0, (4000,), 1, "/proc/vmstat") for scope in ("host", "cgroup"))


def job(**of_host_2: Any) -> Evidence:
    """A failed job of two ranks a host, in which only the third host shows something."""
    views = [
        HostView(number, f"node{number + 1}", (2 * number, 2 * number + 1), has_evidence=True) for number in range(4)
    ]
    views[2] = views[2]._replace(**of_host_2)
    return Evidence("node1", 0.0, (), (), (), None, hosts=tuple(views))


def concluded(class_name: str, *ranks: int, message: str = "it failed") -> Diagnosis:
    """A diagnosis with a cause of this class."""
    return Diagnosis("it failed", None, None, (), (), (), cause=Cause(class_name, message, ranks, "", ""))


def kinds(found: tuple[HostFault, ...]) -> list[tuple[str, str]]:
    """Who, and what of."""
    return [(fault.label, fault.kind) for fault in found]


# --------------------------------------------------------------------------------------------- by a host's own evidence


@pytest.mark.parametrize(
    ("shown", "cause", "kind"),
    [
        ({"kernel_lines": (OFF_THE_BUS,)}, concluded("connection_lost", 1), "gpu"),
        ({"kernel_lines": (SWITCH,)}, concluded("nccl_timeout", 0), "gpu"),
        ({"kernel_lines": (MACHINE,)}, concluded("segmentation_fault", 4), "machine"),
        ({"kernel_lines": (READ_ONLY,)}, concluded("python_exception", 4), "file_system"),
        ({"kernel_lines": (LINK_DOWN,)}, concluded("connection_lost", 0), "link"),
        ({"kernel_lines": (LINK_DOWN,)}, concluded("hang_stuck_collective"), "link"),
        ({"oom": OF_HOST}, concluded("host_oom_kill", 4), "memory"),
        ({"abandoned_ranks": (5,)}, concluded("connection_lost", 0), "stuck"),
        ({"lost_reason": "unreachable", "has_evidence": False}, concluded("host_lost", 4, 5), "lost"),
        ({"lost_reason": "unknown", "has_evidence": False}, concluded("host_lost", 4, 5), "lost"),
        ({"lost_reason": "frozen", "has_evidence": False}, concluded("host_lost", 4, 5), "lost"),
        ({"lost_reason": "cut", "has_evidence": False}, concluded("network_cut", 4, 5), "link"),
        ({}, concluded("gpu_hardware_error", 5), "gpu"),
        ({}, concluded("hang_gpu", 5), "gpu"),
        ({}, concluded("network_cut", 4, 5), "link"),
    ],
)
def test_a_host_s_own_fault_is_told_with_its_kind(shown: dict[str, Any], cause: Diagnosis, kind: str) -> None:
    """Each kind of evidence by itself, whatever the ranks of other hosts said."""
    [fault] = host_faults(job(**shown), cause)
    assert (fault.label, fault.host, fault.kind) == ("node3", 2, kind)
    assert fault.reason
    assert not fault.reason.endswith(".")


@pytest.mark.parametrize(
    ("shown", "cause"),
    [
        ({}, concluded("python_exception", 4)),
        ({}, concluded("import_error", 4, 5)),
        ({}, concluded("cuda_out_of_memory", 4)),
        ({}, concluded("missing_gpu", 4)),
        ({}, concluded("unknown")),
        ({"oom": OF_CGROUP}, concluded("host_oom_kill", 4)),
        # The OOM killer was at work, and the job failed of something else.
        ({"oom": OF_HOST}, concluded("python_exception", 0)),
        # Links may flap while a job fails of its own code.
        ({"kernel_lines": (LINK_DOWN,)}, concluded("python_exception", 4)),
        ({"kernel_lines": ("NVRM: Xid (PCI:0000:43:00): 31, pid=101, Ch 1",)}, concluded("cuda_error", 4)),
        ({"kernel_lines": ("NVRM: Xid (PCI:0000:43:00): 63, pid=101, Row Remapper",)}, concluded("unknown")),
        # Somebody has killed its saferun.
        ({"lost_reason": "gone", "has_evidence": False}, concluded("host_lost", 4, 5)),
    ],
)
def test_what_a_program_or_a_person_did_is_no_host_s_fault(shown: dict[str, Any], cause: Diagnosis) -> None:
    """To leave a host out for a bug in the script would cost the job one host after the other."""
    assert host_faults(job(**shown), cause) == ()


def test_the_gpu_of_another_job_on_the_same_host_does_not_count() -> None:
    evidence = job(kernel_lines=(OFF_THE_BUS,))
    used = (RankGpu(4, "0000:1b:00.0"), RankGpu(5, "0000:52:00.0"))
    evidence = evidence._replace(capture=Capture(gpus=used))
    assert host_faults(evidence, concluded("connection_lost", 1)) == ()
    mine = evidence._replace(capture=Capture(gpus=(*used[:1], RankGpu(5, "0000:43:00.0"))))
    assert kinds(host_faults(mine, concluded("connection_lost", 1))) == [("node3", "gpu")]


def test_what_half_of_the_hosts_have_alike_is_no_host_s_own_fault() -> None:
    """A storage server that hangs leaves ranks that cannot be killed everywhere."""
    evidence = job()
    hosts = [host._replace(abandoned_ranks=host.ranks[:1]) for host in evidence.hosts]
    for bad in (hosts, (*hosts[:2], *evidence.hosts[2:])):
        assert host_faults(evidence._replace(hosts=tuple(bad)), concluded("connection_lost")) == ()
    # Two GPUs that fail are two GPUs that have failed.
    dead = [host._replace(kernel_lines=(OFF_THE_BUS,)) for host in evidence.hosts]
    assert len(host_faults(evidence._replace(hosts=tuple(dead)), concluded("unknown"))) == len(dead)


def test_a_host_that_loses_all_others_is_cut_off_itself() -> None:
    """It judges, and would blame each of them."""
    evidence = job()
    lost = [host._replace(lost_reason="unreachable", lost_message="no answer") for host in evidence.hosts[1:]]
    found = host_faults(evidence._replace(hosts=(evidence.hosts[0], *lost)), concluded("network_cut"))
    assert kinds(found) == [("node1", "link")]


def test_a_failed_nvswitch_is_named_with_its_address() -> None:
    (found,) = host_faults(job(kernel_lines=(SWITCH,)), concluded("nccl_timeout", 0))
    assert found.reason.endswith("an NVLink of NVSwitch 0000:59:00 went down (SXid 20034)")


def test_the_worst_comes_first_and_each_kind_once() -> None:
    evidence = job(kernel_lines=(LINK_DOWN, READ_ONLY, READ_ONLY, OFF_THE_BUS, SWITCH))
    found = host_faults(evidence, concluded("connection_lost"))
    assert kinds(found) == [("node3", "gpu"), ("node3", "file_system"), ("node3", "link")]
    assert found[0].proof == OFF_THE_BUS
    assert [fault.may_pass for fault in found] == [False, False, True]


def test_a_job_of_one_host_has_its_evidence_in_other_fields() -> None:
    evidence = Evidence("node1", 0.0, (), (), (), None, ranks=(0, 1), kernel_lines=(OFF_THE_BUS,))
    assert kinds(host_faults(evidence, concluded("cuda_error", 0))) == [("node1", "gpu")]
    assert host_faults(evidence._replace(kernel_lines=()), concluded("cuda_error", 0)) == ()


def test_a_long_kernel_log_of_hostile_lines_is_read_within_bounds() -> None:
    line = "\x1b[2J" + OFF_THE_BUS + " I/O error, dev nvme0n1" * 5000
    found = host_faults(job(kernel_lines=(line,) * 9000), concluded("unknown"))
    assert found
    assert all(len(fault.reason) < 300 and len(fault.proof) <= 200 for fault in found)


# --------------------------------------------------------------------------------------------------------- kernel lines


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("machine", MACHINE),
        ("machine", "{1}[Hardware Error]: event severity: fatal"),
        ("machine", "EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"),
        ("machine", "MCE: Killing python:4711 due to hardware memory corruption fault at 7f0000000000"),
        ("machine", "pcieport 0000:80:01.0: AER: Uncorrected (Fatal) error received: 0000:81:00.0"),
        (
            "machine",
            "pcieport 0000:80:01.0: AER: Multiple Uncorrectable (Fatal) error message received from 0000:81:00.0",
        ),
        (
            "machine",
            "pcieport 0000:80:01.0: AER: Uncorrected (Fatal) error received: 0000:81:00.0, after a Non-Fatal one",
        ),
        ("machine", "Kernel panic - not syncing: Fatal exception"),
        ("machine", "NMI watchdog: Watchdog detected hard LOCKUP on cpu 12"),
        ("file_system", READ_ONLY),
        ("file_system", "EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2: comm python: reading directory"),
        ("file_system", "XFS (nvme1n1): Filesystem has been shut down due to log error (0x2)."),
        ("file_system", "BTRFS info (device sdb): forced readonly"),
        ("file_system", "blk_update_request: I/O error, dev nvme0n1, sector 2048 op 0x0:(READ) flags 0x0"),
        ("file_system", "nvme nvme0: Removing after probe failure status: -19"),
        ("link", LINK_DOWN),
        ("link", "bnxt_en 0000:5e:00.0 ens2f0np0: NIC Link is Down"),
        ("link", "bond0: (slave eth1): link status definitely down, disabling slave"),
        ("link", "NETDEV WATCHDOG: eth0 (ixgbe): transmit queue 3 timed out"),
    ],
)
def test_a_kernel_line_that_shows_a_broken_host_is_known(kind: str, line: str) -> None:
    assert kernel_fault(line) == kind


@pytest.mark.parametrize(
    "line",
    [
        "Command line: BOOT_IMAGE=/vmlinuz panic=1 mce=off",
        "mce: [Hardware Error]: Machine check events logged",
        "{2}[Hardware Error]: event severity: corrected",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        "pcieport 0000:80:01.0: AER: Corrected error received: 0000:81:00.0",
        "pcieport 0000:3a:00.0: AER: Uncorrected (Non-Fatal) error received: 0000:3b:00.0",
        "pcieport 0000:3a:00.0: AER: Multiple Uncorrectable (Non-Fatal) error message received from 0000:3b:00.0",
        "pcieport 0000:3a:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
        "EXT4-fs (sda1): error count since last fsck: 4",
        "EXT4-fs (sda1): initial error at time 1571302101: ext4_journal_check_start:61",
        "EXT4-fs (sda1): last error at time 1571302101: ext4_journal_check_start:61",
        "blk_update_request: I/O error, dev fd0, sector 0 op 0x0:(READ) flags 0x0",
        "blk_update_request: I/O error, dev sr0, sector 0",
        "mlx5_core 0000:12:00.0 hsn0: Link up",
        "docker0: port 1(veth12ab34c) entered disabled state",
        "EXT4-fs (sda1): mounted filesystem with ordered data mode. Quota mode: none.",
        "nvme nvme0: 8/0/0 default/read/poll queues",
        "nfs: server filer not responding, still trying",
        "python[4711]: segfault at 0 ip 0000000000000000 sp 00007ffd error 14",
        "Out of memory: Killed process 4711 (python)",
        "Out of memory (oom_kill_allocating_task): Killed process 4711 (python)",
        OFF_THE_BUS,
        "",
    ],
)
def test_what_healthy_hosts_log_too_shows_nothing(line: str) -> None:
    """Floppy drives that are not there, corrected errors, errors of the past, containers that come and go."""
    assert kernel_fault(line) == ""


# --------------------------------------------------------------------------------------------------------------- checks


def finding(check: str, class_name: str, *hosts: int) -> list[HostFinding]:
    """What a check found on these hosts."""
    return [HostFinding(f"node{host + 1}", check, class_name, "it is bad", host) for host in hosts]


@pytest.mark.parametrize(
    ("check", "class_name", "kind"),
    [
        ("gpus", "gpu_hardware_error", "gpu"),
        ("gpus", "missing_gpu", "gpu"),
        ("gpus", "gpu_fabric", "gpu"),
        ("fabric", "fabric_degraded", "link"),
        ("interfaces", "network_interface", "link"),
        ("links", "network_between_hosts", "link"),
        ("nic_errors", "network_interface", "link"),
        ("storage", "file_system_error", "file_system"),
        ("disk", "disk_full", "file_system"),
        ("kernel_log", "machine_fault", "machine"),
        ("memory", "host_out_of_memory", "memory"),
        ("clock", "", "clock"),
        ("compute", "gpu_hardware_error", "gpu"),
    ],
)
def test_what_a_check_finds_of_one_host_is_that_host_s_fault(check: str, class_name: str, kind: str) -> None:
    assert kinds(found_faults(finding(check, class_name, 2), 4)) == [("node3", kind)]
    assert kinds(host_faults(job(), None, finding(check, class_name, 2))) == [("node3", kind)]


@pytest.mark.parametrize(
    ("check", "class_name"),
    [
        ("gpus", "gpu_busy"),
        ("links", ""),
        ("open_files", "too_many_open_files"),
        ("ports", "port_in_use"),
        ("versions", ""),
        ("", ""),
    ],
)
def test_settings_and_other_programs_are_no_host_s_fault(check: str, class_name: str) -> None:
    assert found_faults(finding(check, class_name, 2), 4) == ()


@pytest.mark.parametrize(
    ("check", "class_name"),
    [
        *(("gpus", "gpu_fabric"), ("gpus", "missing_gpu")),
        *(("interfaces", "network_interface"), ("memory", "host_out_of_memory")),
    ],
)
def test_what_a_wrong_setting_looks_like_counts_only_in_comparison(check: str, class_name: str) -> None:
    """More ranks than GPUs on all hosts, or on the only one, is a mistake in the command line."""
    assert found_faults(finding(check, class_name, 0, 1, 2, 3), 4) == ()
    assert found_faults(finding(check, class_name, 0), 1) == ()
    assert kinds(found_faults(finding(check, class_name, 0), 2)) == [("node1", KINDS[_index(check)])]


@pytest.mark.parametrize(
    ("check", "class_name"),
    [("fabric", "fabric_degraded"), ("memory", "host_out_of_memory"), ("disk", "disk_full")],
)
def test_a_host_by_itself_is_not_blamed_for_how_it_is_built_or_what_runs_there(check: str, class_name: str) -> None:
    """A scheduler would take it out of use: ports without a cable, memory that a job took, a /tmp that it filled."""
    assert found_faults(finding(check, class_name, 0), 1, is_launch=False) == ()
    assert found_faults(finding("gpus", "gpu_hardware_error", 0), 1, is_launch=False) != ()


def _index(check: str) -> int:
    return {"gpus": 0, "interfaces": 4, "memory": 6}[check]


def test_storage_that_hangs_everywhere_is_the_server_s_fault() -> None:
    assert found_faults(finding("storage", "file_system_error", 0, 1), 2) == ()
    assert kinds(found_faults(finding("storage", "file_system_error", 1), 2)) == [("node2", "file_system")]
    assert kinds(found_faults(finding("storage", "file_system_error", 0), 1)) == [("node1", "file_system")]
