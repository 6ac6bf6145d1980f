"""GPU errors that are about the set-up: their advice is not to run the job once more without asynchronous launches."""

from __future__ import annotations

import pytest

from saferun.diagnosis.causes import cause_of
from saferun.diagnosis.causes.failure import read_failure
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import ExitStatus, RankEnd

TRACEBACK = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step', "    f()")
IN_NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, unhandled cuda error, NCCL version 2.21.5",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Last error:",
)
SYNCHRONOUS = ("CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL")


def found_in(*lines: str, signum: int | None = None) -> Cause:
    status = ExitStatus(None, signum) if signum else ExitStatus(1, None)
    end = RankEnd(1, 1, 4001, status, 100.0, 1.7e9, stopped_by_us=False)
    output = RankOutput(1, lines, "", "", 0.0)
    evidence = Evidence(
        "node1", 90.0, (end,), (output,), (), None, ranks=(0, 1), script="train.py", cwd="/home/user/job"
    )
    return cause_of(read_failure(evidence, end, output))


@pytest.mark.parametrize(
    ("message", "class_name", "words"),
    [
        ((*IN_NCCL, "Cuda failure 'named symbol not found'"), "cuda_error", "build of NCCL"),
        (
            (*IN_NCCL, "Cuda failure 209 'no kernel image is available for execution on the device'"),
            "cuda_error",
            "build of NCCL",
        ),
        (
            (*IN_NCCL, "Cuda failure 217 'peer access is not supported between these two devices'"),
            "cuda_error",
            "NCCL_P2P_DISABLE=1",
        ),
        (("RuntimeError: HIP error: invalid device function",), "hip_error", "PYTORCH_ROCM_ARCH"),
        (("RuntimeError: HIP error: no kernel image is available for execution on the device",), "hip_error", "HSA_"),
        (("RuntimeError: Triton Error [CUDA]: device kernel image is invalid",), "cuda_error", "TRITON_CACHE_DIR"),
        (("RuntimeError: CUDA error: invalid device function",), "cuda_error", "architecture"),
        (
            ("RuntimeError: CUDA error: the remote procedural call to the MPS server failed",),
            "cuda_error",
            "MPS daemon",
        ),
        (
            ("RuntimeError: CUDA error: MPS client failed to connect to the MPS control daemon or the MPS server",),
            "cuda_error",
            "MPS daemon",
        ),
        (
            ("RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 805: MPS client failed to connect",),
            "missing_gpu",
            "MPS daemon",
        ),
    ],
)
def test_what_a_set_up_lacks_is_not_looked_for_with_synchronous_launches(
    message: tuple[str, ...], class_name: str, words: str
) -> None:
    """Such a call fails where it is made: what helps is another build, a variable or a daemon."""
    found = found_in(*TRACEBACK, *message)
    assert found.class_name == class_name
    assert words in found.advice
    assert not any(word in found.advice for word in SYNCHRONOUS)


def test_rocblas_without_a_library_for_the_gpu_has_no_kernel_for_it() -> None:
    """It aborts with that message, which no exception explains."""
    line = "rocBLAS error: Cannot read /opt/rocm/lib/rocblas/TensileLibrary.dat: Illegal seek for GPU arch : gfx1031"
    found = found_in(line, signum=6)
    assert (found.class_name, found.message) == ("hip_error", "the program has no kernel image for this GPU")
    assert "HSA_OVERRIDE_GFX_VERSION" in found.advice


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("RuntimeError: CUDA error: unspecified launch failure", "CUDA_LAUNCH_BLOCKING"),
        ("RuntimeError: HIP error: unspecified launch failure", "AMD_SERIALIZE_KERNEL"),
        ("RuntimeError: Triton Error [CUDA]: misaligned address", "CUDA_LAUNCH_BLOCKING"),
    ],
)
def test_a_kernel_that_failed_is_still_looked_for_with_synchronous_launches(line: str, words: str) -> None:
    assert words in found_in(*TRACEBACK, line).advice
