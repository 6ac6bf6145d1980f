"""Runs checks side by side, each with its deadline; one that breaks or is late is skipped, with its reason."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from saferun.preflight.checks.context import Check, CheckContext
from saferun.preflight.results import HELD_BY_OLD_RANK, CheckResult

PATIENCE_S = 30.0
"""How long a retry waits for GPUs: the driver may still be giving back the memory of the previous attempt."""
STILL_S = 8.0
"""For how long what holds them may stay the same, unless it is known to be a rank of the previous attempt."""
_AGAIN_S = 0.5
_WAITED_FOR = "gpu_busy"


def run_checks(
    checks: Sequence[Check],
    context: CheckContext,
    report: Callable[[CheckResult], None],
    *,
    patience_s: float = PATIENCE_S,
    still_s: float = STILL_S,
) -> None:
    """Run checks side by side; returns when each has reported, or its time is over.

    Args:
        checks: what to run.
        context: what they are given.
        report: takes each result as it comes, never two at once.
        patience_s: how long GPUs that are busy are checked again, at a retry.
        still_s: the same where what holds them stays the same, and is not known to be a rank of the previous attempt.
    """
    lock = threading.Lock()
    pending = {check.name: check for check in checks}
    changed = threading.Condition(lock)
    began_at = time.monotonic()
    patient_until = began_at + (patience_s if context.attempt else 0.0)

    def run(check: Check) -> None:
        result = _checked(check, context)
        if result.class_name == _WAITED_FOR and result.transient and time.monotonic() < patient_until:
            with lock:
                # Its deadline is for one look; it has looked.
                deadlines[check.name] = patient_until + check.deadline_s
            result = _when_free(result, lambda: _checked(check, context), patient_until, still_s)
        with changed:
            if pending.pop(check.name, None) is not None:
                report(result)
            changed.notify_all()

    deadlines = {check.name: began_at + check.deadline_s for check in checks}
    for check in checks:
        try:
            threading.Thread(target=run, args=(check,), daemon=True).start()
        except RuntimeError:  # there can be no more
            run(check)
    with changed:
        while pending:
            now = time.monotonic()
            for name in [name for name in pending if deadlines[name] <= now]:
                late = pending.pop(name)
                message = f"it took longer than {late.deadline_s:g} s"
                report(CheckResult(name, "skipped", message, duration_s=now - began_at))
            if pending:
                changed.wait(max(min(deadlines[name] for name in pending) - now, 0.001))


def _when_free(
    result: CheckResult, check_again: Callable[[], CheckResult], patient_until: float, still_s: float
) -> CheckResult:
    """The last result: once the GPUs are free, or there is no use in waiting."""
    message, changed_at = result.message, time.monotonic()
    while result.class_name == _WAITED_FOR and result.transient and time.monotonic() < patient_until:
        is_known = any(name == HELD_BY_OLD_RANK for name, _ in result.facts)
        if not is_known and time.monotonic() - changed_at >= still_s:
            break  # another container's, which will not come free; what is being given back shrinks
        time.sleep(_AGAIN_S)
        result = check_again()
        if result.message != message:
            message, changed_at = result.message, time.monotonic()
    return result


def _checked(check: Check, context: CheckContext) -> CheckResult:
    began_at = time.monotonic()
    try:
        result = check.check(context)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        return CheckResult(check.name, "skipped", message[:300], duration_s=time.monotonic() - began_at)
    return result._replace(name=check.name, duration_s=time.monotonic() - began_at)
