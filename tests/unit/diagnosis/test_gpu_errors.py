"""Lines of the kernel log about GPUs: what they say, and whose GPU they are about."""

from __future__ import annotations

import signal

import pytest

from saferun.diagnosis import diagnose
from saferun.diagnosis.gpu_errors import (
    APPLICATION,
    HARDWARE,
    INFORMATION,
    SXIDS,
    XIDS,
    GpuOwners,
    error_in,
    failure_text,
    pci_address,
)
from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.gpu_evidence import RankGpu
from saferun.evidence.job_evidence import Capture, Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd

LOST_PEER = (
    "Traceback (most recent call last):",
    '  File "/home/user/job/train.py", line 52, in step',
    "    dist.all_reduce(loss)",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, remote process exited, or a network error",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "Last error:",
    "socketProgressOpt: Call to recv from 172.16.0.4<33759> failed : Connection reset by peer",
)
GPUS = tuple(RankGpu(rank, f"0000:{bus:02x}:00.0") for rank, bus in enumerate((0x1B, 0x43, 0x52, 0x9D)))
OFF_THE_BUS = "NVRM: Xid (PCI:0000:{bus}:00): 79, GPU has fallen off the bus"


def end_of(rank: int, *, code: int = 0, signum: int = 0, at: float = 100.0, stopped: bool = False) -> RankEnd:
    status = ExitStatus(None, signum) if signum else ExitStatus(code, None)
    return RankEnd(rank, rank, 4000 + rank, status, at, 1.7e9 + at, stopped_by_us=stopped)


def evidence_of(ends: tuple[RankEnd, ...], kernel_lines: tuple[str, ...], gpus: tuple[RankGpu, ...] = GPUS) -> Evidence:
    outputs = tuple(RankOutput(end.rank, LOST_PEER if end.status.code == 1 else (), "", "", 0.0) for end in ends)
    return Evidence(
        "node1",
        90.0,
        ends,
        outputs,
        (),
        None,
        ranks=(0, 1, 2, 3),
        kernel_lines=kernel_lines,
        capture=Capture(gpus=gpus),
        script="train.py",
        cwd="/home/user/job",
    )


def cause_of(found: Diagnosis) -> Cause:
    assert found.cause is not None, found.headline
    return found.cause


# From leptonai/gpud#1174 and #1160, NVIDIA/NVSentinel#155, NVIDIA/open-gpu-kernel-modules#1150,
# ROCm/legacy-rocm-build#1886 and Bumblebee-Project/Bumblebee#677.
@pytest.mark.parametrize(
    ("line", "number", "pci", "is_fatal"),
    [
        (
            "NVRM: Xid (PCI:0019:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x00000000)",
            149,
            "0019:01:00",
            True,
        ),
        (
            "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)",
            145,
            "0018:01:00",
            False,
        ),
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", 79, "0000:44:00", True),
        (
            "kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3, Ch 00000001 caused by previous Xid 149",
            45,
            "0000:dc:00",
            False,
        ),
        (
            "amdgpu 0000:e3:00.0: amdgpu: uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!",
            0,
            "0000:e3:00",
            True,
        ),
        ("NVRM: Xid (PCI:0000:9b:00): 92, pid=1234, High single-bit ECC error rate", 92, "0000:9b:00", False),
        ("NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", 94, "0000:9b:00", True),
        ("NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101, intr 10000000", 31, "0000:01:00", False),
        ("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short", 20009, "0000:c3:00", False),
        ("nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 23001, Fatal, Link 12 Always Fatal", 23001, "0000:59:00", True),
        ("NVRM: fallen off the bus and is not responding to commands.", 79, "", True),
    ],
)  # fmt: skip
def test_lines_of_drivers_are_read(line: str, number: int, pci: str, is_fatal: bool) -> None:
    """Number, address, and whether the GPU or its link can no longer be used."""
    error = error_in(line)
    assert error is not None
    assert (error.number, error.pci, error.is_fatal) == (number, pci, is_fatal)


@pytest.mark.parametrize(
    "line", ["", "NVRM: loading NVIDIA UNIX Open Kernel Module", "amdgpu 0000:03:00.0: GPU reset begin!"]
)
def test_other_lines_are_none_of_a_broken_gpu(line: str) -> None:
    """A reset follows from something else."""
    assert error_in(line) is None


