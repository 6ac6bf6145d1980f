"""Whether a process aborted as an exception was ending it: objects are destroyed, threads still run. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.lazy_patterns import LazyPattern, first_match
from saferun.diagnosis.log_levels import is_of_logger, is_of_module
from saferun.diagnosis.message_end import ABORTS
from saferun.diagnosis.recorded_exception import RecordedException
from saferun.diagnosis.tracebacks import PythonError, find_cpp_error

LINES_AT_EXIT = 60
"""What may come after the traceback that ends a program: what is printed at exit."""
# A thread of C++ was still running when the process ended.
_THREAD_RUNS = "terminate called without an active exception"
_FATAL = "Fatal Python error:"
# The lines with which torch ends its messages about GPUs.
_OF_GPU_MESSAGES = LazyPattern(
    r"(?:(?:CUDA|HIP) kernel errors might |For debugging consider passing |Compile with `TORCH_USE_|Search for `"
    r"|Device-side assertion|Exception raised from )"
)
# What the destructors of torch's objects raise of a GPU whose driver was shut down, or of an allocator that is gone.
OF_SHUTDOWN = LazyPattern(
    r"\bdriver shutting down\b|^invalid device pointer: |\bcontext is destroyed\b|\binvalid device context\b"
    r"|cudaErrorCudartUnloading|hipErrorDeinitialized|CUDA_ERROR_DEINITIALIZED"
)
NOISE = LazyPattern(r"\s{0,8}(?:frame #\d|#\d{1,3} |Extension modules:|<omitting python|C\+\+ CapturedTraceback:)")


def aborts_below(error: PythonError, clean: Sequence[str], recorded: RecordedException) -> bool:
    """Whether a traceback that reaches up to the module, and was not logged, is the last before an abort of shutdown.

    A program may have caught it, and gone on with its output on stdout: another abort says itself what ended it. Where
    the exception was recorded as the one that ended the program, any abort, and other lines between, are of its end.

    Args:
        error: the last exception.
        clean: the lines of stderr, cleaned.
        recorded: what is known of the exception that ended the program.
    """
    below = clean[error.last_message + 1 :]
    end = next((index for index, line in enumerate(below) if line.startswith((*ABORTS, _FATAL))), len(below))
    if recorded.is_of(error.last.frames, error.last.message):
        return end <= LINES_AT_EXIT
    own = (line for line in below[:end] if line and not NOISE.match(line) and not _OF_GPU_MESSAGES.match(line))
    is_last = next(own, None) is None and is_of_module(error.last.frames) and not is_of_logger(error.before)
    return is_last and _is_of_shutdown(below[end:])


def _is_of_shutdown(lines: Sequence[str]) -> bool:
    """Whether these lines, from an abort on, show that the process was ending already."""
    cpp_error = find_cpp_error(lines)
    # Of what faulthandler prints the caller sees whether Python was over.
    return any(line.startswith((_THREAD_RUNS, _FATAL)) for line in lines[:1]) or (
        cpp_error is not None and first_match(OF_SHUTDOWN, cpp_error.message) is not None
    )
