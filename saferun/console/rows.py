r"""What a rank draws with cursor movements, kept within rows of its own. Pure.

A progress bar of several rows (rich, Lightning, nested tqdm) moves the cursor up and draws again. On a console that
many ranks share, that would erase the lines of other ranks and the prefix. So the bytes of such a stream go through a
small terminal of its own: the rows that it may still reach are *live*; all above them are lines, which are final.

Sources: ECMA-48; ctlseqs of xterm; what rich.live, rich.progress, tqdm and GNU readline write.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

from saferun.console.screen_row import Row, Style, new_lines

MOST_ROWS = 40
"""The most rows that stay live; what is above them is a line."""
# This many lines without a movement upwards: what drew bars has ended.
_CALM_LINES = 30
_TAB = 8
# A sequence without an end is dropped.
_LONGEST_SEQUENCE_BYTES = 4 << 10
_DIGITS = 4  # of a number; more are no number

# Colours and attributes alone need no model.
_MOVES = re.compile(rb"\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]")
_UNSAFE = re.compile(rb"\x1b(?!\[[0-9;:]*m)|[\x00-\x06\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]|\xc2[\x80-\x9f]")
_SEQUENCE = re.compile(
    r"\x1b\[(?P<parameters>[0-?]*)[ -/]*(?P<final>[@-~])"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b(?P<charset>[()][0-~])"
    r"|\x1b[ -/]+[0-~]"
    r"|\x1b(?P<single>[0-OQ-WYZ\\`-~])"
)
_BEGUN = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b\n]*\x1b?|[ -/]*)\Z")
_TEXT = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
_STRIPPED = re.compile(
    rb"\x1b\[(?![0-9;:]*m)[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-OQ-WYZ\\`-~]|\x08"
)

_SEQUENCES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-OQ-WYZ\\`-~]")

# The VT100's line drawing characters (ctlseqs of xterm, "Designate G0 Character Set").
_LINE_DRAWING = str.maketrans("`afgjklmnopqrstuvwxyz{|}~", "◆▒°±┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·")


def moves_cursor(chunk: bytes, *, is_terminal: bool) -> bool:
    """Whether bytes hold more than text, line ends, carriage returns and colours.

    Args:
        chunk: what a rank wrote.
        is_terminal: whether it is for a terminal: then no other control character may reach it either.
    """
    return (_UNSAFE if is_terminal else _MOVES).search(chunk) is not None


def without_movements(chunk: bytes) -> bytes:
    """The text and colours of a chunk alone: for output of which there is too much to draw it."""
    return _STRIPPED.sub(b"", chunk)


def without_sequences(text: str) -> str:
    """Text without movements and colours, for a reader who wants to know what it says."""
    return _SEQUENCES.sub("", text)


class Rows:
    """The terminal of one stream.

    Args:
        columns: its width.

    Attributes:
        awaits_picture: whether a picture is being drawn: how many rows it has is only known when it is drawn again.
    """

    _most_count = 10**_DIGITS  # of a sequence that moves, inserts or repeats

    def __init__(self, columns: int) -> None:
        self.columns = max(columns, 1)
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._rest = ""
        self._rows = [Row()]
        self._row = 0  # the cursor's
        self._column = 0
        self._style = Style()
        self._reach = 0  # how many rows above the last one the stream may come back to
        self._calm = 0  # lines since it last moved up
        self._is_hidden = False  # the cursor
        self.awaits_picture = False
        self._is_back = False  # it has moved up and written nothing since
        self._wraps = True
        self._saved = (0, 0)
        self._charsets = {"(": False, ")": False}  # whether these sets of characters are line drawing
        self._charset = "("
        self._last = ""  # character, for its repetition
        self._lines: list[bytes] = []

    # ---------------------------------------------------------------------------------------------- what it shows

    @property
    def is_plain(self) -> bool:
        """Whether nothing is live: text without movements can be shown as it is."""
        is_empty = len(self._rows) == 1 and not self._rows[0] and not self._rest
        return is_empty and not self._reach and not self.awaits_picture and self._style.is_plain

    @property
    def live(self) -> list[bytes]:
        """The live rows with their colours, top first; rows without content at the end are left out."""
        shown = [row.encoded() for row in self._rows]
        while shown and not shown[-1]:
            shown.pop()
        return shown

    @property
    def cursor(self) -> tuple[int, int] | None:
        """The cursor's row among the live ones, and its column; None while it is hidden."""
        return None if self._is_hidden else (self._row, self._column)

    def take(self) -> bytes:
        """Everything that is live, as lines: the stream ends. Empty where there is nothing."""
        rows = self._rows
        while rows and not rows[-1]:
            rows.pop()
        self._rows, self._row, self._column, self._rest = [Row()], 0, 0, ""
        self._reach = self._calm = 0
        return new_lines(rows)

    # ---------------------------------------------------------------------------------------------- what it reads

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes in. Returns the lines that have become final, each with its end."""
        text = self._rest + self._decoder.decode(chunk)
        self._rest = ""
        at, size = 0, len(text)
        while at < size:
            run = _TEXT.match(text, at)
            if run is not None:
                self._write(run[0])
                at = run.end()
                continue
            if text[at] != "\x1b":
                self._control(text[at])
                at += 1
                continue
            sequence = _SEQUENCE.match(text, at)
            if sequence is not None:
                self._sequence(sequence)
                at = sequence.end()
            elif size - at > _LONGEST_SEQUENCE_BYTES or (
                size - at > 1 and text[at + 1] not in "[]PX^_ !\"#$%&'()*+,-./"
            ):
                at += 1  # no sequence: the escape character alone is left out
            elif "\n" in text[at:]:
                at += 1  # none goes over the end of a line
            else:
                self._rest = text[at:]
                break
        return self._lines_so_far()

    def _lines_so_far(self) -> bytes:
        lines = b"".join(self._lines)
        self._lines.clear()
        return lines

    def _write(self, text: str) -> None:
        if self._is_back:
            self._begin_again()
        if self._charsets[self._charset]:
            text = text.translate(_LINE_DRAWING)
        self._last = text[-1]
        if text.isascii():
            self._write_narrow(text)
            return
        for char in text:
            width = _width(char)
            if not width:
                self._rows[self._row].combine(self._column, char)
                continue
            if self._column + width > self.columns:
                self._wrap(width)
            self._rows[self._row].put(self._column, char, self._style.text)
            if width > 1:
                self._rows[self._row].put(self._column + 1, "", self._style.text)
            self._column += width

    def _write_narrow(self, text: str) -> None:
        while text:
            if self._column >= self.columns:
                self._wrap(1)
            piece = text[: self.columns - self._column]
            self._rows[self._row].put_run(self._column, piece, self._style.text)
            self._column += len(piece)
            text = text[len(piece) :]

    def _wrap(self, width: int) -> None:
        """The row is full."""
        if not self._wraps:
            self._column = max(self.columns - width, 0)
            return
        self._rows[self._row].goes_on = True
        self._column = 0
        self._down()

    def _control(self, char: str) -> None:
        if char == "\n":
            if self._is_back:
                self._begin_again()
            self._rows[self._row].goes_on = False
            self._rows[self._row].has_ended = True
            self._column = 0
            self._calm += 1
            self._down()
        elif char == "\r":
            self._column = 0
        elif char == "\b":
            self._column = max(min(self._column, self.columns - 1) - 1, 0)
        elif char == "\t":
            self._column = min((self._column // _TAB + 1) * _TAB, self.columns - 1)
        elif char in "\v\f":
            self._down()
        elif char in "\x0e\x0f":
            self._charset = ")" if char == "\x0e" else "("

    # --------------------------------------------------------------------------------------------------------- its rows

    def _down(self) -> None:
        self._row += 1
        if self._row == len(self._rows):
            self._rows.append(Row())
        self._settle()

    def _up(self, count: int) -> None:
        """Move up; above the first live row new ones begin, since what was there is final."""
        self._calm = 0
        self._is_back = True
        missing = count - self._row
        if missing > 0:
            room = MOST_ROWS - len(self._rows)
            added = max(min(missing, room), 0)
            self._rows[:0] = [Row() for _ in range(added)]
            self._row += added
        self._row = max(self._row - count, 0)
        self._reach = max(self._reach, len(self._rows) - 1 - self._row)

    def settle(self) -> bytes:
        """Nothing has come for a while: rows above those that it has come back to so far are final."""
        self._finish_above(self._reach)
        return self._lines_so_far()

    def _settle(self) -> None:
        """A line has ended: make lines of the rows that the stream will not come back to."""
        if self._calm > _CALM_LINES:
            self._reach = 0
        elif self.awaits_picture:
            self._finish_above(MOST_ROWS - 1)
            return
        self._finish_above(self._reach)

    def _begin_again(self) -> None:
        """It has come back to rows and draws them again: what is above them is final."""
        self._is_back = False
        self._finish_above(self._reach)

    def _finish_above(self, reach: int) -> None:
        final = min(len(self._rows) - 1 - reach, self._row)
        while final > max(len(self._rows) - MOST_ROWS, 0) and self._rows[final - 1].goes_on:
            final -= 1  # the rest of this line is not final
        if final > 0:
            self._finish(final)

    def _finish(self, count: int) -> None:
        """The first rows are final."""
        # Where the rest of the last line is live, what is final of it is a line of its own.
        self._lines.append(new_lines(self._rows[:count]))
        del self._rows[:count]
        self._row -= count
        self._saved = (max(self._saved[0] - count, 0), self._saved[1])

    # ------------------------------------------------------------------------------------------- escape sequences

    def _sequence(self, match: re.Match[str]) -> None:
        single, final = match["single"], match["final"]
        if single is not None:
            self._single(single)
        elif final is not None:
            parameters = match["parameters"]
            if final == "m":
                if parameters[:1] not in {"?", ">", "<", "="}:
                    self._style = self._style.changed(parameters)
            elif parameters[:1] == "?":
                self._mode(parameters[1:], is_set=final == "h")
            elif parameters[:1] not in {">", "<", "="}:
                self._csi(final, _numbers(parameters))
        elif match["charset"] is not None:
            self._charsets[match["charset"][0]] = match["charset"][1] == "0"

    def _single(self, char: str) -> None:
        if char == "M":
            self._up(1)
        elif char in "DE":
            self._down()
            self._column = 0 if char == "E" else self._column
        elif char == "7":
            self._saved = (self._row, self._column)
        elif char == "8":
            self._go(*self._saved)
        elif char == "c":
            self._style = Style()

    def _mode(self, parameters: str, *, is_set: bool) -> None:
        for mode in parameters.split(";"):
            if mode == "7":
                self._wraps = is_set
            elif mode == "25":
                self._hide(is_hidden=not is_set)
            elif mode in {"47", "1047", "1049"}:
                self._switch(is_whole=is_set)

    def _switch(self, *, is_whole: bool) -> None:
        """A program takes the whole screen, or gives it back: what was shown before, and its last picture, stay."""
        while len(self._rows) > 1 and not self._rows[-1]:
            self._rows.pop()
        if self._rows[-1]:
            self._rows.append(Row())
        self._row, self._column = len(self._rows) - 1, 0
        self._calm = self._reach = 0
        self._finish_above(0)
        if is_whole:
            self._home()

    def _hide(self, *, is_hidden: bool) -> None:
        self._is_hidden = self.awaits_picture = is_hidden
        if not is_hidden:
            # What it drew is complete.
            self._reach = 0
            self._finish_above(0)

    def _csi(self, final: str, numbers: list[int]) -> None:
        first = numbers[0]
        count = min(max(first, 1), self._most_count)
        if final in "HfABCDEFG`aedsu":
            self._move(final, count, numbers)
        elif final == "J":
            self._erase_rows(first)
        elif final == "K":
            start, end = self._column if first == 0 else 0, self._column + 1 if first == 1 else None
            self._rows[self._row].erase(start, end)
        elif final == "P":
            self._rows[self._row].delete(self._column, count)
        elif final == "X":
            self._rows[self._row].erase(self._column, self._column + count)
        elif final == "@":
            self._rows[self._row].insert(self._column, min(count, self.columns), self.columns)
        elif final == "b" and self._last:
            self._write(self._last * min(count, self.columns))
        elif final in "LM":
            self._shift(final, min(count, MOST_ROWS))
        # Reports, regions and modes: they do not concern the rows.

    def _move(self, final: str, count: int, numbers: list[int]) -> None:
        last = self.columns - 1
        column = min(self._column, last)
        if final in "AF":
            self._up(count)
        elif final in "BEe":
            self._row = min(self._row + count, len(self._rows) - 1)
        elif final in "CDa":
            self._column = min(column + count, last) if final in "Ca" else max(column - count, 0)
        elif final in "G`":
            self._column = min(count - 1, last)
        elif final == "d":
            self._home()
            self._go(count - 1, column)
        elif final in "Hf":
            self._home()
            self._go(count - 1, min(max(numbers[1] if len(numbers) > 1 else 1, 1), self._most_count) - 1)
        elif final == "s":
            self._saved = (self._row, self._column)
        else:
            self._go(*self._saved)
        if final in "EF":
            self._column = 0

    def _home(self) -> None:
        """To the first row; where the stream addresses rows by number, all of them stay live."""
        self._calm = 0
        self._row = self._column = 0
        self._reach = MOST_ROWS - 1

    def _go(self, row: int, column: int) -> None:
        row = min(row, MOST_ROWS - 1)
        while len(self._rows) <= row:
            self._rows.append(Row())
        self._row = row
        self._column = min(column, self.columns - 1)

    def _shift(self, final: str, count: int) -> None:
        """Insert empty rows above the cursor's, or remove rows from it on."""
        if final == "L":
            self._rows[self._row : self._row] = [Row() for _ in range(count)]
            del self._rows[MOST_ROWS:]
        else:
            del self._rows[self._row : self._row + count]
            while len(self._rows) <= self._row:
                self._rows.append(Row())

    def _erase_rows(self, which: int) -> None:
        above = self._rows[: self._row] if which in {1, 2, 3} else []
        below = self._rows[self._row + 1 :] if which in {0, 2, 3} else []
        for row in (*above, *below):
            row.erase(0, None)
        self._rows[self._row].erase(0 if which else self._column, None if which != 1 else self._column + 1)
        if which != 1:
            # Nothing is below the cursor any more.
            del self._rows[self._row + 1 :]


def _numbers(parameters: str) -> list[int]:
    """The parameters of a sequence; what is no number counts as 0."""
    return [
        int(part) if part.isascii() and part.isdigit() and len(part) <= _DIGITS else 0 for part in parameters.split(";")
    ]


def _width(char: str) -> int:
    """How many columns a character takes."""
    if unicodedata.combining(char) or char in "\u200b\u200d\ufe0e\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(char) in {"W", "F"} else 1
