"""Stacks from torch's worker server, which the hook opens on a Unix socket in ranks that use torch.distributed."""

from __future__ import annotations

import time

from saferun.captures.flight_recorder import NoAnswerError, ask_server
from saferun.captures.scene import UNPTRACEABLE_STATES, Process
from saferun.linux.procfs import read_stat

_PATIENCE_S = 1.0


def dump_by_worker_server(process: Process, deadline: float) -> bytes:
    """The answer of the server's ``dump_traceback``, which is faulthandler's text; empty without an answer.

    Args:
        process: the process.
        deadline: in monotonic seconds; it waits for one second at most in any case.
    """
    stat = read_stat(process.pid)
    if not process.hook_prefix or stat is None or stat.state in UNPTRACEABLE_STATES:
        return b""
    path = f"{process.hook_prefix}.{process.pid}.sock"
    try:
        return ask_server(path, "POST", "/handler/dump_traceback", min(deadline, time.monotonic() + _PATIENCE_S))
    except NoAnswerError:
        return b""
