"""Stacks of a core by pystack: Python and native calls in one stack.

pystack is optional, and may crash on the core of a broken process: it runs in a separate process. Both the program and
the parser of its output are here.

Source: pystack's pystack.engine and pystack.types.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from saferun.captures.tools import Tool
from saferun.evidence.job_evidence import Frame, ThreadStack
from saferun.model import Value
from saferun.text.decoding import loads
from saferun.text.typed_json import fit

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from saferun.captures.pystack_core import main; sys.exit(main())"
_THREADS_LIMIT = 512
# Of an endless recursion both ends are kept: where it was, and how it began.
_INNERMOST, _OUTERMOST = 160, 40
_NAME_LIMIT = 512
_INLINED = " (inlined)"


def is_pystack_here() -> bool:
    """Whether this interpreter has pystack."""
    import importlib.util

    return importlib.util.find_spec("pystack") is not None


def pystack_tool(core: str, executable: str, timeout_s: float) -> Tool:
    """The command.

    Args:
        core: the core's path.
        executable: the path of the program; empty: pystack finds it.
        timeout_s: how long it may take, in seconds.
    """
    return Tool((sys.executable, "-P", "-c", _PROGRAM, _ROOT, core, executable), timeout_s)


class _Thread(Value):
    name: str
    tid: int
    is_main: bool
    owns_gil: bool
    frames: tuple[Frame, ...]


def threads_from_pystack(content: bytes) -> tuple[ThreadStack, ...]:
    """Parse the program's output.

    Raises:
        ValueError: it is malformed.
    """
    try:
        threads: tuple[_Thread, ...] = fit(tuple[_Thread, ...], loads(content))
    except TypeError as error:
        raise ValueError(f"it is not a list of threads: {error}") from None
    return tuple(ThreadStack(one.name, one.tid, one.is_main, one.owns_gil, one.owns_gil, one.frames) for one in threads)


# --------------------------------------------------------------------------------------------------------- the program


def main() -> int:
    """Print the threads of a core as JSON; errors go to stderr."""
    core, executable = sys.argv[2:4]
    try:
        threads = _read(core, executable)
    except Exception as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(threads))
    return 0


def _read(core: str, executable: str) -> list[Any]:
    from pystack.engine import CoreFileAnalyzer, NativeReportingMode, get_process_threads_for_core

    analyzer = CoreFileAnalyzer(core, executable) if executable else CoreFileAnalyzer(core)
    executable = executable or str(analyzer.extract_executable())
    pid = analyzer.extract_pid()
    threads: list[Any] = []
    # All: the thread that crashed may not be one of Python's.
    for thread in get_process_threads_for_core(core, executable, native_mode=NativeReportingMode.ALL):
        if len(threads) >= _THREADS_LIMIT:
            break
        frames = list(_merged(thread))
        frames.reverse()
        if len(frames) > _INNERMOST + _OUTERMOST:
            frames = frames[:_INNERMOST] + frames[-_OUTERMOST:]
        threads.append([thread.name or "", thread.tid, thread.tid == pid, thread.holds_the_gil > 0, frames])
    return threads


def _merged(thread: Any) -> Iterator[tuple[str, str, int, bool]]:  # noqa: ANN401 - pystack's PyThread
    """Calls of both languages, outermost first.

    Each frame of the interpreter's loop in the native stack stands for the Python call that entered it, and those that
    the loop made itself. If the numbers differ, or the native stack is missing, Python's calls are put at the innermost
    loop, which is right for the innermost calls.
    """
    from pystack.types import NativeFrame, frame_type

    kinds = NativeFrame.FrameType
    native = [(frame_type(frame, thread.python_version), frame) for frame in thread.native_frames]
    python = list(thread.all_frames)
    loops = [index for index, (kind, _) in enumerate(native) if kind == kinds.EVAL]
    entries = [index for index, frame in enumerate(python) if frame.is_entry]
    is_exact = len(loops) == len(entries)
    bounds = zip(entries, [*entries[1:], len(python)], strict=False)
    parts = iter([python[start:end] for start, end in bounds])
    if not loops:
        yield from _python_calls(python)
    for index, (kind, frame) in enumerate(native):
        if kind == kinds.EVAL and is_exact:
            yield from _python_calls(next(parts))
        elif kind == kinds.EVAL and index == loops[-1]:
            yield from _python_calls(python)
        elif kind == kinds.OTHER and (is_exact or not loops or index > loops[-1]):
            yield _native_call(frame)


def _python_calls(frames: list[Any]) -> Iterator[tuple[str, str, int, bool]]:
    for frame in frames:
        if not frame.is_shim:
            code = frame.code
            yield code.scope[:_NAME_LIMIT], code.filename[:_NAME_LIMIT], max(code.location.lineno, 0), False


def _native_call(frame: Any) -> tuple[str, str, int, bool]:  # noqa: ANN401 - pystack's NativeFrame
    function = frame.symbol.removesuffix(_INLINED).partition("@")[0] or "???"
    has_source = frame.path not in {"", "???"} and frame.linenumber > 0
    file = frame.path if has_source else frame.library
    return function[:_NAME_LIMIT], file[:_NAME_LIMIT], frame.linenumber if has_source else 0, True
