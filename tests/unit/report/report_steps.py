"""What tests of report.json and report.txt share."""

from __future__ import annotations

from saferun.evidence.job_evidence import OomKill
from saferun.report.report_json import Incident
from tests.unit.report.report_samples import (
    CORE,
    FILES,
    SEGFAULT,
    dead,
    evidence_of,
    sleeping,
)

HANG = Incident(
    "hang",
    0,
    1.7e9 + 300,
    evidence_of(),
    sleeping(8),
    "recovered",
    312.4,
    ("saferun: rank 3 sleeps", "hint: look"),
    f"{FILES}/node1/attempt_0/hang_1",
    "03:20:02",
)

CRASH = Incident(
    "failure",
    1,
    1.7e9 + 500,
    evidence_of()._replace(
        hang=None,
        ends=(dead(2, signum=11), dead(3, code=1)),
        outputs=(SEGFAULT.output,) if SEGFAULT.output else (),
        cores=(CORE, CORE._replace(rank=7, threads=(), failure="truncated")),
        oom=OomKill("cgroup", 64 << 30, 61 << 30, (4002,), 1, "/sys/fs/cgroup/memory.events"),
    ),
    SEGFAULT,
    "ended",
)
