"""The process that makes report.html: forked from the supervisor, which never waits for it without a limit.

It may hang with the file system, run out of memory or lack jinja2: then there is no page, and nothing else is lost. It
writes nothing itself; the writer gets the page as a file in memory.
"""

from __future__ import annotations

import gc
import json
import os
import resource

from saferun.errors import suppress
from saferun.files.hand_in import hand_in
from saferun.files.inbox import Outbox
from saferun.linux.bare_socket import Socket
from saferun.linux.memory_limit import be_killed_first, limit_memory
from saferun.model import JsonObject

MEMORY_BYTES = 512 << 20
"""Address space that a page may take, besides what the supervisor has."""
CPU_S = 60
_LINE_BYTES = 1 << 16
_HAND_IN_S = 10.0
_NICENESS = 10
_LONGEST_REASON = 200


def serve(connection: Socket, outbox: Outbox) -> None:
    """Import what a page takes, then make one for each line, and answer it.

    A line has ``run_dir``, the ``path`` of the page, and ``patience_s``, as of ``read_run``.

    Args:
        connection: the line to the supervisor.
        outbox: leads to the writer.
    """
    be_killed_first()
    limit_memory(MEMORY_BYTES)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    with suppress(OSError):
        os.nice(_NICENESS)
    reason = _prepare()
    rest = b""
    while chunk := connection.recv(_LINE_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            order = json.loads(line)
            answer: JsonObject = {"failed": reason}
            if not reason:
                answer = _make(str(order["run_dir"]), str(order["path"]), float(order["patience_s"]), outbox)
            connection.sendall(json.dumps(answer).encode() + b"\n")


def _prepare() -> str:
    """Import and compile everything. Returns why that is impossible; empty: it is not."""
    gc.disable()  # all of it stays
    try:
        from saferun.report.page import rendering, run_reading

        rendering.prepare()
        del run_reading
    except Exception as error:
        return _reason(error)
    finally:
        gc.enable()
    return ""


def _make(run_dir: str, path: str, patience_s: float, outbox: Outbox) -> JsonObject:
    from saferun.report.page.rendering import render_page
    from saferun.report.page.run_reading import read_run

    try:
        page = render_page(read_run(run_dir, patience_s=patience_s))
    except Exception as error:
        return {"failed": _reason(error)}
    if not hand_in(outbox, path, page, _HAND_IN_S):
        return {"failed": "the process that writes files does not take it"}
    return {"made": len(page)}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:_LONGEST_REASON]
