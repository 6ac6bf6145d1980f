"""Jobs of several hosts that tests of the diagnosis share."""

from __future__ import annotations

import signal

from saferun.evidence.diagnosis_values import Cause, Diagnosis
from saferun.evidence.job_evidence import Evidence
from tests.unit.host_samples import (
    RESET,
    captured,
    ended,
    host_evidence,
    traceback_of,
)


def cause_of(found: Diagnosis) -> Cause:
    assert found.cause is not None, found.headline
    return found.cause


def stopped(host: int, nproc: int = 2, **fields: object) -> Evidence:
    """A host whose ranks saferun stopped."""
    ends = [
        ended(rank, nproc, after_s=33.0, signum=signal.SIGTERM, stopped=True)
        for rank in range(host * nproc, (host + 1) * nproc)
    ]
    return host_evidence(host, nproc, ends=ends, capture=captured(host, nproc), **fields)  # type: ignore[arg-type]


def lost_peer(host: int, peer: int, after_s: float = 31.6, message: str = RESET) -> Evidence:
    """A host whose ranks lost their connections to another one."""
    ranks = (2 * host, 2 * host + 1)
    return host_evidence(
        host,
        ends=[ended(rank, 2, after_s=after_s, code=1) for rank in ranks],
        said={rank: traceback_of(message.format(host=peer + 1)) for rank in ranks},
    )
