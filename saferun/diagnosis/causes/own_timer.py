"""Ranks that a timer of their own ended: ``faulthandler.dump_traceback_later(..., exit=True)``. Pure.

Sources: what faulthandler of Python 3.8 to 3.14 prints before it calls ``_exit(1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.diagnosis.causes.failure import LAST_LINES, Failure, cause, own_lines
from saferun.diagnosis.causes.reasons import gives_reason
from saferun.diagnosis.frames import location_text
from saferun.diagnosis.lazy_patterns import LazyPattern
from saferun.evidence.diagnosis_values import Cause
from saferun.evidence.job_evidence import Frame

_TIMED_OUT = LazyPattern(r"Timeout \((\d{1,6}):(\d\d):(\d\d)(?:\.(\d{1,6}))?\)!$")
_THREAD = LazyPattern(r"(?:Current thread|Thread) 0x[0-9a-fA-F]{1,20}.{0,80} \(most recent call first\):$")
_THREAD_FRAME = LazyPattern(r'\s{0,8}File "([^"]{1,400})", line (\d{1,9}) in (.{1,300})$')
# Where a stack is cut short or empty; and what the process that keeps the names of shared memory prints afterwards.
_MAY_FOLLOW = LazyPattern(
    r"\s{0,8}(?:\.\.\.|<no Python frame>|<tstate is freed>)$"
    r"|\S{0,300}/resource_tracker\.py:\d{1,6}: UserWarning: resource_tracker: |\s{1,8}warnings\.warn\("
)
# An error above it may be the reason.
_ERROR = LazyPattern(
    r"(?:Error|Exception)\b|\b(?:ERROR|CRITICAL|FATAL)\b|\b[Ee]rror:|^\[[EF]\d{4} |\bTraceback\b|\b[Oo]ut of memory\b"
    r"|\b[Cc]onnection (?:closed|reset|refused|lost)\b"
)
_COLLECTIVES = "/torch/distributed/"
ITS_OWN_TIMER = "its own timer (faulthandler)"
_ADVICE = (
    "faulthandler.dump_traceback_later sets that time: look at what the other ranks did, and at the calls that it has "
    "printed; where they only take long, give it more time"
)


def own_timer(failure: Failure) -> Cause | None:
    """What it did took too long: where that is a call of torch.distributed, it waited for others."""
    if failure.end.status.code != 1 or not failure.died_silently or failure.earlier is not None:
        return None
    line, frames = _report(failure)
    match = _TIMED_OUT.match(line)
    if match is None or _has_other_reason(failure, line):
        return None
    hours, minutes, seconds, part = match.groups("0")
    lasted = int(hours) * 3600 + int(minutes) * 60 + float(f"{seconds}.{part}")
    message = f"{ITS_OWN_TIMER} ended it after {lasted:g} s"
    location = next((location_text(frame) for frame in frames if failure.user.owns(frame)), "")
    class_name = "collective_timeout" if _waits_for_others(frames) else "python_exit"
    return cause(failure, class_name, message, _ADVICE, proof=line, location=location)


def waited_until_its_timer(failure: Failure) -> bool:
    """Whether its own timer ended a rank in a call of torch.distributed."""
    return _waits_for_others(_report(failure)[1])


def _waits_for_others(frames: Sequence[Frame]) -> bool:
    return any(_COLLECTIVES in frame.file for frame in frames)


def _has_other_reason(failure: Failure, timed_out: str) -> bool:
    start = max(index for index, line in enumerate(failure.lines) if line == timed_out)
    if any(map(_ERROR.search, failure.lines[max(start - LAST_LINES, 0) : start])):
        return True
    own = own_lines(failure.stdout_lines)
    return bool(own) and gives_reason(own[-1])


def _report(failure: Failure) -> tuple[str, tuple[Frame, ...]]:
    """The line by which its stderr ends with a report of faulthandler's timer, and the main thread's calls."""
    lines = failure.lines
    start = max((index for index, line in enumerate(lines) if _TIMED_OUT.match(line)), default=len(lines))
    below = lines[start + 1 :]
    heads = [index for index, line in enumerate(below) if _THREAD.match(line)]
    # With exit=False the program goes on, and prints more.
    if not heads or not all(map(_is_of_report, below)):
        return "", ()
    # The main thread's calls are the last, innermost first.
    found = (_THREAD_FRAME.match(line) for line in below[heads[-1] + 1 :])
    return lines[start], tuple(Frame(frame[3], frame[1], int(frame[2])) for frame in found if frame is not None)


def _is_of_report(line: str) -> bool:
    if not line or _THREAD.match(line):
        return True
    return _THREAD_FRAME.match(line) is not None or _MAY_FOLLOW.match(line) is not None
