"""What the kernel has logged lately of broken hardware and file systems, where it may be read.

Errors of long ago may have been repaired. So only lines since the previous look count: of the same launch, or of
``saferunctl health``.
"""

from __future__ import annotations

import time

from saferun.preflight.checks.answers import ok, skipped, warning
from saferun.preflight.checks.context import CheckContext
from saferun.preflight.results import CheckResult
from saferun.text.wording import duration_text

# Each: to read the lines, and to judge them.
_BUDGET_S = 0.8
_MOST_LINES = 8192
_MOST_SHOWN = 3
_LONGEST_LINE = 160
# Links that flap are counted by another check.
_CLASSES = {"machine": "machine_fault", "file_system": "file_system_error"}
# The worst first.
_ORDER = ("gpu_hardware_error", "machine_fault", "file_system_error")
_HINTS = {
    "gpu_hardware_error": "reset the GPU or reboot the host before it is used again",
    "machine_fault": "take the host out of the job and have it repaired",
    "file_system_error": "check the disk and its file system (`dmesg`, `smartctl`)",
}


def check_kernel_log(context: CheckContext) -> CheckResult:
    """What the kernel has reported of this host's hardware since the previous look. It only warns."""
    if not context.since:
        return ok("there is no earlier check to compare the kernel log with")
    from saferun.captures.kernel_lines import tidy
    from saferun.captures.kernel_log import read_kernel_log
    from saferun.diagnosis.gpu_errors import error_in, failure_text
    from saferun.diagnosis.host_fault import kernel_fault

    log = read_kernel_log(
        context.since, time.monotonic() + _BUDGET_S, kmsg=context.path("dev/kmsg"), may_ask_journal=False
    )
    if log.failure:
        return skipped(log.failure)
    found: dict[str, list[str]] = {}
    until = time.monotonic() + _BUDGET_S
    # The newest first: a kernel that reports without end takes no more time than this from the other checks.
    for line in dict.fromkeys(map(tidy, log.lines[: -_MOST_LINES - 1 : -1])):
        if time.monotonic() > until:
            break
        error = error_in(line)
        if error is not None and error.is_fatal:
            what, _ = failure_text(error)
            of = f"GPU {error.pci}: " if error.pci and not error.is_switch else ""
            found.setdefault("gpu_hardware_error", []).append(f"{of}{what or line}")
        elif class_name := _CLASSES.get(kernel_fault(line)):
            found.setdefault(class_name, []).append(line)
    lasted = duration_text(max(time.time() - context.since, 0.0))
    if not found:
        return ok(f"the kernel has reported no fault in the last {lasted}")
    worst = min(found, key=_ORDER.index)
    lines = list(dict.fromkeys(line[:_LONGEST_LINE] for line in found[worst]))
    more = f" (and {len(lines) - _MOST_SHOWN} more)" if len(lines) > _MOST_SHOWN else ""
    message = f"the kernel has reported in the last {lasted}: {'; '.join(lines[:_MOST_SHOWN])}{more}"
    facts = [(name, str(len(some))) for name, some in found.items()]
    return warning(message, _HINTS[worst], facts, class_name=worst)
