"""Finds tracebacks that another rank has just printed, so that each stands on the console once. Pure.

The first copy passes through unchanged, and its lines are remembered. Bytes of another rank that begin like it are
held back, for a short time and in bounded memory: if they turn out to be the same traceback, line by line, they are
dropped and counted; in every other case they are returned as they are. C++ frames are left out before, so that
tracebacks whose frames differ in their addresses alone are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from saferun.console.cpp_frames import HOLD_S, CppFrames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.console_stream import ConsoleStream as Key
else:
    Key = object

MARKER = b"Traceback (most recent call last):"
GROUP_MARKER = b"  + Exception Group " + MARKER
# Begins each of them, and C++ frames: whether a chunk is of interest at all is one search.
_CALLS = b" (most recent call "
# What Python prints of a SyntaxError has no header.
_SYNTAX_ERROR = b'  File "'
# Of a larger chunk, which is bulk output, only so much at its end is searched.
_SEARCHED_BYTES = 16 << 10
# A longer traceback is not folded.
_MOST_LINES = 400
_MOST_BYTES = 64 << 10
_MOST_RECORDS = 16
# A traceback that is older is too far up on the screen to be referred to by another rank.
_RECENT_S = 10.0
_CHAINS = (
    b"The above exception was the direct cause of the following exception:",
    b"During handling of the above exception, another exception occurred:",
)
_LINES_AFTER_A_CHAIN = 3
# What begins something else: log lines, and what Python prints at its end.
_OTHERS = (b"Exception ignored ", b"terminate called ", b"Fatal Python error", b"Thread 0x", b"wandb:", b"sys:1: ")
_EXCEPTION_BYTES = 120
# Ends an exception group, and each group within it.
_END_OF_GROUP = b"+" + b"-" * 36


class _Traceback:
    """The lines of one traceback, without line ends and without torch's ``[rank3]: ``."""

    __slots__ = (
        *("at", "exception", "is_closed", "is_complete", "is_dead", "is_group", "is_tagged"),
        *("lines", "rank", "same", "size"),
    )

    def __init__(self, rank: int, now: float, *, is_tagged: bool) -> None:
        self.rank = rank
        self.at = now  # of its newest line
        self.is_tagged = is_tagged
        self.lines: list[bytes] = []
        self.size = 0
        self.exception = b""
        self.is_complete = False  # whether the line of the exception is there
        self.is_group = False  # an exception group, all lines of which are indented
        self.is_closed = False  # no further line belongs to it
        self.is_dead = False  # not whole on the console
        self.same: set[int] = set()  # ranks that printed the same

    def add(self, line: bytes, *, is_tagged: bool) -> bool:
        """Take the next line. Returns False if it does not belong to this traceback, which then has ended."""
        if self.lines and not self._continues(line, is_tagged=is_tagged):
            self.is_closed = True
            return False
        self.lines.append(line)
        self.size += len(line)
        if line in {MARKER, GROUP_MARKER}:
            self.is_group = line == GROUP_MARKER
            self.is_complete = False
            self.exception = b""
        elif self.is_group:
            if line[:4] == b"  | " and line[4:5] not in {b" ", b""} and not self.is_complete:
                self.exception = self.exception or line[4:]
            self.is_complete = self.is_complete or line.lstrip(b" ") == _END_OF_GROUP
        elif line and not self.is_complete and line[:1] not in b" \t":
            self.is_complete = True
            self.exception = line
        return True

    def _continues(self, line: bytes, *, is_tagged: bool) -> bool:
        # An empty line may end what torch has tagged.
        if (is_tagged is not self.is_tagged and line) or b"\r" in line:
            return False
        if len(self.lines) >= _MOST_LINES or self.size + len(line) > _MOST_BYTES:
            self.is_dead = True
            return False
        if line in {MARKER, GROUP_MARKER}:
            return any(before in _CHAINS for before in self.lines[-_LINES_AFTER_A_CHAIN:])
        return not (self.is_complete and (line.startswith(_OTHERS) or _is_log_line(line)))


class _Stream:
    """A stream within a traceback: its own copy, and what is held back of it."""

    __slots__ = ("candidates", "held", "is_ended", "own", "parsed", "rest", "since")

    def __init__(self, own: _Traceback, candidates: list[_Traceback], now: float) -> None:
        self.own = own
        self.candidates = candidates  # tracebacks that this one may be a copy of; none: this one is shown
        self.since = now
        self.held = bytearray()
        self.parsed = 0  # how much of ``held`` are lines of ``own``
        self.rest = bytearray()  # of what is shown: the line without an end
        self.is_ended = False

    @property
    def match(self) -> _Traceback | None:
        """The traceback of which this one is an exact copy, as far as both are known."""
        own = self.own
        if not own.is_complete or own.is_dead or (not self.is_ended and self.parsed < len(self.held)):
            return None
        for other in self.candidates:
            if other.is_complete and not other.is_dead and other.lines == own.lines:
                return other
        return None


