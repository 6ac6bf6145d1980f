"""Native stacks of living processes that are not Python, by gdb, where a user asks for stacks.

gdb stops a process while it reads its stacks, usually for less than a second, and lets it go on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence

from saferun.captures.gdb import find_gdb, threads_from_gdb
from saferun.captures.left_stopped import resumed_if_killed
from saferun.captures.process_state import read_thread_states
from saferun.captures.ptrace import ptrace_denial
from saferun.captures.scene import UNPTRACEABLE_STATES
from saferun.evidence.job_evidence import StackDump
from saferun.linux.child_output import run_program
from saferun.linux.children import SpawnError
from saferun.text.wording import NOT_PYTHON

_TIMEOUT_S = 60.0
_LEAST_S = 1.0
_MOST_PROCESSES = 8
_KEPT_BYTES = 4 << 20
_COMMANDS = ("set pagination off", "set confirm off", "set debuginfod enabled off", "thread apply all bt 64")


def with_native_stacks(
    dumps: Sequence[StackDump], environ: Mapping[str, str], until: float = math.inf
) -> tuple[StackDump, ...]:
    """The dumps, with native stacks for the first processes that are not Python.

    Args:
        dumps: of all processes.
        environ: gdb's environment, which has no network to look for symbols in.
        until: when to stop, in monotonic seconds.
    """
    chosen = [dump for dump in dumps if not dump.threads and dump.failure.endswith(NOT_PYTHON)][:_MOST_PROCESSES]
    return tuple(_read(dump, environ, until) if dump in chosen else dump for dump in dumps)


def _read(dump: StackDump, environ: Mapping[str, str], until: float) -> StackDump:
    timeout_s = min(_TIMEOUT_S, until - time.monotonic())
    if timeout_s < _LEAST_S:
        return dump._replace(failure=f"{dump.failure}, and there was no time for its native stacks")
    gdb = find_gdb()
    if not gdb:
        return dump._replace(failure=f"{dump.failure}, and its native stacks need gdb, which is not installed")
    states = set(read_thread_states(dump.pid).values())
    if not states:
        return dump._replace(failure="the process has ended")
    if held := UNPTRACEABLE_STATES & states:
        # gdb would wait for it, and leave it stopped when it is killed for that.
        return dump._replace(
            failure=f"{dump.failure}, and gdb cannot stop it while a thread of it is in state {min(held)}"
        )
    options = [word for command in _COMMANDS for word in ("-ex", command)]
    own = {name: value for name, value in environ.items() if name != "DEBUGINFOD_URLS"}
    try:
        with resumed_if_killed([dump.pid]) as resumer:
            output, status = run_program(
                [gdb, "-nx", "-batch", *options, "-p", str(dump.pid)],
                own,
                timeout_s,
                errors=True,
                kept_bytes=_KEPT_BYTES,
            )
            if status is None or status.signum:
                resumer.tool_failed(dump.pid)
    except SpawnError as error:
        return dump._replace(failure=f"gdb cannot be started: {os.strerror(error.errno)}")
    text = output.decode(errors="replace")
    threads = threads_from_gdb(text, dump.pid)
    if threads:
        return dump._replace(threads=threads, tool="gdb", failure="")
    if "ptrace" in text or "attach" in text:
        return dump._replace(failure=ptrace_denial(dump.pid))
    return dump._replace(failure=f"{dump.failure}, and gdb read no stacks of it")
