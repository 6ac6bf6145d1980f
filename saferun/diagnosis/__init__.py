"""Evidence -> diagnosis. Pure.

``diagnose`` is the entry point. Crashes are judged in ``crash``, hangs in ``hang``; both are loaded when there is one.
What has a similar name here:

``crash``, ``crash_cases``, ``judged_failures``, ``causes``
    Why an attempt failed; which failed rank explains the others; one rank alone; the rules for its cause.
``hang``, ``hang_classes``, ``rank_waits``, ``wait_rules``
    Why nothing moves; the classes of causes and their advice; who waits in what; the rules for one rank.
``collectives``, ``mismatched_calls``, ``diverging_calls``
    Flight Recorders compared; different calls under one number; the last Python calls compared (``--trace-calls``).
``job_end``, ``job_hosts``, ``host_fault``, ``network_faults``
    Ends that are no rank's failure; which rank is on which host; whether one is bad; what is wrong between hosts.
``timeouts``, ``call_timeouts``
    What is said of ranks that waited too long; how long a call may last.
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
