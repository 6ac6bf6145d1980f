"""Hosts whose own hardware or system was found to be at fault: noted in the report, and in the file of --exclude-file.

The leader alone does both, since it knows the whole job. A file that cannot be written costs one line.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from saferun.diagnosis.host_fault import BadHost, HostFault
from saferun.launch.launch_context import LaunchContext
from saferun.supervisor.policy.faulty_hosts import FLAPPING_S

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Literal

    from saferun.files.file_stream import WriterAnswer

_MOST_NAMED = 8


def note_bad_hosts(
    context: LaunchContext, faults: Sequence[HostFault], *, attempt: int, found_by: Literal["checks", "failure"]
) -> None:
    """Note that hosts are bad; to be called on the leader, at any time. It neither raises nor waits for anything.

    The list of --exclude-file gets a host at once, or where the fault may pass, the second time within ``FLAPPING_S``.

    Args:
        context: the launch.
        faults: what is wrong with them.
        attempt: before or in which it was found, from 0.
        found_by: the checks before that attempt, or its failure.
    """
    context.guarded("note a bad host", _note, context, faults, attempt, found_by)


def _note(
    context: LaunchContext, faults: Sequence[HostFault], attempt: int, found_by: Literal["checks", "failure"]
) -> None:
    log = context.investigation.log
    bad: list[str] = []
    for fault in faults:
        host = fault.label or context.host
        row = BadHost(time.time(), attempt, host, fault.kind, fault.reason, found_by, fault.proof)
        before = log.last_seen_bad(row)
        is_new = log.add_bad_host(row)
        if is_new if not fault.may_pass else before is not None and row.time - before <= FLAPPING_S:
            # Behind a dot stands the number of one of several saferuns on a host: schedulers know no such name.
            bad.append(host.partition(".")[0])
    path = context.config.retry.exclude_file
    if path and bad:
        _add_to_list(context, path, list(dict.fromkeys(bad)))


def _add_to_list(context: LaunchContext, path: str, hosts: list[str]) -> None:
    shown = ", ".join(hosts[:_MOST_NAMED]) + (f" and {len(hosts) - _MOST_NAMED} more" * (len(hosts) > _MOST_NAMED))

    def on_answer(answer: WriterAnswer | None) -> None:
        if answer is None:
            context.warn(f"--exclude-file {path}: the file system does not answer; {shown} may not be in it")
        elif answer.error is not None:
            context.warn(f"--exclude-file {path}: {answer.error.strerror}; {shown} may not be in it")
        else:
            for host in answer.value[:_MOST_NAMED]:
                context.report(f"{host} is added to {path} (--exclude-file)")
            if len(answer.value) > _MOST_NAMED:
                context.report(f"{len(answer.value) - _MOST_NAMED} more are added to {path}")

    context.run_dir.files.ask("add_hosts", [path, hosts], on_answer)
