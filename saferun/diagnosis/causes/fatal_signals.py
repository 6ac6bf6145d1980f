"""Ranks that a signal ended: crashes, aborts, and what others send. Pure.

Source: signal(7); glibc's malloc messages; ``std::terminate`` of libstdc++; Python's faulthandler.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from saferun.diagnosis.causes.failure import CRASH_SIGNALS, Failure, cause, shortened
from saferun.diagnosis.causes.schedulers import CRASHED
from saferun.diagnosis.causes.texts import first_line
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause
from saferun.model import signal_name

_AT_EXIT = (
    "free torch objects before Python exits: del the DDP model, gc.collect(), then dist.destroy_process_group() at the "
    "end of the script"
)
_NATIVE = (
    "look at the native call: a compiled extension that does not fit this torch, or a bad size or pointer given to one"
)
_HEAP = LazyPattern(
    r"(?:free|malloc|realloc|munmap_chunk|calloc|malloc_consolidate|_int_malloc)\(\): .{1,120}"
    r"|double free or corruption.{0,60}|corrupted (?:size|double-linked|unsorted).{0,80}"
    r"|Attempt to free invalid pointer.{0,40}|\*\*\* (?:stack smashing|buffer overflow) detected \*\*\*.{0,40}"
)
_ASSERTION = LazyPattern(r"Assertion [`'].{1,300}' failed|Check failed: .{1,300}")
_FAULTHANDLER_MESSAGES = {
    "Segmentation fault",
    "Aborted",
    "Bus error",
    "Floating point exception",
    "Floating-point exception",
    "Illegal instruction",
}


def sent_by_another_process(failure: Failure) -> Cause | None:
    """A signal that programs bring upon themselves, but that another process sent."""
    core = failure.core
    if core is None or failure.signum not in CRASH_SIGNALS:
        return None
    sender = core.sender_pid
    if sender in {0, failure.end.pid, *failure.supervisor_pids} or sender < 0:
        return None
    message = f"{signal_name(failure.signum)} sent by {_who(failure, sender)}"
    return cause(failure, "killed_from_outside", message, "look at what that process is, and why it did so")


def _who(failure: Failure, pid: int) -> str:
    rank = dict(failure.others).get(pid)
    return f"rank {rank} (pid {pid})" if rank is not None else f"pid {pid}"


def crash(failure: Failure) -> Cause | None:
    """A fault of the processor's: a bad address, a bad instruction, a division by zero."""
    if failure.error is not None:
        # An exception had ended the program; the crash came when the interpreter cleaned up.
        return None
    match failure.signum:
        case signal.SIGSEGV:
            name, message, advice = "segmentation_fault", "segmentation fault", _NATIVE
        case signal.SIGBUS:
            name, message = "bus_error", "bus error"
            advice = "check whether /dev/shm is full, or a mapped file was cut short or lies on a failing disk"
        case signal.SIGFPE:
            name, message = "floating_point_error", "floating point exception"
            advice = "look for a division of integers by zero in native code"
        case signal.SIGILL:
            name, message = "illegal_instruction", "illegal instruction"
            advice = "a library was built for another processor than this host's: install or build it for this one"
        case _:
            return None
    if failure.python_was_over:
        return cause(failure, name, f"{message} during interpreter shutdown", _AT_EXIT, proof=_fatal_line(failure))
    native = failure.native_location
    message += f" in {native}" if native else ""
    return cause(failure, name, message, advice, proof=_fatal_line(failure))


