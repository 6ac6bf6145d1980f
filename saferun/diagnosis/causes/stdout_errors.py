"""One failed rank as its stdout shows it, and what it printed after an error of which its end does not tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.asides import without_asides
from saferun.diagnosis.boxed_tracebacks import BOX_END
from saferun.diagnosis.causes.aborts_at_exit import LINES_AT_EXIT, NOISE
from saferun.diagnosis.causes.failure import (
    LAST_LINES,
    LINES_AFTER_CAUGHT,
    Failure,
    is_of_warning,
    own_lines,
    without_error,
)
from saferun.diagnosis.causes.going_on import is_about_end, takes_steps
from saferun.diagnosis.causes.reasons import gives_reason
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.diagnosis.tracebacks import PythonError, clean_lines, find_python_error
from saferun.evidence.job_evidence import RankOutput

_TRACEBACK = "Traceback (most recent call last):"
# What torch prints below the first line of its messages.
_OF_A_MESSAGE = ("Exception raised from ", ". This may indicate ")
_NCCL_LOG = LazyPattern(r"\bNCCL (?:WARN|INFO|TRACE|version)\b")


def _from_last_own(lines: list[str]) -> list[str]:
    """The lines from the last one of the program's own on; what such a line follows, the program had got over.

    A message that rich has broken into lines, and what torch puts below its own messages, belong together.
    """
    for index in range(max(len(lines) - 1 - LINES_AFTER_CAUGHT, 0), len(lines)):
        if lines[index].lstrip().startswith(BOX_END):
            return lines[index:]
    for index in range(len(lines) - 1, -1, -1):
        if not lines[index].startswith(_OF_A_MESSAGE) and own_lines(lines[index : index + 1]):
            return lines[index:]
    return lines


def read_stdout(failure: Failure, output: RankOutput) -> Failure:
    """The same failure as its stdout shows it: scripts print there why they exit, and so do loggers.

    Args:
        failure: of a rank that has exited by itself.
        output: what it wrote.
    """
    lines = output.last_stdout_lines
    if not any(_TRACEBACK in line for line in lines):
        lines = lines[-2 * LAST_LINES :]
    lines = tuple(line for line in lines if "NCCL " not in line or not _NCCL_LOG.search(line))
    error = find_python_error(lines)
    clean = clean_lines(lines)
    if error is not None and (
        error.is_aside or error.lines_after > LINES_AFTER_CAUGHT or not error.innermost.exception
    ):
        clean = without_error(error, clean)
        error = None
    clean = [line for line in clean if not NOISE.match(line)]
    if error is None:
        clean = _from_last_own(clean)
    return failure._replace(error=error, lines=tuple(clean), stdout_lines=())


def far_on_stdout(failure: Failure, output: RankOutput) -> Failure | None:
    """The same failure with an error on its stdout below which it has logged no more than its shutdown; else None.

    Args:
        failure: of a rank that has exited by itself.
        output: what it wrote.
    """
    error = find_python_error(output.last_stdout_lines)
    if error is None or error.is_aside or not error.innermost.exception:
        return None
    clean = clean_lines(output.last_stdout_lines)
    if error.lines_after <= LINES_AFTER_CAUGHT or not only_shuts_down(error, clean):
        return None
    if any(map(gives_reason, own_lines(failure.lines)[-1:])):
        return None
    return failure._replace(error=error, lines=tuple(without_error(error, clean)), stdout_lines=(), earlier=None)


def only_shuts_down(error: PythonError, clean: Sequence[str]) -> bool:
    """Whether a program has hardly printed more after an error than how it shuts down.

    Args:
        error: what it had printed.
        clean: all lines of that stream.
    """
    after = list(without_asides(clean[error.last.message_start + 1 :]))
    own = own_lines(after)
    if is_of_warning(error) or error.lines_after > LINES_AT_EXIT or len(own) > LINES_AFTER_CAUGHT:
        return False
    return not takes_steps(after) and all(is_about_end(error, line) for line in own[-1:])
