"""The stacks in cores: by pystack; by gdb if that is missing or requested, with py-spy for Python's calls."""

from __future__ import annotations

import os
import resource
from collections.abc import Generator, Sequence
from contextlib import suppress

from saferun.captures.gdb import SIGNAL_HANDLER, find_gdb, gdb_tool, threads_from_gdb, with_python_calls
from saferun.captures.py_spy import failure_text
from saferun.captures.py_spy_json import threads_from_json
from saferun.captures.pystack_core import is_pystack_here, pystack_tool, threads_from_pystack
from saferun.captures.scene import one_line
from saferun.captures.tools import Steps, Tool, ToolEnd, find_tool, run_steps
from saferun.evidence.job_evidence import Frame, ThreadStack
from saferun.linux.core_notes import CoreNotes
from saferun.linux.memory_limit import TOO_MUCH, limited_memory
from saferun.model import Value, signal_name

_PYSTACK_S = 60.0
_GDB_S = 120.0
_PY_SPY_S = 20.0
# pystack takes 50 to 200 MB per core, gdb 700.
_AT_ONCE = 4
# py-spy takes as much memory as the core's size.
_PY_SPY_BYTES = 2 << 30
# All of them map the core, and every library that the process had loaded: those of CUDA are 5 GB.
_TOOL_BYTES = 16 << 30
_TRAMPOLINES = frozenset({SIGNAL_HANDLER, "__restore_rt", "__kernel_rt_sigreturn"})
_RAISERS = ("raise", "gsignal", "pthread_kill", "__pthread_kill", "__GI_raise", "kill", "faulthandler_fatal_error")
_HANDLER_FRAMES = 40
_NAMELESS = frozenset({"", "???", "_start", "__clone3", "clone3", "start_thread"})


class CoreJob(Value):
    """A core to be read, as a descriptor: its path may lead to another file by now.

    ``executable`` is empty if it is to be found in the core.
    """

    fd: int
    notes: CoreNotes
    executable: str = ""

    def read_by(self, tool: Tool) -> Tool:
        """A tool that gets the core as ``path``."""
        return tool._replace(keep=(self.fd,), memory_bytes=_TOOL_BYTES + self.notes.size_bytes)

    @property
    def path(self) -> str:
        """The core's path for a tool."""
        return f"/proc/self/fd/{self.fd}"


class CoreReading(Value):
    """The result of reading a core.

    ``threads`` begins with the crashed one. ``failure`` says in one line why the result is incomplete. ``output`` is
    the tools' own output, if it has more than the stacks.
    """

    threads: tuple[ThreadStack, ...] = ()
    tool: str = ""
    failure: str = ""
    output: str = ""

    @property
    def is_taken(self) -> bool:
        """Whether the location of the crash is known."""
        return bool(self.threads) and any(frame.function not in _NAMELESS for frame in self.threads[0].frames)


def read_cores(jobs: Sequence[CoreJob], deadline: float, *, gdb: bool = False) -> list[CoreReading]:
    """Read cores, a few at a time.

    Args:
        jobs: the cores.
        deadline: in monotonic seconds.
        gdb: whether to run gdb even if pystack succeeds.
    """
    # A tool that crashes on a broken core must not leave a core itself.
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # No tool is to fetch debugging information from servers.
    os.environ.pop("DEBUGINFOD_URLS", None)
    readings = [CoreReading() for _ in jobs]
    if is_pystack_here():
        run_steps((_ask_pystack(jobs, readings, i) for i in range(len(jobs))), at_once=_AT_ONCE, deadline=deadline)
    else:
        readings = [CoreReading(failure="pystack is not installed") for _ in jobs]
    for index, job in enumerate(jobs):
        if job.notes.is_cut_off and not readings[index].is_taken:
            readings[index] = CoreReading(failure=_truncation_text(job.notes))
    # No tool can read truncated cores, and gdb takes long to find out.
    rest = [i for i, job in enumerate(jobs) if gdb or not (readings[i].is_taken or job.notes.is_cut_off)]
    run_steps((_ask_others(jobs, readings, index, gdb=gdb) for index in rest), at_once=1, deadline=deadline)
    return readings


def _ask_pystack(jobs: Sequence[CoreJob], readings: list[CoreReading], index: int) -> Steps:
    job = jobs[index]
    end = yield job.read_by(pystack_tool(job.path, job.executable or job.notes.executable, _PYSTACK_S))
    if end.failure or end.code:
        readings[index] = CoreReading(failure=f"pystack: {_tool_failure(end)}")
        return
    try:
        with limited_memory():
            threads = crashed_first(threads_from_pystack(end.stdout), job.notes)
        readings[index] = CoreReading(threads, "pystack")
        if not readings[index].is_taken:
            readings[index] = CoreReading(failure="pystack: it does not find the thread that crashed")
    except (ValueError, TypeError, KeyError) as error:
        readings[index] = CoreReading(failure=f"pystack: {one_line(str(error))}")
    except MemoryError:
        readings[index] = CoreReading(failure=f"pystack: {TOO_MUCH}")


