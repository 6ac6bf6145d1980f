"""Hosts whose own hardware or system was found to be at fault: noted in the report, and in the file of --exclude-file.

The leader alone does both, since it knows the whole job. A file that cannot be written costs one line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from saferun.diagnosis.host_fault import BadHost, HostFault
from saferun.launch.launch_context import LaunchContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from saferun.files.file_stream import WriterAnswer

FLAPPING_S = 300.0
"""A fault that may pass shows a bad host when it comes again within so many seconds."""


def note_bad_host(
    context: LaunchContext, fault: HostFault, *, attempt: int, found_by: Literal["checks", "failure"]
) -> None:
    """Note that a host is bad; to be called on the leader, at any time. It neither raises nor waits for anything.

    The list of --exclude-file gets the host at once, or where the fault may pass, the second time within
    ``FLAPPING_S``.

    Args:
        context: the launch.
        fault: what is wrong with it.
        attempt: before or in which it was found, from 0.
        found_by: the checks before that attempt, or its failure.
    """
    row = BadHost(time.time(), attempt, fault.label or context.host, fault.kind, fault.reason, found_by, fault.proof)
    context.guarded("note a bad host", _note, context, fault, row)


def note_bad_hosts(
    context: LaunchContext, faults: Sequence[HostFault], *, attempt: int, found_by: Literal["checks", "failure"]
) -> None:
    """The same for several."""
    for fault in faults:
        note_bad_host(context, fault, attempt=attempt, found_by=found_by)


def _note(context: LaunchContext, fault: HostFault, row: BadHost) -> None:
    log = context.investigation.log
    before = log.last_seen_bad(row)
    is_new = log.add_bad_host(row)
    path = context.config.retry.exclude_file
    if path and (is_new if not fault.may_pass else before is not None and row.time - before <= FLAPPING_S):
        _add_to_list(context, path, row.host)


def _add_to_list(context: LaunchContext, path: str, host: str) -> None:
    def on_answer(answer: WriterAnswer | None) -> None:
        if answer is None:
            context.warn(f"--exclude-file {path}: the file system does not answer; {host} may not be in it")
        elif answer.error is not None:
            context.warn(f"--exclude-file {path}: {answer.error.strerror}; {host} is not in it")
        elif answer.value:
            context.report(f"{host} is added to {path} (--exclude-file)")

    context.run_dir.files.ask("add_host", [path, host], on_answer)