def test_the_catalogue_says_whose_fault_a_number_is() -> None:
    """What the program, and what the hardware brings about, and what is only reported."""
    assert {XIDS[number].blame for number in (13, 31, 43, 69, 137)} == {APPLICATION}
    assert {XIDS[number].blame for number in (46, 48, 64, 74, 79, 94, 95, 109, 110, 119, 120, 136, 140, 143)} == {
        HARDWARE
    }
    assert {XIDS[number].blame for number in (*range(144, 151), 155, 156, 157, 158, 171, 172)} == {HARDWARE}
    assert {XIDS[number].blame for number in (45, 63, 92, 121, 154)} == {INFORMATION}
    assert all(xid.meaning and xid.advice for xid in XIDS.values())


def test_the_catalogue_of_nvswitches_tells_what_is_only_reported_from_what_has_failed() -> None:
    """Most SXids are corrected errors, for which nobody needs to reset anything."""
    assert {SXIDS[number].blame for number in (11012, 19071, 20001, 22013, 10004, 20012)} == {INFORMATION}
    assert {SXIDS[number].blame for number in (11013, 12020, 20034, 22003, *range(23001, 23018), 24007)} == {HARDWARE}
    assert all(one.meaning and one.advice for one in SXIDS.values())


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("20034, Fatal, Link 30 LTSSM Fault Up", "an NVLink of an NVSwitch went down (SXid 20034)"),
        ("11012, Non-fatal, Link 3 ingress ECC", "corrected memory error of an NVSwitch (SXid 11012)"),
        ("23001, Fatal, Link 12", "an NVSwitch failed as a whole (SXid 23001)"),
        ("20009, Non-fatal, Link 28 RX Short Error Rate", "NVSwitch error that is not fatal (SXid 20009)"),
        ("29999, Fatal, Link 12 of a driver that is newer", "NVSwitch error (SXid 29999)"),
    ],
)
def test_an_sxid_is_explained_by_its_number(line: str, text: str) -> None:
    error = error_in(f"nvidia-nvswitch0: SXid (PCI:0000:59:00.0): {line}")
    assert error is not None
    assert failure_text(error)[0] == text


@pytest.mark.parametrize(
    ("text", "address"),
    [("00000000:3B:00.0", "0000:3b:00"), ("0000:3b:00", "0000:3b:00"), ("3B:00.0", "0000:3b:00"), ("?", ""), ("", "")],
)
def test_addresses_are_compared_in_one_form(text: str, address: str) -> None:
    """The driver, its library and sysfs write them in three ways."""
    assert pci_address(text) == address


# ------------------------------------------------------------------------------------------------------------ whose GPU


def test_the_gpu_of_another_rank_does_not_make_one_that_lost_its_peer_the_culprit() -> None:
    """The Xid is of rank 3, which saferun stopped; rank 1 only lost its connection to it."""
    ends = (end_of(1, code=1), end_of(0, signum=15, stopped=True), end_of(3, signum=9, at=101.0, stopped=True))
    found = diagnose(evidence_of(ends, (OFF_THE_BUS.format(bus="9d"),)))
    assert cause_of(found).class_name == "gpu_hardware_error"
    assert cause_of(found).ranks == (3,)
    assert "rank 3" in found.headline
    assert 1 in found.victims


def test_a_rank_whose_own_gpu_failed_is_the_culprit_though_it_says_that_it_lost_a_peer() -> None:
    """NCCL reports a broken NVLink as a lost peer."""
    line = "NVRM: Xid (PCI:0000:43:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406)"
    found = diagnose(evidence_of((end_of(1, code=1),), (line,), (GPUS[0], GPUS[2], GPUS[3])))
    assert cause_of(found).class_name == "gpu_hardware_error"
    assert cause_of(found).ranks == (1,)
    assert "Xid 149" in cause_of(found).message


def test_an_xid_counts_for_every_rank_where_nothing_is_known_of_their_gpus() -> None:
    """A host without the driver's library."""
    found = diagnose(evidence_of((end_of(1, code=1),), (OFF_THE_BUS.format(bus="43"),), ()))
    assert cause_of(found).class_name == "gpu_hardware_error"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2)",
        "NVRM: Xid (PCI:0000:43:00): 92, pid=4001, name=python3, High single-bit ECC error rate",
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate",
        "NVRM: Xid (PCI:0000:9d:00): 79, pid=4003, GPU has fallen off the bus",
    ],
)
def test_what_is_not_fatal_or_not_its_own_leaves_a_lost_peer_a_victim(line: str) -> None:
    """The last one names another rank's process."""
    ends = (end_of(1, code=1), end_of(3, signum=int(signal.SIGABRT), at=99.0))
    found = diagnose(evidence_of(ends, (line,), ()))
    assert cause_of(found).class_name == "abort"
    assert found.victims == (1,)


