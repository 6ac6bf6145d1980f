"""Recordings: the stacks of ranks over some seconds, by py-spy, as it counts them.

py-spy reads the processes without stopping them: nothing that a user only looks at may be slowed down, or be left
stopped by a tool that is killed. A sample that was taken while the process changed its stack may be wrong.
"""

from __future__ import annotations

import base64
import json
import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated

from saferun.captures import py_spy
from saferun.captures.ptrace import ptrace_denial
from saferun.captures.tools import Steps, Tool, ToolEnd, find_tool, run_steps
from saferun.captures.wire import MOST_RECORDED, CaptureTarget
from saferun.model import Value
from saferun.text.decoding import MALFORMED, loads
from saferun.text.redaction import redacted_path, redacted_text
from saferun.text.typed_json import fit, line_of, list_of, number_of

_ENDS_S = 10.0
_MOST_STACKS = 100_000
_MOST_FRAMES = 512
_LONGEST_FRAME = 500
_LONGEST_FAILURE = 500
_LONGEST_TEXT = 16 << 20
_LONGEST_JSON = 32 << 20
_MOST_ITEMS = 1 << 23
_FEWEST_STACKS = 8
_COUNTED = re.compile(r"(?P<frames>.*\S) (?P<count>[0-9]{1,9})")
_THREAD = re.compile(r"thread \((?:0x)?[0-9a-fA-F]+\)(?:: (?P<name>.*))?")
_LOCATION = re.compile(r"(?P<function>.*) \((?P<file>.*?)(?P<line>:[0-9]+)?\)")

_Frame = Annotated[str, line_of(_LONGEST_FRAME)]


class CountedStack(Value):
    """A stack, the name of the thread first, and in how many samples it was seen. ``frames``: ``f (/a/b.py:12)``."""

    frames: Annotated[tuple[_Frame, ...], list_of(_Frame, _MOST_FRAMES)]
    samples: Annotated[int, number_of(1 << 40)]


class Recording(Value):
    """What was recorded of one rank. ``left_out``: samples of stacks for which there was no room."""

    rank: Annotated[int, number_of(1 << 31)]
    pid: Annotated[int, number_of(1 << 31)]
    stacks: Annotated[tuple[CountedStack, ...], list_of(CountedStack, _MOST_STACKS)] = ()
    failure: Annotated[str, line_of(_LONGEST_FAILURE)] = ""
    left_out: Annotated[int, number_of(1 << 40)] = 0

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(stack.samples for stack in self.stacks) + self.left_out


class RecordOptions(Value):
    """How to record.

    Attributes:
        seconds: for how long.
        rate: how many samples a second.
        idle: whether threads count that wait.
    """

    seconds: float = 30.0
    rate: int = 100
    idle: bool = False


def record(targets: Sequence[CaptureTarget], options: RecordOptions) -> list[Recording]:
    """Record these ranks side by side. Returns one recording of each, in their order.

    Args:
        targets: the ranks.
        options: how.
    """
    program = find_tool("py-spy")
    if not program:
        return [Recording(target.rank, target.pid, failure="py-spy is not installed") for target in targets]
    ends: dict[int, ToolEnd] = {}
    work = [_step(target, program, options, ends.__setitem__) for target in targets]
    run_steps(work, at_once=MOST_RECORDED, deadline=time.monotonic() + options.seconds + _ENDS_S)
    return [_recording(target, ends.get(target.pid)) for target in targets]


def _step(target: CaptureTarget, program: str, options: RecordOptions, keep: Callable[[int, ToolEnd], None]) -> Steps:
    sampling = ("--duration", str(max(1, round(options.seconds))), "--rate", str(options.rate), "--format", "raw")
    flags = ("--full-filenames", "--threads", "--nonblocking", *(["--idle"] if options.idle else []))
    argv = (program, "record", "--pid", str(target.pid), *sampling, *flags, "--output", "/dev/stdout")
    keep(target.pid, (yield Tool(argv, options.seconds + _ENDS_S)))


