"""The health of this host by itself, without a launch: the checks in a process of their own, within bounds of time."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from saferun.linux.poller import Poller
from saferun.preflight.check_process import HostChecks
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.health_record import HOST_RECORD, read_health_record, write_health_record
from saferun.preflight.results import SEVERITY, CheckResult

NO_RECORD = "none"


def check_host(
    *, storage: Sequence[str] = (), gpus: int = -1, full: bool = False, record: str = "", timeout_s: float = 30.0
) -> list[CheckResult]:
    """Check this host.

    Args:
        storage: paths that have to answer.
        gpus: how many GPUs the host has to have; -1: that is not known.
        full: whether to compute as well.
        record: the file with the counters of the previous run, which this run replaces; empty: root's, if this is root;
            ``NO_RECORD``: none.
        timeout_s: how long the checks may take, without the computation.

    Returns:
        The results, the worst first. A check that is late, or breaks, is skipped.
    """
    path = _record_path(record)
    earlier, since = read_health_record(path) if path else ((), 0.0)
    context = CheckContext(
        nproc=1,
        environ=dict(os.environ),
        spans_hosts=True,
        storage=tuple(map(os.path.abspath, storage)),
        python=sys.executable,
        vendor="auto",
        earlier=earlier,
        since=since,
        health="full" if full else "quick",
        gpus=gpus,
        is_of_host=True,
    )
    results = _run(context, timeout_s)
    counts = next((result.facts for result in results if result.name == "nic_errors"), ())
    if path and counts and (why := write_health_record(counts, path)):
        results.append(CheckResult("record", "skipped", f"the counters are not kept: {why}"))
    return sorted(results, key=lambda result: -SEVERITY.get(result.verdict, 0))


def _record_path(chosen: str) -> str:
    if chosen:
        return "" if chosen == NO_RECORD else os.path.abspath(chosen)
    return HOST_RECORD if os.geteuid() == 0 else ""


def _run(context: CheckContext, timeout_s: float) -> list[CheckResult]:
    """The results of the checks, as far as they have come in time."""
    poller, lost, done = Poller(), list[str](), list[bool]()
    checks = HostChecks(poller, on_done=lambda: done.append(True), warn=lost.append)
    checks.start(context, None, is_probed=False, beside=False, give_up_s=timeout_s)
    try:
        while not done:
            poller.wait(max((checks.deadline or 0.0) - time.monotonic(), 0.0) + 0.001)
            checks.tick(time.monotonic())
    finally:
        checks.close()
    return [*checks.results, *(CheckResult("checks", "skipped", line) for line in lost)]
