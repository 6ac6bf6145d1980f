"""Stacks of a core by gdb: native calls only, slow, but available nearly everywhere. Pure, except to find gdb.

Source: gdb's manual, "Backtraces".
"""

from __future__ import annotations

import re

from saferun.captures.tools import Tool, find_tool
from saferun.evidence.job_evidence import Frame, ThreadStack

_FRAMES = 200
# No init files or scripts of libraries, and no network access.
_ARGV = ("-nx", "-nh", "-batch", "-iex", "set auto-load off", "-iex", "set debuginfod enabled off")
_SETTINGS = ("set pagination off", "set width 0", "set print frame-arguments none", "set print address on")
_QUESTIONS = (f"bt {_FRAMES}", "info threads", f"thread apply all bt {_FRAMES}")
_THREAD = re.compile(r"Thread (\d+) \((?:Thread 0x[0-9a-f]+ )?\(?(?:LWP|process) (\d{1,10})\)?.*\):$")
_FRAME = re.compile(r"#(\d+)\s+(?:0x[0-9a-f]+ in )?(.+)$")
_AT = re.compile(r" at (.+):(\d{1,10})$")
_FROM = re.compile(r" from (.+)$")
SIGNAL_HANDLER = "<signal handler called>"
_NAME_LIMIT = 512


def find_gdb() -> str:
    """The path of gdb; empty if it is not installed."""
    return find_tool("gdb")


def gdb_tool(gdb: str, core: str, executable: str, timeout_s: float) -> Tool:
    """The command: the crashed thread, and then all of them.

    Args:
        gdb: the path of gdb.
        core: the core's path.
        executable: the path of the program; empty: gdb finds it.
        timeout_s: how long it may take, in seconds. Reading torch's symbols takes seconds, the first time half a
            minute.
    """
    commands = [word for command in (*_SETTINGS, *_QUESTIONS) for word in ("-ex", command)]
    return Tool((gdb, *_ARGV, *commands, *([executable] if executable else []), "-c", core), timeout_s)


def threads_from_gdb(text: str, pid: int) -> tuple[ThreadStack, ...]:
    """Parse gdb's output, in its order; empty if there are no threads.

    Args:
        text: its output.
        pid: the process; the thread with this id is the main one.
    """
    threads: list[ThreadStack] = []
    frames: list[Frame] = []
    tid = 0
    for line in [*text.splitlines(), "Thread 0 (LWP 0):"]:
        header = _THREAD.match(line)
        if header is not None:
            if tid and frames:
                threads.append(ThreadStack("", tid, tid == pid, False, False, tuple(frames)))
            frames, tid = [], int(header[2])
        elif tid and len(frames) < _FRAMES:
            match = _FRAME.match(line)
            if match is not None:
                frames.append(_frame(match[2]))
    return tuple(threads)


def _frame(text: str) -> Frame:
    """``sum (n=...) at sum.c:7``, ``poll () from /lib/libc.so.6``, ``?? ()``."""
    if text.startswith(SIGNAL_HANDLER):
        return Frame(SIGNAL_HANDLER, "", 0, native=True)
    file, line = "", 0
    if location := _AT.search(text):
        file, line, text = location[1], int(location[2]), text[: location.start()]
    elif location := _FROM.search(text):
        file, text = location[1], text[: location.start()]
    function = _without_parameters(text)
    return Frame(function[:_NAME_LIMIT] if function != "??" else "???", file[:_NAME_LIMIT], line, native=True)


def _without_parameters(text: str) -> str:
    """A call without its last pair of parentheses; a function's name may hold parentheses too."""
    text = text.rstrip()
    depth = 0
    for index in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[index], 0)
        if depth == 0:
            return text[:index].rstrip() if index < len(text) - 1 else text
    return text.partition(" (")[0]


_LOOP = ("_PyEval_EvalFrameDefault", "_PyEval_EvalFrameDefault.cold")
_OF_THE_INTERPRETER = re.compile(
    r"_?Py(?:Eval|Object|Function|CFunction|Method|Vectorcall)_|_PyEval|.*vectorcall|do_call_core|function_code_fastcall"
    r"|slot_tp_call|type_call|cfunction_|method_|_Py_"
)


def with_python_calls(native: ThreadStack, python: ThreadStack | None) -> ThreadStack:
    """A native stack in which Python's calls replace the interpreter's own.

    Above the interpreter's innermost loop is what Python called, which is where crashes happen; below it only Python's
    calls are kept. Without Python calls ``native`` is returned.
    """
    if python is None or not python.frames:
        return native
    loop = next((index for index, frame in enumerate(native.frames) if frame.function in _LOOP), None)
    above = native.frames[:loop] if loop is not None else ()
    kept = tuple(frame for frame in above if not _OF_THE_INTERPRETER.match(frame.function))
    return native._replace(
        name=python.name, active=python.active, owns_gil=python.owns_gil, frames=(*kept, *python.frames)
    )
