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

    @property
    def colored(self) -> list[tuple[str, str, str, str]]:
        """The rows on the screen: a prefix of four characters, its colour, the text behind it, and its colour."""
        rows = [self._screen.buffer[row] for row in range(self._screen.lines)]
        texts = [line.rstrip() for line in self._screen.display]
        return [(text[:4], row[0].fg, text[4:], row[4].fg) for row, text in zip(rows, texts, strict=True) if text]

    @property
    def is_plain(self) -> bool:
        """Whether what is written next has no colours and attributes, and wraps."""
        attributes = self._screen.cursor.attrs
        plain = attributes.fg == attributes.bg == "default" and not attributes.bold
        return plain and pyte.modes.DECAWM in self._screen.mode
