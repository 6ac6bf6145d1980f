"""A check of a kernel's own that failed: every later call to that GPU fails, each in the words of its library."""

from __future__ import annotations

import pytest

from saferun.diagnosis import diagnose
from saferun.evidence.diagnosis_values import Cause
from saferun.model import ExitStatus
from tests.unit.diagnosis.test_causes import evidence_of

CHECKS = tuple(
    f"/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1146: indexSelectLargeIndex: block: [1,0,0], "
    f"thread: [{number},0,0] Assertion `srcIndex < srcSelectDimSize` failed."
    for number in range(32)
)
HEAD = ("Traceback (most recent call last):", '  File "/home/user/job/train.py", line 52, in step', "    model(batch)")
NO_HANDLE = "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
FOLLOWING = (
    NO_HANDLE,
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m, n, k)`",
    "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasGemmEx( handle, opa, opb, m, n, k)`",
    "RuntimeError: cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
    "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:268, unhandled cuda error, NCCL version 2.21.5",
    "RuntimeError: ncclUnhandledCudaError: Call to CUDA function failed.",
)


def found_in(*lines: str) -> Cause:
    cause = diagnose(evidence_of(ExitStatus(1, None), lines)).cause
    assert cause is not None
    return cause


@pytest.mark.parametrize("message", FOLLOWING)
def test_an_error_that_follows_from_a_kernels_check_is_that_check(message: str) -> None:
    """A smaller batch does not help against an index that is too large."""
    found = found_in(*CHECKS, *HEAD, message)
    assert found.class_name == "device_side_assert"
    assert found.message == "device-side assert: `srcIndex < srcSelectDimSize`"
    assert found.location == "train.py:52 in step"
    assert found_in(*HEAD, message).class_name != "device_side_assert"


@pytest.mark.parametrize(
    "before",
    [
        "checked block: [0] and thread: [1]: Assertion of the sample failed",
        "model.py:7: UserWarning: Assertion `x < y` failed",
        "assert index < size, 'index out of range'",
        f"INFO the evaluation of shard 7 said: {CHECKS[0]}",
    ],
)
def test_words_that_no_kernel_prints_are_no_check(before: str) -> None:
    assert found_in(before, *HEAD, NO_HANDLE).class_name == "cuda_error"


@pytest.mark.parametrize(
    "message",
    [
        "KeyError: 'labels'",
        "ValueError: unhandled type CUBLAS",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ],
)
def test_an_error_that_does_not_follow_from_a_kernels_check_is_its_own(message: str) -> None:
    """The lines may be those of a child process."""
    assert found_in(*CHECKS, *HEAD, message).class_name != "device_side_assert"


def test_a_job_that_went_on_after_a_kernels_check_does_not_end_because_of_it() -> None:
    """The lines are those of a child process: after its own failed check a process can use its GPU no more."""
    steps = tuple(f"step {number} loss 2.3" for number in range(200))
    for message in FOLLOWING:
        assert found_in(*CHECKS, *steps, *HEAD, message).class_name != "device_side_assert"
        assert found_in(*CHECKS, *steps[:20], *HEAD, message).class_name == "device_side_assert"


def test_an_error_of_nccls_that_quotes_another_failure_of_the_gpu_does_not_follow_from_a_kernels_check() -> None:
    lines = (*CHECKS, *HEAD, FOLLOWING[-2], "Last error:")
    full = found_in(*lines, "Cuda failure 'out of memory'")
    assert full.class_name == "cuda_out_of_memory"
    found = found_in(*lines, "Cuda failure 710 'device-side assert triggered'")
    assert found.class_name == "device_side_assert"


def test_a_library_that_cannot_be_initialized_has_no_memory_in_most_cases() -> None:
    for message in (NO_HANDLE, "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"):
        found = found_in(*HEAD, message)
        assert found.class_name == "cuda_error"
        assert "no memory left" in found.advice
        assert "CUDA_LAUNCH_BLOCKING=1" in found.advice
