"""A console that gets the ranks' bytes unchanged (``--prefix none``)."""

from __future__ import annotations

from saferun.console.pane import Pane

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.target import Target

# Other ranks wait for a rank's open line: until that rank has been silent for this long, until they have waited for
# this long, or until this much waits.
_OPEN_LINE_S = 5.0
_LONGEST_HOLD_S = 10.0
_MOST_HELD_BYTES = 8 << 20


class RawPane(Pane):
    """A target that gets the ranks' bytes unchanged: no prefix, no line feed added, nothing left out.

    A line that a rank writes in several pieces stays one line: while it is open, the bytes of other ranks wait. That
    ends with the line, when its rank has been silent for a while, or when too much waits; then the next bytes follow
    the open line, as they would without a launcher. Nothing waits for a progress bar, which never ends.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.raw = self
        self._owner: object = None  # the stream whose line is open
        self._output_at = 0.0
        self._held: dict[object, bytearray] = {}
        self._held_bytes = 0
        self._held_since = 0.0
        self._ends_open = False

    def pass_on(self, stream: object, chunk: bytes, now: float) -> None:
        """Write bytes of a rank, or keep them while another rank's line is open."""
        if self._owner is None or self._owner is stream:
            self._emit(stream, chunk, now)
            return
        self._hold(stream, chunk, now)
        if self._held_bytes > _MOST_HELD_BYTES:
            self._release(now)

    def _hold(self, stream: object, content: bytes, now: float) -> None:
        if not self._held:
            self._held_since = now
        self._held.setdefault(stream, bytearray()).extend(content)
        self._held_bytes += len(content)
        self.due = min(self._output_at + _OPEN_LINE_S, self._held_since + _LONGEST_HOLD_S)

    def _emit(self, stream: object, chunk: bytes, now: float) -> None:
        tail = b""
        if self._held:
            # Other ranks wait for this line to end.
            end = chunk.rfind(b"\n") + 1
            if end:
                chunk, tail = chunk[:end], chunk[end:]
        self._put_raw(chunk)
        self._output_at = now
        # A line that overwrites itself is a progress bar, for which the others do not wait.
        self._owner = stream if self._ends_open and b"\r" not in chunk[chunk.rfind(b"\n") + 1 :] else None
        if self._held and self._owner is None:
            self._release(now)
        if tail:
            self.pass_on(stream, tail, now)
        if self._held:
            self.due = min(self._output_at + _OPEN_LINE_S, self._held_since + _LONGEST_HOLD_S)

    def _put_raw(self, chunk: bytes) -> None:
        self._ends_open = not chunk.endswith(b"\n")
        self.target.put(chunk)

    def _release(self, now: float) -> None:
        """Write what waits: no line is open any more, or one has been for too long."""
        self._owner = None
        held, self._held, self._held_bytes = self._held, {}, 0
        self.due = None
        for stream, content in held.items():
            if stream is self:
                self.put_message(bytes(content))
            else:
                self.pass_on(stream, bytes(content), now)

    def show_unfinished(self, now: float) -> None:
        """The open line has been silent for too long."""
        self._release(now)

    def put_message(self, text: bytes) -> None:
        """Write lines of saferun itself: they wait for the end of an open line."""
        if self._owner is not None and self._held_bytes <= _MOST_HELD_BYTES:
            self._hold(self, text, self._output_at)
            return
        self._put_raw(b"\n" + text if self._ends_open else text)

    def ended(self, stream: object) -> None:
        """A rank's stream has ended; its open line stays without an end."""
        if self._owner is stream:
            self._release(self._output_at)

    def release(self) -> None:
        """Write everything that waits."""
        while self._held:
            self._release(self._output_at)