def abort(failure: Failure) -> Cause | None:
    """The program gave up: an uncaught C++ exception, a failed assertion, a broken heap."""
    if failure.signum != signal.SIGABRT or failure.error is not None:
        return None
    cpp = failure.cpp_error
    if cpp is not None and cpp.message:
        kind = f"{cpp.type_name}: " if cpp.type_name else ""
        message = f"uncaught C++ exception {kind}{shortened(cpp.message[0], 160)}"
        return cause(failure, "abort", message, "look at the C++ stack in its output", proof=cpp.message[0])
    lines = failure.last_lines
    heap = first_line(_HEAP, reversed(lines))
    if heap is not None:
        advice = (
            "native code wrote beyond its memory or freed it twice: look at the native call, and at compiled extensions"
        )
        return cause(failure, "abort", f"broken heap: {shortened(heap[1][0], 120)}", advice, proof=heap[0])
    assertion = first_line(_ASSERTION, reversed(lines))
    if assertion is not None:
        message = shortened(assertion[1][0], 160)
        return cause(failure, "abort", message, "look at the native code that checks this", proof=assertion[0])
    over = failure.python_was_over
    if over or (cpp is not None and not cpp.type_name):
        when = " during interpreter shutdown" if over else ""
        proof = cpp.line if cpp is not None else _fatal_line(failure)
        return cause(failure, "abort", f"abort{when}: a thread was still running", _AT_EXIT, proof=proof)
    if cpp is not None:
        message = f"uncaught C++ exception {cpp.type_name}"
        return cause(failure, "abort", message, "look at the C++ stack in its output", proof=cpp.line)
    fatal = failure.fatal
    if fatal is not None and fatal.message not in _FAULTHANDLER_MESSAGES:
        message = f"fatal Python error: {shortened(fatal.message, 160)}"
        return cause(failure, "abort", message, _NATIVE, proof=fatal.lines[0])
    native = failure.native_location
    return cause(failure, "abort", f"abort{f' in {native}' if native else ''}", _NATIVE, proof=_fatal_line(failure))


def _fatal_line(failure: Failure) -> str:
    return failure.fatal.lines[0] if failure.fatal is not None else ""


# ------------------------------------------------------------------------------------------------------- from outside

_TIME_LIMIT = LazyPattern(
    r"(?:CANCELLED|cancelled) .{0,60}DUE TO TIME LIMIT|PBS: job killed: walltime|TERM_RUNLIMIT"
    r"|exceeded .{0,40}wall ?(?:clock ?)?(?:time|limit)\b|\bjob\.exception type=timeout\b"
)
_CANCELLED = LazyPattern(
    r"slurmstepd\S{0,80}: error: .{0,120}CANCELLED .{0,60}?DUE to (.{1,60}?) \*\*\*"
    r"|slurmstepd\S{0,80}: error: .{0,120}CANCELLED",
    re.IGNORECASE,
)
# What a task did before the step was cancelled for it.
_CRASHED_BEFORE = LazyPattern(rf"srun\S{{0,40}}: error: .{{1,80}}: {CRASHED}")
_FEW_LINES = 10
PIPE_WITHOUT_READER = "broken_pipe"
"""The class of a rank that SIGPIPE ended."""
_READERS = "find what read from it and ended first: a process that the script started, or what its output is piped to"
_UNKNOWN_SENDER = (
    "the sender is not known; check dmesg, the scheduler's log, earlyoom or systemd-oomd, a kill -9 by hand"
)
_OUTSIDE: dict[int, tuple[str, str]] = {
    signal.SIGKILL: ("killed from outside (SIGKILL)", _UNKNOWN_SENDER),
    signal.SIGTERM: (
        "terminated from outside (SIGTERM)",
        "look at the scheduler's log, and for other programs that terminate it",
    ),
    signal.SIGINT: ("interrupted (SIGINT)", "Ctrl-C was pressed, or SIGINT was sent to this rank"),
    signal.SIGHUP: ("its terminal was closed (SIGHUP)", "start it under nohup, tmux or a scheduler"),
    signal.SIGQUIT: ("quit from outside (SIGQUIT)", "Ctrl-\\ was pressed, or SIGQUIT was sent"),
    signal.SIGUSR1: ("SIGUSR1, which it does not handle", "install a handler before the scheduler sends it"),
    signal.SIGUSR2: ("SIGUSR2, which it does not handle", "install a handler before the scheduler sends it"),
    signal.SIGALRM: ("a timer of its own ran out (SIGALRM)", "look for signal.alarm or setitimer, or handle SIGALRM"),
    signal.SIGXCPU: ("its CPU time limit was exceeded (SIGXCPU)", "raise `ulimit -t`"),
    signal.SIGXFSZ: ("a file grew too large (SIGXFSZ)", "raise `ulimit -f`"),
    signal.SIGSYS: ("a system call that is forbidden here (SIGSYS)", "look at the container's seccomp profile"),
    signal.SIGTRAP: ("a breakpoint in native code (SIGTRAP)", "look at the native call in the stacks"),
}
# Tools of --wrap that send no signal of their own; others may, as timeout does, and nsys after --duration.
_NO_SENDERS = frozenset(
    {
        "chrt",
        "env",
        "gdb",
        "ionice",
        "ltrace",
        "nice",
        "numactl",
        "perf",
        "py-spy",
        "stdbuf",
        "strace",
        "taskset",
        "time",
    }
    | {"valgrind"}
)
_OF_ITSELF = frozenset({signal.SIGALRM, signal.SIGXCPU, signal.SIGXFSZ, signal.SIGSYS, signal.SIGTRAP})
_GOT_SIGNAL = LazyPattern(r"SignalException: Process \d{1,10} got signal: (\d{1,3}|SIG\w{2,8})")


