"""The system calls of ranks in one second, counted by strace. Only on request: it slows them down meanwhile."""

from __future__ import annotations

import time

from saferun.captures.left_stopped import Resumer, resumed_if_killed
from saferun.captures.process_state import read_thread_states
from saferun.captures.ptrace import ptrace_denial
from saferun.captures.py_spy import is_denied
from saferun.captures.scene import UNPTRACEABLE_STATES, Process, Scene, one_line
from saferun.captures.tools import Steps, Tool, find_tool, run_steps
from saferun.captures.wire import NOT_READY

_RANKS_LIMIT = 8
_AT_ONCE = 8
_COUNTING_S = 1.0
_TIMEOUT_S = 4.0


def capture_strace(scene: Scene) -> None:
    """Write a table of system calls for at most eight ranks."""
    if not scene.request.strace:
        return
    program = find_tool("strace")
    if not program:
        scene.note("strace", (-1, 0), time.monotonic(), failure="strace is not installed")
        return
    ranks = [process for process in scene.processes if process.is_rank][:_RANKS_LIMIT]
    with resumed_if_killed([rank.pid for rank in ranks]) as resumer:
        work = (_count(scene, resumer, program, rank) for rank in ranks)
        run_steps(work, at_once=_AT_ONCE, deadline=scene.deadline)


def _count(scene: Scene, resumer: Resumer, program: str, process: Process) -> Steps:
    started_at = time.monotonic()
    scene.begin("strace", process.key)
    states = read_thread_states(process.pid)
    if not states:
        scene.note("strace", process.key, started_at, failure="the process is gone")
        return
    if UNPTRACEABLE_STATES & set(states.values()):
        scene.note("strace", process.key, started_at, failure="not in state T or D")
        return
    end = yield Tool((program, "-c", "-f", "-p", str(process.pid)), _TIMEOUT_S, _COUNTING_S)
    if end.was_killed:
        resumer.tool_failed(process.pid)
    path = failure = ""
    if not scene.left_s:
        failure = NOT_READY
    elif end.failure:
        failure = end.failure
    elif is_denied(end):
        failure = ptrace_denial(process.pid)
    elif b"% time" not in end.stderr:
        output = [line for line in end.stderr.splitlines() if not line.endswith((b" attached", b" detached"))]
        failure = one_line(b" ".join(output).decode(errors="replace")) or "no system call ended within a second"
    else:
        path = scene.write("strace", end.stderr, "txt", process)
    scene.note("strace", process.key, started_at, path=path, failure=failure)
