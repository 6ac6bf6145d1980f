"""Runs captures, each in a separate process, and forwards their findings as they arrive.

A capture that crashes, or never returns from a driver, only loses its own evidence. They are forked from a process with
a single thread, so that they share nothing but what was imported before.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from saferun.captures.all_captures import CAPTURES, CaptureStep
from saferun.captures.process_state import FAMILY_LIMIT, tree_snapshots
from saferun.captures.scene import Emit, Process, Scene
from saferun.captures.waiting import Ends
from saferun.captures.wire import NOT_READY, CaptureRequest, CoreRequest, CoresFound, Done, LibraryLog, encode
from saferun.evidence.job_evidence import CaptureNote, CoreDump, OomKill
from saferun.linux.children import reset_signals
from saferun.linux.descriptors import open_null
from saferun.linux.memory_limit import be_killed_first, limit_memory
from saferun.linux.prctl import die_with_parent
from saferun.model import Value, signal_name

_PROCESSES_LIMIT = 2048
READING_CALLS_BYTES = 1 << 30
"""How much address space the reading of last calls may take."""
_END_WAIT_S = 0.2
_WRAP_UP_S = 0.4
"""How long before the end captures have to return, to report what they could not do."""


class _Child(Value):
    name: str
    pid: int
    fd: int
    started_at: float


def run_request(request: CaptureRequest | CoreRequest, write: Callable[[bytes], None], started_at: float) -> None:
    """Run a request within its budget, and write the results as they arrive; the last line is ``done``.

    Args:
        request: what to capture.
        write: called with whole lines of ``wire``.
        started_at: when the budget began, in monotonic seconds.
    """
    ends_at = started_at + request.budget_s
    if isinstance(request, CoreRequest):
        steps: list[tuple[str, Callable[[Emit], None]]] = []
        if request.dead:
            steps.append(("cores", lambda emit: _examine(request, emit)))
        if request.recorders:
            steps.append(("flight_recorder", lambda emit: _read_recorders(request, emit, ends_at - _WRAP_UP_S)))
        if request.calls:
            steps.append(("last_calls", lambda emit: _read_last_calls(request, emit)))
        _run_in_parallel(steps, write, ends_at)
    else:
        _run_live(request, write, ends_at)
    write(encode("done", Done(round(time.monotonic() - started_at, 3))))


def _run_live(request: CaptureRequest, write: Callable[[bytes], None], ends_at: float) -> None:
    def emit(kind: str, value: object) -> None:
        write(encode(kind, value))

    processes = _take_snapshots(request, emit)
    wrap_up_s = min(_WRAP_UP_S, request.budget_s / 5)
    scene = Scene(request, processes, ends_at - wrap_up_s, emit)
    for is_late in (False, True):
        steps = [
            (step.name, _bound(step, scene))
            for step in CAPTURES
            if step.is_late is is_late and (not step.wanted_by or getattr(request, step.wanted_by))
        ]
        _run_in_parallel(steps, write, ends_at)


def _bound(step: CaptureStep, scene: Scene) -> Callable[[Emit], None]:
    def run(emit: Emit) -> None:
        if step.memory_bytes:
            limit_memory(step.memory_bytes)
        step.run(scene._replace(emit=emit))

    return run


def _take_snapshots(request: CaptureRequest, emit: Emit) -> tuple[Process, ...]:
    """Take snapshots of every rank and its descendants before any tool touches them, ranks first."""
    ends = Ends()
    ranks: list[Process] = []
    others: list[Process] = []
    for target in request.targets[:_PROCESSES_LIMIT]:
        for snapshot in tree_snapshots(target.rank, target.pid, FAMILY_LIMIT, ends):
            process = Process(target.rank, snapshot.pid, snapshot.is_rank, target.hook_prefix, snapshot)
            (ranks if snapshot.is_rank else others).append(process)
            emit("snapshot", snapshot)
    return tuple(ranks + others)[:_PROCESSES_LIMIT]


def _examine(request: CoreRequest, emit: Emit) -> None:
    from saferun.captures.cores import Unwritten, examine_cores

    for found in examine_cores(request):
        if isinstance(found, CoreDump):
            emit("core", found)
        elif isinstance(found, CoresFound):
            emit("cores_found", found)
        elif isinstance(found, OomKill):
            emit("oom", found)
        elif isinstance(found, LibraryLog):
            emit("library_log", found)
        elif isinstance(found, Unwritten):
            emit("unwritten", found.name)
        else:
            emit("kernel_line", found)


def _read_recorders(request: CoreRequest, emit: Emit, deadline: float) -> None:
    from saferun.captures.recorder_dumps import READING_BYTES, read_dumps

    limit_memory(READING_BYTES)
    for found in read_dumps(request.recorders, request.since, deadline):
        emit("note" if isinstance(found, CaptureNote) else "collectives", found)


def _read_last_calls(request: CoreRequest, emit: Emit) -> None:
    from saferun.captures.last_calls import read_dead

    limit_memory(READING_CALLS_BYTES)
    read_dead(request.calls, emit)


# -------------------------------------------------------------------------------------------------------- the processes


def _run_in_parallel(
    steps: list[tuple[str, Callable[[Emit], None]]], write: Callable[[bytes], None], ends_at: float
) -> None:
    """Run each step in a separate process until all have ended or the deadline has passed."""
    children = _start_all(steps, write, ends_at)
    poll = select.poll()
    for fd in children:
        poll.register(fd, select.POLLIN)
    rests = dict.fromkeys(children, b"")
    while children:
        left_s = ends_at - time.monotonic()
        if left_s <= 0:
            break
        for fd, _ in poll.poll(left_s * 1000 + 1):
            chunk = os.read(fd, 1 << 18)
            if not chunk:
                poll.unregister(fd)
                _end(children.pop(fd), write)
                continue
            whole, newline, rests[fd] = (rests[fd] + chunk).rpartition(b"\n")
            if whole:
                write(whole + newline)
    for child in children.values():
        # Timed out: what it had begun is reported as unfinished.
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)
        os.close(child.fd)


def _start_all(
    steps: list[tuple[str, Callable[[Emit], None]]], write: Callable[[bytes], None], ends_at: float
) -> dict[int, _Child]:
    children: dict[int, _Child] = {}
    for name, run in steps:
        failure = NOT_READY
        if time.monotonic() < ends_at:
            try:
                child = _start(name, run, tuple(children))
                children[child.fd] = child
                continue
            except OSError as error:
                failure = f"it cannot be started: {error.strerror}"
        write(encode("note", CaptureNote(name, -1, 0, "", 0.0, failure)))
    return children


def _start(name: str, run: Callable[[Emit], None], inherited: tuple[int, ...]) -> _Child:
    read_end, write_end = os.pipe()
    me = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return _Child(name, pid, read_end, time.monotonic())
    code = 1
    try:
        die_with_parent(me)
        reset_signals(signal.pthread_sigmask(signal.SIG_BLOCK, ()), is_program=False)
        os.setsid()
        be_killed_first()
        # Drop the standard output, so that the reader sees the end of results however long this process lives.
        null = open_null()
        os.dup2(null, 1)
        for fd in (read_end, *inherited):
            os.close(fd)
        run(_emitter(write_end))
        # The results are complete, even if a thread that a driver blocks keeps the process alive.
        os.close(write_end)
        code = 0
    except BaseException as error:
        with suppress(BaseException):
            _emitter(write_end)("note", CaptureNote(name, -1, 0, "", 0.0, f"{type(error).__name__}: {error}"))
    finally:
        os._exit(code)


def _emitter(fd: int) -> Emit:
    # A capture may have threads, and a long line needs several writes.
    lock = threading.Lock()

    def emit(kind: str, value: object) -> None:
        content = encode(kind, value)
        with lock:
            while content:
                content = content[os.write(fd, content) :]

    return emit


def _end(child: _Child, write: Callable[[bytes], None]) -> None:
    os.close(child.fd)
    give_up_at = time.monotonic() + _END_WAIT_S
    pid, status = os.waitpid(child.pid, os.WNOHANG)
    while not pid and time.monotonic() < give_up_at:
        time.sleep(0.001)
        pid, status = os.waitpid(child.pid, os.WNOHANG)
    if pid and os.WIFSIGNALED(status):
        elapsed_s = round(time.monotonic() - child.started_at, 3)
        failure = f"it was killed by {signal_name(os.WTERMSIG(status))}"
        write(encode("note", CaptureNote(child.name, -1, 0, "", elapsed_s, failure)))
