"""The host's clock, as far as one host can judge it; whether hosts agree is checked by the leader."""

from __future__ import annotations

import time

from saferun.linux.small_files import read_text
from saferun.preflight.checks.answers import ok, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult

# No host that runs this had an earlier day: the clock was never set, or its battery is empty. Certificates are not
# valid then, and files of such a time look older than everything.
_EARLIEST_S = 1_750_000_000  # June 2025


def check_clock(context: CheckContext) -> CheckResult:
    """What the clock says, and where it comes from. Read only.

    Source: Linux, Documentation/admin-guide/kernel-parameters.txt (clocksource).
    """
    now = time.time()
    source = read_text(context.path("sys/devices/system/clocksource/clocksource0/current_clocksource")).strip()
    facts = (("time", f"{now:.3f}"), *((("clocksource", source),) if source else ()))
    day = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(now))
    if now < _EARLIEST_S:
        message = f"the clock says {day} UTC, which cannot be"
        return warning(message, "set it (chronyc makestep, timedatectl set-ntp true)", facts)
    return ok(f"the clock says {day} UTC", facts)
