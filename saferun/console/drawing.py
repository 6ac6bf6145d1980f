"""A stream of a rank that moves the cursor: its rows, and the lines that it leaves above them."""

from __future__ import annotations

from collections.abc import Callable

from saferun.console.rows import Rows, moves_cursor, without_movements

# To draw costs 0.2 to 0.5 us a byte, and the loop has other things to do: of what all ranks write in this time, so much
# is drawn, and the rest appears as lines.
_SPAN_S = 0.1
_MOST_DRAWN_BYTES = 32 << 10
_LONGEST_OPEN_BYTES = 4 << 10
# After so long without output, rows that the stream has never come back to are lines.
_REST_S = 1.0


class DrawingBudget:
    """How much is still to be drawn, for all streams of a console."""

    def __init__(self) -> None:
        self._left_bytes = _MOST_DRAWN_BYTES
        self._until = 0.0

    def allows(self, size_bytes: int, now: float) -> bool:
        """Whether to draw a chunk."""
        if now >= self._until:
            self._until = now + _SPAN_S
            self._left_bytes = _MOST_DRAWN_BYTES
        self._left_bytes -= size_bytes
        return self._left_bytes >= 0


class Drawing:
    """The rows of one stream.

    Args:
        budget: shared by all streams of the console.
        is_terminal: whether the console is a terminal.
        columns: returns the width that the rank's own terminal has.
    """

    def __init__(self, budget: DrawingBudget, columns: Callable[[], int], *, is_terminal: bool) -> None:
        self._budget = budget
        self._is_terminal = is_terminal
        self._columns = columns
        self._rows = Rows(columns())
        self._fed_at = 0.0

    def begin(self, line: bytes) -> bytes:
        """Take in what the stream has begun to write as a line, before anything that moves the cursor.

        Returns:
            The lines that have become final: all of one that is too long to be drawn.
        """
        return self._rows.feed(line) if len(line) <= _LONGEST_OPEN_BYTES else line + b"\n"

    def wants(self, chunk: bytes) -> bool:
        """Whether the rows change what a chunk means; if not, it may be shown as it is."""
        return not self._rows.is_plain or moves_cursor(chunk, is_terminal=self._is_terminal)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Take bytes in. Returns the lines that have become final, each with its end."""
        self._fed_at = now
        if self._budget.allows(len(chunk), now):
            self._rows.columns = max(self._columns(), 1)
            return self._rows.feed(chunk)
        text = without_movements(chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        if len(text) - end > _LONGEST_OPEN_BYTES:
            text += b"\n"
            end = len(text)
        return self._rows.take() + text[:end] + self._rows.feed(text[end:])

    def settle(self, now: float) -> bytes:
        """The lines that have become final because nothing has come for a while."""
        return self._rows.settle() if now >= self._fed_at + _REST_S else b""

    def take(self) -> bytes:
        """All rows, as lines: the stream has ended."""
        return self._rows.take()

    @property
    def live(self) -> tuple[bytes, ...]:
        """The rows that may change, top first."""
        return tuple(self._rows.live)

    @property
    def cursor(self) -> tuple[int, int] | None:
        """Where its cursor is among them: row and column; None while it is hidden."""
        return self._rows.cursor
