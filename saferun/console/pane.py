"""One of saferun's outputs: whole lines of many ranks, and below them the unfinished ones."""

from __future__ import annotations

import time
from collections.abc import Sequence

from saferun.console.lines import closed_row, prefixed, shown_width
from saferun.console.target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.console_stream import ConsoleStream
    from saferun.console.drawing import DrawingBudget
    from saferun.console.held_output import HeldOutput
    from saferun.console.raw_pane import RawPane
    from saferun.console.status_line import StatusLine

# An unfinished line (a prompt, a progress bar) appears on a terminal after this time, and on a pipe after this one.
_TERMINAL_REFRESH_S = 0.1
_PIPE_REFRESH_S = 1.0
# How often what has been drawn is searched for lines that will not change any more.
_REST_S = 1.0
# A line that counts seconds.
_STATUS_S = 1.0
# The most rows of unfinished lines at the bottom of a terminal, and how many rows of a lower one are left for lines.
_MOST_ROWS = 16
_LEAST_LINES = 4
# Lines up to this size are joined; larger ones are not worth a copy.
_SMALL_BYTES = 4 << 10


class Pane:
    """One target and its unfinished lines. ``raw``: it gets bytes unchanged. ``held``: one rank has it for itself."""

    raw: RawPane | None = None
    held: HeldOutput | None = None

    def __init__(self, target: Target, bar_interval_s: float = 30.0) -> None:
        self.target = target
        self.due: float | None = None
        self.budget: DrawingBudget | None = None
        self.statuses: dict[str, StatusLine] = {}
        self._bar_interval_s = bar_interval_s
        self._unfinished: dict[ConsoleStream, tuple[bytes, ...]] = {}
        self._since: dict[ConsoleStream, float] = {}  # when each of these lines began
        self._rows = 0
        self._below = 0  # of these rows, how many are below the cursor
        self._cannot_draw = False  # rows at the bottom: that has failed
        target.shape_note = self._above_the_rows

    def put(self, text: bytes, *, is_teed: bool = False) -> bool:
        """Write lines of a rank. Returns whether they are not skipped because the reader is too slow.

        ``is_teed``: a log file of ``-t`` has a copy.
        """
        if self.held is not None:
            return self.held.keep(text)
        if self.target.has_room(len(text), is_teed=is_teed):
            self.target.put(self._above_the_rows(text))
            return True
        self.target.skip(text.count(b"\n"))
        return False

    def put_pieces(self, pieces: Sequence[bytes | memoryview], *, is_teed: bool = False) -> bool:
        """The same for lines in several pieces."""
        size = sum(map(len, pieces))
        is_alone = not self._rows and self.held is None
        if not is_alone or size <= _SMALL_BYTES or not self.target.has_room(size, is_teed=is_teed):
            return self.put(b"".join(pieces), is_teed=is_teed)
        for piece in pieces:
            self.target.put(piece)
        return True

    def put_message(self, text: bytes) -> None:
        """Write lines that are never skipped."""
        if self.held is not None:
            self.target.put(self.held.beside(text))
            return
        # A terminal may show what was typed, a ^C for example, before the cursor.
        self.target.put(self._above_the_rows(text) if self._rows or not self.target.is_terminal else b"\r" + text)

    @property
    def columns(self) -> int:
        """The width of a terminal; 0 where there is none."""
        if not self.target.is_terminal:
            return 0
        from saferun.linux.streams import terminal_size

        return terminal_size(self.target.fd)[0]

    def hold(self, held: HeldOutput | None) -> None:
        """Hand to this what ranks write, and draw no rows; None: that is over."""
        self.target.put(self._erase())
        self.held = held
        self._refresh_at(time.monotonic() + _TERMINAL_REFRESH_S)

    def _above_the_rows(self, text: bytes) -> bytes:
        # The rows at the bottom are erased and drawn again below the new lines.
        return self._erase() + text + self._draw() if self._rows and self.draws else text

    @property
    def draws(self) -> bool:
        """Whether rows can be drawn: on a terminal, unless that is a shell's, which has its prompt there."""
        if not self.target.is_terminal or self._cannot_draw:
            return False
        from saferun.linux.streams import is_in_background

        if not is_in_background(self.target.fd):
            return True
        self.forget_rows()
        return False

    def forget_rows(self) -> None:
        """What has been drawn stays where it is; it is drawn again below, where rows can be drawn."""
        if self._rows:
            self._rows = self._below = 0
            self._unfinished = dict.fromkeys(self._unfinished, ())
            self._refresh_at(time.monotonic())

    def _redraw(self) -> None:
        # If a slow terminal has no room for them, or one rank has it for itself, they are drawn later.
        if self.held is None and self.draws and self.target.has_room(0, is_teed=True):
            self.target.put(self._erase() + self._draw())

    def note_unfinished(self, stream: ConsoleStream, now: float) -> None:
        """Record that the stream's unfinished line is new or has changed."""
        self._refresh_at(now + (_TERMINAL_REFRESH_S if self.target.is_terminal else _PIPE_REFRESH_S))
        if stream not in self._unfinished:
            self._unfinished[stream] = ()
            self._since[stream] = now

    def forget(self, stream: ConsoleStream) -> None:
        """Its unfinished line has been completed."""
        self._since.pop(stream, None)
        if self._unfinished.pop(stream, None) is not None and self._rows:
            self._redraw()

    def update(self, stream: ConsoleStream) -> None:
        """Some of its rows have become lines: they are not drawn once more."""
        if self.target.is_terminal and self._unfinished.get(stream):
            self._unfinished[stream] = stream.live

    def show_unfinished(self, now: float) -> None:
        """Show the unfinished lines that are due."""
        self.due = None
        if self.draws:
            self._show_rows(now)
            return
        if self.target.is_terminal and not self._cannot_draw and (self._unfinished or self.statuses):
            self._refresh_at(now + _PIPE_REFRESH_S)  # it may be in the foreground by then
        for stream, shown in list(self._unfinished.items()):
            if stream.settle(now):
                self._refresh_at(now + _REST_S)
            state = stream.live
            if state == shown or stream not in self._unfinished:
                continue
            if stream.overwrites_itself:
                if shown and now < self._since[stream] + self._bar_interval_s:
                    self._refresh_at(self._since[stream] + self._bar_interval_s)
                    continue
                self._unfinished[stream] = state
                self._since[stream] = now
                rows = b"".join(prefixed(stream.prefix, row) for row in stream.new(shown))
                self.put(rows, is_teed=stream.is_teed)
                self._refresh_at(now + self._bar_interval_s)
            elif stream.is_held():
                # The rank may have written its end long ago.
                self._since[stream] = now
                self._refresh_at(now + _PIPE_REFRESH_S)
            elif now < self._since[stream] + _PIPE_REFRESH_S:
                # The line is newer than the one that this refresh was due for.
                self._refresh_at(self._since[stream] + _PIPE_REFRESH_S)
            else:
                # Plain text without an end: it is written as a line, and what follows begins another.
                self.put(prefixed(stream.prefix, stream.take_unfinished()), is_teed=stream.is_teed)
                del self._unfinished[stream], self._since[stream]

    def set_status(self, key: str, text: str | None, *, since: float, until: float) -> None:
        """Show, change or remove a line below all others."""
        if text is not None:
            from saferun.console.status_line import StatusLine

            self.statuses[key] = StatusLine(text, since, until)
            self._refresh_at(time.monotonic() + _STATUS_S)
        elif self.statuses.pop(key, None) is None:
            return
        self._redraw()
        if not self.target.has_room(0, is_teed=True):
            self._refresh_at(time.monotonic() + _STATUS_S)

    def _status_rows(self) -> list[bytes]:
        """The lines that say what is going on; none where that fails."""
        try:
            from saferun.console.status_line import status_rows

            return status_rows(self.statuses, time.monotonic(), self.columns)
        except Exception:
            self.statuses.clear()
            return []

    def _show_rows(self, now: float) -> None:
        """Draw the newest rows of all streams at the bottom of the terminal."""
        if self.statuses:
            self._refresh_at(now + _STATUS_S)
        for stream in list(self._unfinished):
            if stream.settle(now):
                self._refresh_at(now + _REST_S)
        for stream in self._unfinished:
            self._unfinished[stream] = stream.live
        self._redraw()
        if self._cannot_draw:
            self._refresh_at(now + _PIPE_REFRESH_S)

    def _refresh_at(self, at: float) -> None:
        self.due = at if self.due is None else min(self.due, at)

    def _erase(self) -> bytes:
        rows, self._rows = self._rows, 0
        above, self._below = rows - 1 - self._below, 0
        if not rows:
            return b""
        return b"\r\x1b[%dA\x1b[J" % above if above else b"\r\x1b[J"

    def _draw(self) -> bytes:
        """The rows; where that fails, unfinished lines are shown as on a pipe from now on."""
        if self._cannot_draw:
            return b""
        try:
            return self._drawn()
        except Exception:
            self._cannot_draw = True
            self._rows = self._below = 0
            self._unfinished = dict.fromkeys(self._unfinished, ())
            return b""

    def _drawn(self) -> bytes:
        drawn = {stream: rows for stream, rows in self._unfinished.items() if rows}
        below = self._status_rows() if self.statuses else []
        if not drawn and not below:
            return b""
        from saferun.linux.streams import terminal_size

        # More rows than the terminal has could not be erased again.
        room = min(_MOST_ROWS, max(terminal_size(self.target.fd)[1] - _LEAST_LINES - len(below), 1))
        shown: list[bytes] = []
        cursor = None
        for index, (stream, rows) in enumerate(drawn.items()):
            # Each has the rows that the others leave; of what is higher, the rows nearest to its end.
            most = max((room - len(shown)) // (len(drawn) - index), 1)
            left_out = max(len(rows) - most, 0)
            at = stream.cursor
            if at is not None and left_out <= at[0] < len(rows):
                cursor = (len(shown) + at[0] - left_out, stream.prefix_columns + at[1])
            shown += [stream.prefix + closed_row(row) for row in rows[left_out:]]
        shown = shown[:room]
        if below and shown and (cursor is None or cursor[0] >= len(shown)):
            # Behind the last row, as without the lines below it: what is typed is shown there.
            cursor = (len(shown) - 1, shown_width(shown[-1]))
        elif cursor is not None and cursor[0] >= len(shown):
            cursor = None
        shown += below
        self._rows = len(shown)
        # Without line wrapping each of them is one row, whatever its width.
        text = b"\x1b[?7l" + b"\n".join(shown) + b"\x1b[?7h"
        if cursor is None:
            return text
        self._below = self._rows - 1 - cursor[0]
        return text + (b"\x1b[%dA" % self._below if self._below else b"") + b"\x1b[%dG" % (cursor[1] + 1)