class Folding:
    """All streams of a console on which tracebacks are folded. Streams are known by any key."""

    def __init__(self) -> None:
        self._streams: dict[Key, _Stream] = {}
        self._shown: list[_Traceback] = []
        self._folded: list[tuple[_Traceback, int]] = []
        self._note_at: float | None = None
        self._frames = CppFrames()
        self._in_frames = self._frames.runs

    def wants(self, key: Key, chunk: bytes) -> bool:
        """Whether ``feed`` has anything to do; the usual chunk passes without."""
        if _CALLS in chunk if len(chunk) <= _SEARCHED_BYTES else chunk.find(_CALLS, -_SEARCHED_BYTES) >= 0:
            return True
        return key in self._streams or key in self._in_frames or chunk.startswith(_SYNTAX_ERROR)

    def is_within(self, key: Key) -> bool:
        """Whether a stream is within a traceback or within C++ frames."""
        return key in self._streams or key in self._in_frames

    def feed(self, key: Key, rank: int, chunk: bytes, now: float, *, at_line_start: bool = True) -> bytes:
        """More bytes of a stream.

        Args:
            key: the stream.
            rank: whose stream it is.
            chunk: the bytes.
            now: monotonic seconds.
            at_line_start: whether the previous bytes of the stream ended with a line feed.

        Returns:
            What is to be shown now of this stream, after everything that was returned before.
        """
        return self._feed(key, rank, self._frames.feed(key, rank, chunk, now), now, at_line_start=at_line_start)

    def _feed(self, key: Key, rank: int, chunk: bytes, now: float, *, at_line_start: bool) -> bytes:
        """More bytes of a stream, without C++ frames."""
        shown = bytearray()
        while chunk:
            stream = self._streams.get(key)
            if stream is None:
                start = _start(chunk, rank, at_line_start=at_line_start)
                if start < 0:
                    return bytes(shown + chunk) if shown else chunk
                shown += chunk[:start]
                chunk = chunk[start:]
                stream = self._streams[key] = self._begin(rank, chunk, now)
            if stream.candidates:
                passed, chunk = self._follow(key, stream, chunk, now)
                shown += passed
            else:
                passed, chunk = self._record(key, stream, chunk, now)
                shown += passed
            at_line_start = True
        return bytes(shown)

    def _begin(self, rank: int, chunk: bytes, now: float) -> _Stream:
        own = _Traceback(rank, now, is_tagged=chunk.startswith(b"[rank%d]:" % rank))
        candidates = [
            other
            for other in self._shown
            if other.rank != rank
            and rank not in other.same
            and not other.is_dead
            and other.is_tagged is own.is_tagged
            and now - other.at <= _RECENT_S
        ]
        stream = _Stream(own, candidates, now)
        if not candidates:
            self._remember(own)
        return stream

    def _remember(self, own: _Traceback) -> None:
        self._shown.append(own)
        if len(self._shown) > _MOST_RECORDS:
            self._shown.pop(0).is_dead = True

    def _record(self, key: Key, stream: _Stream, chunk: bytes, now: float) -> tuple[bytes, bytes]:
        """Remember the lines of a traceback that is shown. Returns what is shown, and what is not part of it."""
        own = stream.own
        own.at = now
        text = bytes(stream.rest) + chunk
        before = len(stream.rest)
        start = 0
        while (end := text.find(b"\n", start)) >= 0:
            line, is_tagged = _line(text[start:end], own.rank)
            if not own.add(line, is_tagged=is_tagged):
                self._finish(key, own)
                # What has been shown of the line already is not shown again.
                cut = max(start - before, 0)
                return (chunk, b"") if start < before else (chunk[:cut], chunk[cut:])
            start = end + 1
        stream.rest = bytearray(text[start:])
        if len(stream.rest) > _MOST_BYTES:
            self._finish(key, own)
        return chunk, b""

    def _finish(self, key: Key, own: _Traceback) -> None:
        del self._streams[key]
        own.is_closed = True
        if not own.is_complete or own.is_dead:
            own.is_dead = True
            if own in self._shown:
                self._shown.remove(own)

    def _follow(self, key: Key, stream: _Stream, chunk: bytes, now: float) -> tuple[bytes, bytes]:
        """Compare what may be a copy. Returns what is shown, and what is not part of it."""
        own, held = stream.own, stream.held
        held += chunk
        while not stream.is_ended and (end := held.find(b"\n", stream.parsed)) >= 0:
            line, is_tagged = _line(bytes(held[stream.parsed : end]), own.rank)
            if not own.add(line, is_tagged=is_tagged):
                stream.is_ended = True
                break
            stream.parsed = end + 1
            i = len(own.lines) - 1
            stream.candidates = [
                other
                for other in stream.candidates
                if not other.is_dead and (other.lines[i] == line if i < len(other.lines) else not other.is_closed)
            ]
            if not stream.candidates:
                return self._show(key, stream, now)
        if stream.is_ended:
            if (other := stream.match) is not None:
                return b"", self._fold(key, stream, other)
            if all(other.is_closed or len(other.lines) > len(own.lines) for other in stream.candidates):
                return self._show(key, stream, now)
        if len(held) > _MOST_BYTES:
            return self._show(key, stream, now)
        return b"", b""

    def _show(self, key: Key, stream: _Stream, now: float) -> tuple[bytes, bytes]:
        """It is no copy: show what was held back, and remember its lines instead."""
        own, held = stream.own, bytes(stream.held)
        own.at = now
        parsed = stream.parsed
        self._remember(own)
        if stream.is_ended:
            self._finish(key, own)
            return held[:parsed], held[parsed:]
        recorded = self._streams[key] = _Stream(own, [], now)
        # The lines so far are known; the rest is recorded as it is shown.
        passed, left = self._record(key, recorded, held[parsed:], now)
        return held[:parsed] + passed, left

    def _fold(self, key: Key, stream: _Stream, other: _Traceback) -> bytes:
        """It is a copy. Returns what follows it."""
        del self._streams[key]
        rank = stream.own.rank
        other.same.add(rank)
        self._folded.append((other, rank))
        due = stream.since + HOLD_S
        self._note_at = due if self._note_at is None else min(self._note_at, due)
        return bytes(stream.held[stream.parsed :])

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When ``tick`` is due, in monotonic seconds."""
        if not self._streams and self._note_at is None and not self._in_frames:
            return None
        dues = [(stream.since if stream.candidates else stream.own.at) + HOLD_S for stream in self._streams.values()]
        dues += [due for due in (self._note_at, self._frames.deadline) if due is not None]
        return min(dues, default=None)

    def tick(self, now: float) -> list[tuple[Key, bytes]]:
        """Decide about what has been held back for long enough.

        Returns:
            What is to be shown now, by stream.
        """
        due = self.deadline
        if due is None or due > now:
            return []
        shown: list[tuple[Key, bytes]] = []
        for key in self._frames.due(now):
            text = self._frames.end(key)
            stream = self._streams.get(key)
            if stream is not None:
                text = self._feed(key, stream.own.rank, text, now, at_line_start=False)
            shown.append((key, text))
        items = list(self._streams.items())
        is_time = self._note_at is not None and self._note_at <= now
        is_time = is_time or any(stream.candidates and stream.since + HOLD_S <= now for _, stream in items)
        for key, stream in items:
            if not stream.candidates:
                if stream.own.at + HOLD_S <= now:
                    self._finish(key, stream.own)
            elif is_time and (other := stream.match) is not None:
                # Those that came a little later are decided with the first one: the note names all of them.
                shown.append((key, self._fold(key, stream, other)))
            elif stream.since + HOLD_S <= now:
                passed, left = self._show(key, stream, now)
                shown.append((key, passed + left))
        return [(key, text) for key, text in shown if text]

    def end(self, key: Key, now: float) -> bytes:
        """The stream has ended. Returns what is to be shown of it."""
        text = self._frames.end(key)
        stream = self._streams.get(key)
        if stream is None:
            return text
        before = self._feed(key, stream.own.rank, text, now, at_line_start=False) if text else b""
        return before + self._end(key, now)

    def _end(self, key: Key, now: float) -> bytes:
        stream = self._streams.get(key)
        if stream is None:
            return b""
        if not stream.candidates:
            self._finish(key, stream.own)
            return b""
        if (other := stream.match) is not None:
            return self._fold(key, stream, other)
        passed, left = self._show(key, stream, now)
        if key in self._streams:
            self._finish(key, stream.own)
        return passed + left

    def invalidate(self, key: Key, rank: int) -> None:
        """Bytes of a stream were not shown: its tracebacks may not be whole on the console."""
        stream = self._streams.get(key)
        if stream is not None and not stream.candidates:
            self._finish(key, stream.own)
        for own in [own for own in self._shown if own.rank == rank]:
            own.is_dead = True
            self._shown.remove(own)

    def held(self) -> list[tuple[Key, bytes]]:
        """What is held back of each stream."""
        keys = dict.fromkeys((*self._streams, *self._in_frames))
        held = []
        for key in keys:
            stream = self._streams.get(key)
            held.append((key, bytes(stream.held if stream is not None else b"") + self._frames.held(key)))
        return [(key, text) for key, text in held if text]

    def release(self) -> list[tuple[Key, bytes]]:
        """Hold nothing back any more of the tracebacks that have begun. Returns what was held."""
        held = self.held()
        self._in_frames.clear()
        for key, stream in list(self._streams.items()):
            self._finish(key, stream.own)
        return held

    def notes(self, now: float | None = None) -> list[str]:
        """What is to be said of folded copies; with a time only if that is due."""
        if not self._folded or (now is not None and self._note_at is not None and self._note_at > now):
            return []
        folded, self._folded, self._note_at = self._folded, [], None
        ranks: dict[_Traceback, list[int]] = {}
        for other, rank in folded:
            ranks.setdefault(other, []).append(rank)
        return [
            f"{_ranks_text(sorted(same))}: the same as rank {other.rank}: {_exception_text(other.exception)}"
            for other, same in ranks.items()
        ]

    def forget(self) -> None:
        """Other ranks are started: none of what they print is referred to what stands above."""
        for other in self._shown:
            other.is_dead = True
        self._shown.clear()

    def whole_on_console(self, rank: int) -> list[Sequence[bytes]]:
        """The lines of each traceback of a rank that stands whole on the console, once for all that printed it."""
        return [
            other.lines for other in self._shown if other.is_complete and (other.rank == rank or rank in other.same)
        ]


def _start(chunk: bytes, rank: int, *, at_line_start: bool) -> int:
    """Where a traceback begins in a chunk; -1: nowhere."""
    if at_line_start and chunk.startswith(_SYNTAX_ERROR):
        _, _, number = chunk[: chunk.find(b"\n") + 1].rpartition(b'", line ')
        if number.strip().isdigit():
            return 0
    tag = b"[rank%d]: " % rank
    group = GROUP_MARKER.removesuffix(MARKER)
    at = max(len(chunk) - _SEARCHED_BYTES, 0) - 1
    while (at := chunk.find(MARKER, at + 1)) >= 0:
        end = at + len(MARKER)
        if chunk[end : end + 1] != b"\n" and chunk[end : end + 2] != b"\r\n":
            continue
        start = chunk.rfind(b"\n", 0, at) + 1
        if chunk[start:at] in {b"", tag, group, tag + group} and (start or at_line_start):
            return start
    return -1


def _line(line: bytes, rank: int) -> tuple[bytes, bool]:
    """A line without its end and torch's tag of the same rank, and whether it had that."""
    tag = b"[rank%d]:" % rank
    line = line.removesuffix(b"\r")
    if line.startswith(tag):
        return line[len(tag) :].removeprefix(b" "), True
    return line, False


def _is_log_line(line: bytes) -> bool:
    """``[W1122 20:15:33``, ``W1122 20:15``, ``2026-11-22 20:15``."""
    head = line[:24].removeprefix(b"[")
    if head[:1] in {b"D", b"I", b"W", b"E", b"F"} and head[1:5].isdigit():
        return True
    return head[:4].isdigit() and head[4:5] == b"-" and head[5:7].isdigit() and head[7:8] == b"-"


def _exception_text(line: bytes) -> str:
    first, *others = line.split(b"\x1b[")
    plain = first + b"".join(other.partition(b"m")[2] for other in others)
    text = plain[:_EXCEPTION_BYTES].decode(errors="replace")
    return f"{text}…" if len(plain) > _EXCEPTION_BYTES else text


def _ranks_text(ranks: Sequence[int]) -> str:
    """``ranks 1-3, 5``. Not that of ``saferun.text``: nothing more is imported at the start."""
    parts: list[str] = []
    for i, rank in enumerate(ranks):
        if i and rank == ranks[i - 1] + 1:
            parts[-1] = f"{parts[-1].partition('-')[0]}-{rank}"
        else:
            parts.append(str(rank))
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
