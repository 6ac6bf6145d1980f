"""What a script reports about its rank: steps and long phases, in a small file that saferun reads.

The file lies in memory, beside the heartbeat file. Each call writes all of it, in one piece of a fixed size that
begins and ends with the same mark, so that a reader recognizes what is half written. ``saferun.text.script_state``
reads it and has the format.
"""

from __future__ import annotations

import math
import os
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

__all__ = ["Phase", "expect", "last_step", "step"]

_SUFFIX = ".heartbeat"
_SIZE_BYTES = 1024
_MOST_METRICS = 8
_LONGEST_NAME = 32
_LONGEST_WHAT = 80
_LONGEST_PHASE_S = 86400.0
_HIGHEST_STEP = 1 << 53


class _Reported:
    """What this process has reported so far. No lock: a forked child would inherit it, and every write is whole."""

    def __init__(self) -> None:
        self.count = 0
        self.step = -1
        self.at = 0.0
        self.metrics: dict[str, float] = {}
        self.first_bad = ""  # the line of the first value that was no finite number
        self.phases: list[Phase] = []


_reported = _Reported()


def step(number: int, **metrics: float) -> None:
    """Report that this rank has finished a step; optional, once a step.

    ``saferunctl status``, ``--metrics`` and the report show the last step of each rank. A step is a sign of progress.
    The first value that is no finite number is reported once, with rank and step. A call takes some microseconds, never
    raises, and does nothing in a process that saferun did not start.

    Args:
        number: of the step, from 0.
        metrics: for instance ``loss=0.53``; at most 8, of anything that ``float`` takes. The value of a tensor on a GPU
            is left out, since reading it would wait for the GPU: pass ``loss.item()`` where you have it anyway.
    """
    try:
        number = int(number)
        if not 0 <= number < _HIGHEST_STEP:
            return
        _reported.step, _reported.at = number, time.monotonic()
        for name in [*metrics][:_MOST_METRICS]:
            value = _value(metrics[name])
            if value is not None:
                _take(number, _word(name), value)
        _write()
    except Exception:  # noqa: S110 - it may not disturb the script
        pass


def _take(number: int, name: str, value: float) -> None:
    if name in _reported.metrics or len(_reported.metrics) < _MOST_METRICS:
        _reported.metrics[name] = value
    if not _reported.first_bad and not math.isfinite(value):
        _reported.first_bad = f"bad {number} {name} {value!r}"


def _value(value: object) -> float | None:
    """It as a number; None where it is none, or lies on a device that would have to be waited for."""
    try:
        device = getattr(value, "device", None)
        if device is not None and getattr(device, "type", "cpu") != "cpu":
            return None
        # torch warns of a scalar of a tensor that requires a gradient, and a warning may be an error.
        detach = getattr(value, "detach", None)
        return float(detach() if callable(detach) else value)  # type: ignore[arg-type]
    except Exception:  # one metric costs neither the step nor the others
        return None


def last_step() -> int:
    """The number of the last step that this process has reported; -1: none."""
    return _reported.step


def expect(seconds: float, what: str = "") -> Phase:
    """A long phase: ``with saferun.expect(1800, "saving the checkpoint"):``.

    Until it has lasted so long, no hang is reported on this rank's host: neither of this rank nor of those that wait
    for it. If it lasts longer, saferun reports that at once and names the phase; the job is never ended because of that
    alone. Phases may be nested. A phase never raises, and has no effect in a process that saferun did not start.

    Args:
        seconds: how long it may take, at most a day.
        what: its name in the report.
    """
    return Phase(seconds, what)


class Phase:
    """One phase, as ``saferun.expect`` makes it; its time begins with the ``with``."""

    def __init__(self, seconds: float, what: str) -> None:
        self._seconds, self._what = seconds, what
        self.since = self.until = 0.0
        self.line = ""
        self._process = 0

    def __enter__(self) -> Self:
        try:
            seconds = min(float(self._seconds), _LONGEST_PHASE_S)
            if seconds > 0:  # which is not true of nan
                self._process = os.getpid()
                self.since = time.monotonic()
                self.until = self.since + seconds
                what = _line(str(self._what), _LONGEST_WHAT) or "a long phase"
                self.line = f"phase {self.since:.3f} {self.until:.3f} {what}"
                _reported.phases.append(self)
                _write()
        except Exception:  # noqa: S110 - as above
            pass
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # A child that is forked within the phase leaves it, too: the rank is still in it.
            if self in _reported.phases and os.getpid() == self._process:
                _reported.phases.remove(self)
                _write()
        except Exception:  # noqa: S110 - as above
            pass


def _word(name: str) -> str:
    return "".join(one if one.isalnum() or one in "_-./" else "_" for one in name[:_LONGEST_NAME])


def _line(text: str, longest: int) -> str:
    return "".join(one if one.isprintable() else " " for one in text[: 4 * longest]).strip()[:longest]


def _write() -> None:
    heartbeat = os.environ.get("SAFERUN_HEARTBEAT_FILE", "")
    if not heartbeat.endswith(_SUFFIX):
        return
    _reported.count += 1
    mark = f"{os.getpid()}.{_reported.count}"
    lines = [mark, f"step {_reported.step} {_reported.at:.3f}"]
    lines += [f"metric {name} {value!r}" for name, value in _reported.metrics.items()]
    if _reported.first_bad:
        lines.append(_reported.first_bad)
    if _reported.phases:
        lines.append(min(_reported.phases, key=lambda phase: phase.until).line)
    content = ("\n".join(lines) + "\n").encode(errors="replace")
    room = _SIZE_BYTES - len(mark) - 1
    if len(content) > room:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(f"{heartbeat[: -len(_SUFFIX)]}.progress", flags, 0o600)
    try:
        os.pwrite(descriptor, content.ljust(room) + f"{mark}\n".encode(), 0)
    finally:
        os.close(descriptor)
