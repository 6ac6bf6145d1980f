"""Evidence -> diagnosis. Pure.

``diagnose`` is the entry point. Crashes are judged in ``crash``, hangs in ``hang``; both are loaded when there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from saferun.model import ABORT_FAILURES

if TYPE_CHECKING:
    from saferun.evidence.diagnosis_values import Diagnosis
    from saferun.evidence.job_evidence import Evidence


def diagnose(evidence: Evidence) -> Diagnosis:
    """Name the cause of a failed or hanging attempt, the rank that it lies with, and what became of the others.

    Args:
        evidence: what is known. Where it hung and no rank failed by itself, the hang is judged; else the failure.
    """
    from saferun.diagnosis.crash import diagnose_crash
    from saferun.diagnosis.crash_cases import failed_by_itself

    reason = evidence.abort_reason
    is_lost = any(host.lost_reason for host in evidence.hosts) or (
        reason is not None and reason.reason not in ABORT_FAILURES
    )
    if evidence.hang is not None and not is_lost and not any(failed_by_itself(end) for end in evidence.ends):
        from saferun.diagnosis.hang import diagnose_hang

        return diagnose_hang(evidence)._replace(start=evidence.start)
    return diagnose_crash(evidence)._replace(start=evidence.start)
