"""What a person sees on a terminal: everything that has scrolled away, and the rows on the screen."""

from __future__ import annotations

import pyte


class Shown:
    """A terminal that reads what is written to it.

    Args:
        columns: the width.
        rows: the height.
    """

    def __init__(self, columns: int, rows: int) -> None:
        self._screen = pyte.HistoryScreen(columns, rows, history=100_000)
        self._screen.set_mode(pyte.modes.LNM)  # the terminal's driver makes \r\n of \n
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, written: bytes) -> None:
        """More bytes."""
        self._stream.feed(written)

    @property
    def lines(self) -> list[str]:
        """Everything from the first line on, without the blank ones at the end."""
        columns = self._screen.columns
        gone = ["".join(row[column].data for column in range(columns)) for row in self._screen.history.top]
        lines = [line.rstrip() for line in (*gone, *self._screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def cursor(self) -> int:
        """The column of the cursor."""
        return int(self._screen.cursor.x)
