"""The stacks of every rank and its Python descendants: by py-spy first, then by other means.

py-spy stops the process if possible, and reads it without stopping otherwise: a tracer of a process in state T or D
blocks as long as that lasts. Native frames come last, of few processes, and never delay the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import repeat

from saferun.captures import py_spy
from saferun.captures.faulthandler_dump import dump_by_signal, threads_from_text
from saferun.captures.left_stopped import Resumer, resumed_if_killed
from saferun.captures.process_state import read_thread_states
from saferun.captures.ptrace import ptrace_denial, tracer_of
from saferun.captures.py_spy_json import threads_from_json
from saferun.captures.scene import UNPTRACEABLE_STATES, Process, Scene
from saferun.captures.tools import Steps, Tool, ToolEnd, find_tool, has_module, responds, run_steps
from saferun.captures.wire import DEAD_FILE_SYSTEM, NOT_READY
from saferun.captures.worker_server import dump_by_worker_server
from saferun.evidence.job_evidence import StackDump, ThreadStack
from saferun.linux.memory_limit import TOO_MUCH, limited_memory
from saferun.linux.procfs import mount_of, own_mounts
from saferun.linux.small_files import has_own_processes, read_link
from saferun.text.wording import NOT_PYTHON

_AT_ONCE = 4
_TIMEOUT_S = 3.0
_ATTEMPTS = 3
_NATIVE_AT_ONCE = 2
_NATIVE_TIMEOUT_S = 8.0
_NATIVE_AUTO_TIMEOUT_S = 1.5
"""That may be too short for a build of torch for GPUs, whose libraries have gigabytes of symbols."""
_NATIVE_LONG = 2
"""Of so many ranks they may take longer where it is certain that the job hangs: all at the same time."""
_NATIVE_RANKS_AUTO = 16
"""Native frames of more ranks than this are only taken on request."""
_NATIVE_REPRESENTATIVES = 3
_NATIVE_LEAST_S = 2.0
_UNLIKELY_TRIED = 16
_STOPPED_THREADS = 512
_PROGRAMS_TRIED = 4
_ANSWER_S = 1.5
"""A file system that takes longer to stat a program would block py-spy for too long."""
_SILENT_SERVERS = 3
_PYSTACK_LIVE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pystack_live.py")
# A Python stack that ends in one of these files explains the wait by itself.
_PLAIN_WAITS = frozenset(
    [
        *("connection.py", "distributed_c10d.py", "popen_fork.py", "queue.py", "selectors.py", "socket.py"),
        *("ssl.py", "subprocess.py", "threading.py"),
    ]
)
# So does a process that sleeps, or waits for a child, in one of these calls.
_PLAIN_CALLS = frozenset(
    [
        *("clock_nanosleep", "nanosleep", "pause", "wait4", "waitid"),
        # These end with EINTR when their thread is stopped (signal(7)), and it may not be prepared for that.
        *("io_getevents", "msgrcv", "msgsnd", "mq_timedreceive", "mq_timedsend", "rt_sigsuspend", "rt_sigtimedwait"),
        *("semop", "semtimedop"),
    ]
)


def capture_stacks(scene: Scene) -> None:
    """Take the stacks of all processes of the job that run Python."""
    # Whoever wanted them may have this process killed at any moment.
    with resumed_if_killed([process.pid for process in scene.processes]) as resumer:
        _Stacks(scene, resumer).take_all()


class _Stacks:
    """One round of stacks. ``_dumps`` has the stacks so far, by pid; ``_left`` why other processes have none yet."""

    def __init__(self, scene: Scene, resumer: Resumer) -> None:
        self._scene = scene
        self._resumer = resumer
        self._py_spy = find_tool("py-spy")
        self._stuck = ""  # the file system of the ranks' programs that does not respond
        self._dumps: dict[int, StackDump] = {}
        self._left: dict[int, str] = {}
        # A call that sleeps may end with EINTR when its thread is stopped, which a healthy job may not be prepared for.
        self._stops_none = scene.request.is_asked and scene.request.native != "always"
        self._by_pid = {process.pid: process for process in scene.processes}

    def take_all(self) -> None:
        likely = [process for process in self._scene.processes if process.is_rank or _may_be_python(process)]
        likely_pids = {process.pid for process in likely}
        unlikely = [process for process in self._scene.processes if process.pid not in likely_pids][:_UNLIKELY_TRIED]
        for process in likely:
            self._scene.begin("py_spy", process.key)
        for path in self._programs(likely):
            if not self._stuck and not responds(path, _ANSWER_S):
                self._stuck = _hang_text(path)
        if self._py_spy or self._stuck:
            work = [self._ask_py_spy(process, self._py_spy) for process in likely]
            # For interpreters embedded in other programs; failures for those without are not reported.
            work += [self._ask_py_spy(process, self._py_spy, silent=True) for process in unlikely]
            run_steps(work, at_once=_AT_ONCE, deadline=self._scene.deadline)
        else:
            for process in likely:
                self._fail("py_spy", process, time.monotonic(), "py-spy is not installed")
        self._use_what_is_left()
        for pid, failure in self._left.items():
            process = self._by_pid[pid]
            self._scene.emit(
                "stack", StackDump(process.rank, pid, process.is_rank, process.snapshot.name, "", (), failure)
            )
        self._take_native()

    @staticmethod
    def _programs(processes: list[Process]) -> list[str]:
        """The programs of these processes, and the interpreter that runs pystack."""
        programs = dict.fromkeys([sys.executable])
        for process in processes:
            programs[read_link(f"/proc/{process.pid}/exe")] = None
        return [path for path in programs if path.startswith("/")][:_PROGRAMS_TRIED]

    # ------------------------------------------------------------------------------------------------------- py-spy

    def _ask_py_spy(self, process: Process, program: str, *, silent: bool = False) -> Steps:
        started_at = time.monotonic()
        failure = ""
        flags: tuple[str, ...] = ()
        was_killed = is_traced = False
        for attempt in range(_ATTEMPTS):
            states = read_thread_states(process.pid)
            if self._stuck or not states or set(states.values()) <= {"Z", "X"}:
                failure = self._stuck or "the process has ended"
                break
            held = bool(UNPTRACEABLE_STATES & set(states.values()))
            # To stop a thread ends some calls that it sleeps in with EINTR, and what sleeps can be read as it is.
            sleeps = not attempt and set(states.values()) <= {"S", "I"}
            is_unstopped = self._stops_none or held or sleeps or was_killed or is_traced or attempt == _ATTEMPTS - 1
            flags = ("--nonblocking",) if is_unstopped else ()
            end = yield Tool(py_spy.argv_of(program, process.pid, *flags), _TIMEOUT_S)
            was_killed = end.was_killed
            if was_killed:
                self._resumer.tool_failed(process.pid)
            threads, failure = _threads_of(end, process.pid)
            if threads:
                self._keep("py_spy", process, "py-spy", threads, started_at, end.stdout)
                return
            if end.is_stuck:
                self._stuck = _hang_text(read_link(f"/proc/{process.pid}/exe") if end.is_started else program)
            # Whoever traces it already, as strace does, does not keep it from being read.
            is_traced = not flags and py_spy.is_denied(end) and tracer_of(process.pid) != 0
            if not is_traced and (why := self._why_no_other_try(end, process)):
                failure = why
                break
            if was_killed and flags and attempt:
                break  # a third time would take as long
        if not silent:
            self._fail("py_spy", process, started_at, failure)

    def _why_no_other_try(self, end: ToolEnd, process: Process) -> str:
        if not self._scene.left_s:
            return NOT_READY
        if self._stuck:
            return self._stuck
        if py_spy.is_denied(end):
            return ptrace_denial(process.pid)
        return f"{process.snapshot.name}{NOT_PYTHON}" if py_spy.is_no_python(end) else ""

    # ------------------------------------------------------------------------------------------------ what else is left

    def _use_what_is_left(self) -> None:
        self._each_by_pystack()
        if not self._scene.left_s:
            return
        left = [self._by_pid[pid] for pid in self._left]
        started_at = time.monotonic()
        if not self._scene.request.is_asked:
            for pid, text in dump_by_signal(left, self._scene.deadline).items():
                self._keep_text("faulthandler", "faulthandler", self._by_pid[pid], text, started_at)
        silent = 0
        for pid in tuple(self._left):
            process = self._by_pid[pid]
            if not process.hook_prefix or silent >= _SILENT_SERVERS or not self._scene.left_s:
                continue
            started_at = time.monotonic()
            text = dump_by_worker_server(process, self._scene.deadline)
            self._keep_text("worker_server", "worker server", process, text, started_at)
            silent += time.monotonic() - started_at > 0.5  # noqa: PLR2004 - a server responds in milliseconds or never

    def _keep_text(self, capture: str, tool: str, process: Process, text: bytes, started_at: float) -> None:
        threads = threads_from_text(text, process.pid)
        if threads:
            self._keep(capture, process, tool, threads, started_at, text, "txt")

    def _each_by_pystack(self) -> None:
        # If ptrace is denied, so it is to pystack, and it reads only Python processes either.
        may_help = [
            self._by_pid[pid]
            for pid, failure in self._left.items()
            if not failure.endswith((NOT_PYTHON, "has ended", NOT_READY)) and not failure.startswith("ptrace is denied")
        ]
        if may_help and not self._stuck and has_module("pystack"):
            work = (self._ask_pystack(process) for process in may_help)
            run_steps(work, at_once=_NATIVE_AT_ONCE, deadline=self._scene.deadline)

    def _ask_pystack(self, process: Process) -> Steps:
        started_at = time.monotonic()
        self._scene.begin("pystack", process.key)
        # -P: modules of this directory must not shadow Python's library.
        argv = (sys.executable, "-P", _PYSTACK_LIVE, str(process.pid))
        end = yield Tool((*argv, "--no-block"), _TIMEOUT_S)
        threads, failure = _threads_of(end, process.pid)
        if not threads and not end.was_killed and not py_spy.is_denied(end) and self._can_be_stopped(process):
            # A process that runs may change what is read of it meanwhile.
            end = yield Tool(argv, _TIMEOUT_S)
            if end.was_killed or end.code < 0:
                self._resumer.tool_failed(process.pid)
            threads, failure = _threads_of(end, process.pid)
        if threads:
            self._keep("pystack", process, "pystack", threads, started_at, end.stdout)
            return
        if py_spy.is_denied(end):
            failure = ptrace_denial(process.pid)
            self._left[process.pid] = failure
        self._scene.note("pystack", process.key, started_at, failure=failure)

    def _can_be_stopped(self, process: Process) -> bool:
        """Whether pystack can stop a process, a thread after the other, well before it would be killed."""
        if self._stops_none:
            return False
        states = read_thread_states(process.pid)
        return 0 < len(states) <= _STOPPED_THREADS and not UNPTRACEABLE_STATES & set(states.values())

    # ------------------------------------------------------------------------------------------------- native frames

    def _take_native(self) -> None:
        chosen = [process for process in self._native_candidates() if self._can_bear_native(process)]
        if not self._py_spy or not chosen or self._stuck or self._scene.left_s < _NATIVE_LEAST_S:
            return
        # py-spy reads every library of a process, uninterruptibly.
        if not all(responds(path, _ANSWER_S) for path in _libraries(process.pid for process in chosen)):
            return
        is_auto, long = self._scene.request.native == "auto", _NATIVE_LONG if self._scene.request.is_certain else 0
        timeouts = (
            _NATIVE_AUTO_TIMEOUT_S if is_auto and index >= long else _NATIVE_TIMEOUT_S for index in range(len(chosen))
        )
        work = map(self._ask_native, chosen, repeat(self._py_spy), timeouts)
        run_steps(work, at_once=_NATIVE_AT_ONCE, deadline=self._scene.deadline)

    def _native_candidates(self) -> list[Process]:
        wanted = self._scene.request.native
        if wanted == "always":
            return [self._by_pid[pid] for pid, dump in self._dumps.items() if dump.tool == "py-spy"]
        if wanted != "auto" or len(self._scene.request.targets) > _NATIVE_RANKS_AUTO:
            return []
        alike: dict[object, list[StackDump]] = {}
        for dump in sorted(self._dumps.values(), key=lambda dump: dump.rank):
            if dump.is_rank and dump.tool == "py-spy" and dump.threads[0].is_main and dump.threads[0].frames:
                alike.setdefault(dump.threads[0].frames, []).append(dump)
        # The smallest groups first: the outliers are what matters.
        groups = sorted(alike.values(), key=len)
        representatives = [group[0] for group in groups if self._is_puzzling(group[0])]
        return [self._by_pid[dump.pid] for dump in representatives[:_NATIVE_REPRESENTATIVES]]

    def _is_puzzling(self, dump: StackDump) -> bool:
        """Whether only native frames can explain what the main thread is doing."""
        snapshot = self._by_pid[dump.pid].snapshot
        innermost = dump.threads[0].frames[0]
        explained = (
            snapshot.waits_on or snapshot.syscall in _PLAIN_CALLS or os.path.basename(innermost.file) in _PLAIN_WAITS
        )
        return not explained

    def _can_bear_native(self, process: Process) -> bool:
        states = set(read_thread_states(process.pid).values())
        return bool(states) and not UNPTRACEABLE_STATES & states and not process.snapshot.tracer_pid

    def _ask_native(self, process: Process, program: str, timeout_s: float) -> Steps:
        started_at = time.monotonic()
        self._scene.begin("py_spy_native", process.key)
        end = yield Tool(py_spy.argv_of(program, process.pid, "--native"), timeout_s)
        if end.was_killed:
            self._resumer.tool_failed(process.pid)
        threads, failure = _threads_of(end, process.pid)
        if threads:
            self._keep("py_spy_native", process, "py-spy --native", threads, started_at, end.stdout)
        else:
            self._scene.note(
                "py_spy_native", process.key, started_at, failure=failure if self._scene.left_s else NOT_READY
            )

    # ------------------------------------------------------------------------------------------------------- results

    def _keep(
        self,
        capture: str,
        process: Process,
        tool: str,
        threads: tuple[ThreadStack, ...],
        started_at: float,
        content: bytes,
        extension: str = "json",
    ) -> None:
        dump = StackDump(process.rank, process.pid, process.is_rank, process.snapshot.name, tool, threads)
        self._scene.emit("stack", dump)
        self._left.pop(process.pid, None)
        self._dumps.setdefault(process.pid, dump)
        path = self._scene.write(capture, content, extension, process)
        self._scene.note(capture, process.key, started_at, path=path)

    def _fail(self, capture: str, process: Process, started_at: float, failure: str) -> None:
        self._left[process.pid] = failure
        self._scene.note(capture, process.key, started_at, failure=failure)


def _threads_of(end: ToolEnd, pid: int) -> tuple[tuple[ThreadStack, ...], str]:
    """The threads from a tool's output, or why there are none in one line."""
    if end.failure or end.code != 0:
        return (), py_spy.failure_text(end)
    try:
        with limited_memory():
            return threads_from_json(end.stdout, pid), ""
    except ValueError as error:
        return (), f"what it says cannot be read: {error}"
    except MemoryError:
        return (), TOO_MUCH


def _libraries(pids: Iterable[int]) -> list[str]:
    """One mapped file of the processes for each file system."""
    mounts = own_mounts()
    found: dict[str, str] = {}
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            for line in file if has_own_processes() else ():
                path = line.rstrip("\n").partition("/")[2]
                if path:
                    found.setdefault(mount_of(f"/{path}", mounts), f"/{path}")
    return list(found.values())[:_PROGRAMS_TRIED]


def _hang_text(path: str) -> str:
    return f"{DEAD_FILE_SYSTEM}{mount_of(path, own_mounts()) or path} does not answer"


def _may_be_python(process: Process) -> bool:
    name = os.path.basename(read_link(f"/proc/{process.pid}/exe")) or process.snapshot.name
    return name.startswith(("python", "pypy", "pt_"))
