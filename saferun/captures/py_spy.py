"""Parsing py-spy's output: its JSON as values, its errors as one line.

The process's code chose the names in it, so everything is bounded.
"""

from __future__ import annotations

from typing import Any

from saferun.captures.scene import one_line
from saferun.captures.tools import ToolEnd
from saferun.evidence import Frame, ThreadStack
from saferun.text.decoding import loads

_THREADS_LIMIT = 256
_FRAMES_LIMIT = 256
_ALL_FRAMES_LIMIT = 8192
_INNERMOST_KEPT = 192
# Thousands of threads are decoded, of which some are left out.
_ITEMS_LIMIT = 4 << 20
_LENGTH_LIMIT_BYTES = 64 << 20
_NAME_LIMIT = 512
_PATH_LIMIT = 1024


def argv_of(py_spy: str, pid: int, *flags: str) -> tuple[str, ...]:
    """The command that dumps the stacks of a process as JSON.

    With short file names py-spy searches for packages around each file while the process is stopped: if their file
    system hangs, the process would stay stopped.
    """
    return (py_spy, "dump", "--json", "--full-filenames", "--pid", str(pid), *flags)


def threads_from_json(content: bytes, pid: int) -> tuple[ThreadStack, ...]:
    """Parse the output of ``py-spy dump --json``, the main thread first.

    Raises:
        ValueError: it is malformed.
    """
    raw_threads = loads(content, longest=_LENGTH_LIMIT_BYTES, most=_ITEMS_LIMIT)
    if not isinstance(raw_threads, list):
        raise ValueError("it is not a list of threads")  # noqa: TRY004 - what was read is wrong, not the caller
    threads = []
    left = _ALL_FRAMES_LIMIT
    found = [raw for raw in raw_threads if isinstance(raw, dict)]
    # The main thread comes last, and of hundreds of threads some are left out.
    for raw in sorted(found, key=lambda raw: not _is_main(raw, pid))[:_THREADS_LIMIT]:
        if left > 0:
            thread = _thread(raw, pid, left)
            left -= len(thread.frames)
            threads.append(thread)
    if not threads:
        raise ValueError("there is no thread in it")
    return tuple(threads)


def _is_main(raw: dict[str, Any], pid: int) -> bool:
    tid = _count(raw.get("os_thread_id"))
    return tid == pid if tid else raw.get("thread_name") == "MainThread"


def _thread(raw: dict[str, Any], pid: int, left: int) -> ThreadStack:
    frames = raw.get("frames")
    kept: list[Any] = frames if isinstance(frames, list) else []
    if len(kept) > _FRAMES_LIMIT:
        # Of an endless recursion keep both ends: where it is, and how it began.
        kept = kept[:_INNERMOST_KEPT] + kept[_INNERMOST_KEPT - _FRAMES_LIMIT :]
    return ThreadStack(
        _text(raw.get("thread_name"), _NAME_LIMIT),
        _count(raw.get("os_thread_id")),
        _is_main(raw, pid),
        raw.get("active") is True,
        raw.get("owns_gil") is True,
        tuple(_frame(frame) for frame in kept[:left] if isinstance(frame, dict)),
    )


def _frame(raw: dict[str, Any]) -> Frame:
    # Only native frames have a module: their library.
    module = raw.get("module")
    file = _text(raw.get("filename") or module, _PATH_LIMIT)
    return Frame(_text(raw.get("name"), _NAME_LIMIT), file, _count(raw.get("line")), isinstance(module, str))


def _text(value: object, limit: int) -> str:
    return value[:limit] if isinstance(value, str) else ""


def _count(value: object) -> int:
    return value if type(value) is int and 0 <= value < 1 << 31 else 0


def is_denied(end: ToolEnd) -> bool:
    """Whether py-spy, or a similar tool, lacked permission."""
    errors = end.stderr.lower()
    return any(
        sign in errors
        for sign in (b"permission denied", b"os error 13)", b"os error 1)", b"operation not permitted", b"eperm")
    )


def is_no_python(end: ToolEnd) -> bool:
    """Whether it failed because the process runs no Python interpreter that it knows."""
    return b"find python version" in end.stderr or b"find a python" in end.stderr.lower()


def failure_text(end: ToolEnd) -> str:
    """Why a tool failed, in one line: the last cause."""
    if end.failure:
        return end.failure
    lines = end.stderr.decode(errors="replace").partition("Stack backtrace:")[0].splitlines()
    causes = [line.strip() for line in lines if line.strip() and line.strip() != "Caused by:"]
    if not causes:
        return f"it ended with code {end.code}"
    first = causes[0].removeprefix("Error: ")
    last = causes[-1].partition(": ")[2] if causes[-1][:1].isdigit() else ""
    return one_line(f"{first}: {last}" if last and last not in first else first)
