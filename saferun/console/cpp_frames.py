"""Leaves out the C++ frames that torch appends to its messages; one line says how many there were. Pure.

They follow a line ``Exception raised from … (most recent call first):``, which is shown, and each is one line. What
looks otherwise is shown as it is, and so are a few frames.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.console_stream import ConsoleStream as Key
else:
    Key = object

# Nothing is held back for longer.
HOLD_S = 0.2
_RAISED = b"Exception raised from "
_FIRST = b"(most recent call first):\n"
# Of the second form of such stacks, in which each frame is a line "#4 function from file:line".
_HEAD = b"C++ CapturedTraceback:"
_OMITTED = b"<omitting python frames>"
# Fewer frames than one line saves are shown.
_FEW = 3
_LONGEST_LINE_BYTES = 64 << 10


class _Run:
    """The frames that a stream is in."""

    __slots__ = ("count", "rest", "since", "tag", "text")

    def __init__(self, now: float) -> None:
        self.since = now
        self.text = b""  # of the frames, while they are few
        self.count = 0
        self.tag = b""  # torch's ``[rank3]: `` before each of them
        self.rest = b""  # the line that has no end yet

    @property
    def shown(self) -> bytes:
        """What to show of it."""
        if self.count <= _FEW:
            return self.text + self.rest
        return self.tag + b"(%d lines of C++ frames: in the rank's stderr.log)\n" % self.count + self.rest


class CppFrames:
    """All streams of a console on which C++ frames are left out. Streams are known by any key.

    ``runs``: of the streams that are within such frames.
    """

    def __init__(self) -> None:
        self.runs: dict[Key, _Run] = {}

    def feed(self, key: Key, rank: int, chunk: bytes, now: float) -> bytes:
        """More bytes of a stream. Returns what is to be shown now."""
        shown = b""
        while chunk:
            run = self.runs.get(key)
            if run is None:
                start = _start(chunk)
                if start < 0:
                    return shown + chunk
                shown += chunk[:start]
                chunk = chunk[start:]
                run = self.runs[key] = _Run(now)
            text, run.rest = run.rest + chunk, b""
            chunk = b""
            start = 0
            while (end := text.find(b"\n", start) + 1) > 0:
                line, tag = _untagged(text[start : end - 1], rank)
                if not _is_frame(line):
                    break
                run.count += 1
                run.tag = tag
                run.text = run.text + text[start:end] if run.count <= _FEW else b""
                start = end
            if end > 0 or len(text) - start > _LONGEST_LINE_BYTES:
                shown += self.end(key)
                chunk = text[start:]
            else:
                run.rest = text[start:]
        return shown

    @property
    def deadline(self) -> float | None:
        """When the first of the runs has been held for long enough, in monotonic seconds."""
        return min((run.since + HOLD_S for run in self.runs.values()), default=None)

    def due(self, now: float) -> list[Key]:
        """The streams of which nothing may be held any longer."""
        return [key for key, run in self.runs.items() if run.since + HOLD_S <= now]

    def held(self, key: Key) -> bytes:
        """What is to be shown of a stream if nothing more comes."""
        run = self.runs.get(key)
        return run.shown if run is not None else b""

    def end(self, key: Key) -> bytes:
        """The frames of a stream are over. Returns what is to be shown of them."""
        run = self.runs.pop(key, None)
        return run.shown if run is not None else b""


def _start(chunk: bytes) -> int:
    """Where C++ frames begin in a chunk; -1: nowhere."""
    at = -1
    while (at := chunk.find(_FIRST, at + 1)) >= 0:
        if _RAISED in chunk[chunk.rfind(b"\n", 0, at) + 1 : at]:
            return at + len(_FIRST)
    return -1


def _untagged(line: bytes, rank: int) -> tuple[bytes, bytes]:
    """A line without torch's tag of its rank, and the tag."""
    tag = b"[rank%d]: " % rank
    return (line[len(tag) :], tag) if line.startswith(tag) else (line, b"")


def _is_frame(line: bytes) -> bool:
    """``frame #3: c10::Error::Error(…)``; ``#3 c10::Error::Error(…) from …``."""
    if line.startswith(b"frame #"):
        return line[7:].partition(b":")[0].isdigit()
    if line.startswith(b"#"):
        number, _, call = line[1:].partition(b" ")
        return number.isdigit() and b" from " in call
    return line in {_HEAD, _OMITTED}
