"""A stream of a rank that moves the cursor: its rows, and the lines that it leaves above them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from saferun.console.log_rows import LogRows
from saferun.console.rows import Rows, moves_cursor, without_movements

# To draw costs 0.2 to 0.5 us a byte, and the loop has other things to do: of what all ranks write in this time, so much
# is drawn, and the rest appears as lines.
_SPAN_S = 0.1
_MOST_DRAWN_BYTES = 32 << 10
# A line of text that has no end yet may be so long, and in a log, where it does not wrap, so long.
_LONGEST_OPEN_BYTES = 4 << 10
_LONGEST_LOGGED_BYTES = 64 << 10
# After so long without output, rows that the stream has never come back to are lines.
_REST_S = 1.0
# What comes next is not the rest of the line in which the cursor is. Colours, what erases to the end of the line, and
# the first bytes of a sequence move nothing.
_STAYS = rb"\[(?:[0-9;:]*m|0?K|\?25[hl])"
_MOVES_FIRST = re.compile(rb"(?:\x1b%b)*(?:\x08|\x1b(?!%b|\[?[0-9;:?]*\Z))" % (_STAYS, _STAYS))


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
        self._log = None if is_terminal else LogRows()
        self._rows = Rows(columns()) if self._log is None else self._log
        self._fed_at = 0.0
        self._cut = b""  # the first byte of what may be the end of a line, \r\n
        self._awaited_from: float | None = None  # since when a log waits for a picture to be drawn again

    def begin(self, line: bytes) -> bytes:
        """Take in what the stream has begun to write as a line, before anything that moves the cursor.

        Returns:
            The lines that have become final: all of one that is too long to be drawn.
        """
        return self._rows.feed(line) if len(line) <= self._longest(line) else line + b"\n"

    def _longest(self, text: bytes) -> int:
        return _LONGEST_LOGGED_BYTES if self._log is not None and text.isascii() else _LONGEST_OPEN_BYTES

    def wants(self, chunk: bytes) -> bool:
        """Whether the rows change what a chunk means; if not, it may be shown as it is."""
        return self._cut != b"" or not self._rows.is_plain or moves_cursor(chunk, is_terminal=self._is_terminal)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Take bytes in. Returns the lines that have become final, each with its end."""
        self._fed_at = now
        chunk, self._cut = self._cut + chunk, b""
        if self._budget.allows(len(chunk), now):
            if self._log is None:
                self._rows.columns = max(self._columns(), 1)
            lines = self._rows.feed(chunk)
            if not self._rows.awaits_picture:
                self._awaited_from = None
            elif self._awaited_from is None:
                self._awaited_from = now
            return lines
        return self._feed_undrawn(chunk)

    def _feed_undrawn(self, chunk: bytes) -> bytes:
        """The lines of a chunk without its movements. In a log, a line of which the rows have the beginning is one."""
        log = self._log
        begun = 0
        if log is not None:
            chunk = log.take_unread() + chunk
            begun = 0 if _MOVES_FIRST.match(chunk) else log.open_columns
            if log.has_returned and chunk.startswith(b"\n"):
                chunk = chunk[1:]  # the end of the line that is live, whose \r has been read
        if chunk.endswith(b"\r"):
            chunk, self._cut = chunk[:-1], b"\r"
        text = without_movements(chunk).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        end = text.rfind(b"\n") + 1
        if len(text) - end + (0 if end else begun) > self._longest(text):
            text += b"\n"
            end = len(text)
        if log is None or not begun:
            return self._rows.take() + text[:end] + self._rows.feed(text[end:])
        return (log.take_with(text[:end]) if end else b"") + log.feed(text[end:])

    def settle(self, now: float) -> bytes:
        """The lines that have become final because nothing has come for a while."""
        if now >= self._fed_at + _REST_S:
            return self._rows.settle()
        if self._log is not None and self._awaited_from is not None and now >= self._awaited_from + _REST_S:
            return self._log.end_picture()
        return b""

    def take(self) -> bytes:
        """All rows, as lines: the stream has ended."""
        return self._rows.take()

    @property
    def live(self) -> tuple[bytes, ...]:
        """The rows that may change, top first."""
        return tuple(self._rows.live)

    def new(self, shown: Sequence[bytes]) -> list[bytes]:
        """The live lines that are printed now where there is no terminal.

        Args:
            shown: those that were live when some were printed last.
        """
        return [row for row in self.live if row not in shown] if self._log is None else self._log.new(shown)

    @property
    def cursor(self) -> tuple[int, int] | None:
        """Where its cursor is among them: row and column; None while it is hidden."""
        return self._rows.cursor