def test_a_fatal_error_of_an_nvswitch_is_the_cause_of_lost_peers() -> None:
    """It is nobody's GPU and everybody's."""
    line = "nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 23001, Fatal, Link 12 Always Fatal"
    found = diagnose(evidence_of((end_of(1, code=1),), (line,)))
    assert cause_of(found).class_name == "gpu_hardware_error"
    assert "SXid 23001" in cause_of(found).message


def test_a_dead_rank_has_the_gpu_that_none_of_the_living_has() -> None:
    """A rank that has died has no process on its GPU any more; local ranks take them in the order of addresses."""
    ends = tuple(end_of(rank, signum=9) for rank in range(4))
    owners = GpuOwners([(end.rank, end.pid) for end in ends], (GPUS[0], GPUS[1], GPUS[3]))
    error = error_in(OFF_THE_BUS.format(bus="52"))
    assert error is not None
    assert owners.rank_of(error) == 2
    assert [owners.may_be_of(error, rank) for rank in range(4)] == [False, False, True, False]


def test_two_dead_ranks_are_told_apart_by_the_order_of_the_gpus() -> None:
    """Rank 1's GPU lies between those of ranks 0 and 2."""
    ends = tuple(end_of(rank, signum=9) for rank in range(4))
    owners = GpuOwners([(end.rank, end.pid) for end in ends], (GPUS[0], GPUS[2]))
    error = error_in(OFF_THE_BUS.format(bus="43"))
    assert error is not None
    assert owners.rank_of(error) == 1
    mixed = GpuOwners([(end.rank, end.pid) for end in ends], (RankGpu(0, "0000:52:00.0"), RankGpu(2, "0000:1b:00.0")))
    assert mixed.rank_of(error) is None
    assert mixed.may_be_of(error, 3)


# ----------------------------------------------------------------------------------------------- GPUs of other jobs

FOREIGN = "NVRM: Xid (PCI:0000:9d:00): 79, pid=77777, name=python3, GPU has fallen off the bus"
STEP = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step')


@pytest.mark.parametrize(
    ("message", "class_name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda_out_of_memory"),
        ("torch.AcceleratorError: CUDA error: device-side assert triggered", "device_side_assert"),
        ("KeyError: 'RELATIONSHIP'", "python_exception"),
        ("RuntimeError: CUDA error: unspecified launch failure", "cuda_error"),
    ],
)
@pytest.mark.parametrize("gpus", [(), GPUS[:2]])
def test_a_gpu_of_another_jobs_process_is_not_the_cause(
    message: str, class_name: str, gpus: tuple[RankGpu, ...]
) -> None:
    """The kernel log is that of the whole host."""
    evidence = evidence_of((end_of(1, code=1),), (FOREIGN,), gpus)
    output = evidence.outputs[0]._replace(last_lines=(*STEP, message))
    assert cause_of(diagnose(evidence._replace(outputs=(output,)))).class_name == class_name


@pytest.mark.parametrize("message", ["torch.OutOfMemoryError: CUDA out of memory.", "KeyError: 'RELATIONSHIP'"])
def test_what_a_program_asked_for_is_no_fault_of_a_gpu_whose_rank_is_not_known(message: str) -> None:
    evidence = evidence_of((end_of(1, code=1),), (OFF_THE_BUS.format(bus="9d"),), ())
    output = evidence.outputs[0]._replace(last_lines=(*STEP, message))
    assert cause_of(diagnose(evidence._replace(outputs=(output,)))).class_name != "gpu_hardware_error"


def test_an_error_with_the_pid_of_a_containers_host_is_of_the_rank_that_is_known_to_have_that_gpu() -> None:
    """In the container the process has another number."""
    found = diagnose(evidence_of((end_of(3, code=1),), (FOREIGN,), GPUS))
    assert (cause_of(found).class_name, cause_of(found).ranks) == ("gpu_hardware_error", (3,))
    error = error_in(FOREIGN)
    assert error is not None
    owners = GpuOwners([(rank, 4000 + rank) for rank in range(4)], GPUS[:3])
    assert owners.rank_of(error) is None
    assert not any(owners.is_probably_of(error, rank) for rank in range(4))
    # Enough to suspect the host, not to name the cause.
    assert owners.may_be_of(error, 3)


@pytest.mark.parametrize("message", ["RuntimeError: HIP error: unknown error", "RuntimeError: HIPBLAS_STATUS_UNKNOWN"])
def test_an_error_of_hips_is_one_of_a_gpu(message: str) -> None:
    evidence = evidence_of((end_of(1, code=1),), (OFF_THE_BUS.format(bus="43"),), ())
    output = evidence.outputs[0]._replace(last_lines=(*STEP, message))
    assert cause_of(diagnose(evidence._replace(outputs=(output,)))).class_name == "gpu_hardware_error"
