"""Running py-spy: its command, and its errors as one line."""

from __future__ import annotations

from saferun.captures.scene import one_line
from saferun.captures.tools import ToolEnd


def argv_of(py_spy: str, pid: int, *flags: str) -> tuple[str, ...]:
    """The command that dumps the stacks of a process as JSON.

    With short file names py-spy searches for packages around each file while the process is stopped: if their file
    system hangs, the process would stay stopped.
    """
    return (py_spy, "dump", "--json", "--full-filenames", "--pid", str(pid), *flags)


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
