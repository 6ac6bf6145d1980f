"""The rows of a stream whose console is a pipe or a file: what is printed there stays, and has no width. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from saferun.console.rows import Rows
from saferun.console.screen_row import Row, joined_rows

# A line may be several rows, so this is only how much of it is one object.
_COLUMNS = 4096
# No terminal is wider, and a few bytes are not to become thousands of spaces.
_MOST_COUNT = 500


class LogRows(Rows):
    """Rows that become lines of a log.

    A line that has ended is final unless the stream has come back to it: also if the cursor is hidden, and if the
    screen is erased next. Rows without an end, a bar or a picture of curses, are drawn again and again and stay live.
    """

    _most_count = _MOST_COUNT

    def __init__(self) -> None:
        super().__init__(_COLUMNS)
        self._is_whole = False  # a program has taken the whole screen

    @property
    def live(self) -> list[bytes]:
        """The lines that may change, top first; those without content at the end are left out."""
        shown = [text for _, text in joined_rows(self._rows)]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    def new(self, shown: Sequence[bytes]) -> list[bytes]:
        """The live lines that are printed now, and once more only if they change.

        Args:
            shown: the lines that were live when some were printed last: those that have only moved are left out.
        """
        lines = [(first, text) for first, text in joined_rows(self._rows) if text != first.shown and text not in shown]
        while lines and not lines[-1][1]:
            lines.pop()
        for first, text in lines:
            first.shown = text
        return [text for _, text in lines]

    def settle(self) -> bytes:
        """Nothing has come for a while: what it wrote last is no picture if that had fewer rows."""
        if self._calm > self._reach + 1:
            self._reach = 0
        return self.end_picture()

    def end_picture(self) -> bytes:
        """A picture would have been drawn again by now: rows that the stream has not come back to are final."""
        self.awaits_picture = False
        return super().settle()

    @property
    def open_columns(self) -> int:
        """How wide the last line is, if text that comes next is its rest; else 0."""
        last = self._rows[-1]
        is_at_end = self._row == len(self._rows) - 1 and self._column == last.width and not self._is_back
        if not is_at_end or last.has_ended:
            return 0
        width = last.width
        first = last
        for row in reversed(self._rows[:-1]):
            if not row.goes_on:
                break
            width += row.width
            first = row
        return width if first.shown is None else 0

    @property
    def has_returned(self) -> bool:
        """Whether the cursor is back at the beginning of the last line."""
        return self._row == len(self._rows) - 1 and self._column == 0 and self._rows[-1].width > 0

    def take_with(self, text: bytes) -> bytes:
        """Everything that is live, as lines: ``text`` is the rest of the last one, which has columns."""
        self._rows[-1].goes_on = True  # blanks at its end are within the line
        return self.take()[:-1] + self._style.text.encode() + text

    def take_unread(self) -> bytes:
        """The bytes at the end of what has been read that begin a character or a sequence."""
        rest, self._rest = self._rest, ""
        begun = self._decoder.getstate()[0]
        self._decoder.reset()
        return rest.encode(errors="surrogateescape") + begun

    def _switch(self, *, is_whole: bool) -> None:
        super()._switch(is_whole=is_whole)
        self._is_whole = is_whole

    def _move(self, final: str, count: int, numbers: list[int]) -> None:
        if final in "Hf" and count == 1 and max(numbers[1:2], default=1) <= 1 and not self._is_whole:
            self._finish_ended()
            self._row = self._column = self._calm = self._reach = 0
        else:
            super()._move(final, count, numbers)

    def _erase_rows(self, which: int) -> None:
        if which and not self._is_whole:
            self._finish_ended()
        super()._erase_rows(which)

    def _finish_ended(self) -> None:
        """Whatever happens to the screen, lines that have ended stay in a log."""
        count = max((number for number, row in enumerate(self._rows, 1) if row.has_ended), default=0)
        if not count:
            return
        if count == len(self._rows):
            self._rows.append(Row())
        self._finish(count)
        self._row = max(self._row, 0)
