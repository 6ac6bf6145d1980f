"""Errors of any call to a GPU that follow from a check of a kernel's own: most often an index out of range. Pure."""

from __future__ import annotations

import re

from saferun.diagnosis.causes.failure import LAST_LINES, Failure
from saferun.diagnosis.causes.texts import first_line, in_all
from saferun.diagnosis.lazy_patterns import LazyPattern

# The line of a kernel's thread, which the driver prints; after it every call to this GPU fails, each in its own words.
_KERNEL_CHECK = LazyPattern(
    r"^\S{1,300}\.(?:cuh?|hip|h|hpp|cpp|py):\d{1,6}: .{0,300}\bblock: \[\d.{0,40}thread: \[\d"
    r".{0,40}Assertion .{1,300} failed"
)
_AFTER_A_CHECK = LazyPattern(
    r"(?:CU|HIP)(?:BLAS|BLASLT|DNN|SOLVER|SPARSE|RAND)_STATUS"
    r"_(?:NOT_INITIALIZED|ALLOC_FAILED|EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)"
    r"|CUDNN_STATUS_EXECUTION_FAILED_\w{1,20}|CUFFT_(?:INTERNAL_ERROR|EXEC_FAILED|SETUP_FAILED)"
    r"|(?:CUDA|HIP) error: unspecified launch failure|\b(?:nccl|rccl)UnhandledCudaError\b|\bunhandled cuda error\b"
)
# What NCCL quotes of a call that failed for another reason.
_OTHER_FAILURE = LazyPattern(
    r"\b(?:[Cc]uda|HIP) failure (?:\d{1,4} )?'(?!device-side assert|unspecified launch failure)"
)


def after_check(failure: Failure) -> tuple[str, re.Match[str]] | None:
    """An error that any call to the GPU may end with once a kernel's check has failed, where one has, just above.

    A job that has gone on for many lines is no victim of it: a child process has printed it, say.
    """
    found = in_all(failure, _AFTER_A_CHECK)
    if found is None or in_all(failure, _OTHER_FAILURE) is not None:
        return None
    error = failure.error
    last = 2 * LAST_LINES if error is None else LAST_LINES + len(error.lines) + error.lines_after
    return found if first_line(_KERNEL_CHECK, failure.lines[-last:]) is not None else None
