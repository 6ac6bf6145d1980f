"""Which hosts another attempt is better off without, as the policy has it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.host_fault import HostFault
from saferun.evidence.job_evidence import HostView
from saferun.supervisor.policy.faulty_hosts import FaultyHost

__all__ = ["faulty_hosts"]

# What the script may have brought about, or what another host does not change.
_NOT_REPLACED = frozenset({"clock", "memory"})


def faulty_hosts(faults: Sequence[HostFault], hosts: Sequence[HostView]) -> tuple[FaultyHost, ...]:
    """The hosts that are at fault, and those that are lost, whatever the reason: they come to no other attempt.

    Args:
        faults: found by the evidence of the attempt.
        hosts: of the job.
    """
    lost = {host.host: host for host in hosts if host.lost_reason}
    found: dict[int, FaultyHost] = {}
    for fault in faults:
        if fault.host >= 0 and fault.kind not in _NOT_REPLACED:
            is_lost = fault.host in lost
            found.setdefault(
                fault.host,
                FaultyHost(fault.host, fault.label, fault.reason, may_pass=fault.may_pass, is_lost=is_lost),
            )
    for host in lost.values():
        why = host.lost_message or "it is lost"
        found.setdefault(host.host, FaultyHost(host.host, host.label, why, is_lost=True))
    return tuple(found.values())
