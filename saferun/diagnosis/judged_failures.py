"""One rank that ended badly: its failure, and the cause by all that it has printed. Pure."""

from __future__ import annotations

from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import (
    LINES_AFTER_CAUGHT,
    Failure,
    is_of_warning,
    own_lines,
    read_failure,
    shortened,
)
from saferun.diagnosis.causes.going_on import is_progress
from saferun.diagnosis.causes.reasons import is_of_its_own
from saferun.diagnosis.causes.stdout_errors import far_on_stdout, only_shuts_down, read_stdout
from saferun.diagnosis.job_hosts import Hosts
from saferun.diagnosis.tracebacks import PythonError, clean_lines
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import RankEnd

# A rank that exited, and of which nothing more is known.
_UNEXPLAINED = "python_exit"
# A connection of any kind.
_CONNECTION = "connection_lost"


def judged_failure(
    evidence: Evidence, end: RankEnd, output: RankOutput | None, hosts: Hosts | None = None
) -> tuple[Failure, Cause]:
    """The failure of a rank and its cause, by its stdout where nothing else explains it.

    In whichever stream a traceback stands by which a rank has lost another one, it explains its end better than
    nothing; a line that says so does where it is the last of the program's own. What a rank brings about alone is
    believed of a traceback only, and only where its stderr has no words of the program's own, for which of the two
    streams was written to last is not known.

    Args:
        evidence: what is known of all.
        end: how this rank ended.
        output: what it wrote.
        hosts: the hosts of the evidence.
    """
    failure, found = _judged(read_failure(evidence, end, output, hosts), output)
    return _with_line_of_stdout(failure), _doubted(failure, noted(failure, found), output)


def noted(failure: Failure, found: Cause) -> Cause:
    """A cause, with a note where its error is one of several, or has ended a thread only."""
    error = failure.error
    if error is None or found.proof not in {
        shortened(line.strip()) for block in error.blocks for line in block.message
    }:
        return found
    if error.of_group:
        return found._replace(message=f"{found.message} ({error.of_group} errors of an ExceptionGroup)")
    code = failure.end.status.code
    # What is lost is said of the rank, in whichever of its threads.
    if error.is_aside and code is not None and (found.class_name == _CONNECTION or role_of(found) is Role.CULPRIT):
        note = f"it ended a thread only; the process ended with exit code {code}"
        return found._replace(message=f"{found.message} ({note})")
    return found


def _doubted(failure: Failure, found: Cause, output: RankOutput | None) -> Cause:
    """A cause, with a note where the script may have handled its error and gone on: then it exits with its own code.

    Python exits with code 1 where nothing handles an exception. When the lines were written is not known, nor whether
    those that follow belong to the message.
    """
    error, code = failure.error, failure.end.status.code
    is_recorded = output is not None and bool(output.failure or output.error_message)
    if error is None or error.is_uncaught or error.is_aside or is_recorded or failure.signum or code in {None, 0, 1}:
        return found
    is_other = found.proof not in {shortened(line.strip()) for line in error.last.message}
    if role_of(found) is not Role.CULPRIT or not error.lines_after or is_other:
        return found
    note = f"printed before its last lines; it may not be why the process ended with exit code {code}"
    return found._replace(message=f"{found.message} ({note})")


def _with_line_of_stdout(failure: Failure) -> Failure:
    """The failure; where its error is a thread's and no words follow, those on stdout are shown, which may say why."""
    if failure.error is None or not failure.error.is_aside or failure.line_after:
        return failure
    return failure._replace(line_after=(own_lines(failure.stdout_lines) or [""])[-1])


def _judged(failure: Failure, output: RankOutput | None) -> tuple[Failure, Cause]:
    found = cause_of(failure)
    if found.class_name != _UNEXPLAINED:
        return failure, found
    # What was logged above an error of which other lines follow are no last words.
    above = failure.earlier.before if failure.earlier is not None else ""
    has_reason_lines = any(line != above for line in failure.own_last_lines)
    for other in _other_readings(failure, output):
        is_logged = other.error is not None and (other.error is failure.earlier or not is_of_warning(other.error))
        if not is_logged and has_reason_lines:
            # Why it ends they say, and it had printed the rest before.
            continue
        cause = cause_of(other)
        if role_of(cause) is not Role.CULPRIT and not (cause.class_name == _CONNECTION and _is_doubtful(other)):
            return other, cause
        has_earlier = _has_earlier(failure) and failure.end.status.code == 1
        if other.error is None or other.error is failure.earlier or has_earlier or has_reason_lines:
            continue
        if not is_of_warning(other.error) and other.error.lines_after <= LINES_AFTER_CAUGHT:
            return other, cause
    return failure, found


def _has_earlier(failure: Failure) -> bool:
    """Whether an error that may end a program stands before its last lines."""
    return failure.earlier is not None and not failure.earlier.ends_nothing


def _other_readings(failure: Failure, output: RankOutput | None) -> list[Failure]:
    """The failure by what it does not show at first: an error before its last lines, and its stdout.

    Python ends with exit code 1 by what it prints on stderr. With another code an error at the end of stdout explains
    more than one that stands before other lines on stderr.
    """
    others = []
    if failure.earlier is not None and _may_explain(failure, failure.earlier, output):
        others.append(failure._replace(error=failure.earlier, earlier=None))
    if output is not None and output.last_stdout_lines:
        far = far_on_stdout(failure, output)
        if far is not None and cause_of(far).class_name != _CONNECTION:
            others.append(far)
        printed = read_stdout(failure, output)
        # What stderr has as well explains nothing more.
        if printed.error is not None or not {*printed.closing_lines} <= {*failure.closing_lines}:
            is_nearer = printed.error is not None and failure.end.status.code != 1 and _has_earlier(failure)
            others.insert(0 if is_nearer else len(others), printed)
    return others


def _is_doubtful(failure: Failure) -> bool:
    """Whether the end of a rank does not show that its error has ended it: then a connection may be of any kind."""
    error = failure.error
    if error is None:
        return False
    return error.ends_nothing or (error.lines_after > LINES_AFTER_CAUGHT and failure.end.status.code != 1)


def _may_explain(failure: Failure, error: PythonError, output: RankOutput | None) -> bool:
    """Whether a rank that had printed an error before its last words may be another one's victim by that."""
    if error.ends_nothing:
        # It has ended before: only where it does not say why may what it lost be the reason.
        return all(map(is_progress, (*failure.own_last_lines, *own_lines(failure.stdout_lines))))
    if is_of_its_own(failure.line_after) and not is_progress(failure.line_after):
        return False
    if failure.end.status.code == 1:
        return True
    return output is not None and only_shuts_down(error, clean_lines(output.last_lines))
