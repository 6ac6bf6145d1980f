"""What processes print of errors that do not end them: of threads, destructors, functions at exit, helpers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from saferun.diagnosis.lazy_patterns import LazyPattern

_MARKER = "Traceback (most recent call last):"
ENDS_NOTHING = (
    "Exception ignored in",
    "Exception ignored while",
    "Exception in callback ",
    "Error in atexit._run_exitfuncs:",
    "Task exception was never retrieved",
    "Future exception was never retrieved",
    "--- Logging error ---",
)
"""What has no effect on the exit code: destructors, functions that run at exit, tasks of asyncio, loggers."""
ASIDE = ("Exception in thread", *ENDS_NOTHING)
"""What does not end a process by itself; a thread may have ended it on purpose."""
WHOSE = ("future: ", "handle: ", "task: ")
"""What asyncio prints between that and the traceback."""
CHILD = LazyPattern(r"Process \S.{0,60}:$")
"""What multiprocessing prints before the traceback of a child."""
# What is printed with a traceback of what ends no program: by asyncio, by logging, where one error led to another.
_OF_ASIDES = (
    *WHOSE,
    "Call stack:",
    "Message: ",
    "Arguments: ",
    "The above exception was",
    "During handling of the above",
)
# The process in which multiprocessing keeps the names of what is shared; it prints names that it does not know.
_TRACKER = LazyPattern(r'\s{0,8}File "[^"]{0,600}/multiprocessing/resource_tracker\.py", line \d{1,6}, in main$')

_BOOTSTRAP = LazyPattern(r'\s{0,8}File "[^"]{0,600}/multiprocessing/process\.py", line \d{1,6}, in _bootstrap$')
_MOST_LINES_OF_A_CHILD = 100


def without_tracker(lines: list[str]) -> list[str]:
    """Lines without the tracebacks of multiprocessing's resource tracker, which ends no rank."""
    if not any("/resource_tracker.py" in line for line in lines):
        return lines
    kept: list[str] = []
    is_inside = False
    for line, below in zip(lines, [*lines[1:], ""], strict=True):
        if line.endswith(_MARKER) and _TRACKER.match(below):
            is_inside = True
        elif is_inside:
            # The line that names the exception is the last one.
            is_inside = line[:1].isspace()
        else:
            kept.append(line)
    return kept


def _begins_child(lines: Sequence[str], index: int) -> bool:
    """Whether a child's traceback follows; a line of a program's own may look like the one above it."""
    if CHILD.match(lines[index]) is None:
        return False
    for line in lines[index + 1 : index + 1 + _MOST_LINES_OF_A_CHILD]:
        if _BOOTSTRAP.match(line):
            return True
        if line.startswith(ASIDE) or CHILD.match(line):
            return False
    return False


def without_asides(lines: Sequence[str]) -> Iterator[str]:
    """Lines without the tracebacks of what ends no program: threads, destructors, functions at exit, children."""
    is_inside = has_begun = False
    for index, line in enumerate(lines):
        if line.startswith(ASIDE) or _begins_child(lines, index):
            is_inside, has_begun = True, False
        elif is_inside and line.endswith(_MARKER):
            has_begun = True
        elif is_inside and (not line or line[0].isspace() or line.startswith(_OF_ASIDES)):
            continue
        elif is_inside and has_begun:
            # It names the exception.
            has_begun = False
        else:
            is_inside = False
            yield line
