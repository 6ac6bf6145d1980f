"""One rank that ended badly: its failure, and the cause by all that it has printed. Pure."""

from __future__ import annotations

from saferun.diagnosis.causes import Role, cause_of, role_of
from saferun.diagnosis.causes.failure import Failure, is_of_warning, read_failure, read_stdout
from saferun.diagnosis.job_hosts import Hosts
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Evidence, RankOutput
from saferun.model import RankEnd

# A rank that exited, and of which nothing more is known.
_UNEXPLAINED = "python_exit"


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
    failure = read_failure(evidence, end, output, hosts)
    found = cause_of(failure)
    if found.class_name != _UNEXPLAINED:
        return failure, found
    others = []
    if failure.earlier is not None:
        others.append(failure._replace(error=failure.earlier, earlier=None))
    if output is not None and output.last_stdout_lines:
        printed = read_stdout(failure, output)
        # What stderr has as well explains nothing more.
        if printed.error is not None or not {*printed.closing_lines} <= {*failure.closing_lines}:
            others.append(printed)
    for other in others:
        is_logged = other.error is not None and (other.error is failure.earlier or not is_of_warning(other.error))
        if not is_logged and failure.has_own_lines:
            # Why it ends they say, and it had printed the rest before.
            continue
        cause = cause_of(other)
        if role_of(cause) is not Role.CULPRIT:
            return other, cause
        if other.error is None or failure.earlier is not None or failure.has_own_lines:
            continue
        if not is_of_warning(other.error):
            return other, cause
    return failure, found