def _recording(target: CaptureTarget, end: ToolEnd | None) -> Recording:
    stacks = stacks_from_text(end.stdout) if end is not None else ()
    failure = ""
    if end is None:
        failure = "it was not recorded in time"
    elif not stacks and (end.failure or end.code):
        failure = ptrace_denial(target.pid) if py_spy.is_denied(end) else py_spy.failure_text(end)
    return Recording(target.rank, target.pid, stacks, failure[:_LONGEST_FAILURE])


def stacks_from_text(content: bytes) -> tuple[CountedStack, ...]:
    """The stacks in py-spy's raw format, the most frequent first; lines that are none are left out.

    Source: py-spy, ``--format raw``: frames from the outermost call inwards with semicolons between them, a space, and
    the number of samples.
    """
    counts: dict[tuple[str, ...], int] = {}
    known: dict[str, str] = {}
    for line in content.decode(errors="replace").splitlines():
        match = _COUNTED.fullmatch(line)
        if match is None or line.startswith("py-spy>"):
            continue
        names = match["frames"].split(";")[:_MOST_FRAMES]
        frames = tuple(known.get(word) or known.setdefault(word, _shown(word)) for word in names)
        counts[frames] = counts.get(frames, 0) + int(match["count"])
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return tuple(CountedStack(frames, count) for frames, count in ordered[:_MOST_STACKS])


def _shown(word: str) -> str:
    """A frame without the number of its thread, and without secrets."""
    thread = _THREAD.fullmatch(word)
    if thread is not None:
        return redacted_text(thread["name"] or "thread")[:_LONGEST_FRAME]
    location = _LOCATION.fullmatch(word)
    if location is None:
        return redacted_text(word)[:_LONGEST_FRAME]
    shown = f"{redacted_text(location['function'])} ({redacted_path(location['file'])}{location['line'] or ''})"
    return shown[:_LONGEST_FRAME]


# --------------------------------------------------------------------------------------------------- between the hosts


def encode_recordings(recordings: Sequence[Recording], limit_bytes: int) -> str:
    """Recordings as text of ASCII. Where they find no room the rarest stacks are left out.

    Args:
        recordings: of the ranks of one host.
        limit_bytes: how long the text may be; where not even the least finds room, it is empty.
    """
    most = max((len(one.stacks) for one in recordings), default=0)
    while True:
        text = _packed([_shortened(one, most) for one in recordings])
        if text is not None and len(text) <= limit_bytes:
            return text
        if most <= _FEWEST_STACKS:
            return ""
        most //= 2


def _shortened(one: Recording, most: int) -> Recording:
    rest = sum(stack.samples for stack in one.stacks[most:])
    return one._replace(stacks=one.stacks[:most], left_out=one.left_out + rest)


def _packed(recordings: Sequence[Recording]) -> str | None:
    names: dict[str, int] = {}
    rows = [
        [
            one.rank,
            one.pid,
            [[[names.setdefault(frame, len(names)) for frame in stack.frames], stack.samples] for stack in one.stacks],
            one.failure,
            one.left_out,
        ]
        for one in recordings
    ]
    content = json.dumps([list(names), rows], separators=(",", ":")).encode()
    return base64.b85encode(zlib.compress(content, 6)).decode() if len(content) <= _LONGEST_JSON else None


def decode_recordings(text: str) -> list[Recording]:
    """The other end of :func:`encode_recordings`.

    Raises:
        ValueError: the text holds none.
    """
    if not 0 < len(text) <= _LONGEST_TEXT:
        raise ValueError("no recordings")
    try:
        content = zlib.decompressobj().decompress(base64.b85decode(text), _LONGEST_JSON)
        names, rows = loads(content, longest=_LONGEST_JSON, most=_MOST_ITEMS)
        found: list[Recording] = []
        for rank, pid, stacks, failure, left_out in rows:
            counted = [[[names[number] for number in numbers], samples] for numbers, samples in stacks]
            found.append(fit(Recording, [rank, pid, counted, failure, left_out]))
    except (*MALFORMED, zlib.error) as error:
        raise ValueError(f"no recordings: {error}") from None
    return found