def _ask_others(jobs: Sequence[CoreJob], readings: list[CoreReading], index: int, *, gdb: bool) -> Steps:
    job, before = jobs[index], readings[index]
    program = find_gdb()
    python: tuple[ThreadStack, ...] = ()
    failures = [before.failure] if before.failure else []
    if not before.is_taken:
        python, failure = yield from _ask_py_spy(job)
        failures += [failure] if failure else []
    native: tuple[ThreadStack, ...] = ()
    output = ""
    if program:
        end = yield job.read_by(gdb_tool(program, job.path, job.executable or job.notes.executable, _GDB_S))
        output = f"$ gdb\n{end.stdout.decode(errors='replace')}"
        with suppress(MemoryError), limited_memory():
            native = threads_from_gdb(end.stdout.decode(errors="replace"), job.notes.pid)
        if not native:
            failures.append(f"gdb: {_tool_failure(end)}")
    else:
        failures.append("gdb is not installed")
    if before.is_taken:
        readings[index] = before._replace(output=output, failure="" if native or not gdb else failures[-1])
        return
    by_tid = {thread.tid: thread for thread in python}
    merged = [with_python_calls(thread, by_tid.pop(thread.tid, None)) for thread in native]
    threads = crashed_first((*merged, *by_tid.values()), job.notes) if merged or by_tid else ()
    tools = [*(["gdb"] if native else []), *(["py-spy"] if python else [])]
    reading = CoreReading(threads, " and ".join(tools), "", output)
    if not reading.is_taken or not native:
        reading = reading._replace(failure=one_line("; ".join(failures)))
    readings[index] = reading


def _ask_py_spy(job: CoreJob) -> Generator[Tool, ToolEnd, tuple[tuple[ThreadStack, ...], str]]:
    program = find_tool("py-spy")
    if not program:
        return (), "py-spy is not installed"
    if job.notes.size_bytes > _PY_SPY_BYTES:
        return (), "py-spy: the core is too large for it"
    end = yield job.read_by(Tool((program, "dump", "--json", "--core", job.path), _PY_SPY_S))
    try:
        if end.failure or end.code:
            return (), f"py-spy: {failure_text(end)}"
        with limited_memory():
            return threads_from_json(end.stdout, job.notes.pid), ""
    except ValueError as error:
        return (), f"py-spy: {error}"
    except MemoryError:
        return (), f"py-spy: {TOO_MUCH}"


def _truncation_text(notes: CoreNotes) -> str:
    written = f"{notes.size_bytes / 1e6:.0f} MB of {notes.full_bytes / 1e6:.0f} MB"
    return f"it is truncated, {written} were written: the disk was full, or there was a limit (ulimit -c)"


def _tool_failure(end: ToolEnd) -> str:
    lines = [line.strip() for line in end.stderr.decode(errors="replace").splitlines() if line.strip()]
    if end.failure:
        return end.failure
    if end.code < 0:
        return f"it died of {signal_name(-end.code)}"
    return one_line(lines[-1]) if lines else f"it ended with code {end.code}"


def crashed_first(threads: Sequence[ThreadStack], notes: CoreNotes) -> tuple[ThreadStack, ...]:
    """The threads, beginning with the one that crashed, whose innermost call is where the original signal was raised.

    A signal handler, such as faulthandler's, raises the signal again when it is done: its calls are removed, so that
    the innermost call is the one that crashed.
    """
    tid = notes.tids[0] if notes.tids else notes.pid
    crashed = next((thread for thread in threads if thread.tid == tid), None)
    if crashed is None:
        crashed = ThreadStack("", tid, tid == notes.pid, True, False, ())
    first = crashed._replace(frames=_without_handler(crashed.frames), active=True)
    named = [first, *(thread for thread in threads if thread.tid != tid)]
    return tuple(
        thread._replace(name="MainThread") if thread.is_main and not thread.name else thread for thread in named
    )


def _without_handler(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    for index, frame in enumerate(frames[:_HANDLER_FRAMES]):
        if frame.function in _TRAMPOLINES:
            raised = any(above.function.startswith(_RAISERS) for above in frames[:index])
            return frames[index + 1 :] if raised else frames
    return frames


# ------------------------------------------------------------------------------------------------------------ messages


def core_headline(notes: CoreNotes) -> str:
    """The process and why it died, in one line."""
    what = "an on-demand snapshot, no crash" if not notes.signum else signal_name(notes.signum)
    parts = [what, f"pid {notes.pid}", notes.command or notes.name]
    if notes.address:
        parts.append(f"address {notes.address}")
    if notes.sender_pid:
        parts.append(f"sent by pid {notes.sender_pid}")
    return ", ".join(parts)


def stack_lines(threads: Sequence[ThreadStack]) -> list[str]:
    """Every thread's calls, innermost first."""
    lines: list[str] = []
    for index, thread in enumerate(threads):
        parts = [f"{'crashed thread' if index == 0 else 'thread'} {thread.tid}"]
        parts += [thread.name] if thread.name else []
        parts += ["has the GIL"] if thread.owns_gil else []
        lines += ["", f"{', '.join(parts)}:"]
        lines += [f"  {_frame_text(frame)}" for frame in thread.frames] or ["  (no calls could be read)"]
    return lines


def _frame_text(frame: Frame) -> str:
    location = f"{frame.file}:{frame.line}" if frame.line else frame.file
    text = f"{frame.function}  {location}" if location else frame.function
    return "".join(char if char.isprintable() else "?" for char in text)
