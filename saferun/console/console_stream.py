"""One stream of one rank on the console."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from saferun.console.lines import LONGEST_LINE_BYTES, LONGEST_LOGGED_BYTES, LineAssembler, prefixed, shown_width
from saferun.errors import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from saferun.console.drawing import Drawing
    from saferun.console.open_colors import OpenColors
    from saferun.console.pane import Pane
    from saferun.console.screen import Screen

# A line without an end, a prompt with a long answer for example, is shown in as many rows as it needs, up to this many;
# of a longer one the newest are shown.
_MOST_WRAPPED_ROWS = 8
_LONGEST_CHARACTER_BYTES = 4
# Bytes of text, line ends, carriage returns, tabs and bells. Of the others ESC begins colours too, and \xc2 letters: a
# chunk that has one is searched.
_PLAIN = bytes(byte for byte in range(256) if (byte >= 0x20 and byte not in {0x7F, 0xC2}) or byte in b"\a\t\n\r")  # noqa: PLR2004


class ConsoleStream:
    """One stream of one rank on the console.

    Args:
        pane: where it is shown.
        prefix: of its lines.
        folder: the screen that folds its tracebacks, if any.
        rank: whose stream it is.
        tag: what torch puts before its lines and the prefix says already; it is left out.
        is_teed: whether a log file of ``-t`` has a copy.
    """

    def __init__(
        self,
        pane: Pane,
        prefix: bytes,
        folder: Screen | None = None,
        rank: int = -1,
        tag: bytes = b"",
        *,
        is_teed: bool = False,
    ) -> None:
        self.prefix = prefix
        self.rank = rank
        self._folder = folder
        self._pane = pane
        self._tag = tag
        self.is_teed = is_teed
        self._lines = LineAssembler(LONGEST_LINE_BYTES if pane.target.is_terminal else LONGEST_LOGGED_BYTES)
        self._drawing: Drawing | None = None
        self._is_drawn = False
        self._can_draw = True  # until drawing fails
        self._colors: OpenColors | None = None  # set in lines that have ended
        self._noted = False
        self.is_held: Callable[[], bool] = lambda: self.is_full  # whether reading the rank is paused
        self._diverted: Callable[[bytes], None] | None = None

    @property
    def is_full(self) -> bool:
        """Whether to pause reading this stream."""
        return self._pane.target.is_full_for(is_teed=self.is_teed)

    @property
    def overwrites_itself(self) -> bool:
        """Whether the unfinished line is a progress bar."""
        return self._is_drawn or self._lines.overwrites_itself

    @property
    def live(self) -> tuple[bytes, ...]:
        """The line that has no end yet, or the newest rows of a progress bar; empty where there is none."""
        if self._is_drawn and self._drawing is not None:
            try:
                return self._drawing.live
            except Exception:
                self._can_draw = False  # what it has becomes lines with the next bytes, or at the end
                return ()
        line = self._lines.unfinished
        if not line:
            return ()
        if self._colors is not None:
            line = self._colors.opening + line
        return self._wrapped(line) if self._pane.target.is_terminal else (line,)

    def new(self, shown: Sequence[bytes]) -> list[bytes]:
        """Of a bar, the rows that are printed now where there is no terminal.

        Args:
            shown: those that were live when some were printed last.
        """
        if self._is_drawn and self._drawing is not None:
            try:
                return self._drawing.new(shown)
            except Exception:
                self._can_draw = False
                return []
        return [row for row in self.live if row not in shown]

    def _wrapped(self, line: bytes) -> tuple[bytes, ...]:
        """An unfinished line as the rank's own terminal would show it: what is typed behind a prompt may be long.

        A bar is one row. What is shown is bounded in any case: it is drawn again with each line of any rank.
        """
        with suppress(Exception):
            columns = self.columns
            width = max(columns, 1)
            longest = width * _MOST_WRAPPED_ROWS * _LONGEST_CHARACTER_BYTES
            if len(line) > (longest if self._lines.overwrites_itself else columns):
                from saferun.console.open_colors import rest_of
                from saferun.console.rows import Rows

                rows = Rows(width)
                # In steps of a row, so that its rows do not move with each character.
                rows.feed(rest_of(line, -(-max(len(line) - longest, 0) // width) * width))
                return tuple(rows.live[-_MOST_WRAPPED_ROWS if columns > 0 else -1 :])
        return (line,)

    @property
    def cursor(self) -> tuple[int, int] | None:
        """Where the cursor is among these rows: row and column; None: at the end, or hidden."""
        try:
            return self._drawing.cursor if self._is_drawn and self._drawing is not None else None
        except Exception:
            return None

    @property
    def prefix_columns(self) -> int:
        """How wide the prefix is."""
        return shown_width(self.prefix)

    @property
    def columns(self) -> int:
        """How wide the rank's own terminal is."""
        from saferun.linux.streams import terminal_size

        return terminal_size(self._pane.target.fd)[0] - self.prefix_columns

    def take_unfinished(self) -> bytes:
        """Take the unfinished line, which then counts as written."""
        self._noted = False
        return self._lines.take()

    @property
    def is_within_line(self) -> bool:
        """Whether a line has been begun and not ended."""
        return bool(self._lines) or self._is_drawn

    def feed(self, chunk: bytes, now: float) -> None:
        """Process more bytes from the rank."""
        if self._diverted is not None:
            self._diverted(chunk)
            return
        folder = self._folder
        is_wanted = is_within = False
        if folder is not None and (folding := folder.folding) is not None:
            try:
                is_wanted = folding.wants(self, chunk)
                is_within = is_wanted and folding.is_within(self)
            except Exception:
                folder.abandon_folding(now)
        if folder is not None and is_wanted and folder.folding is not None:
            # Only while files keep all of it.
            if self._pane.target.skipping or is_within:
                if self._lines and not is_within:
                    # A header may come in several pieces.
                    self._forget()
                    chunk = self._lines.take_back() + chunk
                chunk = folder.fold(self, chunk, now)
            if not chunk:
                return
        self.show(chunk, now)

    def divert(self, show: Callable[[bytes], None] | None) -> bool:
        """Hand to this what the rank writes from now on; None: lines are shown as usual again.

        Returns:
            Whether there is an unfinished line, which is not shown here any more.
        """
        self._diverted = show
        was_open = self.is_within_line
        if show is not None and was_open:
            self._forget()
            self._drawing, self._is_drawn = None, False
            self._lines.take()
        return was_open

    def show_plainly(self, chunk: bytes) -> None:
        """It has failed to process a chunk, which is shown as lines; should that fail as well, files have it."""
        with suppress(Exception):
            self._pane.put(prefixed(self.prefix, chunk), is_teed=self.is_teed)

    def show(self, chunk: bytes, now: float) -> None:
        """Show bytes from the rank."""
        if self._pane.raw is not None:
            self._pane.raw.pass_on(self, chunk, now)
            return
        if chunk[:1] == b"[" and self._lines:
            chunk = self._rejoined(chunk)
        if (self._drawing is not None or (self._can_draw and self._may_move(chunk))) and self._draw(chunk, now):
            return
        is_whole = True
        if self._pane.target.has_room(len(chunk), is_teed=self.is_teed):
            pieces = self._lines.feed_prefixed(chunk, self.prefix)
            if pieces:
                self._forget()
                pieces = self._adjusted(pieces, chunk)
                is_whole = self._pane.put_pieces(pieces, is_teed=self.is_teed)
        elif lines := self._lines.skip(chunk):
            self._forget()
            self._pane.target.skip(lines)
            is_whole = False
        if not is_whole and self._folder is not None and self._folder.folding is not None:
            try:
                self._folder.folding.invalidate(self, self.rank)
            except Exception:
                self._folder.abandon_folding(now)
        if self._lines:
            self._pane.note_unfinished(self, now)
            self._noted = True

    def _rejoined(self, chunk: bytes) -> bytes:
        """A chunk with the unfinished line before it, if reading has cut a cursor movement in two behind its ESC."""
        if not self._can_draw or self._drawing is not None or not self._lines.ends_with(b"\x1b"):
            return chunk
        if begun := self._lines.take_back():
            self._forget()
        return begun + chunk

    def _adjusted(self, pieces: Sequence[bytes | memoryview], chunk: bytes) -> Sequence[bytes | memoryview]:
        """Whole lines as they are shown."""
        # The search for one byte is thirty times as fast as that for several.
        if self._tag and b"[" in chunk and self._tag in chunk:
            pieces = (self._untagged(b"".join(pieces)),)
        if self._pane.target.is_terminal and (self._colors is not None or b"\x1b[" in chunk):
            pieces = (self._closed(b"".join(pieces)),)
        return pieces

    def _untagged(self, lines: bytes) -> bytes:
        """Lines without the tag that stands right behind the prefix."""
        prefix, tag = self.prefix, self._tag
        if lines.startswith(prefix + tag):
            lines = prefix + lines[len(prefix + tag) :].removeprefix(b" ")
        for end in (b" ", b""):
            lines = lines.replace(b"\n" + prefix + tag + end, b"\n" + prefix)
        return lines

    def _closed(self, lines: bytes) -> bytes:
        """Whole lines that colour nothing behind their own ends."""
        with suppress(Exception):
            from saferun.console.open_colors import OpenColors

            colors = self._colors if self._colors is not None else OpenColors()
            lines = colors.closed(lines, self.prefix)
            self._colors = None if colors.is_plain else colors
        return lines

    def _may_move(self, chunk: bytes) -> bool:
        """Whether the chunk has bytes of cursor movements, or others that are not for a terminal."""
        if self._pane.target.is_terminal:
            return bool(chunk.translate(None, _PLAIN))
        # One byte is found ten times as fast as two.
        return b"\x1b" in chunk and b"\x1b[" in chunk

    def _draw(self, chunk: bytes, now: float) -> bool:
        """Draw a chunk that moves the cursor. Returns whether it has been shown."""
        try:
            if self._can_draw and self._draws(chunk):
                self._show_drawn(chunk, now)
                return True
        except Exception:
            self._can_draw = False
        if not self._can_draw:
            self._stop_drawing()
        return False

    def _draws(self, chunk: bytes) -> bool:
        """Whether the chunk moves the cursor, or is for rows that are live."""
        if self._drawing is None:
            from saferun.console.drawing import Drawing, DrawingBudget
            from saferun.console.rows import moves_cursor

            is_terminal = self._pane.target.is_terminal
            if not moves_cursor(chunk, is_terminal=is_terminal):
                return False
            if self._pane.budget is None:
                self._pane.budget = DrawingBudget()
            self._drawing = Drawing(self._pane.budget, lambda: self.columns, is_terminal=is_terminal)
        elif not self._drawing.wants(chunk):
            return False
        begun = lines = self._lines.take()
        if self._colors is not None:
            begun, self._colors = self._colors.opening + begun, None
        try:
            lines = self._drawing.begin(begun)
        finally:  # if it fails, all that was taken is shown as lines
            if lines:
                self._pane.put(prefixed(self.prefix, lines), is_teed=self.is_teed)
        return True

    def _show_drawn(self, chunk: bytes, now: float) -> None:
        """Draw; what scrolls out of the stream's rows are lines."""
        drawing = self._drawing
        if drawing is None:
            return
        self._put_drawn(drawing, drawing.feed(chunk, now))
        if drawing.live:
            self._pane.note_unfinished(self, now)
            self._noted = True

    def _put_drawn(self, drawing: Drawing, lines: bytes) -> None:
        """Show lines that are final; its other rows are drawn when that is due."""
        self._is_drawn = bool(drawing.live) or drawing.wants(b"")
        self._pane.update(self)
        if lines:
            self._pane.put(prefixed(self.prefix, lines), is_teed=self.is_teed)
        if not drawing.live:
            self._forget()

    def settle(self, now: float) -> bool:
        """Show what has become final because nothing has come for a while. Returns whether anything may still."""
        drawing = self._drawing
        if not self._is_drawn or drawing is None:
            return False
        try:
            self._put_drawn(drawing, drawing.settle(now))
            return len(drawing.live) > 1
        except Exception:
            self._can_draw = False
            self._stop_drawing()
            return False

    def _stop_drawing(self) -> None:
        """It has failed, or the stream has ended: what it has is shown as lines."""
        self._forget()
        drawing, self._drawing, self._is_drawn = self._drawing, None, False
        with suppress(Exception):
            if drawing is not None and (rest := drawing.take()):
                self._pane.put(prefixed(self.prefix, rest), is_teed=self.is_teed)

    def close(self) -> None:
        """The stream has ended: complete its unfinished line, unless bytes pass unchanged."""
        if self._pane.raw is not None:
            self._pane.raw.ended(self)
            return
        if self._folder is not None and (rest := self._folder.fold(self, b"", None)):
            self.show(rest, 0.0)
        self._forget()
        if self._drawing is not None:
            self._stop_drawing()
        if self._lines:
            lines = prefixed(self.prefix, self._lines.take())
            is_colored = self._pane.target.is_terminal and (self._colors is not None or b"\x1b[" in lines)
            self._pane.put(self._closed(lines) if is_colored else lines, is_teed=self.is_teed)

    def _forget(self) -> None:
        """The unfinished line has been completed."""
        if self._noted:
            self._noted = False
            self._pane.forget(self)