def scheduler_timeout(failure: Failure) -> Cause | None:
    """The scheduler's time limit was reached, and its message is in the output."""
    if not failure.signum and not failure.died_silently:
        return None
    lines = [*reversed(failure.last_lines), *reversed(failure.stdout_lines[-_FEW_LINES:])]
    if (limit := time_limit(lines)) is not None:
        return limit._replace(ranks=(failure.end.rank,))
    found = first_line(_CANCELLED, lines)
    if found is not None and first_line(_CRASHED_BEFORE, lines[lines.index(found[0]) :]) is None:
        why = f" ({found[1][1].lower()})" if found[1][1] else ""
        message = f"the scheduler cancelled the job{why}"
        return cause(failure, "killed_from_outside", message, "look at the scheduler's log", proof=found[0])
    return None


def time_limit(lines: Iterable[str]) -> Cause | None:
    """The line in which the scheduler reports its time limit."""
    found = first_line(_TIME_LIMIT, lines)
    if found is None:
        return None
    advice = "ask for more time, or write checkpoints and go on from them in the next job"
    return Cause("scheduler_timeout", "the scheduler's time limit was reached", (), shortened(found[0].strip()), advice)


def killed_from_outside(failure: Failure) -> Cause | None:
    """A signal from outside, of unknown reason."""
    got = first_line(_GOT_SIGNAL, failure.messages)
    if got is not None:
        name = got[1][1]
        number = int(name) if name.isdigit() else signal.Signals.__members__.get(name, 0)
        message, advice = _OUTSIDE.get(number, (f"signal {name}", _UNKNOWN_SENDER))
        return cause(failure, "killed_from_outside", message, advice, proof=got[0])
    error = failure.error
    if error is not None:
        if error.last.exception != "KeyboardInterrupt":
            return None
        message, advice = _OUTSIDE[signal.SIGINT]
        return cause(failure, "killed_from_outside", message, advice, proof=error.last.message[0])
    if failure.signum not in _OUTSIDE:
        return None
    message, advice = _OUTSIDE[failure.signum]
    core = failure.core
    if core is not None and core.sender_pid > 0 and core.sender_pid != failure.end.pid:
        message += f" by {_who(failure, core.sender_pid)}"
    elif failure.signum not in _OF_ITSELF and (tool := _possible_sender(failure.tools)):
        advice = f"it ran under {shortened(tool, 80)} (--wrap), which may have sent the signal; if not, {advice}"
    return cause(failure, "killed_from_outside", message, advice)


def _possible_sender(tools: Iterable[str]) -> str:
    """The outermost tool that may send its program a signal."""
    for tool in tools:
        if tool.partition(" ")[0].rpartition("/")[2] not in _NO_SENDERS:
            return tool
    return ""


def broken_pipe(failure: Failure) -> Cause | None:
    """What it wrote to has no reader any more: its output, or a pipe that the script has made."""
    if failure.signum != signal.SIGPIPE:
        return None
    message = "a pipe or socket that it wrote to had no reader (SIGPIPE)"
    return cause(failure, PIPE_WITHOUT_READER, message, _READERS)
