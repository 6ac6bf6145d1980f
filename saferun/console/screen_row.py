"""A row of a terminal: its characters and their colours. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from saferun.model import Value

# UTF-8 of the control characters of ECMA-48, and what is shown in their place.
_CONTROL, _REPLACEMENT = re.compile(rb"\xc2[\x80-\x9f]"), b"\xef\xbf\xbd"
_RESET = "\x1b[0m"
# SGR of ECMA-48: which parameters set or end the same thing.
_SLOTS = {
    **dict.fromkeys(("1", "2", "22"), "weight"),
    **dict.fromkeys(("3", "23"), "italic"),
    **dict.fromkeys(("4", "21", "24"), "underline"),
    **dict.fromkeys(("5", "6", "25"), "blink"),
    **dict.fromkeys(("7", "27"), "reverse"),
    **dict.fromkeys(("8", "28"), "conceal"),
    **dict.fromkeys(("9", "29"), "strike"),
    **dict.fromkeys((*map(str, range(30, 40)), *map(str, range(90, 98))), "color"),
    **dict.fromkeys((*map(str, range(40, 50)), *map(str, range(100, 108))), "background"),
}
_ENDS = frozenset({"22", "23", "24", "25", "27", "28", "29", "39", "49"})
_EXTENDED = {"38": "color", "48": "background"}
_MOST_PARAMETERS = 32


class Style(Value):
    """Colours and attributes.

    Attributes:
        slots: (what is set, the parameters that set it).
        text: the sequence that sets all of it; empty for the default.
    """

    slots: tuple[tuple[str, str], ...] = ()
    text: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether nothing is set."""
        return not self.slots

    def changed(self, parameters: str) -> Style:
        """After a sequence with these parameters."""
        slots = dict(self.slots)
        left = parameters.split(";")[:_MOST_PARAMETERS]
        while left:
            name = left.pop(0)
            head = name.partition(":")[0].lstrip("0") or "0"
            if head == "0":
                slots.clear()
            elif head in _EXTENDED:
                if ":" not in name:
                    taken = {"5": 2, "2": 4}.get(left[0] if left else "", 0)
                    name = ";".join((name, *left[:taken]))
                    del left[:taken]
                slots[_EXTENDED[head]] = name
            elif head in _ENDS:
                slots.pop(_SLOTS[head], None)
            elif head in _SLOTS:
                slots[_SLOTS[head]] = name
        return Style(tuple(slots.items()), f"\x1b[{';'.join(slots.values())}m" if slots else "")


class Row:
    """A row.

    Attributes:
        goes_on: whether the next row has the rest of the same line.
        has_ended: whether a line feed has been written behind it.
        shown: the line that begins here, as a log has it already; None: it has not.
    """

    __slots__ = ("_cells", "_styles", "goes_on", "has_ended", "shown")

    def __init__(self) -> None:
        self._cells: list[str] = []  # a character of two columns is followed by an empty one
        self._styles: list[str] = []
        self.goes_on = False
        self.has_ended = False
        self.shown: bytes | None = None

    def __bool__(self) -> bool:
        """Whether anything stands in it."""
        return bool(self._cells)

    @property
    def width(self) -> int:
        """How many columns it takes."""
        return len(self._cells)

    def _fill(self, column: int) -> None:
        missing = column - len(self._cells)
        if missing > 0:
            self._cells.extend(" " * missing)
            self._styles.extend([""] * missing)

    def put(self, column: int, char: str, style: str) -> None:
        """Write one character."""
        self.put_run(column, (char,), style)

    def put_run(self, column: int, chars: str | tuple[str], style: str) -> None:
        """Write characters of one column each."""
        self._fill(column)
        size = len(chars)
        self._cells[column : column + size] = chars
        self._styles[column : column + size] = [style] * size

    def combine(self, column: int, mark: str) -> None:
        """Add a combining mark to the character before the column."""
        if 0 < column <= len(self._cells) and len(self._cells[column - 1]) < 8:  # noqa: PLR2004 - no pile of marks
            at = column - 2 if not self._cells[column - 1] and column > 1 else column - 1
            self._cells[at] += mark

    def erase(self, start: int, end: int | None) -> None:
        """Erase columns; to the end of the row with None."""
        if end is None or end >= len(self._cells):
            del self._cells[start:], self._styles[start:]
            self.has_ended = self.has_ended and start > 0
            return
        self._cells[start:end] = " " * (end - start)
        self._styles[start:end] = [""] * (end - start)

    def delete(self, column: int, count: int) -> None:
        """Remove characters; those behind them move up."""
        del self._cells[column : column + count], self._styles[column : column + count]

    def insert(self, column: int, count: int, columns: int) -> None:
        """Insert spaces; what leaves the row at its end is gone."""
        self._fill(column)
        self._cells[column:column] = " " * count
        self._styles[column:column] = [""] * count
        del self._cells[columns:], self._styles[columns:]

    def encoded(self) -> bytes:
        """Its bytes, with colours, without spaces at the end of a line."""
        pieces: list[str] = []
        current = ""
        start = 0
        size = len(self._cells)
        while start < size:
            style = self._styles[start]
            end = start + 1
            while end < size and self._styles[end] == style:
                end += 1
            if style != current:
                if current:
                    pieces.append(_RESET)
                pieces.append(style)
                current = style
            pieces.append("".join(self._cells[start:end]))
            start = end
        text = "".join(pieces)
        if current:
            text += _RESET
        elif not self.goes_on:
            text = text.rstrip(" ")
        return without_controls(text.encode(errors="surrogateescape"))


def joined_rows(rows: Iterable[Row]) -> Iterator[tuple[Row, bytes]]:
    """The lines that rows are, each with its first row."""
    first: Row | None = None
    pieces: list[bytes] = []
    for row in rows:
        first = row if first is None else first
        pieces.append(row.encoded())
        if not row.goes_on:
            yield first, without_controls(b"".join(pieces))
            first, pieces = None, []
    if first is not None:
        yield first, without_controls(b"".join(pieces))


def new_lines(rows: Iterable[Row]) -> bytes:
    """The lines that rows are, each with its end, without those that a log has already."""
    return b"".join(text + b"\n" for first, text in joined_rows(rows) if text != first.shown)


def without_controls(encoded: bytes) -> bytes:
    """Text in which bytes that are no characters each are no control character together, either."""
    return _CONTROL.sub(_REPLACEMENT, encoded) if b"\xc2" in encoded else encoded
