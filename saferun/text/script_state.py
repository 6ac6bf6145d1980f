"""What a rank's script has reported by ``saferun.step`` and ``saferun.expect``: its file, decoded and bounded. Pure.

A file is ``SIZE_BYTES`` long: a mark, lines, blanks, and the same mark. Where the marks differ it was being written.
The lines: ``step NUMBER AT``, ``metric NAME VALUE``, ``bad STEP NAME VALUE``, ``phase SINCE UNTIL NAME``, with times in
monotonic seconds. Whatever does not fit is left out.
"""

from __future__ import annotations

import math

from saferun.errors import printable
from saferun.model import Value

__all__ = ["SIZE_BYTES", "ReportedPhase", "ScriptState", "state_from"]

SIZE_BYTES = 1024
LONGEST_PHASE_S = 86400.0
"""No phase puts off a verdict for longer."""
# What the rank's side (``api/script/reported_progress.py``) never exceeds. It runs in the script's process, and imports
# nothing from here.
_MOST_LINES = 16
_MOST_METRICS = 8
_LONGEST_NAME = 32
_LONGEST_WHAT = 80
_LONGEST_NUMBER = 32
_HIGHEST_STEP = 1 << 53


class ReportedPhase(Value):
    """A long phase that a rank is in. Times are in monotonic seconds of the host."""

    what: str
    since: float
    until: float


class ScriptState(Value):
    """What one rank has reported.

    Attributes:
        mark: differs after each call.
        step: the last step; -1: none.
        step_at: when it was reported, in monotonic seconds.
        metrics: names and last values.
        bad: the first value that was no finite number: step, name and value, ready to be shown; empty: none.
        phase: the phase that ends first of those that it is in.
    """

    mark: str = ""
    step: int = -1
    step_at: float = 0.0
    metrics: tuple[tuple[str, float], ...] = ()
    bad: tuple[int, str, str] | None = None
    phase: ReportedPhase | None = None


def state_from(content: bytes) -> ScriptState | None:
    """The state; None where the file is no such file, or half written."""
    if len(content) != SIZE_BYTES or not content.endswith(b"\n"):
        return None
    lines = content.decode("utf-8", errors="replace").split("\n")[: _MOST_LINES + 1]
    mark = lines[0]
    if not 0 < len(mark) <= _LONGEST_NUMBER or content[:-1].rpartition(b" ")[2] != mark.encode():
        return None
    state = ScriptState(mark)
    for line in lines[1:]:
        parts = line.split(" ")
        try:
            state = _with(state, parts[0], parts[1:])
        except (ValueError, IndexError, OverflowError):
            continue
    return state


def _with(state: ScriptState, kind: str, parts: list[str]) -> ScriptState:
    if kind == "step":
        number, at = _number(parts[0]), float(parts[1][:_LONGEST_NUMBER])
        return state._replace(step=number, step_at=at) if math.isfinite(at) else state
    if kind == "metric" and len(state.metrics) < _MOST_METRICS:
        name = printable(parts[0])[:_LONGEST_NAME]
        return state._replace(metrics=(*state.metrics, (name, float(parts[1][:_LONGEST_NUMBER]))))
    if kind == "bad":
        return state._replace(bad=(_number(parts[0]), printable(parts[1])[:_LONGEST_NAME], printable(parts[2])[:8]))
    if kind == "phase":
        since, until = (float(word[:_LONGEST_NUMBER]) for word in parts[:2])
        if 0 <= since < until and until - since <= LONGEST_PHASE_S + 1:
            what = printable(" ".join(parts[2:]).strip())[:_LONGEST_WHAT]
            return state._replace(phase=ReportedPhase(what, since, until))
    return state


def _number(word: str) -> int:
    if len(word) > _LONGEST_NUMBER or not word.isascii() or not word.isdecimal():
        raise ValueError("no number")
    number = int(word)
    if number >= _HIGHEST_STEP:
        raise ValueError("too high")
    return number


def step_text(state: ScriptState, now: float) -> str:
    """``step 120 (loss 0.53), 4 s before``; empty where it has reported no step. ``now``: monotonic seconds."""
    if state.step < 0:
        return ""
    metrics = ", ".join(f"{name} {value:.6g}" for name, value in state.metrics)
    ago = f", {max(now - state.step_at, 0.0):.0f} s before" if state.step_at > 0 else ""
    return f"step {state.step}{f' ({metrics})' if metrics else ''}{ago}"
